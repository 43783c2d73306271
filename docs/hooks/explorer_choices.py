"""What the unit explorer says about each choice, except the measured lines: diagrams,
errors, sentences and code. `make pages` writes them to docs/explorer/choices.js.
"""

import collections
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import explorer

import keras_preact as kp
from keras_preact.analysis import figures
from keras_preact.analysis.figures import diagrams, style
from training.config import Model
from training.ranks import spread
from training.reproduce import pictures, results
from training.reproduce.report import FAIL
from training.reproduce.rows import TABLES

FILE = explorer.FOLDER / "choices.js"
#: Name of a colour of the page to that of a white page; `style.DARK` has its dark counterpart.
COLOURS: Mapping[str, str] = {
    **{"norm": style.BLUE, "activation": style.ORANGE, "weight": diagrams.WEIGHT_COLOUR},
    **{"other": diagrams.OTHER_COLOUR, "pale": style.PALE, "edge": style.EDGE},
    **{"ink": style.INK, "grey": style.GREY, "line": style.LINE, "grid": style.GRID},
    **{"path": style.HUES[1].text, "gradient": style.HUES[1].text},
    **{"forward": style.HUES[0].text, "backward": style.HUES[2].text},
}
#: Colour of the inside of a box to its name.
INSIDES = {COLOURS[name]: name for name in ("norm", "activation", "weight", "other", "pale")}
#: The first choice, and the one that the charts compare with.
FIRST, REFERENCE = ("original", "identity", 110), ("full_preactivation", "identity")
#: Number of shortcuts in Table 1; the others are later.
OF_THE_PAPER = 7

#: Shortcut that a unit by itself cannot have by name, to the Python of one that it can have.
ALONE = {
    "decayed_identity": "kp.shortcuts.DecayedIdentity(factor=0.8)",
    "depth_scaling": "kp.shortcuts.DepthScaling(units={units})",
}

#: Tables of the results whose rows are choices of the page.
WITH_ERRORS = (
    *("table1", "table2", "table3", "table4", "first_paper", "preact", "eighth1", "eighth2"),
    *("eighth_20_1", "eighth_20_2"),
    *("digits1", "digits2", "shortcuts", "shortcuts_eighth", "deep"),
)
#: Recipe of a trial to what it trains on, in words.
TRAINED = {
    "paper": "CIFAR-10",
    "batch64": "CIFAR-10, batches of 64",
    "eighth": "CIFAR-10, 1/8 of the schedule",
    "small": "8x8 digits, 1/4 of the channels",
}

#: What h and f do, in the sentence.
H = {
    "identity": "h passes x on unchanged",
    "constant_scaling": "h halves x in each unit",
    "exclusive_gating": "a gate that starts at 0.998 scales x, the rest scales F",
    "shortcut_only_gating": "a gate that starts at 0.998 scales x",
    "conv1x1": "h multiplies x by random weights in each unit",
    "dropout": "h drops half of x in each unit",
    "scaled_residual": "h passes x on unchanged while F starts at 0",
    "orthogonal": "h passes x on unchanged",
    "decayed_identity": "the factors of h fall from 1 to 0.6 with depth",
    "depth_scaling": "h passes x on unchanged",
    "hyper_connections": "h hardly mixes its four streams at the start",
}
F = {
    "original": "f is a ReLU",
    "bn_after_addition": "f is BN and ReLU",
    "relu_before_addition": "nothing follows the addition (but F can only add)",
    "relu_only_preactivation": "nothing follows the addition",
    "full_preactivation": "nothing follows the addition",
    "bn_only_preactivation": "f is a ReLU",
}
#: What to know about the lines of a shortcut.
NOTES = {
    "conv1x1": 'The shortcut mixes channels, so "h alone" is not a number.',
    "dropout": "Dropout doubles what it keeps: the mean stays near 1, but fewer and fewer arrive.",
    "none": "Without a shortcut, nothing arrives past the branches.",
}
#: Least part of the gradient that arrives, and what the path is then.
PATHS = (
    *((1.02, "Growing"), (1, "Clean"), (0.9, "Nearly clean")),
    *((0.5, "Leaky"), (0.01, "Narrow"), (0.0, "Blocked")),
)


def arriving(arrangement: str, shortcut: str, depth: int) -> float | None:
    """Return the part of the gradient at the end of a stage that reaches its start through h
    and f: of the stage where it differs most from 1. None without a finite measurement. For
    dropout, it is the share of the entries of a gradient, from theory.
    """
    path = measured().get(explorer.key(arrangement, shortcut, depth), {}).get("path")
    if shortcut == "none":
        return 0.0
    if path is None:
        return None
    if shortcut == "dropout":
        return kp.analysis.expected_gain(shortcut, explorer.units(depth) // 3 - 1)
    if not isinstance(path, list):
        return path
    at = explorer.points(depth)
    found = [path[at.index(start)] for start in explorer.starts(depth)]
    parts = [part for part in found if part is not None]  # where something arrives at the end
    return max(parts, key=lambda part: abs(math.log(max(part, 1e-300))), default=0.0)


def sentence(arrangement: str, shortcut: str, depth: int) -> str:
    """Return what to conclude from a choice."""
    part = arriving(arrangement, shortcut, depth)
    if shortcut == "none":
        return (
            "No path: without a shortcut, every signal and every gradient passes all "
            f"{explorer.units(depth)} branches."
        )
    if part is None:
        if explorer.key(arrangement, shortcut, depth) not in measured():
            return "Not computed for this depth."
        return f"Overflow: {H[shortcut]}, and the numbers leave the range of float32."
    path = next(words for least, words in PATHS if part >= least)
    is_clean = H[shortcut].startswith(H["identity"])
    cause = H[shortcut]
    if is_clean or not F[arrangement].startswith("nothing"):
        with_both = is_clean == F[arrangement].startswith("nothing")
        cause += f", {'and' if with_both else 'but'} {F[arrangement]}"
    what = "of the gradient at the end of a stage reaches"
    if shortcut == "dropout":
        what = "of the gradient's entries at the end of a stage reach"
    if part == 1:
        effect = "the whole gradient at the end of a stage reaches every unit of it"
    elif path == "Growing":
        effect = f"the gradient at the end of a stage reaches its start {part:,.2g} times as large"
    else:
        effect = f"{share(part)} {what} its start"
    return f"{path} path: {cause}, so {effect} without passing a branch."


def share(part: float) -> str:
    """Return a part of 1 in words."""
    if part >= 1e-4:
        return f"{100 * part:.{0 if part >= 0.01 else 2}f}\N{NO-BREAK SPACE}%"
    return f"only {part:.0e}".replace("e-0", "e-") if part else "nothing"


@functools.cache
def measured() -> dict[str, Any]:
    """Return the content of measured.js."""
    return explorer.read()


def code(arrangement: str, shortcut: str, depth: int) -> dict[str, str]:
    """Return the Python that builds the unit and the network of a choice."""
    h = ALONE.get(shortcut, f'"{shortcut}"').format(units=explorer.units(depth))
    block = explorer.DEPTHS[depth]
    options = f'depth={depth}, arrangement="{arrangement}", shortcut="{shortcut}"'
    return {
        "unit": f'kp.ResidualUnit(16, block="{block}", arrangement="{arrangement}", shortcut={h})',
        "network": f"kp.models.resnet_cifar({options})",
    }


@functools.cache
def refusal(shortcut: str) -> str:
    """Return why a unit by itself cannot have a shortcut by name; "" if it can."""
    channels = 16 * kp.SHORTCUTS[shortcut]().streams
    try:
        kp.ResidualUnit(16, shortcut=shortcut).build((None, 8, 8, channels))
    except ValueError as error:
        return str(error)
    return ""


class Line(NamedTuple):
    """A line of the table of errors.

    Args:
        depth: Number of layers.
        trained: Data and recipe in words, and the options of the shortcut.
        published: Error of `kp.published` in percent; "" if there is none.
        ours: Our median in percent, with the range; "" if it is not measured.
        runs: Number of runs.
    """

    depth: int
    trained: str
    published: str
    ours: str
    runs: int


@functools.cache
def errors() -> Mapping[str, list[Line]]:
    """Return the published and the measured errors of each arrangement and shortcut."""
    groups = results.groups(results.read(explorer.ROOT / "results"))
    found: dict[str, dict[tuple, Line]] = collections.defaultdict(dict)
    for row in (row for name in WITH_ERRORS for row in TABLES[name].rows):
        model = row.trial.model
        arguments = kp.model_entry(model.name).arguments
        if {"block", "kernel_initializer"} & (arguments.keys() | model.overrides().keys()):
            continue
        words = [TRAINED[row.trial.recipe], *_options(model)]
        if row.trial.dataset == "cifar100":
            words[0] = "CIFAR-100"
        runs = results.largest(groups.get(row.trial.name, ()))
        of_paper = row.published if row.trial.recipe in ("paper", "batch64") else None
        line = Line(
            arguments["depth"],
            ", ".join(words),
            _published(of_paper),
            spread([run.error for run in runs], ".2f") if runs else "",
            len(runs),
        )
        lines = found["/".join(pictures.unit(model))]
        before = lines.get(line[:2])
        # trials of two tables can be the same network
        if (line.published or runs) and (before is None or line.runs > before.runs):
            lines[line[:2]] = line
    return {choice: sorted(lines.values(), key=_order) for choice, lines in found.items()}


def _order(line: Line) -> tuple:
    return line.depth, not line.trained.startswith("CIFAR"), line.trained


def _options(model: Model) -> list[str]:
    """Return the options of a trial's shortcut in words."""
    words = [f"factors {model.scales[0]:g} and {model.scales[1]:g}"] if model.scales else []
    words += [f"b_g = {model.gate_bias:g}"] if model.gate_bias is not None else []
    return [*words, *(option.replace("=", " = ") for option in model.shortcut_options)]


def _published(row: kp.published.Result | None) -> str:
    if row is None:
        return ""
    return f"fail (> {FAIL:g})" if row.error is None else f"{row.error:.2f}"


def parts(diagram: diagrams.Diagram) -> dict[str, Any]:
    """Return a unit for the page: text and colour of each box."""
    boxes = {
        path: [[box.text, INSIDES[box.colour]] for box in getattr(diagram, path)]
        for path in ("branch", "shortcut", "gate", "after_addition")
    }
    return boxes | {"connected": diagram.connected}


def choices() -> dict[str, Any]:
    """Return the content of the file."""
    sentences: dict[str, int] = {}
    said = {
        explorer.key(*cell): sentences.setdefault(sentence(*cell), len(sentences))
        for cell in explorer.cells()
    }
    pairs = [(arrangement, h) for arrangement in kp.ARRANGEMENTS for h in kp.SHORTCUTS]
    return {
        "first": explorer.key(*FIRST),
        "reference": "/".join(REFERENCE),
        "colours": {name: [light, style.DARK.get(light, light)] for name, light in COLOURS.items()},
        "arrangements": {name: diagrams.in_words(name) for name in kp.ARRANGEMENTS},
        "shortcuts": {name: diagrams.in_words(name) for name in kp.SHORTCUTS},
        "of_the_paper": OF_THE_PAPER,
        "depths": {
            depth: {
                "block": block,
                "units": explorer.units(depth),
                "points": explorer.points(depth),
                "starts": explorer.starts(depth),
            }
            for depth, block in explorer.DEPTHS.items()
        },
        "diagrams": {
            f"{arrangement}/{h}/{block}": parts(figures.diagram(arrangement, h, block))
            for arrangement, h in pairs
            for block in dict.fromkeys(explorer.DEPTHS.values())
        },
        # the page fills in the arrangement
        "code": {
            f"{h}/{depth}": code("ARRANGEMENT", h, depth)
            for h in kp.SHORTCUTS
            for depth in explorer.DEPTHS
        },
        "refusals": {h: words for h in kp.SHORTCUTS if (words := refusal(h))},
        "notes": NOTES,
        "errors": errors(),
        "sentences": list(sentences),
        "said": said,
    }


def text() -> str:
    """Return the text of the file."""
    about = "Written by docs/hooks/explorer_choices.py (make pages)."
    return explorer.script("CHOICES", about, choices())
