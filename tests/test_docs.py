"""The pages of the site tell the truth: their Python runs, commands and links exist,
and the site builds without a warning.
"""

import contextlib
import importlib
import inspect
import io
import json
import os
import re
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlsplit

import pytest

import keras_preact as kp
from tests import command_lines

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text()
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
BLOCKS = [
    (name, i, block)
    for name, page in PAGES.items()
    if name != "index.md"  # test_front_page_prints_what_it_shows runs its blocks
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page, re.S))
]
#: All texts with commands: the pages, README, and files that a page names or includes.
TEXTS = PAGES | {
    path: (ROOT / path).read_text()
    for path in (
        "README.md",
        "CONTRIBUTING.md",
        "saved_models/README.md",
        "training/launch/README.md",
        "keras_preact/serving/deploy/README.md",
    )
}
LINES = {name: command_lines.code(text) for name, text in TEXTS.items()}
COMMANDS = sorted({line for text in TEXTS.values() for line in command_lines.commands(text)})
MODULES = sorted({line for page in PAGES.values() for line in command_lines.modules(page)})


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with what the pages take for granted: a finished run on digits."""
    folder = tmp_path_factory.mktemp("pages")
    run = folder / "runs" / "digits"
    run.mkdir(parents=True)
    kp.create_model("digits_resnet8_preact", include_preprocessing=True).save(run / "model.keras")
    return folder


def shown(block: str, folder: Path) -> str:
    """Return what a block of Python prints when it runs in a folder."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.chdir(folder):
        exec(compile(block, "page", "exec"), {"__name__": "page"})
    return written.getvalue()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("page", "block"),
    [(page, block) for page, _, block in BLOCKS],
    ids=[f"{p}-{i}" for p, i, _ in BLOCKS],
)
def test_python_runs(page, block, workplace):
    shown(block, workplace)


def test_front_page_prints_what_it_shows(workplace):
    """Each of its blocks with an output: the words are the same, the numbers as good or
    of the same size.
    """
    pairs = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", PAGES["index.md"], re.S)
    assert len(pairs) == 2
    number = r"\d[\d.]*(?:e[+-]?\d+)?"
    printed = [shown(block, workplace) for block, _ in pairs]
    for found, (_, written) in zip(printed, pairs, strict=True):
        assert re.sub(number, "0", found).split() == re.sub(number, "0", written).split()
    assert 0.96 <= float(printed[0].split()[-1]) <= 1
    exact, cut = (float(line.split()[-1]) for line in printed[1].splitlines())
    assert exact < 1e-6 < 0.1 < cut


def test_names_of_the_library_exist():
    names, models = set(), set()
    for page, text in TEXTS.items():
        for name in re.findall(r"`kp\.(\w+(?:\.\w+)*)", text):
            names.add(name)
            value = kp
            for part in name.split("."):
                value = getattr(value, part, None) or importlib.import_module(
                    f"{value.__name__}.{part}"
                )
            assert value is not None, (page, name)
        for name in re.findall(r"`((?:cifar|imagenet|dense|digits)_[a-z]+net\w+)`", text):
            models.add(name)
            assert name in kp.list_models(), (page, name)
    assert len(names) > 20
    assert models


def test_every_variant_is_on_its_page():
    for kind, table in (("arrangement", kp.ARRANGEMENTS), ("shortcut", kp.SHORTCUTS)):
        assert re.findall(rf"\{{\{{ {kind} (\w+) \}}\}}", PAGES["variants.md"]) == list(table)


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {
        (page, target)
        for page, lines in LINES.items()
        for target in re.findall(r"^make ([a-z-]+)", "\n".join(lines), re.M)
    }
    assert named
    assert {target for _, target in named} <= targets, named


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line):
    command_lines.parse(line)


def test_commands_are_found():
    assert len(COMMANDS) > 50
    everything = "\n".join(TEXTS.values())
    assert not re.findall(r"python -m training\.(?!launch\.)\S+", everything)
    assert "python -m keras_preact.serving" not in everything


@pytest.mark.parametrize("line", MODULES)
def test_modules_have_their_options(line):
    command_lines.check_module(line)


def hook(name: str):
    """Import a module of docs/hooks."""
    with mock.patch.object(sys, "path", [str(ROOT / "docs" / "hooks"), *sys.path]):
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def hooks():
    return hook("benchmarks")


def test_benchmarks_are_those_of_the_files(hooks):
    """Each cell is found again from the single rounds, not from the summary that the
    table is made of.
    """
    lines = re.findall(r"^\| (?!measured|---)(.+) \|$", hooks.benchmarks(), re.M)
    rows = [row for rows in hooks.TABLES.values() for row in rows]
    assert len(lines) == len(rows) >= 30
    checked = 0
    for row, line in zip(rows, lines, strict=True):
        what, median, spread, rounds, cpu, threads, file = line.split(" | ")
        content = json.loads(
            (ROOT / "training/benchmark/measured" / f"{file.strip('`')}.json").read_text()
        )
        assert cpu.split()[0] in content["machine"]["cpu"]
        assert threads.startswith(f"{content['machine']['usable_cores']} core")
        for name, value in content["machine"].get("environment", {}).items():
            assert ("THREADS" not in name) or f"`{name}={value}`" in threads
        # Over what a network in 16 bits is measured must be said.
        assert row.over is None or "bfloat16" not in what or "float" in row.over
        if "outcomes" not in content:
            continue  # its rounds have another form
        figures = [each for each in content["outcomes"] if each["result"] is not None]
        of = {
            (each["round"], each["label"]): each["result"]["figures"].get(row.figure)
            for each in figures
        }
        baseline = content["candidates"][row.candidate]["baseline"]
        values = [
            value / of[number, baseline] if row.over else value
            for (number, label), value in of.items()
            if label == row.candidate
        ]
        assert int(rounds) == len(values)
        assert float(median) == pytest.approx(
            statistics.median(values), abs=0.5000001 * 10**-row.digits
        )
        least, most = (
            (float(each) for each in spread.split(" to "))
            if len(values) > 1
            else (float(median),) * 2
        )
        assert (least, most) == pytest.approx(
            (min(values), max(values)), abs=0.5000001 * 10**-row.digits
        )
        checked += 1
    assert checked >= 15


def test_figures_of_the_other_files_are_in_their_rounds(hooks):
    rows = [
        row
        for rows in hooks.TABLES.values()
        for row in rows
        if row.file in ("input_cifar", "serving")
    ]
    assert len(rows) >= 10
    for row in rows:
        if row.over is None and row.figure in (
            "images_per_second",
            "requests_per_second",
            "p99_ms",
        ):
            found = re.findall(
                r"-?\d+\.\d+", json.dumps(_rounds(hooks.read(row.file), row.candidate, row.figure))
            )
            values = [float(each) for each in found]
            assert values, row
            assert hooks.cells(row)[1] == f"{statistics.median(values):,.{row.digits}f}"


def _rounds(content: dict, candidate: str, figure: str) -> list[float]:
    rounds = content["rounds"]
    rounds = (
        rounds if isinstance(rounds, list) else [each for part in rounds.values() for each in part]
    )
    return [
        each[candidate][figure] for each in rounds if isinstance(each, dict) and candidate in each
    ]


def test_table_of_arrangements_holds_the_published_numbers():
    text = hook("tables").arrangements()
    rows = {
        name: cells
        for name, *cells in re.findall(
            r"^\| `(\w+)`[^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|$", text, re.M
        )
    }
    assert {name: [" ".join(cell.split()) for cell in cells] for name, cells in rows.items()} == {
        "original": ["W BN ReLU W BN", "ReLU", "6.61", "5.93"],
        "bn_after_addition": ["W BN ReLU W", "BN ReLU", "8.17", "6.50"],
        "relu_before_addition": ["W BN ReLU W BN ReLU", "", "7.84", "6.14"],
        "relu_only_preactivation": ["ReLU W BN ReLU W BN", "", "6.71", "5.91"],
        "full_preactivation": ["BN ReLU W BN ReLU W", "", "6.37", "5.46"],
        "bn_only_preactivation": ["BN W ReLU BN W", "ReLU", "", ""],
    }


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
            self.requested += [
                given[key] for key in ("src", "href", "srcset", "poster") if given.get(key)
            ]


@pytest.fixture(scope="module")
def site(once_per_run):
    for name in ("material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(name)

    def build(target):
        built = subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
            cwd=ROOT,
            env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert built.returncode == 0, built.stdout + built.stderr

    return once_per_run("site", build)


@pytest.mark.soak
def test_site_is_whole_and_asks_nobody(site):
    """Every address that a page fetches or links is in the site, or is a link to
    elsewhere.
    """
    pages = {
        path: Links(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"
    }
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
    assert not [
        path
        for path in site.rglob("*.css")
        if re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", path.read_text())
    ]


@pytest.mark.soak
def test_reference_has_every_public_name(site):
    """What a package under `kp` exports has an entry, under the module that defines it."""
    anchors = set().union(
        *(Links(path.read_text()).anchors for path in (site / "reference").glob("*.html"))
    )
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
        own = [
            each
            for each in exported.values()
            if getattr(each, "__module__", "").startswith("keras_preact")
        ]
        named = {
            f"{each.__module__}.{each.__qualname__}"
            for each in own
            if inspect.isclass(each) or inspect.isfunction(each)
        }
        assert named <= anchors, (package, named - anchors)


@pytest.mark.soak
def test_site_leaves_nothing_unfilled(site):
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert not re.search(r"\{\{ \w", text), path.name
        assert 'class="arithmatex"' not in text, path.name
        assert not re.search(r"<blockquote>\s*<blockquote>", text), (
            path.name
        )  # an example that is no code block
