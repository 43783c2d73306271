"""A fingerprint changes with every piece of code that computes, and with nothing else."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import keras_preact
from tests.training.commands import ROOT
from training.reproduce import fingerprints

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend"
)

PACKAGES = {"keras_preact": fingerprints.LIBRARY, "training": fingerprints.SCRIPTS}

#: Modules that a run loads and that compute none of its numbers, by what they are for instead. What
#: else a run loads must be in the fingerprint; a new module belongs here only if no change in it
#: can change a number.
OTHERS = {
    "put together what is there": (
        "keras_preact/__init__.py",
        "training/__init__.py",
        "training/data/__init__.py",
    ),
    "names, texts and tables; recipes and networks stand in the record itself": (
        *(
            "keras_preact/advice.py",
            "keras_preact/published.py",
            "keras_preact/recommendation.py",
            "keras_preact/preprocessing.py",
        ),
        *(
            "training/config.py",
            "training/recipes.py",
            "training/reproduce/trials.py",
            "training/reproduce/__init__.py",
        ),
    ),
    "other networks": ("keras_preact/transformer.py",),
    "other pipelines; the images have a fingerprint of their own": (
        *(
            f"training/data/{name}.py"
            for name in ("finishing", "images", "mixing", "pipelines", "rand_augment", "readers")
        ),
        *(
            "training/data/sources.py",
            "training/reproduce/images.py",
            "training/reproduce/smoke.py",
        ),
    ),
    "processes, files and messages": (
        *(
            f"training/{name}.py"
            for name in (
                "backends",
                "callbacks",
                "checkpoints",
                "cli",
                "commands",
                "runs",
                "signals",
            )
        ),
        *("training/terminal.py", "training/variables.py"),
        *(
            f"training/reproduce/{name}.py"
            for name in ("fingerprints", "pieces", "results", "worker")
        ),
    ),
}
#: Parts of the library that networks do not use.
OTHER_FOLDERS = ("keras_preact/export/", "keras_preact/health/", "keras_preact/transfer/")


@pytest.fixture
def tree(tmp_path):
    """A copy of the two packages, and a function that returns its fingerprint and the
    files that it is made of.
    """
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path


def hashed(root: Path) -> list[Path]:
    """Return the files in the fingerprint of a tree."""
    return sorted(
        {
            path
            for package, globs in PACKAGES.items()
            for glob in globs
            for path in (root / package).glob(glob)
        }
    )


def fingerprint(root: Path, monkeypatch) -> str:
    monkeypatch.setattr(keras_preact, "__file__", str(root / "keras_preact" / "__init__.py"))
    monkeypatch.setattr(
        fingerprints, "__file__", str(root / "training" / "reproduce" / "fingerprints.py")
    )
    return fingerprints.source.__wrapped__()


def test_a_copy_has_the_same(tree, monkeypatch):
    ours = fingerprints.source()
    assert re.fullmatch("[0-9a-f]{64}", ours)
    assert fingerprint(tree, monkeypatch) == ours


def test_comments_docstrings_and_layout_do_not_count(tree, monkeypatch):
    before = fingerprint(tree, monkeypatch)
    for path in hashed(tree):
        text = path.read_text()
        docstring = '\n\n\n"""Another documentation of the module."""\n# and a comment\n\n'
        text = re.sub(r'\A""".*?"""\n', docstring, text, flags=re.DOTALL)
        text = re.sub(
            r'^( +)""".*?"""$',
            r'\1"""Another."""  # of a function',
            text,
            count=1,
            flags=re.DOTALL | re.MULTILINE,
        )
        text = re.sub(r"^(def .*:)$", r"\1\n    # a comment\n", text, flags=re.MULTILINE)
        assert text != path.read_text()
        path.write_text(text + "\n\n# the end\n")
    assert fingerprint(tree, monkeypatch) == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("keras_preact/optimizers.py", "def __init__(", "def __init__(  # noqa\n        *,"),
        ("training/data/crops.py", "PADDING = 4", "PADDING = 5"),
        ("training/data/crops.py", "2 * PADDING + 1", "2 * PADDING - 1"),
        ("training/plans.py", "round(images", "math.ceil(images"),
        ("training/reproduce/run.py", "LEGS = 64", "LEGS = 64.0"),
        ("training/data/crops.py", '"reflect"', '"edge"'),
        ("training/reproduce/legs.py", "loss: float = 0.0", "loss: float = 0.5"),
        ("training/reproduce/on_device.py", "values[-1]", "values[0]"),
    ],
)
def test_code_counts(file, old, new, tree, monkeypatch):
    before = fingerprint(tree, monkeypatch)
    path = tree / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert fingerprint(tree, monkeypatch) != before


def test_every_file_counts(tree, monkeypatch):
    """A constant more in any of them, another name for one, and a new one."""
    paths = hashed(tree)
    assert len(paths) > 25
    for path in paths:  # so that all of them are read as often as there are files in no time
        path.write_text("SOMETHING = None\n")
    before = seen = fingerprint(tree, monkeypatch)
    for path in paths:
        path.write_text(path.read_text() + "\nANOTHER = None\n")
        found = fingerprint(tree, monkeypatch)
        assert found not in (before, seen)
        seen = found
    new = tree / "keras_preact" / "models" / "new.py"
    new.write_text("")
    with_new = fingerprint(tree, monkeypatch)
    assert with_new != seen
    new.rename(new.with_name("newer.py"))
    assert fingerprint(tree, monkeypatch) not in (with_new, seen)


def test_files_that_do_not_compute_do_not_count(tree, monkeypatch):
    before = fingerprint(tree, monkeypatch)
    for name in ("training/cli.py", "training/reproduce/report.py", "keras_preact/published.py"):
        (tree / name).write_text("nothing = 1\n")
    assert fingerprint(tree, monkeypatch) == before


@pytest.mark.parametrize(
    "name", [f"{package}/{glob}" for package, globs in PACKAGES.items() for glob in globs]
)
def test_every_pattern_finds_something(name):
    assert list(ROOT.glob(name))


# The fingerprint by a Python that has none of the packages.
ALONE = """
import importlib.util, sys, types
root = sys.argv[1]
package = types.ModuleType("keras_preact")
package.__file__ = root + "/keras_preact/__init__.py"
sys.modules["keras_preact"] = package
spec = importlib.util.spec_from_file_location("fingerprints", root + "/training/reproduce/fingerprints.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.source())
"""


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_all_versions_of_python_agree(version):
    python = shutil.which(f"python{version}")
    works = (
        python
        and subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0
    )
    pyenv = sorted(
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(
            f"versions/{version}.*/bin/python"
        )
    )
    if not works and not pyenv:
        pytest.skip(f"there is no Python {version}")
    command = [python if works else str(pyenv[-1]), "-c", ALONE, str(ROOT)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == fingerprints.source()


# A run in small, as a worker makes it, and the files of this project that it has loaded.
LOADED = """
import json, sys
from tests.training.reproduce import tiny
tiny.install()
from training.reproduce.worker import Job, work
settings = {"results": sys.argv[1], "work": sys.argv[1], "smoke": True}
work(Job(tiny.PLAIN.name, [0], None, settings))
names = [name for name in sys.modules if name.partition(".")[0] in ("keras_preact", "training")]
print(json.dumps([sys.modules[name].__file__ for name in names]))
"""


def test_all_that_a_run_loads_is_known(tmp_path):
    """So that no module that computes is forgotten."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOADED, str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = {
        str(Path(file).relative_to(ROOT)) for file in json.loads(done.stdout.splitlines()[-1])
    }
    in_fingerprint = {str(path.relative_to(ROOT)) for path in hashed(ROOT)}
    others = {name for names in OTHERS.values() for name in names}
    unknown = {
        name for name in loaded - in_fingerprint - others if not name.startswith(OTHER_FOLDERS)
    }
    assert not unknown, "Do they compute? Then they belong into the fingerprint."
    assert not others & in_fingerprint
    assert others <= loaded
    assert {
        "keras_preact/units.py",
        "training/reproduce/on_device.py",
        "training/plans.py",
    } <= loaded & in_fingerprint


def git(root: Path, *arguments: str) -> str:
    author = ["-c", "user.name=name", "-c", "user.email=mail", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", root, *author, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_where_the_sources_are_from(tree, monkeypatch):
    monkeypatch.setattr(fingerprints, "_ROOT", tree)
    assert fingerprints._origin() == {"commit": None, "modified": False}
    (tree / "bundle.json").write_text('{"commit": "0123abc", "modified": true, "files": 3}')
    assert fingerprints._origin() == {"commit": "0123abc", "modified": True}
    git(tree, "init")
    git(tree, "add", "training", "keras_preact")
    git(tree, "commit", "-m", "one")
    commit = git(tree, "rev-parse", "HEAD")
    assert fingerprints._origin() == {"commit": commit, "modified": False}
    (tree / "README.md").write_text("no source")
    assert fingerprints._origin() == {"commit": commit, "modified": False}
    (tree / "training" / "plans.py").write_text("another = 1\n")
    assert fingerprints._origin() == {"commit": commit, "modified": True}


def test_code_of_this_tree():
    code = fingerprints.code()
    assert code["fingerprint"] == fingerprints.source()
    assert set(code) == {"fingerprint", "commit", "modified"}
