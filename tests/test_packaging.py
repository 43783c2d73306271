"""The files of the wheel and of the source distribution, and the versions that they
require.
"""

import datetime
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
VERSION = PROJECT["project"]["version"]
#: The versions of Python that the project names.
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
#: Name of a package in the wheel to its folder.
PACKAGES = {"keras_preact": "keras_preact", "keras_preact_training": "training"}
BUILD = """
from setuptools import build_meta
build_meta.build_wheel("../dist")
build_meta.build_sdist("../dist")
"""
README = """
import pathlib, re, sys
for block in re.findall(r"```python\\n(.*?)```", pathlib.Path(sys.argv[1]).read_text(), re.S):
    exec(compile(block, "README.md", "exec"), {})
"""
#: Value of PYTHONWARNINGS. Keras' variables under NumPy 2 warn, see pyproject.toml.
STRICT = "error,ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"


def run(*command: object, cwd: Path, stderr: int = subprocess.PIPE, **variables: str) -> str:
    """Run a command outside of the checkout: nothing in its environment leads there.
    Return its stdout, with stderr if that is `subprocess.STDOUT`.
    """
    hidden = ("PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= variables
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + (done.stderr or "")[-2000:]
    return done.stdout


def test_every_package_is_listed():
    """pyproject.toml lists each, and training/ by its name in site-packages."""
    folders = {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)


@pytest.fixture(scope="module")
def tracked():
    """The files that git tracks or does not ignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("git says what a source distribution holds; this is no checkout")
    listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = run("git", "-c", "safe.directory=*", *listed, cwd=ROOT).split("\0")
    return {name for name in names if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory):
    """The wheel and the source distribution, built in a copy because a build leaves
    folders. The copy has a run and an exported model, as a working checkout has.
    """
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "project"
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for own in ("runs/digits", "saved_models/digits"):
        (source / own).mkdir(parents=True)
        (source / own / "model.keras").write_text("a run")
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "copy"]):
        run("git", *command, cwd=source)
    (folder / "dist").mkdir()
    run(sys.executable, "-c", BUILD, cwd=source)
    [wheel], [sdist] = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def test_wheel_holds_every_module_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    modules = {
        f"{package}/{path.relative_to(ROOT / folder)}"
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    data = {
        f"{package}/{path.relative_to(ROOT / PACKAGES[package])}"
        for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (ROOT / PACKAGES[package]).glob(pattern)
    }
    assert len(data) > 5
    assert names == modules | data


def test_source_distribution_holds_what_git_tracks(built, tracked):
    """It has everything that building and testing need, and no runs."""
    pytest.importorskip("setuptools_scm")  # lists the tracked files
    with tarfile.open(built[1]) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    generated = {"PKG-INFO", "setup.cfg"}
    assert {name for name in names if ".egg-info/" not in name} - generated == tracked
    assert "saved_models/cifar10_resnet20/2/variables/variables.index" in names


def test_the_description_needs_no_repository(built):
    """An index of packages shows it: it has no relative links and no pictures."""
    with zipfile.ZipFile(built[0]) as file:
        [name] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        text = file.read(name).decode().partition("\n\n")[2]
    assert "https://arxiv.org/abs/1603.05027)" in text
    assert "The tutorial (`docs/tutorial.md`) shows each step" in text
    assert not re.findall(r"\]\((?!https://)[^)]*\)|<(?:img|picture|source)", text)


@pytest.mark.soak
@pytest.mark.parametrize("version", PYTHONS)
def test_a_fresh_installation(version, built, tmp_path):
    """The wheel's commands and README's Python work outside of the checkout, without a
    visible warning, and all its extras fit together in the versions of the tests.

    The backends that are no dependency run in the Python of the tests alone: on many
    machines only this Python has a build of PyTorch without gigabytes of CUDA.
    """
    find = (f"python{version}", "-c", "import sys; print(sys.executable)")
    try:
        base = run(*find, cwd=tmp_path, PYENV_VERSION=version).strip()  # which pyenv reads
    except (FileNotFoundError, AssertionError):
        pytest.skip(f"no Python {version} on this machine")
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:  # 2 GB
        run(base, "-m", "venv", "--without-pip", folder, cwd=tmp_path)
        python, script = (Path(folder, "bin", name) for name in ("python", "keras-preact"))
        install = (sys.executable, "-m", "pip", "--python", python, "install", "--no-compile")
        install += ("--disable-pip-version-check", "-c", ROOT / "constraints/tested.txt")
        run(*install, f"{built[0]}[training,serving]", cwd=tmp_path)
        place = run(python, "-c", "import keras_preact as kp; print(kp.__file__)", cwd=tmp_path)
        assert Path(place).is_relative_to(folder)
        spec = "from importlib.util import *; print(find_spec('training'))"
        assert run(python, "-c", spec, cwd="/") == "None\n"
        lines = run(script, "--version", cwd=tmp_path).splitlines()
        assert lines[0] == f"keras-preact {VERSION}"
        assert lines[1].startswith(f"Python {version}.")
        assert "usage: keras-preact serve" in run(script, "serve", "--help", cwd=tmp_path)
        # `make test` installs the extra test. The libraries of the extra gpu have gigabytes.
        extras = sorted(EXTRAS.keys() - {"test", "gpu"})
        run(*install, "--dry-run", f"{built[0]}[{','.join(extras)}]", cwd=tmp_path)
        ours = f"{sys.version_info.major}.{sys.version_info.minor}"
        for backend in ("tensorflow", "jax", "torch") if version == ours else ("tensorflow",):
            if backend != "tensorflow":
                run(*install, f"{built[0]}[{backend}]", cwd=tmp_path)
            of = {"cwd": tmp_path, "KERAS_BACKEND": backend}
            run(python, "-c", README, ROOT / "README.md", **of, PYTHONWARNINGS=STRICT)
            train = (script, "train", "digits", "--epochs", "1", "--output", f"runs/{backend}")
            # TensorFlow's AutoGraph has DeprecationWarnings under Python 3.13, which nobody sees
            told = run(*train, **of, stderr=subprocess.STDOUT)
            assert "of the 144 held-out images" in told
            assert "warning" not in told.lower(), told


def test_tensorflow_has_the_extra_for_gpus():
    [requirement] = EXTRAS["gpu"]
    [extra] = re.findall(r"\[([\w-]+)\]", requirement)
    assert extra in importlib.metadata.metadata("tensorflow").get_all("Provides-Extra")


def test_lowest_versions_are_those_that_the_project_names():
    requirements = [*PROJECT["project"]["dependencies"], *EXTRAS["jax"], *EXTRAS["torch"]]
    named = dict(re.match(r"([\w-]+)>=([\d.]+)", each).groups() for each in requirements)
    lines = (ROOT / "constraints/lowest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pinned.pop("jaxlib") == pinned["jax"]
    assert pinned.keys() == named.keys()
    for name, version in named.items():
        assert re.fullmatch(rf"{re.escape(version)}(\.0)*", pinned[name]), name


#: Patterns of this version in the files that name it.
NAMED = {
    "README.md": r"Version ([\d.]+)\.",
    "docs/install.md": r"keras_preact-([\d.]+)-py3",
    "docs/cite.md": r"version *= \{([\d.]+)\}",
    "CITATION.cff": r"^version: (.+)",
}


@pytest.mark.parametrize("path", NAMED)
def test_the_docs_name_this_version(path):
    assert set(re.findall(NAMED[path], (ROOT / path).read_text(), re.M)) == {VERSION}


def test_the_date_of_a_release():
    """The changelog and the citation agree on it."""
    changes = re.findall(r"^## \[(.+)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    [cited] = re.findall(r"^date-released: (.+)", (ROOT / "CITATION.cff").read_text(), re.M)
    assert datetime.date.fromisoformat(cited)
    assert dict(changes)[VERSION] == cited
