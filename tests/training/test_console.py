"""The command `keras-preact`: its table, its help texts and its errors."""

import contextlib
import functools
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata

import pytest

from tests.training.commands import ROOT, error_of, finish, start
from training import cli, console, recipes
from training.benchmark import __main__ as benchmark
from training.benchmark import import_time
from training.reproduce import __main__ as reproduce


@pytest.mark.parametrize(
    "arguments", [(), ("--help",), ("-h",), ("--verbose",), ("--verbose", "--help")]
)
def test_help_lists_every_command_in_a_line(capsys, arguments):
    console.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: keras-preact COMMAND [OPTIONS]"
    for name, command in console.COMMANDS.items():
        [line] = [line for line in lines if line.split()[:1] == [name]]
        assert line.split(maxsplit=1)[1] == command.about
    assert max(map(len, lines)) <= 110


#: Commands that take the name of something first to those names.
SECOND = {
    "train": recipes.RECIPES,
    "reproduce": reproduce.COMMANDS,
    "benchmark": benchmark.COMMANDS,
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


@pytest.mark.parametrize("names", HELPS, ids=" ".join)
def test_help_begins_with_three_examples_and_is_readable(names):
    lines = help_of(*names).splitlines()
    assert lines[0].startswith(f"usage: keras-preact {' '.join(names)} ")
    start = lines.index("Examples:")
    assert not any(lines[1:start])
    shown = itertools.takewhile(lambda line: line.startswith("  keras-preact "), lines[start + 1 :])
    examples = [line.split("  # ")[0].strip() for line in shown]
    own = console.COMMANDS[names[0]].examples
    assert examples == [f"keras-preact {line}" for line in own]
    assert len(examples) == 3
    unreadable = r"\{None|None\}|None\||\bSTR\b|\[\[|INT \[INT|FLOAT \[FLOAT|NAME \[NAME"
    assert not re.search(rf"{unreadable}|\(default: \)|python -m", help_of(*names))


def loaded(commands: list[list[str]], among: set[str], folder) -> list[str]:
    """Return which packages a process has loaded that starts these commands."""
    code = (
        "import sys\nfrom training import console\n"
        f"for arguments in {commands}:\n"
        "    try:\n        console.main(arguments)\n    except SystemExit:\n        pass\n"
        f"print(sorted({{name.partition('.')[0] for name in sys.modules}} & {among}))"
    )
    status, out, _ = finish(start("-c", code, cwd=folder))
    assert status == 0
    return json.loads(out.splitlines()[-1].replace("'", '"'))


def test_help_is_fast_because_nothing_large_is_loaded(tmp_path):
    heavy = {"keras", "tensorflow", "jax", "torch", "matplotlib", "sklearn", "scipy"}
    assert loaded([[*names, "--help"] for names in HELPS], heavy, tmp_path) == []
    commands = [["--help"], ["--version"], ["trian"]]
    assert loaded(commands, heavy | {"numpy", "tyro"}, tmp_path) == []


@pytest.mark.parametrize(
    "example",
    [line for command in console.COMMANDS.values() for line in command.examples],
    ids=str,
)
def test_options_of_examples_exist(example):
    """Each option of an example is one of its command's; short names are those of
    `train`.
    """
    words = shlex.split(example)
    names = words[: 2 if words[0] in SECOND and not words[1].startswith("-") else 1]
    if len(names) == 2:
        assert names[1] in SECOND[names[0]]
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", help_of(*names)), option


def test_version(capsys):
    console.main(["--version"])
    assert capsys.readouterr().out == f"keras-preact {metadata.version('keras-preact')}\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trian", "Did you mean 'train'?"),
        ("analyse", "Did you mean 'analyze'?"),
        ("exprot", "Did you mean 'export'?"),
        ("nothing at all", "Unknown command: 'nothing at all'. Choose one of: train, "),
        ("--verison", "Unknown command: '--verison'"),
    ],
)
def test_unknown_command_is_one_line_with_the_nearest(capsys, name, said):
    assert said in error_of(capsys, console.main, [name, "digits"])


def test_arguments_reach_the_script(capsys):
    arguments = ("predict", "nowhere/m", "image.png", "--top", "2")
    message = "error: There is no exported model nowhere/m. keras-preact export writes one.\n"
    assert error_of(capsys, console.main, arguments) == message


def test_verbose_in_front_reaches_the_script(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        console.main(["--verbose", "compare", "runs/digits"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.splitlines()[-1] == "error: The run directory runs/digits does not exist."


def test_installed_package_has_the_same_commands(tmp_path):
    """The wheel has training/ under another name."""
    (tmp_path / "keras_preact_training").symlink_to(ROOT / "training")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "keras_preact_training", "train", "digits", "--help"]
    out = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert out.startswith("usage: keras-preact train digits ")


def without(package: str, command: list[str], folder) -> tuple[int, str, str]:
    """Start a command where a package is not installed."""
    code = (
        f"import sys; sys.modules[{package!r}] = None; from training import console; "
        f"console.main({command!r})"
    )
    return finish(start("-c", code, cwd=folder))


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        (["train", "digits"], "tyro", "training"),
        (["serve", "."], "starlette", "serving"),
    ],
)
def test_a_missing_package_is_one_line_with_its_extra(command, package, extra, tmp_path):
    status, out, err = without(package, command, tmp_path)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert package in err
    assert err.endswith(f": pip install 'keras-preact[{extra}]'\n")


def test_server_without_its_packages_has_its_help(tmp_path):
    status, out, err = without("starlette", ["serve", "--help"], tmp_path)
    assert (status, err) == (0, "")
    assert out.startswith("usage: keras-preact serve ")


class TestMissingPackages:
    def ends_with(self, capsys, error) -> str:
        def fail():
            raise error

        return error_of(capsys, cli.guard, fail)

    @pytest.mark.parametrize(
        "module", ["matplotlib.figure", "sklearn", "tensorflow_datasets", "PIL.Image"]
    )
    def test_of_the_table(self, capsys, module):
        error = ModuleNotFoundError(f"No module named {module!r}", name=module)
        message = self.ends_with(capsys, error)
        assert module.partition(".")[0] in message
        assert "pip install 'keras-preact[training]'" in message

    def test_that_the_library_names(self, capsys):
        told = "Figures need matplotlib: pip install 'keras-preact[training]'."
        assert self.ends_with(capsys, ImportError(told)) == f"error: {told}\n"

    @pytest.mark.parametrize("name", [None, "training.nothing", "matplot"])
    def test_errors_in_the_program_are_not_hidden(self, name):
        def fail():
            raise ModuleNotFoundError("No module", name=name)

        with pytest.raises(ModuleNotFoundError):
            cli.guard(fail)


def test_benchmark_of_imports(tmp_path, capsys, monkeypatch):
    """In real processes, of modules that are imported fast."""
    monkeypatch.setattr(import_time, "BASELINE", "json")
    monkeypatch.setattr(import_time, "MODULES", ("json", "decimal"))
    output = tmp_path / "import.json"
    console.main(["benchmark", "import", "--rounds", "1", "--output", str(output)])
    written = json.loads(output.read_text())
    assert set(written["summary"]) == {"tensorflow/json", "tensorflow/decimal"}
    out = capsys.readouterr().out
    assert all(name in out for name in written["summary"])
    [figures] = written["rounds"]
    base, ours = (figures[f"tensorflow/{name}"] for name in ("json", "decimal"))
    ratio = written["summary"]["tensorflow/decimal"]["wall_seconds"]["ratio"]
    assert ratio["median"] == pytest.approx(ours["wall_seconds"] / base["wall_seconds"])
    assert ratio["over"] == "tensorflow/json"


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_tensorflow_has_its_fast_kernels_unless_told_otherwise(monkeypatch, before, after):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "")  # so that it is set back at the end
    if before is None:
        monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS")
    else:
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", before)
    console.main(["--version"])
    assert os.environ["TF_ENABLE_ONEDNN_OPTS"] == after
