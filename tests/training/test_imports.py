"""How processes of the command line import TensorFlow and Keras, here stand-ins for both."""

import os
import subprocess
import sys

import pytest

from tests.training.calls import ROOT, finish, start

NOTES = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    "I0000 00:00:1.2 345 port.cc:153] oneDNN custom operations are on.\n"
    "E0000 00:00:1.2 345 cuda.cc:52] failed call to cuInit: UNKNOWN ERROR (303)\n"
)
OTHERS = "W0000 00:00:1.2 345 cuda.cc:9] old driver\nE0000 0:0:1 3 a.cc:5] cuInit: (100)\n"
TENSORFLOW = """
import os
from types import SimpleNamespace
os.write(2, {written!r}.encode())
config = SimpleNamespace(
    list_physical_devices=lambda kind: [kind],
    set_visible_devices=lambda *arguments: print(*arguments),
)
{last}
"""
KERAS = """
import os, types
name = os.environ["KERAS_BACKEND"]
if name == "tensorflow":
    import tensorflow
backend = types.SimpleNamespace(backend=lambda: name)
"""


def run(folder, code, keras_backend="tensorflow", last="", written=""):
    """Run Python code with the stand-ins in `folder`; return status, stdout and stderr."""
    sources = {"tensorflow": TENSORFLOW.format(written=written, last=last), "keras": KERAS}
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    path = os.pathsep.join(map(str, (folder, ROOT)))
    variables = {"PYTHONPATH": path, "KERAS_BACKEND": keras_backend}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("last", "expected", "end"),
    [
        ("", 0, ""),
        ("raise ImportError('damaged')", 1, "ImportError: damaged\n"),
        ("os.write(2, b'no newline'); os.abort()", -6, "no newline"),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("os._exit(3)", 3, ""),
    ],
    ids=["works", "error", "abort", "kill", "exit"],
)
def test_only_notes_are_left_out_however_the_import_ends(last, expected, end, tmp_path):
    written = NOTES + OTHERS + NOTES
    status, _, err = run(tmp_path, "import training, tensorflow", last=last, written=written)
    assert status == expected
    assert err.startswith(OTHERS)
    assert err.endswith(end)
    assert not any(line in err for line in NOTES.splitlines())


@pytest.mark.parametrize(
    ("keras_backend", "imports", "hidden"),
    [
        ("jax", "tensorflow, keras", True),
        ("torch", "keras, tensorflow", True),
        ("tensorflow", "tensorflow, keras", False),
        ("tensorflow", "keras, tensorflow", False),
        ("jax", "tensorflow", False),
        ("jax", "keras", False),
    ],
)
def test_tensorflow_leaves_the_accelerator_to_others(keras_backend, imports, hidden, tmp_path):
    """In every process of the package. One without Keras, such as the server, keeps it."""
    status, out, err = run(tmp_path, f"import training, {imports}", keras_backend)
    assert status == 0, err
    assert out == ("[] GPU\n" if hidden else "")


def test_the_server_keeps_the_accelerator_though_it_may_import_keras_later(tmp_path):
    code = (
        "from training.imports import networks_left_out\n"
        "with networks_left_out():\n    import tensorflow\n"
        "print('serves')\n"
        "def fail(*arguments): raise RuntimeError('in use')\n"
        "tensorflow.config.set_visible_devices = fail\n"
        "import keras"
    )
    assert run(tmp_path, code, "jax")[:2] == (0, "serves\n")


@pytest.mark.process
def test_the_real_tensorflow_is_imported_without_notes(tmp_path):
    code = "import training, tensorflow, keras; print(keras.backend.backend())"
    status, out, err = finish(start("-c", code, cwd=tmp_path))
    assert status == 0, err
    assert (out, err) == ("tensorflow\n", "")


@pytest.mark.process
def test_a_process_without_stderr(tmp_path):
    """As `keras-preact ... 2>&-` starts it."""
    code = (
        "from training.cli import console; console.main(['--version'])\n"
        "import tensorflow; print('ok')"
    )
    shell = f'exec 2>&-; exec "{sys.executable}" -c "$0"'
    starter = f"import os; os.execvp('sh', ['sh', '-c', {shell!r}, {code!r}])"
    status, out, _ = finish(start("-c", starter, cwd=tmp_path))
    assert (status, out.splitlines()[-1]) == (0, "ok")
