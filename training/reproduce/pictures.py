"""The pictures of the report: training curves as the paper draws them, and errors by depth."""

import collections
import dataclasses
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

import keras_preact as kp
from keras_preact.analysis.figures import style
from keras_preact.analysis.figures.diagrams import in_words

from ..config import Model, from_json
from ..ranks import number
from .results import Record, by_setting, largest, short_device

#: Name of a trial to its runs.
Groups = Mapping[str, Sequence[Record]]

#: Curve to the label of its axis: errors above losses.
CURVES: Mapping[str, str] = {"test_error": "Test error (%)", "train_loss": "Training loss"}
#: An axis fits the numbers between these percentiles.
INSIDE = (0.5, 99)
NOTE = (
    "Median and range of n runs, on logarithmic axes. \u25b2\u25bc outside them. \u00d7 diverged."
)


#: Layers of the networks with an eighth of the schedule.
DEPTHS = (8, 20, 56)
DEPTH_NOTE = (
    "Median and range of the last errors of n runs, of 8, 20 and 56 layers, on logarithmic axes. "
    "\u00d7 diverged."
)
#: The mark of runs that diverged.
CROSS = {"marker": "x", "ms": 8, "mew": 2, "clip_on": False}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of training curves.

    Args:
        title: What it shows.
        table: Name of the table that it belongs to.
        panels: Title of each panel to the names of its trials.
    """

    title: str
    table: str
    panels: Mapping[str, tuple[str, ...]]


def _figure(
    title: str, table: str, panels: Mapping[str, str], of: str = "cifar10/resnet{}"
) -> Figure:
    """Return a figure. `panels` has the names of the trials of each panel, the baseline
    last; `of` is the pattern of their full names.
    """
    return Figure(
        title,
        table,
        {panel: tuple(map(of.format, names.split())) for panel, names in panels.items()},
    )


#: Panels of Fig. 3, with all rows of Table 1.
_SHORTCUTS = {
    "constant scaling": "original-none original-constant_scaling-0.5-1 "
    "original-constant_scaling-0.5-0.5 original",
    "exclusive gating": "original-exclusive_gating-b0 original-exclusive_gating-b-6 "
    "original-exclusive_gating-b-7 original",
    "shortcut-only gating": "original-shortcut_only_gating-b0 original-shortcut_only_gating-b-6 "
    "original",
    "1x1 convolution, dropout": "original-conv1x1 original-dropout original",
}
#: Rows of Table 2, some of which are in Fig. 1 and 6.
_ACTIVATIONS = (
    "bn_after_addition relu_before_addition relu_only_preactivation full_preactivation original"
)


def _both_depths(trial: str) -> dict[str, str]:
    return {
        f"ResNet-{n}": " ".join(trial.format(f"{n}-{name}") for name in _ACTIVATIONS.split())
        for n in (110, 164)
    }


#: Panels of the pictures of ten years of shortcuts.
_TEN_YEARS = {
    "2016: something on the path": "scaling exclusive gating conv1x1 dropout none identity",
    "2020 to 2025: scaled branches": "skip_init layer_scale depth_scaling identity",
    "2024 and 2025: the path again": "orthogonal orthogonal-map decayed identity",
    "2024 to 2026: hyper-connections": "hyper-none hyper-sinkhorn hyper-permutations identity",
}

#: Name of a picture to what it shows. The numbers of the figures are the paper's.
FIGURES: Mapping[str, Figure] = {
    "preact": _figure(
        "Original units and full pre-activation at 20 to 56 layers, on CIFAR-10",
        "preact",
        {f"ResNet-{n}": f"{n}-full_preactivation {n}-original" for n in (20, 32, 44, 56)},
    ),
    "figure1": _figure(
        "Fig. 1: ResNet-1001 on CIFAR-10",
        "table3",
        {"": "1001-full_preactivation 1001-original"},
    ),
    "figure3": _figure(
        "Fig. 3: shortcuts of ResNet-110, on CIFAR-10",
        "table1",
        _SHORTCUTS,
        "cifar10/resnet110-{}",
    ),
    "figure6": _figure(
        "Fig. 6: where BN and ReLU are, on CIFAR-10",
        "table2",
        _both_depths("{}"),
    ),
    "eighth1": _figure(
        "Shortcuts of ResNet-56 in an eighth of the schedule, on CIFAR-10",
        "eighth1",
        _SHORTCUTS,
        "cifar10/resnet56-{}-eighth",
    ),
    "eighth2": _figure(
        "Where BN and ReLU are: ResNet-56 in an eighth of the schedule, on CIFAR-10",
        "eighth2",
        {"": _ACTIVATIONS},
        "cifar10/resnet56-{}-eighth",
    ),
    "digits1": _figure(
        "Shortcuts of a narrow ResNet-110, on digits",
        "digits1",
        _SHORTCUTS,
        "digits/resnet110-{}",
    ),
    "digits2": _figure(
        "Where BN and ReLU are, in narrow networks on digits",
        "digits2",
        _both_depths("{}"),
        "digits/resnet{}",
    ),
    "shortcuts": _figure(
        "Ten years of shortcuts, on digits",
        "shortcuts",
        _TEN_YEARS,
        "digits/resnet110-preact-{}",
    ),
    "shortcuts_eighth": _figure(
        "Ten years of shortcuts: ResNet-56 in an eighth of the schedule, on CIFAR-10",
        "shortcuts_eighth",
        _TEN_YEARS,
        "cifar10/resnet56-preact-{}-eighth",
    ),
    "deep": _figure(
        "A thousand and ten thousand layers, on digits",
        "deep",
        {
            "1,001 layers": "1001-full_preactivation 1001-original",
            "10,001 layers": "10001-full_preactivation",
        },
        "digits/resnet{}",
    ),
    "plain": _figure(
        "Chains without shortcuts and normalisation, on digits",
        "plain",
        {"1,000 layers": "1000-muon 1000-sgd", "10,000 layers": "10000-muon"},
        "digits/plain{}",
    ),
}

#: Name of a picture of test errors by depth to what it shows. "{}" in the names of its trials
#: stands for the layers.
BY_DEPTH: Mapping[str, Figure] = {
    "eighth1_depths": _figure(
        "Shortcuts by depth, in an eighth of the schedule, on CIFAR-10",
        "eighth_8_1",
        _SHORTCUTS,
        "cifar10/resnet{{}}-{}-eighth",
    ),
    "eighth2_depths": _figure(
        "Where BN and ReLU are, by depth, in an eighth of the schedule, on CIFAR-10",
        "eighth_8_2",
        {"": _ACTIVATIONS},
        "cifar10/resnet{{}}-{}-eighth",
    ),
}


def band(records: Sequence[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the median and the range of a curve over some runs.

    Args:
        records: Runs of a trial.
        name: Name of the curve.

    Returns:
        The iterations `(n,)` at which a run was measured, and the least, median and
        largest number of the runs at them `(3, n)`. Between two of its measurements, a
        run counts with the number on the line between them.
    """
    lines = []
    for record in records:
        pairs = zip(record.curves["iteration"], record.curves[name], strict=True)
        points = [(iteration, value) for iteration, value in pairs if value is not None]
        if points:
            lines.append(np.array(points, "float64").T)
    if not lines:
        return np.zeros(0, "int64"), np.zeros((3, 0))
    iterations = np.unique(np.concatenate([line[0] for line in lines]))
    values = [np.interp(iterations, at, numbers, np.nan, np.nan) for at, numbers in lines]
    bands = [each(values, axis=0) for each in (np.nanmin, np.nanmedian, np.nanmax)]
    return iterations.astype("int64"), np.stack(bands)


def measured(figure: Figure, groups: Mapping[str, Collection]) -> dict[str, list[str]]:
    """Return the panels of a figure, each with the names of its trials that have runs.

    A baseline, a trial that all panels share, is not enough to draw a panel.
    """
    panels = list(figure.panels.values())
    shared = set.intersection(*map(set, panels)) if len(panels) > 1 else set()
    available = {
        title: [name for name in names if groups.get(name)]
        for title, names in figure.panels.items()
    }
    return {title: names for title, names in available.items() if set(names) - shared}


def unit(model: Model) -> tuple[str, str]:
    """Return the names of the arrangement and of the shortcut of a registered network. A chain
    without shortcuts has the default arrangement.
    """
    arguments = kp.model_entry(model.name).arguments
    arrangement = model.arrangement or arguments.get("arrangement", "full_preactivation")
    is_chain = "vanilla" in model.name
    return arrangement, "none" if is_chain else model.shortcut or "identity"


def hue(record: Record) -> style.Hue:
    """Return the colour of the network of a run: see `style.hue`."""
    return style.hue(*unit(from_json(Model, record.config["model"])))


def words(label: str) -> str:
    """Return the label of a row with the names of arrangements in words."""
    return re.sub("|".join(kp.ARRANGEMENTS), lambda name: in_words(name[0]), label)


def named(label: str) -> str:
    """Return the label of a row in words, without factors that have a name."""
    pattern = r" \((?:1-g\(x\)|1x1 conv|dropout)[^()]*(?:\(x\))?\)"
    return re.sub(pattern, "", words(label))


def _short(label: str, panel: str) -> str:
    """Return the label of a row without what its panel says, the network and the kind of
    shortcut. Of a label with a name in brackets, return the name.
    """
    label = re.sub(r"^ResNet-\d+, ", "", named(label))
    label = re.sub(r".*\(([A-Za-z].*)\)$", r"\1", label)
    return label.removeprefix(panel.rpartition(": ")[2]).strip(" ,")


def curves(figure: Figure, labels: Mapping[str, str], groups: Groups) -> Any:
    """Draw training curves: test errors above training losses, medians with the range of
    the runs, on the same axes in all panels. If runs of a trial were on different devices,
    or of different lengths, the largest group is drawn.

    Args:
        figure: A figure with at least one measured panel.
        labels: Name of a trial to its name in the table.
        groups: Name of a trial to its runs.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: without matplotlib.
    """
    panels = {
        title: {
            _label(labels[name], title, runs): runs
            for name in names
            if (runs := largest(groups[name]))
        }
        for title, names in measured(figure, groups).items()
    }
    picture, places = _grid(figure.title, panels, 4.6, [3, 2], NOTE)
    every = [runs for of_panel in panels.values() for runs in of_panel.values()]
    limits = {curve: _limits(every, curve) for curve in CURVES}
    lengths = [record.curves["iteration"][-1:] for runs in every for record in runs]
    places[0][0].set_xlim(0, max(max(lengths), [1])[0])
    ends = []
    for i, ((title, of_panel), both) in enumerate(zip(panels.items(), places, strict=True)):
        for axes, curve in zip(both, CURVES, strict=True):
            is_error = curve == "test_error"
            axes.set_axis_on()
            style.styled(axes, x="" if is_error else "Iteration")
            axes.set_title(title if is_error else "", loc="left", fontsize=style.TITLE)
            axes.set_ylabel("" if i % 2 else CURVES[curve], fontsize=style.LABEL)
            axes.tick_params(labelbottom=not is_error)
            axes.set_yscale("log", nonpositive="mask")
            axes.set_ylim(*limits[curve])
            style.plain_numbers(axes.yaxis)
            ends.append((axes, _panel(axes, of_panel, curve)))
    picture.draw_without_rendering()  # names are placed beside axes that have their place
    for axes, each in ends:
        style.name_ends(axes, each)
    return picture


def _grid(
    title: str,
    panels: Mapping[str, Mapping[str, Any]],
    height: float,
    parts: Sequence[int],
    note: str,
) -> tuple[Any, list[Any]]:
    """Return a figure with a title and a note, and the axes of each panel from top to bottom.
    They share the horizontal axis, and have room for the names of lines at their right.

    Args:
        title, note: Above and below the panels.
        panels: Title of each to its lines by name. Two stand side by side.
        height: Height of a panel in inches.
        parts: Relative heights of its axes.
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    width = 8.0 if columns == 1 else 11.5
    picture = style.new_figure(width, 0.9 + height * rows)
    style.heading(picture, title)
    picture.supxlabel(note, x=0.012, ha="left", fontsize=style.SMALL, color=style.GREY)
    longest = max(len(label) for lines in panels.values() for label in lines)
    room = (0.49 * longest * style.SMALL + 18) / 72  # for the names of lines
    grid = picture.subplots(
        len(parts) * rows,
        2 * columns,
        squeeze=False,
        sharex=True,
        height_ratios=[*parts] * rows,
        width_ratios=[width / columns - 0.75 - room, room] * columns,
    )
    for axes in grid.flat:
        axes.set_axis_off()
    blocks = np.split(grid, rows)
    return picture, [blocks[i // columns][:, 2 * (i % columns)] for i in range(len(panels))]


def at_depths(groups: Groups) -> dict[str, dict[int, list[Record]]]:
    """Return the runs of the rows of `BY_DEPTH` that were measured at two depths or more: name
    with "{}" to layers to runs. See `curves` for runs in several settings.
    """
    names = {
        name for figure in BY_DEPTH.values() for names in figure.panels.values() for name in names
    }
    found = {
        name: {n: runs for n in DEPTHS if (runs := largest(groups.get(name.format(n), ())))}
        for name in names
    }
    return {name: runs for name, runs in found.items() if len(runs) > 1}


def by_depth(figure: Figure, labels: Mapping[str, str], groups: Groups) -> Any:
    """Draw the last test errors of rows by depth: medians with the range of the runs, on the
    same axes in all panels.

    Args:
        figure: A figure of `BY_DEPTH` with at least one measured panel: see `at_depths`.
        labels, groups: See `curves`.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: without matplotlib.
    """
    found = at_depths(groups)
    panels: dict[str, dict[str, dict[int, list[Record]]]] = {}
    for title, names in measured(figure, found).items():
        rows = panels[title] = {}
        for name in names:
            counts = ", ".join(str(len(runs)) for runs in found[name].values())
            label = _short(labels[name.format(DEPTHS[0])], title)
            rows[f"{label}, n = {counts}"] = found[name]
    picture, places = _grid(figure.title, panels, 3.2, [1], DEPTH_NOTE)
    every = [row for rows in panels.values() for row in rows.values()]
    errors = [run.error for row in every for runs in row.values() for run in runs]
    finite = [error for error in errors if error is not None] or [100.0]
    ends = []
    for i, ((title, rows), [axes]) in enumerate(zip(panels.items(), places, strict=True)):
        axes.set_axis_on()
        style.styled(axes, x="Layers", y="" if i % 2 else CURVES["test_error"])
        axes.set_title(title, loc="left", fontsize=style.TITLE)
        axes.tick_params(labelbottom=True)
        axes.set_xscale("log")
        axes.set_xlim(DEPTHS[0] / 1.2, DEPTHS[-1] * 1.2)
        axes.set_xticks(DEPTHS, map(str, DEPTHS))
        axes.xaxis.minorticks_off()
        axes.set_yscale("log")
        axes.set_ylim(min(finite) / 1.15, max(finite) * 1.15)
        style.plain_numbers(axes.yaxis)
        ends.append((axes, _depth_panel(axes, rows)))
    picture.draw_without_rendering()  # as for `curves`
    for axes, each in ends:
        style.name_ends(axes, each)
    return picture


def _depth_panel(axes, rows: Mapping[str, Mapping[int, Sequence[Record]]]) -> list[tuple]:
    """Draw the errors of some rows. Return the end of each, as `style.name_ends` takes it."""
    ends = []
    seen: collections.Counter[style.Hue] = collections.Counter()
    top = axes.get_ylim()[1]
    for i, (name, row) in enumerate(rows.items()):
        colour, look = _look([run for runs in row.values() for run in runs], seen)
        errors = [[number(run.error) for run in runs] for runs in row.values()]
        # beside each other, so that no range hides another
        layers = np.array([*row]) * 1.04 ** (i - (len(rows) - 1) / 2)
        spread = [(min(each), statistics.median(each), max(each)) for each in errors]
        low, middle, high = np.minimum(spread, top).T
        axes.vlines(layers, low, high, color=colour.line, alpha=0.35, linewidth=4)
        axes.plot(layers, middle, **look, lw=1.8, marker="o", markersize=5)
        failed = middle == top
        [cross] = axes.plot(
            layers[failed], middle[failed], **CROSS, color=colour.line, linestyle=""
        )
        cross.set_in_layout(False)
        ends.append((layers[-1], middle[-1], name, colour.text))
    return ends


def _limits(trials: Sequence[Sequence[Record]], curve: str) -> tuple[float, float]:
    """Return the ends of a logarithmic axis that fits the medians of runs that ended."""
    ended = [[record for record in runs if record.error is not None] for runs in trials]
    values = np.concatenate([band(runs, curve)[1][1] for runs in ended])
    values = values[np.isfinite(values) & (values > 0)]
    low, high = np.percentile(values, INSIDE) if len(values) else (1.0, 100.0)
    return low / 1.15, high * 1.15


def _label(label: str, panel: str, records: Sequence[Record]) -> str:
    diverged = sum(record.error is None for record in records)
    text = f"{_short(label, panel)}, n = {len(records)}"
    return text + (
        f", {diverged} diverged" if 0 < diverged < len(records) else ", diverged" * bool(diverged)
    )


def _look(
    records: Sequence[Record], seen: collections.Counter[style.Hue]
) -> tuple[style.Hue, dict[str, str]]:
    """Return the colour of a trial, and how its line is drawn. `seen` counts the lines of each
    colour in this panel, for their dashes.
    """
    colour = hue(records[0])
    dashes = style.DASHES[seen[colour]]
    seen[colour] += 1
    return colour, {"color": colour.line, "linestyle": dashes}


def _panel(axes, runs: Mapping[str, Sequence[Record]], curve: str) -> list[tuple]:
    """Draw a curve of some trials. Return the end of each, as `style.name_ends` takes it."""
    ends = []
    seen: collections.Counter[style.Hue] = collections.Counter()
    for name, records in runs.items():
        colour, look = _look(records, seen)
        iterations, (low, median, high) = band(records, curve)
        if len(records) > 1:
            axes.fill_between(iterations, low, high, color=colour.line, alpha=0.1, linewidth=0)
        axes.plot(iterations, median, **look, lw=1.8, marker="o" if len(iterations) == 1 else "")
        style.clipped(axes, iterations, median, color=colour.line, markersize=5)
        bottom, top = axes.get_ylim()
        x, y = (iterations[-1], np.clip(median[-1], bottom, top)) if len(iterations) else (0, top)
        if all(record.error is None for record in records):
            [cross] = axes.plot(x, y, color=colour.line, **CROSS)
            cross.set_in_layout(False)
        ends.append((x, y, name, colour.text))
    return ends


def strip(title: str, records: Sequence[Record]) -> Any:
    """Draw the final test errors of runs as dots, a line for each device and each number of
    views of an image, with a tick at the median. Return the `matplotlib.figure.Figure`.

    Raises:
        ImportError: without matplotlib.
    """
    lines: dict[str, list[float]] = {}
    for setting, runs in by_setting(records).items():
        views = {"one view": [run.views["one"] for run in runs if "one" in run.views]}
        views["6 views"] = [run.views["flip_shift"] for run in runs if "flip_shift" in run.views]
        for name, measured_views in views.items():
            errors = [100 * (1 - view["accuracy"]) for view in measured_views]
            if errors:
                lines[f"{short_device(setting.device)}, {name}, n = {len(errors)}"] = errors
    picture = style.new_figure(8.0, 1.3 + 0.42 * len(lines))
    axes = style.styled(picture.subplots(), title, "Test error (%)")
    for i, errors in enumerate(lines.values()):
        look = {"color": hue(records[0]).line, "linestyle": ""}
        axes.plot(errors, [i] * len(errors), marker="o", markersize=8, alpha=0.55, **look)
        axes.plot([np.median(errors)], [i], marker="|", markersize=22, markeredgewidth=2, **look)
    axes.set_yticks(range(len(lines)), list(lines))
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.grid(False, axis="y")
    return picture
