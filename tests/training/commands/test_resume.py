"""The words that resume a run. tests/training/run/test_resume.py is about what it does."""

import json
import shlex
import shutil

import pytest

from tests.training.calls import error_of, words
from training.cli import console
from training.commands import train


@pytest.fixture
def here(run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    for seed in (0, 1):
        (tmp_path / f"seeds/seed-{seed}").mkdir(parents=True)
        (tmp_path / f"seeds/seed-{seed}/config.json").touch()
    (tmp_path / "sweep/depth-8/rate-0.1/seed-1").mkdir(parents=True)
    (tmp_path / "sweep/depth-8/rate-0.1/seed-0.log").touch()
    shutil.copytree(run, tmp_path / "mine/seed-0")
    file = tmp_path / "mine/seed-0/config.json"
    described = json.loads(file.read_text())
    described["config"]["callbacks"] = ["my_callbacks:log"]
    file.write_text(json.dumps(described))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", ["resume run", "train --resume run", "resume run --trust"])
def test_a_run_is_resumed_with_its_own_options(line, here, monkeypatch):
    found = []
    monkeypatch.setattr(train, "train", lambda *arguments: found.append(arguments))
    console.main(words(line))
    [(config, recipe)] = found
    assert (str(config.output), config.resume, recipe) == ("run", True, "digits")
    assert (config.seed, config.optimizer.learning_rate) == (3, 0.05)


@pytest.mark.parametrize(
    ("line", "run"),
    [
        ("train --resume=a", "a"),
        ("train digits --resume a", "a"),
        ("train digits --resume=a", "a"),
        ("train digits --seed 3 --resume 'my run' --lr 1", "'my run'"),
        ("train --resume=", "RUN"),
    ],
)
def test_the_right_command_is_named(line, run, capsys):
    message = error_of(capsys, console.main, shlex.split(line))
    assert f"keras-preact resume {run}." in message
    assert "After a recipe, --resume takes no value" in message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("resume a", "The run directory a does not exist"),
        ("train --resume a", "The run directory a does not exist"),
        ("resume run/checkpoints", "is not a run directory: it has no config.json"),
        ("resume sweep", "one of them: keras-preact resume sweep/depth-8/rate-0.1/seed-1"),
        ("resume seeds", "or resume one of them: keras-preact resume seeds/seed-0"),
        # a run that names code of a person
        ("resume mine", "or resume one of them: keras-preact resume mine/seed-0 --trust"),
        ("resume mine/seed-0", "keras-preact resume mine/seed-0 --trust"),
        ("train digits --resume mine/seed-0", "keras-preact resume mine/seed-0 --trust"),
        ("train digits --output mine/seed-0", "keras-preact resume mine/seed-0 --trust"),
        ("train digits --output mine/seed-0 --resume", "keras-preact resume mine/seed-0 --trust"),
    ],
)
def test_errors(line, message, here, capsys):
    assert message in error_of(capsys, console.main, words(line))
