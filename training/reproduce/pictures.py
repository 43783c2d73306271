"""The pictures of the report: training curves as the paper draws them, and the rows of
a shortened table with their spread.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style

from . import medians
from .cells import Groups
from .results import Record
from .rows import Figure, Table

#: The axis of errors leaves out the steep beginning, this share of the iterations, and what is
#: above this percentile after it.
BEGINNING, PEAKS = 0.1, 90
#: Looks of the curves of test images and of training images.
TEST: Mapping[str, Any] = {"linestyle": "-", "linewidth": 1.7, "zorder": 3}
TRAINING: Mapping[str, Any] = {"linestyle": "--", "linewidth": 1.0, "alpha": 0.85}
NAMES: Mapping[str, str] = {"train_error": "Training error", "train_loss": "Training loss"}
#: What the panels of a shortened table show: key in `Record.final` to label.
SPREADS: Mapping[str, str] = {"train_loss": "Training loss", "test_error": "Test error (%)"}

#: Markers of a shortened table.
RUN: Mapping[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 4.5,
    "color": style.GREY,
    "alpha": 0.6,
}
MEDIAN: Mapping[str, Any] = {
    "linestyle": "none",
    "marker": "D",
    "markersize": 4.5,
    "color": style.COLOURS[1],
}
INTERVAL: Mapping[str, Any] = {
    "linestyle": "-",
    "linewidth": 2,
    "color": style.COLOURS[0],
    "alpha": 0.8,
}
DIVERGED: Mapping[str, Any] = {
    "linestyle": "none",
    "marker": "x",
    "markersize": 7,
    "color": style.COLOURS[3],
}


def band(records: Sequence[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what the runs have of a curve.

    Args:
        records: Runs of a trial.
        name: Name of the curve.

    Returns:
        The iterations `(n,)`, and the least, median and largest number of the runs at
        them `(3, n)`. An iteration at which no run has a number is left out.
    """
    at: dict[int, list[float]] = {}
    for record in records:
        for iteration, value in zip(record.curves["iteration"], record.curves[name], strict=True):
            if value is not None:
                at.setdefault(iteration, []).append(value)
    iterations = sorted(at)
    values = [(min(at[i]), float(np.median(at[i])), max(at[i])) for i in iterations]
    return np.array(iterations, "int64"), np.array(values, "float64").reshape(-1, 3).T


def measured(figure: Figure, groups: Groups) -> dict[str, list[str]]:
    """Return the panels of a figure, each with the names of its trials that have runs.

    A baseline, a trial that all panels share, is not enough to draw a panel.
    """
    panels = list(figure.panels.values())
    shared = set.intersection(*map(set, panels)) if len(panels) > 1 else set()
    found = {
        title: [name for name in names if groups.get(name)]
        for title, names in figure.panels.items()
    }
    return {title: names for title, names in found.items() if set(names) - shared}


def curves(figure: Figure, groups: Groups, path: Path) -> None:
    """Draw training curves of our runs: test error solid, training images dashed,
    medians with the range of the runs. A test error that is measured once is a point.

    Args:
        figure: One with a measured panel.
        groups: Name of a trial to its runs.
        path: Path of the PNG file.

    Raises:
        ImportError: without matplotlib.
    """
    panels = measured(figure, groups)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    picture = style.new_figure(7.2 if columns == 1 else 11.0, 1.0 + 3.7 * rows)
    style.heading(picture, f"{figure.title} (median and range of the runs)")
    grid = picture.subplots(rows, columns, squeeze=False)
    colours: dict[str, str] = {}
    shown = {"test_error", figure.training} - {"train_loss"}
    top = _top([groups[name] for names in panels.values() for name in names], shown)
    for axes, (title, names) in zip(grid.flat, panels.items(), strict=False):
        runs = [(name.partition("/")[2], groups[name]) for name in names]
        _panel(axes, title, runs, figure.training, colours)
        axes.set_ylim(0, top)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    looks = {label: {"color": colour, "linewidth": 2.5} for label, colour in colours.items()}
    kinds = {"Test error": TEST, NAMES[figure.training]: TRAINING}
    looks |= {name: {"color": style.GREY, **look} for name, look in kinds.items()}
    style.legend(picture, {label: style.sample(look) for label, look in looks.items()})
    picture.savefig(path, format="png", dpi=110)


def _top(groups: Sequence[Sequence[Record]], names: Collection[str]) -> float:
    """Return how far the axis of errors goes, the same in all panels."""
    tops = [0.0]
    for records, name in itertools.product(groups, names):
        iterations, (_, _, high) = band(records, name)
        if len(iterations):
            tops.append(float(np.percentile(high[iterations >= BEGINNING * iterations[-1]], PEAKS)))
    return min(100.0, 1.15 * max(tops)) or 100.0


def _panel(
    axes,
    title: str,
    rows: Sequence[tuple[str, Sequence[Record]]],
    training: str,
    colours: dict[str, str],
) -> None:
    second = axes
    if training == "train_error":
        style.styled(axes, title, "Iteration", "Error (%)")
    else:
        style.styled(axes, title, "Iteration", "Test error (%)")
        second = style.styled(axes.twinx(), "", "", NAMES[training])
        second.spines["left"].set_visible(False)
        second.grid(False)
        axes.set_zorder(second.get_zorder() + 1)  # errors are drawn over losses
        axes.patch.set_visible(False)
    middles = []
    for label, records in rows:
        colour = colours.setdefault(label, style.colour(len(colours)))
        for where, name, look in ((axes, "test_error", TEST), (second, training, TRAINING)):
            iterations, (low, middle, high) = band(records, name)
            where.fill_between(iterations, low, high, color=colour, alpha=0.15, linewidth=0)
            style.lines(where, {"_": (iterations, middle)}, **{**look, "color": colour})
        middles.append(middle)
    if second is not axes:
        style.decades(second, middles)
    ends = [max(record.curves["iteration"], default=1) for _, records in rows for record in records]
    axes.set_xlim(0, 1.01 * max(ends))


def spreads(table: Table, groups: Groups, path: Path) -> None:
    """Draw the rows of a shortened table in the paper's order: one point per run, the mean
    with its 95 % interval, the median.

    Args:
        table: One with a measured row.
        groups: Name of a trial to its runs.
        path: Path of the PNG file.

    Raises:
        ImportError: without matplotlib.
    """
    rows = sorted(
        (row for row in table.rows if groups.get(row.trial.name)),
        key=lambda row: _rank(row.published.error),
    )
    picture = style.new_figure(11.0, 2.0 + 0.36 * len(rows))
    style.heading(
        picture,
        f"{table.title}: rows in the paper's order, with its test error on CIFAR-10 (%) in "
        "brackets",
    )
    panels = picture.subplots(1, len(SPREADS), sharey=True)
    for axes, (name, heading) in zip(panels, SPREADS.items(), strict=True):
        style.styled(axes, x=heading)
        values = [[record.final[name] for record in groups[row.trial.name]] for row in rows]
        _style_numbers(axes, values)
        for place, own in enumerate(values):
            _spread(axes, place, own)
    paper = [
        "fail" if row.published.error is None else f"{row.published.error:.2f}" for row in rows
    ]
    panels[0].set_yticks(
        range(len(rows)),
        [f"{row.label}  [{number}]" for row, number in zip(rows, paper, strict=True)],
    )
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    looks = {"mean and its 95 % interval": INTERVAL, "median": MEDIAN, "run": RUN}
    if any(record.diverged_at is not None for row in rows for record in groups[row.trial.name]):
        looks |= {"diverged run": DIVERGED}
    style.legend(picture, {label: style.sample(look) for label, look in looks.items()})
    picture.savefig(path, format="png", dpi=110)


def _rank(error: float | None) -> float:
    return float("inf") if error is None else error


def _style_numbers(axes, values: Sequence[Sequence[float | None]]) -> None:
    """Make the horizontal axis logarithmic if its numbers span more than a decade."""
    numbers = [value for own in values for value in own if value]
    if (
        numbers
        and max(numbers) / min(numbers) > style.DECADE
        and all(value != 0 for own in values for value in own)
    ):
        axes.set_xscale("log")
        axes.set_xlim(0.7 * min(numbers), 1.6 * max(numbers))
        style.plain_numbers(axes.xaxis)
    else:
        axes.set_xlim(0, 1.08 * max(numbers, default=1.0))


def _spread(axes, place: int, values: Sequence[float | None]) -> None:
    finite = [value for value in values if value is not None]
    axes.plot(finite, [place] * len(finite), **RUN)
    ends = medians.interval(values)
    mean, _ = medians.mean_and_std(values)
    if ends is not None:
        ends = np.maximum(ends, axes.get_xlim()[0])  # an interval may reach below 0
        axes.plot(ends, [place, place], **INTERVAL)
    if mean is not None:
        axes.plot([mean], [place], "|", color=style.colour(0), markersize=11, markeredgewidth=2)
    median = medians.median(values)
    if median is not None:
        axes.plot([median], [place], **MEDIAN)
    for i in range(len(values) - len(finite)):  # at the right edge, whatever the scale
        axes.plot([0.99 - 0.02 * i], [place], **DIVERGED, transform=axes.get_yaxis_transform())
