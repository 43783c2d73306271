"""Replaces names in double braces on the pages by rows of the library's tables,
sections of files, or measured figures.

`{{ published table=1 }}` calls `published(table="1")`; each function of `MACROS`
returns Markdown.
"""

import inspect
import json
import os
import posixpath
import re
import shlex
from pathlib import Path

import benchmarks

import keras_preact as kp
from keras_preact.models.registry import TRAINED
from training.console import COMMANDS
from training.recipes import RECIPES

ROOT = Path(__file__).parents[2]
WORDS = {"norm": "BN", "activation": "ReLU"}
#: File of the repository to the page that holds it.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "training/launch/README.md": "howto/machines.md",
    "saved_models/README.md": "howto/exported_models.md",
    "results/README.md": "results.md",
    "keras_preact/serving/deploy/README.md": "howto/containers.md",
    "docs/identity_mappings.ipynb": "identity_mappings.md",
}


def table(head: list[str], rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |"
        for line in lines
    )


def published(**wanted: str) -> str:
    """Rows of `kp.published.results`, by table, network and dataset."""
    return kp.published.to_markdown(kp.published.results(**wanted))


def _row(name: str) -> tuple[str, str, dict[str, str]]:
    """Return F and f of an arrangement in words, and its published errors by network."""
    row = kp.ARRANGEMENTS[name]
    order = [WORDS.get(part, part) for part in (*row.first, "W", *row.between, "W", *row.last)]
    after = [WORDS[part] for part in row.after_addition]
    results = [result for result in kp.published.results(table="2") if result.row == name]
    errors = {result.network: f"{result.error:.2f}" for result in results}
    return " ".join(order), " ".join(after), errors


def arrangements() -> str:
    """The table of arrangements with the errors of Table 2."""
    networks = ("ResNet-110", "ResNet-164")
    rows = []
    for name in kp.ARRANGEMENTS:
        order, after, errors = _row(name)
        remark = "" if errors else " (not in the paper)"
        numbers = (errors.get(network, "") for network in networks)
        rows.append([f"`{name}`{remark}", order, after, *numbers])
    return table(["arrangement", "F", "f", *networks], rows)


def commands() -> str:
    """The commands of the command line."""
    return table(
        ["command", "does"],
        [[f"`keras-preact {name}`", command.about] for name, command in COMMANDS.items()],
    )


def arrangement(name: str) -> str:
    """The picture of an arrangement, its order and its published errors."""
    order, after, errors = _row(name)
    numbers = ", ".join(f"{error} % ({network})" for network, error in errors.items())
    published = f"Published test error on CIFAR-10 (Table 2, medians of 5): {numbers}."
    return (
        f"![Unit in the arrangement {name}](figures/arrangement_{name}.svg)\n\n"
        f"F: {order}. f: {after or 'nothing'}.\n\n"
        f"{published if errors else 'Not in the paper.'}"
    )


def shortcut(name: str) -> str:
    """The picture of a shortcut and the rows of Table 1 that it has."""

    def name_of(row) -> str:
        h = row.arguments.get("shortcut", "identity")
        return h if isinstance(h, str) else re.sub(r"(?<!^)(?=[A-Z])", "_", h["class_name"]).lower()

    rows = [row for row in kp.published.results(table="1") if name_of(row) == name]
    return (
        f"![Unit with the shortcut {name}](figures/shortcut_{name}.svg)\n\n"
        + kp.published.to_markdown(rows)
    )


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
    return table(head, [cells(name) for name in kp.list_models(pattern)])


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
    return table(head, [cells(card) for card in cards])


def recipes() -> str:
    """The training recipes, described by their docstrings."""
    docs = {name: inspect.getdoc(recipe).split("\n\n") for name, recipe in RECIPES.items()}
    rows = [
        [f"`{name}`", text[0], " ".join(" ".join(text[1:]).split())] for name, text in docs.items()
    ]
    return table(["recipe", "is", "reaches"], rows)


def checks() -> str:
    """The rows of the audit."""
    from keras_preact.analysis.audit.checks import CHECKS

    return table(
        ["check", "figure", "why", "what to do"],
        [[c.name, c.unit, c.meaning, c.advice] for c in CHECKS],
    )


def measured(file: str, candidate: str, figure: str, digits: str = "2") -> str:
    """A median in training/benchmark/measured/. With `ratio` after the figure, its
    ratio to the baseline.
    """
    figure, _, ratio = figure.partition(" ")
    summary = benchmarks.read(file)["summary"][candidate][figure]
    return f"{summary['ratio']['median'] if ratio else summary['median']:.{digits}f}"


def file(path: str, *, heading: str = "") -> str:
    """A file of the repository, or the text under one of its headings."""
    lines, fenced, level, kept = (ROOT / path).read_text().splitlines(), False, 0, []
    for line in lines:
        fenced ^= line.startswith("```")
        match = None if fenced else re.match(r"(#+) (.*)", line)
        if match and heading:
            if level and len(match[1]) <= level:
                break
            if match[2] == heading:
                level = len(match[1])
                continue
        if level or not heading:
            kept.append(line)
    if not kept:
        raise ValueError(f"{path} has no heading {heading!r}")
    return "\n".join(kept).strip("\n")


def relinked(text: str, path: str, page: str) -> str:
    """Return the text of a file with its links changed to pages of the site. A link to
    a file without a page becomes plain text. Blocks of code are not changed.
    """

    def link(match: re.Match) -> str:
        if re.match(r"https?:|#", match[2]):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if not target.endswith(".png"):  # pictures are at the same place
            target = PAGES.get(target, "")
        start = posixpath.dirname(page) or "."
        return f"[{match[1]}]({os.path.relpath(target, start)})" if target else match[1]

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"\[([^\]]+)\]\(([^)]+)\)", link, part) for part in parts[::2]]
    return "".join(parts)


#: Name in double braces to the function.
MACROS = {f.__name__: f for f in (published, arrangements, arrangement, shortcut, models)}
MACROS |= {f.__name__: f for f in (commands, recipes, weights, checks, measured, file)}
MACROS |= {name: getattr(benchmarks, name) for name in ("benchmarks", "very_deep", "engines")}

#: Weights of pages in the search (1 for others), and pages with tables that need the whole width.
BOOSTS = {"howto/": 2, "install.md": 2, "reference/": 0.5, "changelog.md": 0.5}
WIDE = ("models.md", "benchmarks.md", "results.md")


def on_page_markdown(markdown, page, config, files):
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]

    def filled(match: re.Match) -> str:
        name, *words = shlex.split(match[1])
        options = dict(word.split("=", 1) for word in words if re.match(r"\w+=", word))
        values = [word for word in words if not re.match(r"\w+=", word)]
        text = MACROS[name](*values, **options)
        return relinked(text, values[0], page.file.src_uri) if name == "file" else text

    return re.sub(r"\{\{ (.+?) \}\}", filled, markdown)
