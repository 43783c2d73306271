"""What `pip install keras-preact` brings: the files of wheel and source distribution,
and clean environments that run them.
"""

import importlib.metadata
import json
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

from tests.training.commands import without_notes

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
#: Name of a package in the wheel to its folder.
PACKAGES = {"keras_preact": "keras_preact", "keras_preact_training": "training"}


def run(*command: object, cwd: Path, check: bool = True) -> subprocess.CompletedProcess:
    """Run a command far from the checkout: nothing in its environment leads there."""
    hidden = ("PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL")
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if key not in hidden},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 or not check, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def test_every_package_is_listed():
    """In pyproject.toml, where training/ has the name that it gets in site-packages."""
    folders = {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(folders)


def tracked() -> list[str]:
    """Return the files that git tracks, or would track if they were added."""
    if not (ROOT / ".git").exists():
        pytest.skip("git says what a source distribution holds; this is no checkout")
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    return [name for name in run(*listed, cwd=ROOT).stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(once_per_run):
    """The wheel and the source distribution of a copy, because a build leaves folders
    behind.

    The copy has a run and an exported model, as a working checkout has.
    """

    def build(folder):
        source = folder / "project"
        for name in tracked():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
        for own in ("runs/digits", "saved_models/digits"):
            (source / own).mkdir(parents=True)
            (source / own / "model.keras").write_text("a run")
        author = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "copy"]):
            run("git", *command, cwd=source)
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", source, cwd=folder)

    dist = once_per_run("distributions", build) / "dist"
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def wheel(built):
    return built[0]


@pytest.mark.soak
def test_wheel_holds_every_module_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    modules = {
        f"{package}/{path.relative_to(ROOT / folder)}"
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["keras_preact"]
    data = [path for pattern in patterns for path in (ROOT / "keras_preact").glob(pattern)]
    assert len(data) > 5
    assert names == modules | {str(path.relative_to(ROOT)) for path in data}


@pytest.mark.soak
def test_source_distribution_holds_what_git_tracks(built):
    """All that building and testing take, and no runs."""
    with tarfile.open(built[1]) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    generated = {"PKG-INFO", "setup.cfg"}
    assert {name for name in names if ".egg-info/" not in name} - generated == set(tracked())
    assert "saved_models/cifar10_resnet20/1/variables/variables.index" in names


class Environment:
    """A virtual environment; one with a base sees the packages of the base, and
    installs what those lack.

    Args:
        folder: Where to make it.
        requirement: What to install, in the versions that the tests run with.
        base: Another one.
    """

    def __init__(self, folder: Path, requirement: str, base: "Environment | None" = None):
        venv.create(folder / "venv")
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self.script = folder / "venv" / "bin" / "keras-preact" if base is None else base.script
        self.packages = run(
            self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
        ).stdout
        if base is not None:
            (Path(self.packages.strip()) / "base.pth").write_text(base.packages)
        self.pip(requirement)

    def pip(self, *arguments: str) -> None:
        """Install with the pip of this process; Python compiles what it imports, a
        small part.
        """
        options = (
            "--disable-pip-version-check",
            "--no-compile",
            "--constraint",
            ROOT / "constraints/tested.txt",
        )
        run(
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "install",
            *options,
            *arguments,
            cwd=self.folder,
        )

    def __call__(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess:
        """Run this Python in an empty folder."""
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        return run(self.python, *arguments, cwd=empty, check=check)

    def command(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess:
        """Run the console script in an empty folder."""
        return self(self.script, *arguments, check=check)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel with what it needs, no extra."""
    return Environment(tmp_path_factory.mktemp("installed"), str(wheel))


@pytest.mark.soak
class TestInstalled:
    def test_import_and_saved_networks_load_behind_it_alone(self, installed):
        code = (
            "import json, sys, keras_preact as kp; model = "
            "kp.create_model('digits_resnet20_preact', stacked=True); model.save('m.keras'); "
            "print(json.dumps([kp.__file__, model.count_params(), sorted(dir(kp))]))"
        )
        file, parameters, names = json.loads(installed("-c", code).stdout)
        assert Path(file).is_relative_to(installed.folder)
        assert parameters > 0
        assert {"ResidualUnit", "analysis", "export", "TrainingHealth"} <= set(names)
        installed("-c", "import keras_preact, keras; keras.saving.load_model('m.keras')")

    def test_no_module_called_training_in_site_packages(self, installed):
        done = installed("-c", "import training", check=False)
        assert "No module named 'training'" in done.stderr

    def test_console_script(self, installed):
        out = installed.command("--help").stdout
        assert out.startswith("usage: keras-preact COMMAND")
        version = installed.command("--version").stdout
        assert version == f"keras-preact {PROJECT['project']['version']}\n"
        assert installed(installed.script, check=True).stdout == out

    @pytest.mark.parametrize(
        ("arguments", "extra"),
        [
            (("train", "digits"), "training"),
            (("compare", "x"), "training"),
            (("serve", "."), "serving"),
        ],
    )
    def test_wants_an_extra_in_one_line(self, installed, arguments, extra):
        done = installed.command(*arguments, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert f"pip install 'keras-preact[{extra}]'" in done.stderr


@pytest.mark.soak
def test_training(installed, wheel, tmp_path):
    environment = Environment(tmp_path, f"{wheel}[training]", installed)
    done = environment.command("train", "digits", "--dry-run")
    assert "digits_resnet20_preact" in done.stdout
    done = environment.command("evaluate", "runs/nothing", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert without_notes(done.stderr).startswith("error: runs/nothing is neither a run directory")
    tiny = ("--model.name", "digits_resnet8_preact", "--model.width-factor", "0.25")
    length = ("--schedule.unit", "iterations", "--schedule.length", "5", "--schedule.warmup", "0")
    done = environment.command("train", "digits", *tiny, *length, "--output", "run")
    assert "Next: keras-preact evaluate run\n" in done.stdout
    assert environment.command("evaluate", "run").stdout


@pytest.mark.soak
def test_serving(installed, wheel, tmp_path):
    environment = Environment(tmp_path, f"{wheel}[serving]", installed)
    assert environment.command("serve", "--help").stdout.startswith("usage: keras-preact serve ")
    done = environment.command("serve", "nowhere", check=False)
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1]
        == "keras-preact serve: error: `directory` must be a folder of models. Received: nowhere"
    )


def contained(extra: str) -> set[str]:
    """Return the extras that an extra names."""
    found = [
        re.fullmatch(r"keras-preact\[([\w,]+)\]", requirement) for requirement in EXTRAS[extra]
    ]
    return {name for match in found if match for name in match[1].split(",")}


#: `make test` installs the one. CUDA's libraries have gigabytes, and pip would get them to look at
#: what they need.
ELSEWHERE = {"test", "gpu"}
#: Extras that are in no other one.
OUTERMOST = sorted(
    EXTRAS.keys() - {name for extra in EXTRAS for name in contained(extra)} - ELSEWHERE
)


def test_every_extra_is_resolved():
    seen = {*OUTERMOST, "test"}
    while more := {name for extra in seen for name in contained(extra)} - seen:
        seen |= more
    assert seen == EXTRAS.keys() - {"gpu"}


@pytest.mark.soak
def test_extras_resolve_in_the_versions_of_the_tests(installed, wheel):
    """All at once: what suits each alone, too. pip names what does not."""
    installed.pip("--dry-run", f"{wheel}[{','.join(OUTERMOST)}]")


def test_tensorflow_has_the_extra_for_gpus():
    [requirement] = EXTRAS["gpu"]
    [extra] = re.findall(r"\[([\w-]+)\]", requirement)
    assert extra in importlib.metadata.metadata("tensorflow").get_all("Provides-Extra")


def test_lowest_versions_are_those_that_the_project_names():
    requirements = [*PROJECT["project"]["dependencies"], *EXTRAS["jax"], *EXTRAS["torch"]]
    named = dict(
        re.match(r"([\w-]+)>=([\d.]+)", requirement).groups() for requirement in requirements
    )
    lines = [
        line
        for line in (ROOT / "constraints/lowest.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pinned = dict(line.split("==") for line in lines)
    assert pinned.pop("jaxlib") == pinned["jax"]
    assert pinned.keys() == named.keys()
    for name, version in named.items():
        assert re.fullmatch(rf"{re.escape(version)}(\.0)*", pinned[name]), name
