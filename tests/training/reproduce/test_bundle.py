"""Bundles run where next to nothing is installed: in real processes."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact
import training
from training.cli import UserError
from training.reproduce import bundle, fingerprints, images

# children of these tests compute with JAX, which is not there with every backend
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="nothing of it depends on the backend"
)

HERE = "{}.{}".format(*sys.version_info[:2])
#: Stands in front of everything in a process: what a machine has not is not found there.
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "tensorflow_datasets", "sklearn", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}, as it is blocked", name=name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A bundle with a stand-in of a wheel and one result, in pieces of 1 MiB."""
    folder = tmp_path_factory.mktemp("built")
    wheels = folder / "wheels"
    wheels.mkdir()
    for name in ("standin-1.0", "numpy-2.0", "ml_dtypes-0.5"):
        with zipfile.ZipFile(wheels / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name.partition('-')[0]}.py", "raise ImportError('of the bundle')")
    result = folder / "results" / "digits" / "some" / "seed-0.json"
    result.parent.mkdir(parents=True)
    result.write_text("{}\n")
    before = os.getcwd()
    os.chdir(folder)  # the results that travel are those of the working folder
    try:
        bundle.bundle(folder / "bundle", (), python=HERE, piece_mib=1, wheels=wheels)
    finally:
        os.chdir(before)
    return folder / "bundle"


@pytest.fixture
def machine(built, tmp_path):
    return Path(shutil.copytree(built, tmp_path / "machine"))


def run(
    machine: Path, *arguments: object, code: str | None = None, **variables: str
) -> subprocess.CompletedProcess:
    """Start the runner in another working folder; `code` stands in for Python's -m in
    front of the arguments.
    """
    site = machine.parent / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(BLOCK)
    environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ} | {
        "PYTHONPATH": str(site)
    }
    environment |= variables
    command = [sys.executable, *(["-c", code] if code else [machine / "run_bundle.py"]), *arguments]
    options = {"env": environment, "cwd": site, "stdin": subprocess.DEVNULL, "timeout": 300}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)


def error_of(machine: Path) -> str:
    done = run(machine, "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_pieces(built):
    manifest = json.loads((built / "bundle-manifest.json").read_text())
    files = {path.name: path for path in built.iterdir()}
    assert files.keys() == {*manifest["pieces"], "bundle-manifest.json", "run_bundle.py"}
    for name, described in manifest["pieces"].items():
        contents = files[name].read_bytes()
        assert (len(contents), hashlib.sha256(contents).hexdigest()) == (
            described["bytes"],
            described["sha256"],
        )
        assert len(contents) < 2**20
    assert manifest["python"] == HERE
    assert "digits-images-0.zip" in files
    assert images.read("digits", built).fingerprint == images.load("digits").fingerprint


def test_code(built, tmp_path):
    """The pieces hold the sources of both packages, which git knows or would add, and
    nothing else.
    """
    for path in built.glob("code-and-wheels-*.zip"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(tmp_path)
    for package in (keras_preact, training):
        source = Path(package.__file__).parent
        copied = tmp_path / source.name
        ours = {path.relative_to(source) for path in source.rglob("*.py")}
        assert {path.relative_to(copied) for path in copied.rglob("*.py")} == ours
        assert all((copied / path).read_bytes() == (source / path).read_bytes() for path in ours)
    assert not list(tmp_path.rglob("*.pyc"))
    origin = json.loads((tmp_path / "bundle.json").read_text())
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(training.__file__).parent,
        capture_output=True,
        text=True,
    )
    assert origin["commit"] == (head.stdout.strip() or None)
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == [
        "standin-1.0-py3-none-any.whl"
    ]


def test_help(machine):
    done = run(machine, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: keras-preact reproduce" in done.stdout
    (tree,) = machine.glob("unpacked-*")
    assert (tree / "site-packages" / "standin.py").is_file()
    before = {
        path: path.stat().st_mtime_ns for path in tree.rglob("*") if "__pycache__" not in str(path)
    }
    assert not list(machine.glob(".*"))

    (machine / "results" / "digits" / "some" / "seed-0.json").write_text("changed")
    assert run(machine, "--help").returncode == 0
    assert before.items() <= {path: path.stat().st_mtime_ns for path in tree.rglob("*")}.items()
    assert (machine / "results" / "digits" / "some" / "seed-0.json").read_text() == "changed"


def test_environment(machine):
    """What runs is the bundle's code on JAX with the bundle's data, also in the
    processes that it starts.
    """
    seen = """
import json, os, subprocess, sys
import keras, training, keras_preact
from training.reproduce import fingerprints, images
print(json.dumps({
    "argv": sys.argv[1:], "cwd": os.getcwd(), "backend": keras.backend.backend(), "package": keras_preact.__file__,
    "data": images.load("digits").fingerprint, "code": fingerprints.code(),
    "preallocate": os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"],
}))
"""
    # a checkout in the working folder must not be taken for the bundle's code
    (machine / "training").mkdir()
    (machine / "training" / "__init__.py").write_text(
        "raise SystemExit('not the code of the bundle')"
    )
    probe = machine.parent / "site" / "probe.py"
    probe.parent.mkdir()
    probe.write_text(seen)
    code = (
        "import os, runpy, sys\n"
        "execve = os.execve\n"
        "def observed(path, arguments, environment):\n"
        f"    execve(path, [arguments[0], {str(probe)!r}, *arguments[3:]], environment)\n"
        "os.execve = observed\n"
        f"runpy.run_path({str(machine / 'run_bundle.py')!r}, run_name='__main__')"
    )
    done = run(machine, "--some", "thing else", code=code)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (tree,) = machine.glob("unpacked-*")
    assert told["argv"] == ["--some", "thing else"]
    assert Path(told["cwd"]) == machine
    assert Path(told["package"]) == tree / "keras_preact" / "__init__.py"
    assert (told["backend"], told["preallocate"]) == ("jax", "false")
    assert told["data"] == images.load("digits").fingerprint
    assert told["code"] == fingerprints.code()


@pytest.mark.slow
def test_smoke(machine):
    """The command that trains gets through where TensorFlow, scikit-learn and
    matplotlib cannot be imported.
    """
    rows = ("--rows", "digits/resnet110-full_preactivation")
    fast = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"  # to compile
    done = run(machine, "digits", "--smoke", "--seeds", 1, "--processes", 1, *rows, XLA_FLAGS=fast)
    assert done.returncode == 0, done.stderr
    assert list((machine / "runs" / "reproduce" / "smoke" / "results").rglob("seed-0.json"))


def test_arrival(built, tmp_path):
    """The files arrive one by one, and until the last is there, a start says what is
    missing.
    """
    machine = tmp_path / "machine"
    machine.mkdir()
    expected = sorted(path.name for path in built.glob("*.zip"))
    arriving = ["run_bundle.py", "bundle-manifest.json", *expected]
    for name in arriving:
        shutil.copyfile(built / name, machine / name)
        if name != arriving[-1]:
            told = error_of(machine)
            missing = [name for name in arriving if not (machine / name).exists()]
            named = [name for name in arriving if name in told]
            assert named == (missing[:1] if name == "run_bundle.py" else missing)
            assert "copy" in told
    assert run(machine, "--help").returncode == 0


def test_damaged(machine):
    piece = machine / "code-and-wheels-0.zip"
    contents = bytearray(piece.read_bytes())
    contents[len(contents) // 2] ^= 1
    piece.write_bytes(contents)
    assert "Damaged, or of another bundle: code-and-wheels-0.zip" in error_of(machine)
    assert not list(machine.glob("unpacked-*"))
    manifest = machine / "bundle-manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    assert f"{manifest} is damaged" in error_of(machine)


def test_wrong_python(machine):
    manifest = machine / "bundle-manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"python": "{HERE}"', '"python": "3.9"'))
    assert (
        f"This bundle is for Python 3.9, and this is Python {HERE}: start it with python3.9"
        in error_of(machine)
    )


def test_lacking_machine(machine):
    code = (
        "import importlib.util, runpy\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name in ('jax', 'PIL') else find(name)\n"
        f"runpy.run_path({str(machine / 'run_bundle.py')!r}, run_name='__main__')"
    )
    done = run(machine, code=code)
    assert done.returncode == 2
    assert "lacks jax, pillow" in done.stderr


def test_archives_are_taken_over(built, tmp_path, capsys):
    """Data of an earlier bundle are copied, or cut anew where its pieces are too large;
    nothing is made where one stands.
    """
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (1_500, 32, 32, 3), "uint8"), np.arange(1_500) % 10
    cifar = images.Images(
        "cifar10", tuple("abcdefghij"), x[:1_000], y[:1_000], x[1_000:], y[1_000:]
    )
    (large,) = images.write_archive(cifar, tmp_path / "data")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    for mib in (10, 2):
        bundle.bundle(
            tmp_path / str(mib),
            data_dir=tmp_path / "data",
            python=HERE,
            piece_mib=mib,
            wheels=nothing,
        )
        assert images.read("cifar10", tmp_path / str(mib)).fingerprint == cifar.fingerprint
    assert (tmp_path / "10" / large.name).read_bytes() == large.read_bytes()
    assert [
        path.stat().st_size < 2 * 2**20 for path in images.pieces("cifar10", tmp_path / "2")
    ] == [True] * 3
    assert "cifar10-images-2.zip" in capsys.readouterr().out
    with pytest.raises(UserError, match="exists and is not empty"):
        bundle.bundle(tmp_path / "10", wheels=nothing)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"piece_mib": 0}, "must be positive"),
        ({"wheels": Path("missing")}, "--wheels must be a folder. Received: missing"),
    ],
    ids=["piece", "wheels"],
)
def test_mistakes(options, part, tmp_path):
    with pytest.raises(UserError, match=part):
        bundle.bundle(tmp_path / "out", (), **options)
    assert not list(tmp_path.iterdir())
