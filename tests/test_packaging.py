"""The files of the wheel and of the source distribution, and the versions that they
require.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
#: Name of a package in the wheel to its folder.
PACKAGES = {"keras_preact": "keras_preact", "keras_preact_training": "training"}
BUILD = """
from setuptools import build_meta
build_meta.build_wheel("../dist")
build_meta.build_sdist("../dist")
"""


def run(*command: object, cwd: Path) -> str:
    """Run a command outside of the checkout: nothing in its environment leads there."""
    hidden = ("PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
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


@pytest.mark.soak
def test_a_fresh_installation(built, tmp_path):
    """The wheel's commands work outside of the checkout, and all its extras fit together
    in the versions of the tests.
    """
    venv.create(tmp_path / "venv")
    python, script = (tmp_path / "venv/bin" / name for name in ("python", "keras-preact"))
    install = (sys.executable, "-m", "pip", "--python", python, "install")
    install += ("--disable-pip-version-check", "-c", ROOT / "constraints/tested.txt")
    run(*install, f"{built[0]}[training,serving]", cwd=tmp_path)
    place = run(python, "-c", "import keras_preact; print(keras_preact.__file__)", cwd=tmp_path)
    assert Path(place).is_relative_to(tmp_path)
    found = run(python, "-c", "from importlib.util import *; print(find_spec('training'))", cwd="/")
    assert found == "None\n"
    version = run(script, "--version", cwd=tmp_path)
    assert version == f"keras-preact {PROJECT['project']['version']}\n"
    assert "digits_resnet20_preact" in run(script, "train", "digits", "--dry-run", cwd=tmp_path)
    assert "usage: keras-preact serve" in run(script, "serve", "--help", cwd=tmp_path)
    # `make test` installs the extra test. The libraries of the extra gpu have gigabytes.
    extras = sorted(EXTRAS.keys() - {"test", "gpu"})
    run(*install, "--dry-run", f"{built[0]}[{','.join(extras)}]", cwd=tmp_path)


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


def test_the_docs_name_the_wheel():
    named = re.findall(r"keras_preact-([\d.]+)-py3", (ROOT / "docs/install.md").read_text())
    assert set(named) == {PROJECT["project"]["version"]}
