"""The command `keras-preact`: its table, its help texts and its errors."""

import contextlib
import functools
import io
import os
import platform
import re
import shlex
import sys
from importlib import metadata

import keras
import pytest

from tests.training.calls import ROOT, error_of, finish, start
from training import backends, cli, recipes
from training.benchmark import __main__ as benchmark
from training.cli import console
from training.cli.table import recipe_examples
from training.config import Config, options
from training.reproduce import __main__ as reproduce

#: Commands with a name as their first argument, to the possible names.
SECOND = {
    "train": recipes.RECIPES,
    "reproduce": reproduce.COMMANDS,
    "benchmark": benchmark.COMMANDS,
    "sweep": {name: recipes.RECIPES[name] for name in ("digits", "cifar10")},
}
HELPS = [[name] for name in console.COMMANDS] + [
    [name, second] for name, table in SECOND.items() for second in table
]


@functools.cache
def help_of(*names: str) -> str:
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
        console.main([*names, "--help"])
    return written.getvalue()


def test_every_command_has_a_help_with_its_examples_and_their_options(capsys):
    console.main([])
    listed = capsys.readouterr().out
    assert all(command.about in listed for command in console.COMMANDS.values())
    for names in HELPS:
        text = help_of(*names)
        assert text.startswith(f"usage: keras-preact {' '.join(names)} ")
        own = names[0] == "train" and len(names) > 1
        lines = recipe_examples(names[1]) if own else console.COMMANDS[names[0]].examples
        assert all(f"  keras-preact {line}" in text for line in lines)
        if own:  # they are of this recipe
            assert all(shlex.split(line)[:2] == names for line in lines)
    recipes_lines = [line for name in recipes.RECIPES for line in recipe_examples(name)]
    commands_lines = [line for command in console.COMMANDS.values() for line in command.examples]
    for example in [*commands_lines, *recipes_lines]:
        words = shlex.split(example)
        names = words[: 2 if words[0] in SECOND and not words[1].startswith("-") else 1]
        assert len(names) == 1 or names[1] in SECOND[names[0]]
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", help_of(*names)), example


#: What Python calls values, and types.
OF_PYTHON = r"\b(None|True|False|STR|INT|FLOAT|BOOL|LIST|TUPLE)\b|\(default: *\)|''|\}\||\|\{|fixed"
#: The words after the names of an option, at the beginning of a line.
PLACEHOLDER = r"^[│ ]*(?:--[\w.-]+(?: [^,\n]+)?, )*--[\w.-]+ (\[?[A-Z][A-Z_]+\b(?: \.\.\.\])?)"


@pytest.mark.parametrize("names", [[], ["compare"], ["train", "digits"]])
def test_help_is_a_command_too(names, capsys):
    with contextlib.suppress(SystemExit):
        console.main(["help", *names])
    assert capsys.readouterr().out.splitlines() == help_of(*names).splitlines()


@pytest.mark.parametrize("names", HELPS, ids=" ".join)
def test_options_are_described_in_plain_words(names):
    _, begin, options = help_of(*names).partition("show this help message")
    assert not re.findall(OF_PYTHON, " ".join(options.replace("│", "").split()))
    found = set(re.findall(PLACEHOLDER, options, re.M))
    plain = {"TEXT", "PATH", "NUMBER"}
    assert found <= plain | {f"[{word} ...]" for word in plain}
    assert bool(begin) == (names != [names[0]] or names[0] not in SECOND)


def test_options_have_the_names_by_which_runs_are_compared():
    """An error or a table names no option that does not exist."""
    shown = set(re.findall(r"--([\w.-]*\w)", help_of("train", "digits")))
    assert options(Config()).keys() <= shown
    assert "model.precision" in options(Config())


def test_reference_has_every_command_and_option():
    """The pages are made from the parsers; the names here are read from the help texts."""
    pages = "\n".join(
        (ROOT / f"docs/reference/{page}.md").read_text() for page in ("train", "commands")
    )
    headings = re.findall(r"^##+ (.+)$", pages, re.M)
    listed = {
        name
        for row in re.findall(r"^\| (`-.*?) \|", pages, re.M)
        for name in re.findall(r"`(--[\w.-]+)`", row)
    }
    assert {*console.COMMANDS, *(f"train {name}" for name in recipes.RECIPES)} <= {*headings}
    for names in HELPS:
        options = help_of(*names).partition("show this help message")[2]
        found = set(re.findall(r"--[a-z][\w.-]*\w", options))
        assert found <= listed | {"--help"}, names


def test_precision_has_one_name():
    for names in HELPS:
        found = set(re.findall(r"--[\w.-]*(?:precision|dtype|policy)", help_of(*names)))
        assert found <= {"--precision", "--model.precision"}, names
    for names in (["train", "digits"], ["reproduce", "fast"], ["benchmark", "step"], ["export"]):
        assert "--precision {" in help_of(*names)


def test_short_and_long_names_belong_together():
    for names in HELPS:
        found = set(re.findall(r"--(?:[\w-]+\.)?([\w-]+)", help_of(*names).partition("--help")[2]))
        assert ("batch" in found) == ("batch-size" in found), names
        assert ("lr" in found) == ("learning-rate" in found), names


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_recipe_names_the_options_that_it_takes(recipe):
    """finetune takes its network from a file, the others a registered one."""
    text = help_of("train", recipe)
    [first] = [each for each in text.split("\n\n") if each.startswith("The options that people")]
    others = text.replace(first, "")
    assert all(re.search(rf"{option}\b", others) for option in re.findall(r"--[\w.-]*\w", first))
    assert ("--model.name" in first) == (recipe != "finetune")
    assert ("--model.weights" in first) == (recipe == "finetune")


@pytest.mark.process
def test_help_and_errors_are_fast_because_nothing_large_is_loaded(tmp_path):
    heavy = {"keras", "tensorflow", "jax", "torch", "matplotlib", "sklearn", "scipy"}
    commands = [["trian"], [], ["--version"], *([*names, "--help"] for names in HELPS)]
    code = (
        "import sys\nfrom training.cli import console\n"
        f"for arguments in {commands}:\n"
        "    try:\n        console.main(arguments)\n    except SystemExit:\n        pass\n"
        f"print(sorted({{name.partition('.')[0] for name in sys.modules}} & {heavy}))"
    )
    status, out, err = finish(start("-c", code, cwd=tmp_path))
    assert status == 0, err
    assert out.splitlines()[-1] == "[]"


@pytest.mark.process
def test_installed_package_has_the_same_commands(tmp_path):
    """The wheel has training/ under another name."""
    (tmp_path / "keras_preact_training").symlink_to(ROOT / "training")
    process = start("-m", "keras_preact_training", "train", "digits", "--help", cwd=tmp_path)
    status, out, err = finish(process)
    assert status == 0, err
    assert out.startswith("usage: keras-preact train digits ")


def test_unknown_command(capsys):
    assert "Did you mean 'train'?" in error_of(capsys, console.main, ["trian", "digits"])


def test_arguments_reach_the_command_and_verbose_too(capsys):
    with pytest.raises(SystemExit) as ended:
        console.main(["--verbose", "predict", "nowhere/m", "image.png", "--top", "2"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "nowhere/m cannot be used as an exported model" in err.splitlines()[-1]


def test_versions(capsys, monkeypatch):
    console.main(["--version"])
    first, python, packages = capsys.readouterr().out.splitlines()
    assert first == f"keras-preact {metadata.version('keras-preact')}"
    assert python == f"Python {platform.python_version()}, {platform.platform()}"
    named = dict(package.split(" ") for package in packages.split(", "))
    assert [*named][:3] == ["keras", "numpy", "tensorflow"]
    assert all(metadata.version(name) == version for name, version in named.items())
    console.main(["--version", "--verbose"])
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"backend {keras.backend.backend()}, device {backends.device()}, ")
    monkeypatch.setitem(sys.modules, "keras", None)
    console.main(["--verbose", "--version"])
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("the backend cannot be imported: ModuleNotFoundError: ")


def test_a_command_without_its_package(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    message = error_of(capsys, console.main, ["train", "digits"])
    assert message.endswith("tyro, which is not installed: pip install 'keras-preact[training]'\n")


@pytest.mark.parametrize("name", [None, "training.nothing", "matplot"])
def test_other_missing_modules_are_errors_of_the_program(name):
    def fail():
        raise ModuleNotFoundError("No module", name=name)

    with pytest.raises(ModuleNotFoundError):
        cli.guard(fail)


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_tensorflow_has_its_fast_kernels_unless_switched_off(monkeypatch, before, after):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "")  # so that it is reset at the end
    if before is None:
        monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS")
    else:
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", before)
    console.main(["--version"])
    assert os.environ["TF_ENABLE_ONEDNN_OPTS"] == after
