"""A run or a model of somebody else runs no code, unless a person says so."""

import contextlib
import json
import shutil

import pytest

from tests.own_modules import working_in
from tests.training.calls import TINY, error_of, run_evaluate, words
from training import cli
from training.commands import audit, train
from training.commands.analyze import __main__ as analyze
from training.commands.export import export
from training.config import Config, Data

DATA = """
from sklearn.datasets import load_digits

open("data_was_imported", "w").close()


def load():
    digits = load_digits()
    images = (15 * digits.images).astype("uint8")
    return (images[:200], digits.target[:200]), (images[200:300], digits.target[200:300])
"""
CALLBACKS = """
import keras

open("callbacks_were_imported", "w").close()


def log(folder):
    return keras.callbacks.Callback()
"""
MODULES = {"data_of_gift": DATA, "callbacks_of_gift": CALLBACKS}
OPTIONS = "--data.name data_of_gift:load --callbacks callbacks_of_gift:log --health 0"


@pytest.fixture(scope="module")
def gift(tmp_path_factory):
    """A folder with a run, its exported model, and the modules whose functions they name."""
    folder = tmp_path_factory.mktemp("gift")
    with working_in(folder, **MODULES):
        train.main(["digits", *TINY, *words(OPTIONS), "--output", "run"])
        run_export(*words("run --name m"))
    for path in folder.glob("*imported"):
        path.unlink()
    return folder


@pytest.fixture
def here(gift, tmp_path):
    shutil.copytree(gift, tmp_path, dirs_exist_ok=True)
    with working_in(tmp_path, **MODULES):
        yield tmp_path


def run_export(*arguments) -> None:
    cli.main("export", export, arguments)


COMMANDS = {
    "evaluate run": run_evaluate,
    "evaluate saved_models/m": run_evaluate,
    "export run --name n --precision bfloat16": run_export,
    "analyze run --quick": lambda *arguments: analyze.main(arguments),
    "audit run": lambda *arguments: audit.main(arguments),
    "resume run": lambda *arguments: train.main(["--resume", *arguments]),
    "train --config run --output again": lambda *arguments: train.main(list(arguments)),
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_name_in_a_file_is_not_enough(line, here, capsys):
    _, *arguments = line.split()
    message = error_of(capsys, COMMANDS[line], *arguments)
    assert "data_of_gift:load" in message
    assert "would run the code of data_of_gift" in message
    assert "--trust" in message
    assert not [*here.glob("*imported")]


@pytest.mark.parametrize(
    "line", [line for line in COMMANDS if line.split()[0] not in ("analyze", "train")]
)
def test_a_person_may_trust_it(line, here):
    _, *arguments = line.split()
    with contextlib.suppress(SystemExit):  # the audit finds mistakes
        COMMANDS[line](*arguments, "--trust")
    assert (here / "data_was_imported").is_file()


def test_callbacks_of_a_run_are_named_too(here, capsys):
    config = json.loads((here / "run/config.json").read_text())
    config["config"]["data"]["name"] = "digits"
    (here / "run/config.json").write_text(json.dumps(config))
    message = error_of(capsys, train.main, ["--resume", "run"])
    assert "run/config.json names callbacks_of_gift:log, and" in message
    run_evaluate("run")  # it has no use for callbacks
    assert not [*here.glob("*imported")]


def test_names_of_the_command_line_are_trusted(here, capsys):
    run_evaluate("run", "--data", "data_of_gift:load")
    assert (here / "run/metrics.json").is_file()
    train.main(["digits", *TINY, *words(OPTIONS), "--output", "run", "--resume"])
    assert "Next: keras-preact evaluate run --trust" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("", ["data_of_gift:load", "callbacks_of_gift:log"]),
        ("--data.name digits", ["callbacks_of_gift:log"]),
        ("--data.name=data_of_gift:load --callbacks callbacks_of_gift:log", []),
        ("--data.name digits --callbacks", []),
    ],
)
def test_only_what_the_options_of_a_run_leave_is_asked_for(options, named, here, capsys, received):
    line = ["--config", "run", *words(options)]
    if not named:
        assert received(*line).health == 0
        return
    message = error_of(capsys, received, *line)
    assert f"run/config.json names {', '.join(named)}, and" in message
    assert message.endswith(f"keras-preact train {' '.join(line)} --trust\n")
    assert received(*line, "--trust").health == 0


@pytest.mark.parametrize("name", ["digits", "fake", "tfds:mnist", "hf:somebody/images"])
def test_data_sets_are_no_functions(name):
    assert Config(data=Data(name)).functions == []
