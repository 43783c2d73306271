"""The page about networks, parts, recipes and tables of one's own: its files and commands
work together.
"""

import contextlib
import json
import re
import shlex
import sys

import pytest

from tests import command_lines, own_modules
from tests.training.calls import ROOT
from training import children
from training.cli import console
from training.commands import train
from training.reproduce import rows

PAGE = (ROOT / "docs/howto/own_parts.md").read_text()
FILES = dict(re.findall(r"In `(my_\w+)\.py`:\n\n```python\n(.*?)```", PAGE, re.S))
#: The runs are short: what they learn is not the question.
SHORT = "--schedule.unit iterations --schedule.length 2 --schedule.warmup 0 --health 0"


@pytest.fixture(autouse=True)
def here(tmp_path):
    # as the wheel names it
    (tmp_path / "keras_preact_training").symlink_to(ROOT / "training")
    with own_modules.working_in(tmp_path, **FILES):
        sys.path.insert(0, str(tmp_path))
        yield tmp_path
    own_modules.forget("keras_preact_training")


def test_the_page_has_its_files():
    assert list(FILES) == ["my_parts", "my_models", "my_recipes", "my_tables"]


LINES = [each for each in command_lines.commands(PAGE) if "my_" in each]


@pytest.mark.parametrize("line", LINES)
def test_what_the_commands_name(line, monkeypatch, capsys):
    """Each command makes its network; nothing is trained."""
    made = []

    def build(config, recipe):
        with train.started(config, recipe) as run:
            made.append(run.network)

    def statuses(module, jobs, *_):
        assert module == "training.reproduce.run"
        for trial, seed, _, table in map(json.loads, jobs):
            build(rows.trials(rows.table(table))[trial].config(seed), trial)
        return [0] * len(jobs)

    monkeypatch.setattr(train, "train", build)
    monkeypatch.setattr(children, "statuses", statuses)
    words = shlex.split(line)[1:]
    with contextlib.suppress(SystemExit):  # of --help
        console.main([*words, *(["--smoke"] if "reproduce" in words else ["--dry-run"])])
    if "--help" in words:
        assert "ResNet-8 on digits, with a trained lambda: 2 epochs." in capsys.readouterr().out
    else:
        assert len(made) == (12 if "reproduce" in words else 1)


@pytest.mark.soak
@pytest.mark.parametrize("line", LINES)
def test_the_commands(line, here):
    words = shlex.split(line)[1:]
    if "reproduce" in words:
        console.main([*words, "--smoke", "--seeds", "1"])
        folder = here / "runs/reproduce/smoke/results/mine"
        assert {path.name for path in folder.iterdir()} == {"identity", "none", "TrainedLambda"}
    elif "--help" not in words:
        console.main([*words, *SHORT.split(), "--output", "out"])
        assert len([*here.glob("out/**/model.keras")]) == (3 if "--seeds" in words else 1)
