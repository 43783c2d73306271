"""Fills in the tables and numbers of the pages: `python docs/hooks/tables.py`.

A page has them between two comments, so that it can be read without the site:
`<!-- models dense_* -->` and `<!-- end -->`. The first one calls
`models("dense_*")`; each function of `MACROS` returns Markdown.

The site has the same pages. Here it gets those that are files elsewhere in the
repository, and its links to them.
"""

import collections
import dataclasses
import functools
import importlib
import inspect
import json
import os
import posixpath
import re
import shlex
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[2]))  # so that the command finds training/

import benchmarks
import choices
import diagnosis
from command_reference import command_reference, training_reference

import keras_preact as kp
from keras_preact.models.registry import TRAINED
from training.cli.console import COMMANDS
from training.cli.terminal import markdown
from training.recipes import RECIPES
from training.reproduce import report, results
from training.reproduce.claims import check
from training.reproduce.rows import TABLES

ROOT = Path(__file__).parents[2]
WORDS = {"norm": "BN", "activation": "ReLU"}
#: File of the repository to the page of the site that holds it.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "training/launch/README.md": "howto/machines.md",
    "saved_models/README.md": "howto/exported_models.md",
    "results/README.md": "results.md",
    "keras_preact/serving/deploy/README.md": "howto/containers.md",
    "docs/identity_mappings.ipynb": "identity_mappings.md",
}


def _row(name: str) -> tuple[str, str]:
    """Return F and f of an arrangement in words."""
    row = kp.ARRANGEMENTS[name]
    order = [WORDS.get(part, part) for part in (*row.first, "W", *row.between, "W", *row.last)]
    return " ".join(order), " ".join(WORDS[part] for part in row.after_addition)


def _remark(is_published: bool) -> str:
    return "" if is_published else "\n\nNot in the paper."


def arrangements() -> str:
    """The table of arrangements."""
    return markdown([["arrangement", "F", "f"], *([f"`{n}`", *_row(n)] for n in kp.ARRANGEMENTS)])


def commands() -> str:
    """The commands of the command line."""
    return markdown(
        [
            ["command", "does"],
            *[[f"`keras-preact {name}`", command.about] for name, command in COMMANDS.items()],
        ]
    )


def arrangement(name: str) -> str:
    """The picture of an arrangement and its order."""
    order, after = _row(name)
    remark = _remark(any(result.row == name for result in kp.published.results(table="2")))
    return (
        f"![Unit in the arrangement {name}](figures/arrangement_{name}.svg)\n\n"
        f"F: {order}. f: {after or 'nothing'}.{remark}"
    )


def shortcut(name: str) -> str:
    """The picture of a shortcut."""

    def name_of(row) -> str:
        h = row.arguments.get("shortcut", "identity")
        return h if isinstance(h, str) else re.sub(r"(?<!^)(?=[A-Z])", "_", h["class_name"]).lower()

    remark = _remark(any(name_of(row) == name for row in kp.published.results(table="1")))
    return f"![Unit with the shortcut {name}](figures/shortcut_{name}.svg){remark}"


def models(pattern: str) -> str:
    """The registered models whose names match."""

    def shown(value) -> str:  # a serialised object by its class
        return f"{value['class_name']}()" if isinstance(value, dict) else repr(value)

    def cells(name: str) -> list[str]:
        entry = kp.model_entry(name)
        arguments = ", ".join(f"{key}={shown(value)}" for key, value in entry.arguments.items())
        count = f"{entry.parameters.trainable:,}" if entry.parameters else ""
        errors = "; ".join(
            f"{row.dataset} {'fail' if row.error is None else f'{row.error:g}'} (Table {row.table})"
            for row in entry.published
        )
        return [f"`{name}`", f"{entry.builder.__name__}({arguments})", count, errors]

    head = ["name", "is", "trainable parameters", "published test error, %"]
    return markdown([head, *map(cells, kp.list_models(pattern))])


def weights() -> str:
    """The weights in the package, with their measured accuracy and calibration error."""
    cards = [json.loads(path.read_text()) for path in sorted(TRAINED.glob("*.json"))]

    def cells(card: dict) -> list[str]:
        name, _, weights_name = card["model"].partition(":")
        figures = [f"{100 * card[key]:.2f} %" for key in ("accuracy", "calibration_error")]
        trained = card["trained"]
        by = f"`{trained['command']}`, {trained['iterations']:,} iterations, seed {trained['seed']}"
        return [f"`{name}`", f'`weights="{weights_name}"`', *figures, by]

    head = ["model", "argument", "test accuracy", "calibration error", "trained by"]
    return markdown([head, *map(cells, cards)])


def recipes() -> str:
    """The training recipes, described by their docstrings."""
    docs = {name: inspect.getdoc(recipe).split("\n\n") for name, recipe in RECIPES.items()}
    rows = [
        [f"`{name}`", text[0], " ".join(" ".join(text[1:]).split())] for name, text in docs.items()
    ]
    return markdown([["recipe", "is", "reaches"], *rows])


def checks() -> str:
    """The rows of the audit."""
    from keras_preact.analysis.audit.checks import CHECKS

    return markdown(
        [
            ["check", "measured value", "why", "what to do"],
            *[[c.name, c.unit, c.meaning, c.advice] for c in CHECKS],
        ]
    )


def measured(file: str, candidate: str, figure: str, digits: str = "2") -> str:
    """A median in training/benchmark/measured/. With `ratio` after the figure, its
    ratio to the baseline.
    """
    figure, _, ratio = figure.partition(" ")
    summary = benchmarks.read(file)["summary"][candidate][figure]
    return f"{summary['ratio']['median'] if ratio else summary['median']:.{digits}f}"


@functools.cache
def _runs() -> dict:
    """The measured runs of the results, by trial."""
    return results.groups(results.read(ROOT / "results"))


def measured_table(name: str) -> str:
    """A table of the results."""
    is_measured = any(row.trial.name in _runs() for row in TABLES[name].rows)
    return report.table_text(TABLES[name], _runs()) if is_measured else "Not measured yet."


def measured_row(trial: str) -> str:
    """The row of a shortcut in the results, as a table."""
    ten_years = TABLES["shortcuts"]
    row = next(each for each in ten_years.rows if each.trial.name.endswith(f"/{trial}"))
    if row.trial.name not in _runs():
        return "Not measured yet."
    return report.table_text(dataclasses.replace(ten_years, rows=(row,)), _runs())


def claims(topic: str) -> str:
    """The claims of a topic with their verdicts; those that surprise, with `surprising`."""
    chosen = [
        claim
        for claim in check.all_claims().values()
        if (claim.surprising if topic == "surprising" else claim.topic == topic)
    ]
    return check.table(chosen, check.read(ROOT / "results"))


def claim_counts() -> str:
    """How many claims have which verdict."""
    return check.counts(check.read(ROOT / "results"))


#: The end of the first sentence of a docstring.
SENTENCE = re.compile(r"(?<!\bEq)(?<!\bFig)(?<!\bSec)(?<!\bal)(?<!\.)\.(?=\s|$)")


def names(*modules: str) -> str:
    """The names of modules, with links to the source, and the first sentence of their
    docstrings: of all that are public, or of those in `MODULE:NAME,NAME`. A name that
    several modules have is written with its module.
    """
    rows = []
    for words in modules:
        module = importlib.import_module(words.partition(":")[0])
        of = words.partition(":")[2]
        path = Path(module.__file__).relative_to(ROOT).as_posix()
        for name, value in vars(module).items():
            is_public = not name.startswith("_") and hasattr(value, "__qualname__")
            is_own = getattr(value, "__module__", "") == module.__name__
            if (name in of.split(",") if of else is_public and is_own) and inspect.getdoc(value):
                first = inspect.getdoc(value).partition("\n\n")[0]
                about = SENTENCE.split(" ".join(first.split()))[0].rstrip(":")
                rows.append((name, module.__name__, path, about))
    counts = collections.Counter(name for name, *_ in rows)

    def link(name: str, module: str, path: str) -> str:
        label = f"{module.rpartition('.')[2]}.{name}" if counts[name] > 1 else name
        return f"[`{label}`](../../{path})"

    return markdown([["name", "is"], *([link(*of), about] for *of, about in rows)])


#: Name in a comment to the function.
MACROS = {f.__name__: f for f in (arrangements, arrangement, shortcut, models)}
MACROS |= {f.__name__: f for f in (commands, recipes, weights, checks, measured, names)}
MACROS |= {f.__name__: f for f in (measured_row, measured_table, claims, claim_counts)}
MACROS |= {name: getattr(diagnosis, name) for name in ("diagnosis", "diagnosis_code")}
MACROS |= {f.__name__: f for f in (command_reference, training_reference)}
MACROS |= {name: getattr(benchmarks, name) for name in ("benchmarks", "very_deep", "engines")}
MACROS |= {name: getattr(choices, name) for name in ("choices", "ready_weights", "deep_memory")}

#: A call, what stands between the comments, and the end.
PART = re.compile(rf"(<!-- ((?:{'|'.join(MACROS)})(?: [^>]+?)?) -->)(.*?)(<!-- end -->)", re.S)


def filled(text: str) -> str:
    """Return the text of a page with its parts as the macros return them."""

    def part(match: re.Match) -> str:
        start, call, before, end = match.groups()
        name, *words = shlex.split(call)
        options = dict(word.split("=", 1) for word in words if re.match(r"\w+=", word))
        values = [word for word in words if not re.match(r"\w+=", word)]
        space = "\n\n" if before.startswith("\n") else ""
        return f"{start}{space}{MACROS[name](*values, **options)}{space}{end}"

    return PART.sub(part, text)


def relinked(text: str, path: str, page: str) -> str:
    """Return the text of a file with the links as its page of the site has them. In the
    reference, a name leads to its description. Any other link to a file without a page
    becomes plain text. Blocks of code are not changed.
    """

    def link(match: re.Match) -> str:
        label, target, anchor = match.groups()
        if re.match(r"\w+:|#", target):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if target in PAGES and target != path:
            target = PAGES[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        elif page.startswith("reference/") and target.endswith(".py"):
            module = target.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            return f"[{label}][{module}.{label.strip('`').rpartition('.')[2]}]"
        elif not target.endswith(".svg"):  # pictures of the results are at the same place
            return label
        return f"[{label}]({os.path.relpath(target, posixpath.dirname(page) or '.')}{anchor or ''})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    pattern = r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)"
    parts[::2] = [re.sub(pattern, link, part) for part in parts[::2]]
    return "".join(parts)


#: Weights of pages in the search (1 for others).
BOOSTS = {
    **{"howto/": 2, "install.md": 2, "reference/": 0.5, "changelog.md": 0.5},
    **{"reference/commands.md": 2, "reference/train.md": 2},
}
#: Pages with wide tables, which have no navigation on the left.
WIDE = ("models.md", "choose.md", "ten_years.md", "benchmarks.md", "results.md", "claims.md")


def on_files(files, config):
    from mkdocs.structure.files import File

    for path, page in PAGES.items():
        if path.endswith(".md"):
            files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    for start, boost in BOOSTS.items():
        if uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    if uri in WIDE:
        page.meta["hide"] = ["navigation"]
    paths = {page: path for path, page in PAGES.items()}
    return relinked(markdown, paths.get(uri, f"docs/{uri}"), uri)


def main() -> None:
    """Fill in the pages."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        before = path.read_text()
        after = filled(before)
        if after != before:
            path.write_text(after)
            print(f"Written: {path}")


if __name__ == "__main__":
    main()
