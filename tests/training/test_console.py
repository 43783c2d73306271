"""The console script: its table, its errors, and that it starts each script as `python -m` does."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import keras
import pytest

from tests.training.commands import ROOT, finish, one_error, start
from training import cli, console

pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend")

#: Name to the module that it runs.
MODULES = {name: f"training.{name.replace('-', '_')}" for name in console.COMMANDS} | {"serve": "keras_preact.serving"}


@pytest.fixture(scope="module")
def as_installed(tmp_path_factory):
    """Where training/ lies under the name that it is installed with; PYTHONPATH for that."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "keras_preact_training").symlink_to(ROOT / "training")
    return os.pathsep.join([str(folder), str(ROOT)])


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("--verbose",), ("--verbose", "--help")])
def test_help_lists_every_command_in_a_line(capsys, arguments):
    console.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: python -m training COMMAND [ARGUMENT ...]"
    for name, command in console.COMMANDS.items():
        [line] = [line for line in lines if line.split()[:1] == [name]]
        assert line.split(maxsplit=1)[1] == command.about
    assert max(map(len, lines)) <= 100


def test_every_command_is_a_script():
    for name, module in MODULES.items():
        spec = importlib.util.find_spec(module)
        assert spec is not None, name
        source = Path(spec.origin)
        source = source.with_name("__main__.py") if source.name == "__init__.py" else source
        assert 'if __name__ == "__main__":' in source.read_text()


def test_every_script_is_a_command():
    """All but those that other scripts start, and those of a subfolder, which `python -m` starts."""
    scripts = {
        path.stem if path.name != "__main__.py" else path.parent.name
        for path in [*(ROOT / "training").glob("*.py"), *(ROOT / "training").glob("*/__main__.py")]
        if path != ROOT / "training" / "__main__.py" and 'if __name__ == "__main__":' in path.read_text()
    }
    assert {name.replace("-", "_") for name in console.COMMANDS} == scripts | {"serve"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["trian"]])
def test_imports_neither_keras_nor_tensorflow(arguments, tmp_path):
    code = (
        "import sys\nfrom training import console\n"
        "try:\n    console.main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'keras', 'tensorflow', 'numpy', 'tyro'}))"
    )
    status, out, _ = finish(start("-c", code, *arguments, cwd=tmp_path))
    assert status == 0
    assert out.splitlines()[-1] == "[]"


def test_version(capsys):
    console.main(["--version"])
    assert capsys.readouterr().out == f"keras-preact {metadata.version('keras-preact')}\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trian", "Did you mean 'train'?"),
        ("very_deep", "Did you mean 'very-deep'?"),
        ("exprot", "Did you mean 'export'?"),
        ("nothing at all", "Unknown command. There is: train, "),
        ("--verison", "Received: '--verison'"),
    ],
)
def test_unknown_command_is_one_line_with_the_nearest(capsys, name, said):
    with pytest.raises(SystemExit) as ended:
        console.main([name, "digits"])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in one_error(err)


def test_arguments_reach_the_script(tmp_path):
    status, out, err = finish(start("-m", "training", "predict", "nowhere/m", "image.png", "--top", "2", cwd=tmp_path))
    assert (status, out) == (2, "")
    assert one_error(err) == "error: There is no exported model nowhere/m. python -m training.export writes one.\n"


def test_verbose_in_front_reaches_the_script(tmp_path):
    status, _, err = finish(start("-m", "training", "--verbose", "compare", "runs/digits", cwd=tmp_path))
    assert status == 2
    assert err.startswith("Traceback")
    assert err.splitlines()[-1] == "error: runs/digits is no run directory: it has no config.json."


@pytest.mark.parametrize("name", ["train", "benchmark", "serve"])
def test_help_of_a_command_names_it_as_it_was_started(name, as_installed, tmp_path):
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True, "timeout": 300}
    for module, path, program in [
        ("keras_preact_training", as_installed, f"keras-preact {name}"),
        *([] if name == "serve" else [("training", str(ROOT), f"python -m {MODULES[name]}")]),
    ]:
        out = subprocess.run(
            [sys.executable, "-m", module, name, "--help"], env=os.environ | {"PYTHONPATH": path}, **run
        ).stdout
        assert out.startswith(f"usage: {program} ")
        assert ("python -m training." in out) <= (module == "training")


def test_messages_name_the_command_that_works_where_they_are_read(as_installed, tmp_path):
    code = (
        "from keras_preact_training import cli; print(*map(cli.command, ['train', 'very_deep', 'launch.ray_train']), sep='|')"
    )
    environment = os.environ | {"PYTHONPATH": as_installed}
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert out == "keras-preact train|keras-preact very-deep|python -m keras_preact_training.launch.ray_train\n"
    assert cli.command("very_deep") == "python -m training.very_deep"


def test_no_script_names_itself_for_good():
    """What is printed and started says `cli.command` or `__package__`: the package has two names."""
    for path in (ROOT / "training").rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if path.name == "cli.py":
                continue
            assert '"training.' not in line, (path, number)
            if "python -m training." in line:
                assert not any(word in line for word in ("print(", "Error(", "{run}", 'f"')), (path, number)


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("train", "tyro", "training"),
        ("evaluate", "tyro", "training"),
        ("benchmark", "tyro", "training"),
        ("serve", "starlette", "serving"),
        ("serve", "orjson", "serving"),
    ],
)
def test_a_missing_package_is_one_line_with_its_extra(command, package, extra, tmp_path):
    code = f"import sys; sys.modules[{package!r}] = None; from training import console; console.main({[command, 'digits']!r})"
    status, out, err = finish(start("-c", code, cwd=tmp_path))
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert package in err
    assert err.endswith(f": pip install 'keras-preact[{extra}]'\n")


def test_serving_module_without_its_packages(tmp_path):
    """`training` keeps TensorFlow's notes out of the way."""
    code = (
        "import runpy, sys, training; sys.modules['starlette'] = None; "
        "runpy.run_module('keras_preact.serving', run_name='__main__', alter_sys=True)"
    )
    status, out, err = finish(start("-c", code, cwd=tmp_path))
    assert (status, out, err) == (2, "", "Serving needs starlette: pip install 'keras-preact[serving]'\n")


class TestMissingPackages:
    def ends_with(self, capsys, error) -> str:
        def fail():
            raise error

        with pytest.raises(SystemExit) as ended:
            cli.guard(fail)
        assert ended.value.code == 2
        return one_error(capsys.readouterr().err)

    @pytest.mark.parametrize("module", ["matplotlib.figure", "sklearn", "tensorflow_datasets", "PIL.Image"])
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


def test_benchmark_of_imports(tmp_path):
    arguments = ("benchmark", "import", "--rounds", "1", "--output", "import.json")
    status, out, err = finish(start("-m", "training", *arguments, cwd=tmp_path))
    assert (status, err) == (0, "")
    written = json.loads((tmp_path / "import.json").read_text())
    assert set(written["summary"]) == {"tensorflow/keras", "tensorflow/keras_preact"}
    assert all(name in out for name in written["summary"])
    [figures] = written["rounds"]
    wall = {name: figures[f"tensorflow/{name}"]["wall_seconds"] for name in ("keras", "keras_preact")}
    ratio = written["summary"]["tensorflow/keras_preact"]["wall_seconds"]["ratio"]
    assert ratio["median"] == pytest.approx(wall["keras_preact"] / wall["keras"])
    assert ratio["over"] == "tensorflow/keras"
