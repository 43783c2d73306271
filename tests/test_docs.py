"""The pages of the site tell the truth: their Python runs, commands and links exist, and the site builds without a warning."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import keras
import pytest

import keras_preact as kp

pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend")

ROOT = Path(__file__).parents[1]
PAGES = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
BLOCKS = [
    (name, i, block) for name, page in PAGES.items() for i, block in enumerate(re.findall(r"```python\n(.*?)```", page, re.S))
]
#: What is written as code: commands on lines of their own, and everything between single backticks.
LINES = [
    (name, line)
    for name, page in PAGES.items()
    for line in re.findall(r"^    (\S.*)$|`([^`\n]+)`", page, re.M)
    for line in line
    if line
]
COMMANDS = [shlex.split(line, comments=True)[2:] for _, line in LINES if line.startswith("python -m ")]
#: Programs of other projects that the pages call as modules.
OTHERS = ("pip", "tensorflow_datasets")
#: Scripts of which each recipe, or command, has options of its own.
SUBCOMMANDS = ("training.train", "training.reproduce")


@pytest.mark.parametrize(
    ("page", "block"), [(page, block) for page, _, block in BLOCKS], ids=[f"{p}-{i}" for p, i, _ in BLOCKS]
)
def test_python_runs(page, block):
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(block, page, "exec"), {})


def test_names_of_the_library_exist():
    for page, text in PAGES.items():
        for name in re.findall(r"`kp\.(\w+(?:\.\w+)*)", text):
            value = kp
            for part in name.split("."):
                value = getattr(value, part, None) or importlib.import_module(f"{value.__name__}.{part}")
            assert value is not None, (page, name)
        for name in re.findall(r"`((?:cifar|imagenet|dense|digits)_[a-z]+net\w+)`", text):
            assert name in kp.list_models(), (page, name)


def test_every_variant_is_on_its_page():
    for kind, table in (("arrangement", kp.ARRANGEMENTS), ("shortcut", kp.SHORTCUTS)):
        assert re.findall(rf"\{{\{{ {kind} (\w+) \}}\}}", PAGES["variants.md"]) == list(table)


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {(page, target) for page, line in LINES for target in re.findall(r"^make ([a-z-]+)", line)}
    assert named
    assert {target for _, target in named} <= targets, named


@functools.cache
def help_of(module: str, recipe: str = "") -> str:
    """Return what a command says of its options; of `SUBCOMMANDS`, those of a recipe or a command."""
    written, argv = io.StringIO(), sys.argv
    # by another test: `run_module` would warn; but a package keeps the modules that it has
    script = f"{module}.__main__" if importlib.util.find_spec(module).submodule_search_locations else module
    imported = {script: sys.modules.pop(script)} if script in sys.modules else {}
    sys.argv = [module, *([recipe] if recipe else []), "--help"]
    try:
        with contextlib.redirect_stdout(written), pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = argv
        sys.modules.update(imported)
    assert ended.value.code in (0, None)
    return re.sub(r"\x1b\[[\d;]*m", "", written.getvalue())


@pytest.mark.parametrize("command", sorted({tuple(command) for command in COMMANDS}), ids=" ".join)
def test_commands_have_their_options(command):
    module, *arguments = command
    if module.split(".")[0] in OTHERS:
        return
    spec = importlib.util.find_spec(module)
    assert spec is not None
    recipe = arguments[0] if module in SUBCOMMANDS and arguments and not arguments[0].startswith("-") else ""
    options = [argument for argument in arguments if argument.startswith("--")]
    if options and not (module == "training.train" and not recipe):  # `--resume RUN` and `--help` stand in front
        # no shorter name of another option
        assert not [option for option in options if not re.search(rf"{option}(?![\w.-])", help_of(module, recipe))]


class Links(HTMLParser):
    """The addresses that a page names, and the anchors that it has."""

    def __init__(self, text: str):
        super().__init__()
        self.requested: list[str] = []
        self.linked: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.linked.append(given["href"])
        else:
            # what a browser fetches by itself
            self.requested += [given[key] for key in ("src", "href", "srcset", "poster") if given.get(key)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in ("material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(name)
    target = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    return target


@pytest.mark.slow
def test_site_is_whole_and_asks_nobody(site):
    """Every address that a page fetches or links is in the site, or is a link to elsewhere."""
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) >= len(PAGES)
    for path, found in pages.items():
        for address in found.requested + found.linked:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                assert address not in found.requested, (path.name, address)
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), (path.name, address)
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, (path.name, address)
    assert not [path for path in site.rglob("*.css") if re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", path.read_text())]


@pytest.mark.slow
def test_reference_has_every_public_name(site):
    """What a package under `kp` exports has an entry, under the module that defines it."""
    anchors = set().union(*(Links(path.read_text()).anchors for path in (site / "reference").glob("*.html")))
    for package in (
        "",
        ".models",
        ".analysis",
        ".analysis.figures",
        ".health",
        ".transfer",
        ".weights",
        ".distribution",
        ".export",
    ):
        module = importlib.import_module(f"keras_preact{package}")
        exported = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
        own = [each for each in exported.values() if getattr(each, "__module__", "").startswith("keras_preact")]
        named = {f"{each.__module__}.{each.__qualname__}" for each in own if inspect.isclass(each) or inspect.isfunction(each)}
        assert named <= anchors, (package, named - anchors)


@pytest.mark.slow
def test_site_leaves_nothing_unfilled(site):
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert not re.search(r"\{\{ \w", text), path.name
        assert 'class="arithmatex"' not in text, path.name
        assert not re.search(r"<blockquote>\s*<blockquote>", text), path.name  # an example that is no code block
