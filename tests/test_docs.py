"""README and the pages tell the truth: their commands, names and links exist, their
numbers agree with the files, and their Python runs.
"""

import ast
import collections
import contextlib
import dataclasses
import functools
import http.server
import importlib
import importlib.util
import inspect
import io
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

import keras_preact as kp
from tests import browser, command_lines
from training.commands import audit, train
from training.config import Config, differences, from_json
from training.recipes import RECIPES
from training.reproduce import __main__ as reproduce
from training.reproduce import results
from training.reproduce.rows import TABLES

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
#: All texts with commands: the pages, README, and files that a page names or includes.
TEXTS = PAGES | {
    path: (ROOT / path).read_text()
    for path in (
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "saved_models/README.md",
        "training/launch/README.md",
        "keras_preact/serving/deploy/README.md",
    )
}
COMMANDS = sorted({line for text in TEXTS.values() for line in command_lines.commands(text)})
PYTHON = {name: re.findall(r"```python\n(.*?)```", text, re.S) for name, text in TEXTS.items()}
del PYTHON["saved_models/README.md"]  # it has a placeholder
# its code runs from top to bottom
PYTHON["docs/gallery.md"] = ["".join(PYTHON["docs/gallery.md"])]
# its last block defines what the others use
*others, definitions = PYTHON["docs/diagnosis.md"]
PYTHON["docs/diagnosis.md"] = ["".join([definitions, *others])]
BLOCKS = [
    pytest.param(block, id=f"{name}-{i}")
    for name, blocks in PYTHON.items()
    for i, block in enumerate(blocks)
]


DIGITS = "results/digits/resnet{}/seed-*.json"
#: The arrangements of README's table, in the order of its columns.
UNITS = ("original", "full_preactivation")
FAST = "results/cifar10/fast_resnet8/seed-*.json"
TRAINED = "keras_preact/models/trained/cifar_fast_resnet8.cifar10.json"
ERROR = "final test_error"
H100 = "NVIDIA H100 80GB HBM3"
#: Sentences of README with their numbers in groups. For each number: a pattern of the files, the
#: keys, a factor if README has another unit, the statistic over several files if it is not the
#: median, and the device of the runs if there are several. Change a sentence here and in README
#: together.
CLAIMS = [
    (
        r"two CPU cores this takes (\d+) minutes; the mean accuracy of 5 runs is ([\d.]+) %, .*"
        r"run on an H100 took (\d+) s and reached ([\d.]+) %",
        (FAST, "cost seconds", 1 / 60, statistics.median, "CPU"),
        (FAST, "views flip_shift accuracy", 100, statistics.mean, "CPU"),
        (FAST, "cost seconds", 1, statistics.median, H100),
        (FAST, "views flip_shift accuracy", 100, statistics.median, H100),
    ),
    *(
        (
            rf"ResNet-{depth} on CIFAR-10, 1 run each \| ([\d.]+) \(.*?\) \| ([\d.]+) \|",
            *((f"results/cifar10/resnet{depth}-{name}/seed-*.json", ERROR) for name in UNITS),
        )
        for depth in (20, 32)
    ),
    (
        r"ResNet-110 on digits, 10 runs each "
        r"\| ([\d.]+) \(([\d.]+) to ([\d.]+)\) \| ([\d.]+) \(([\d.]+) to ([\d.]+)\)",
        *(
            (DIGITS.format(f"110-{name}"), ERROR, 1, of)
            for name in UNITS
            for of in (statistics.median, min, max)
        ),
    ),
    (
        r"ResNet-1001 on digits, 3 runs each \| ([\d.]+) \| ([\d.]+) \|",
        *((DIGITS.format(f"1001-{name}"), ERROR) for name in UNITS),
    ),
    (
        r"classifier for CIFAR-10 with a test accuracy of ([\d.]+) %",
        (TRAINED, "accuracy", 100),
    ),
]


def measured(
    pattern: str, keys: str, factor: float = 1, of=statistics.median, device: str | None = None
) -> float:
    """Return a value of a JSON file, or the statistic `of` over all files of a pattern, of
    those of a device.
    """
    found = []
    for file in ROOT.glob(pattern):
        value = json.loads(file.read_text())
        if device not in (None, value.get("device", {}).get("name")):
            continue
        for key in keys.split():
            value = value[key]
        found.append(factor * value)
    return of(found)


def rounded(value: float, written: str) -> str:
    """Return a value with as many significant digits as the `written` number has."""
    digits = written.replace(",", "")
    places = (
        len(digits.partition(".")[2]) if "." in digits else len(digits.rstrip("0")) - len(digits)
    )
    return f"{round(value, places):,.{max(places, 0)}f}"


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row[0])
def test_numbers_are_those_of_the_files(row):
    claim, *places = row
    found = re.search(claim, " ".join(TEXTS["README.md"].split()))
    assert found, f"README.md does not say this any more: {claim}"
    values = [measured(*place) for place in places]
    assert list(found.groups()) == list(map(rounded, values, found.groups()))


def test_benchmarks_are_the_medians_of_their_rounds(monkeypatch):
    """The table is made from the files' summaries; the test computes it from the rounds."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "hooks")
    hooks = importlib.import_module("benchmarks")
    checked = 0
    for row in [row for rows in hooks.TABLES.values() for row in rows]:
        content = hooks.read(row.file)
        of = {
            (each["round"], each["label"]): each["result"]["figures"].get(row.figure)
            for each in content.get("outcomes", ())  # some files have rounds in another form
            if each["result"] is not None
        }
        values = [
            value / of[number, content["candidates"][label]["baseline"]] if row.over else value
            for (number, label), value in of.items()
            if label == row.candidate
        ]
        if values:
            written = float(hooks.cells(row)[2 if row.over else 1].replace(",", ""))
            allowed = 0.5000001 * 10**-row.digits
            median = statistics.median(values)
            expected = 1 / median if row.over and hooks.is_lower_better(row) else median
            assert written == pytest.approx(expected, abs=allowed)
            checked += 1
    assert checked >= 15


def test_the_audit_in_readme_is_what_it_prints(capsys):
    audit.main(["cifar_resnet20_original"])
    shown = re.search(r"```text\n(.*?)```", TEXTS["README.md"], re.S)[1]
    assert shown in capsys.readouterr().out


def test_names_exist():
    """The names of the library, its models, its modules and the Makefile's targets."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for page, text in TEXTS.items():
        for name in re.findall(r"`kp\.(\w+(?:\.\w+)*)", text):
            value = kp
            for part in name.split("."):
                value = getattr(value, part, None) or importlib.import_module(
                    f"{value.__name__}.{part}"
                )
        written = re.sub(r"<!-- .+? -->.*?<!-- end -->", "", text, flags=re.S)
        for name in re.findall(r"`((?:cifar|imagenet|dense|digits)_[a-z]+net\w+)`", written):
            assert name in kp.list_models(), (page, name)
        code = "\n".join(command_lines.code(text))
        for name in re.findall(r"python -m ((?:training|keras_preact)[\w.]*)", code):
            assert importlib.util.find_spec(name), (page, name)
        for name in re.findall(r"^make ([a-z-]+)", code, re.M) + re.findall(
            r"`make ([a-z-]+)", text
        ):
            assert name in targets, (page, name)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line):
    command_lines.parse(line)


@pytest.mark.parametrize("page", [*TEXTS, "results/README.md"])
def test_links_lead_to_files_and_headings(page):
    """In a clone, without the site. Pictures are links too."""
    path = ROOT / page
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.S)
    found = re.findall(r'(?:\]\(|(?:src|srcset)=")(?!\w+:)([^)#"\s]*)(?:#([^)"\s]*))?', text)
    for link, heading in found:
        target = path.parent / link if link else path
        assert target.exists(), link
        if heading and target.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            assert heading in map(anchor, headings), f"{link}#{heading}"


def anchor(heading: str) -> str:
    """The anchor of a heading on GitHub and on the site."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "hooks")
        return importlib.import_module("tables")


@pytest.mark.parametrize("page", PAGES)
def test_generated_parts_are_current(page, tables):
    text = PAGES[page]
    assert tables.filled(text) == text, "run make pages"
    assert text.count("<!-- end -->") == len(tables.PART.findall(text))
    # a comment at the start of a line ends the paragraph on GitHub
    assert not re.search(r"^<!-- .+ -->.*\w.*<!-- end -->", text, re.M)
    assert not re.search(r"\{\{ \w", text)


def test_every_choice_names_the_runs_that_it_shows(tables):
    """Its command trains what the runs of its numbers have trained."""
    choices = importlib.import_module("choices")
    checked = collections.Counter()
    for choice in itertools.chain(*choices.GROUPS.values()):
        if not choice.trial:
            continue
        command, name, *words = shlex.split(choice.command)
        config = from_json(Config, choices.runs_of(choice)[0].config)
        if command == "reproduce":
            [trial] = reproduce.chosen(
                reproduce.COMMANDS[name][1], [words[words.index("--rows") + 1]]
            )
            assert trial.name == choice.trial
        else:
            own, _ = train._configured(f"train {name}", train.Options, RECIPES[name](), [], words)
            if config.model.arrangement is not None:  # that of the registered network
                entry = kp.model_entry(config.model.name)
                assert entry.arguments["arrangement"] == config.model.arrangement
                own = dataclasses.replace(
                    own, model=dataclasses.replace(own.model, arrangement=config.model.arrangement)
                )
            # which computer the run had, and when it was measured
            other = (*results.IGNORED, "--model.precision", "--data.watch-test")

            assert not differences(own, config, other)
        checked[command] += 1
    assert min(checked.values()) >= 5


def test_every_variant_is_on_its_page():
    for kind, table in (("arrangement", kp.ARRANGEMENTS), ("shortcut", kp.SHORTCUTS)):
        assert re.findall(rf"<!-- {kind} (\w+) -->", PAGES["docs/variants.md"]) == list(table)


def test_every_shortcut_is_in_the_ten_years():
    page = PAGES["docs/ten_years.md"]
    rows = [row.trial.name.partition("/")[2] for row in TABLES["shortcuts"].rows]
    assert sorted(re.findall(r"<!-- measured_row (\S+) -->", page)) == sorted(rows)
    assert sorted(re.findall(r"figures/shortcut_(\w+)\.svg", page)) == sorted(kp.SHORTCUTS)


def test_reference_has_every_public_name():
    """A name is listed with the module that defines it: mkdocstrings lists all of its
    public names.
    """
    pages = "\n".join(text for name, text in PAGES.items() if "reference/" in name)
    listed = re.findall(r"^::: (\S+)", pages, re.M)
    packages = ("models", "analysis", "analysis.figures", "health", "transfer", "weights")
    for package in ("", *(f".{name}" for name in (*packages, "distribution", "export"))):
        module = importlib.import_module(f"keras_preact{package}")
        exported = [getattr(module, name) for name in dir(module) if not name.startswith("_")]
        for each in exported:
            if inspect.isclass(each) or inspect.isfunction(each):
                origin = each.__module__
                assert origin in listed or not origin.startswith("keras_preact"), each


#: What holds after a block that prints this word: what its page says of the result.
LEARNED = {
    "overlaps": lambda found: min(found["overlaps"]) > 0.85,
    "repeated": lambda found: found["repeated"] > 0.99 and found["guessed"] < 0.05,
}


@pytest.mark.soak
@pytest.mark.parametrize("block", BLOCKS)
def test_python_runs(block, tmp_path, monkeypatch):
    """The pages assume that there is a finished run on digits."""
    monkeypatch.chdir(tmp_path)
    Path("runs/digits").mkdir(parents=True)
    model = kp.create_model("digits_resnet8_preact", include_preprocessing=True)
    model.save("runs/digits/model.keras")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(block, "page", "exec"), found := {"__name__": "page"})
    assert all(holds(found) for name, holds in LEARNED.items() if name in found)


@pytest.fixture(scope="module")
def docstrings():
    pytest.importorskip("griffe")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "hooks")
        return importlib.import_module("docstrings")


def test_reference_shows_whole_docstrings(docstrings):
    """With the options of the site. griffe makes a box of an unknown label with indented
    lines below it, and a type of what comes before a colon in `Returns:`.
    """
    import griffe

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    [plugin] = [each["mkdocstrings"] for each in site["plugins"] if "mkdocstrings" in each]
    options = plugin["handlers"]["python"]["options"]["docstring_options"]
    kinds = {"text", "parameters", "returns", "yields", "raises", "attributes"}
    labels = set()
    for path in (ROOT / "keras_preact").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                continue
            docstring = ast.get_docstring(node) or ""
            labels.update(re.findall(r"\n\n([A-Z][a-z]*(?: and [a-z]+)?):", docstring))
            read = griffe.Docstring(docstrings.readable(docstring))
            for section in read.parse("google", warnings=False, **options):
                kind, value = section.kind.value, section.value
                assert kind in kinds, (path, docstring)
                if kind == "text":
                    assert ">>>" not in re.sub(r"```.*?```", "", value, flags=re.S), (
                        path,
                        docstring,
                    )
                if kind == "returns":
                    assert [(each.annotation, each.name) for each in value] == [(None, "")], value
    sections = {"Args", "Returns", "Yields", "Raises", "Attributes", "Example"}
    assert labels == sections | set(docstrings.LABELS)


def test_reference_hides_helpers_and_links_what_it_sends_to(docstrings):
    """Its bases are those that a user can know, and `See` a name of the library is a link."""
    import griffe

    extensions = griffe.load_extensions(docstrings.Docstrings())
    loaded = griffe.load("keras_preact", search_paths=[str(ROOT)], extensions=extensions)
    shown = {
        each.path: each
        for each in docstrings.everything(loaded)
        if each.module.path in docstrings.REFERENCE and not each.name.startswith("_")
    }
    unit = "keras_preact.units.ResidualUnit"
    assert list(map(str, shown[unit].bases)) == ["keras.Layer"]
    gated = shown["keras_preact.shortcuts.ExclusiveGating"]
    assert list(map(str, gated.bases)) == ["Shortcut"]
    for each in shown.values():
        if each.is_class:
            for base in map(str, each.bases):
                assert not re.search(r"\b_|HoldsLayers|SameShape", base), (each.path, base)
        text = each.docstring.value if each.docstring else ""
        for name in re.findall(r"\b[Ss]ee `([\w.]+)`", text):  # attributes are described there
            assert name not in dir(importlib.import_module(each.module.path)), (each.path, name)
    text = shown["keras_preact.analysis.figures.diagrams.unit_diagram"].docstring.value
    assert "arrangement: See [`diagram`][keras_preact.analysis.figures.diagrams.diagram]" in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Source: Eq. 5\n    of a paper.\n\nMore.", "**Source:** Eq. 5 of a paper.\n\nMore."),
        (
            "    a, *b: Two\n        lines.",
            "    a: Two\n        lines.\n    *b: Two\n        lines.",
        ),
        ("Example:\n    >>> 1  # doctest: +SKIP", "**Example:**\n\n```python\n>>> 1\n```"),
        (">>> 1\n1\nSource: x.", "```python\n>>> 1\n1\n```\n\n**Source:** x."),
    ],
    ids=["label", "shared", "example", "example and label"],
)
def test_docstrings_become_markdown(docstrings, before, after):
    assert docstrings.readable(before).rstrip() == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<code>a --b.c-d</code>", '<code>a <span class="word">--b.c-d</span></code>'),
        ("<pre><code>a --b</code></pre>", "<pre><code>a --b</code></pre>"),
        (f"<code>--{'b' * 40}</code>", f"<code>--{'b' * 40}</code>"),
        (
            "<table><tr><th>a</th><th>b</th><th><code>c</code></th></tr>"
            "<tr><td>1</td><td>2</td><td>3</td></tr></table>",
            "<table data-columns><tr><th>a</th><th>b</th><th><code>c</code></th></tr>"
            '<tr><td>1</td><td data-heading="b">2</td><td data-heading="c">3</td></tr></table>',
        ),
        ("<table><tr><th>a</th></tr><tr><td>1</td></tr></table>",) * 2,
    ],
    ids=["option", "block", "long", "wide table", "table that fits"],
)
def test_pages_are_prepared_for_narrow_windows(monkeypatch, before, after):
    monkeypatch.syspath_prepend(ROOT / "docs" / "hooks")
    layout = importlib.import_module("layout")
    assert layout.on_page_content(before, None, None, None) == after


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built once."""
    for name in ("material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "Formatting signatures requires" not in built.stderr
    return folder


@pytest.mark.soak
def test_site_is_whole_and_asks_nobody(site):
    """Everything is filled in, and nothing comes from elsewhere."""
    fetched = r'<(?!a\b)\w+[^>]*\s(?:src|href|srcset|poster)="(?:https?:)?//'
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert not re.search(rf"class=\"arithmatex\"|{fetched}", text), path.name
        for picture in re.findall(r'<img [^>]*src="([^"]+\.svg[^"]*)"', text):
            is_film = picture.endswith("film.svg")  # dark on every page
            assert is_film or picture.endswith(("#only-light", "#only-dark")), (path.name, picture)
    for path in site.rglob("*.css"):
        found = re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", path.read_text())
        assert not found, path.name


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, *args) -> None:
        pass


#: Sizes of a telephone and of a notebook.
WINDOWS = ({"width": 390, "height": 844}, {"width": 1280, "height": 800})
#: What people search for, and the page that must come first.
SEARCHES = {
    "--data.flip": "reference/train.html",
    "fp16": "howto/precision.html",
    "resume": "howto/resume.html",
    "own dataset": "howto/folder.html",
    "NaN": "diagnosis.html",
}


@pytest.mark.soak
@browser.needed
def test_site_in_a_browser(site):
    """No page is wider than its window, and none complains, asks another server or makes a
    box of a docstring's label. The search finds what people ask for.
    """
    handler = functools.partial(Quiet, directory=str(site))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        browser.opened_tab() as (tab, complaints),
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        own = (home, "data:", "blob:")
        tab.on("console", lambda line: line.type == "error" and complaints.append(line.text))
        tab.on("request", lambda asked: asked.url.startswith(own) or complaints.append(asked.url))
        pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
        for window, page in itertools.product(WINDOWS, pages):
            tab.set_viewport_size(window)
            tab.goto(home + page)
            width = tab.evaluate("document.documentElement.scrollWidth")
            if width > window["width"]:
                complaints.append(f"{page} is {width} pixels wide in {window}")
            if page.startswith("reference/") and tab.locator("article details").count():
                complaints.append(f"{page} has boxes")
        tab.goto(home)
        tab.get_by_placeholder("Search").click()
        for words, page in SEARCHES.items():
            tab.get_by_placeholder("Search").fill("")
            tab.get_by_placeholder("Search").press_sequentially(words)
            tab.locator(
                f".md-search-result__item:first-child > a[href*='/{page}?h=']"
            ).first.wait_for()
        server.shutdown()
    assert len(pages) > 50
    assert complaints == []
