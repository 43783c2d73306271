"""The pictures of the report: training curves as the paper draws them."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style

from .results import Record, largest

#: Name of a trial to its runs.
Groups = Mapping[str, Sequence[Record]]

#: The axis of errors fits this percentile of the errors (`PEAKS`), without the first iterations
#: (`BEGINNING`, a share of them), in which the curves are steep.
BEGINNING, PEAKS = 0.1, 90
#: Looks of the curves of test images and of training images.
TEST: Mapping[str, Any] = {"linestyle": "-", "linewidth": 1.7, "zorder": 3}
TRAINING: Mapping[str, Any] = {"linestyle": "--", "linewidth": 1.0, "alpha": 0.85}


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


#: Panels of Fig. 3.
_SHORTCUTS = {
    "constant scaling": "original-constant_scaling-0.5-0.5 original",
    "exclusive gating": "original-exclusive_gating-b-6 original",
    "shortcut-only gating": "original-shortcut_only_gating-b0 original",
    "1x1 convolution": "original-conv1x1 original",
}
#: Panels of Fig. 1 and 6.
_ACTIVATIONS = {
    "full pre-activation": "full_preactivation original",
    "BN after addition": "bn_after_addition original",
}

#: Name of a picture to what it shows. The numbers of the figures are the paper's.
FIGURES: Mapping[str, Figure] = {
    "fast": _figure("CIFAR-10 in minutes", "fast", {"": "cifar10/fast_resnet8"}, "{}"),
    "preact": _figure(
        "Full pre-activation against the original, on CIFAR-10",
        "preact",
        {f"ResNet-{n}": f"{n}-full_preactivation {n}-original" for n in (20, 32, 44, 56)},
    ),
    "figure1": _figure(
        "Fig. 1: ResNet-1001 on CIFAR-10",
        "table3",
        {"": "1001-full_preactivation 1001-original"},
    ),
    "figure3": _figure(
        "Fig. 3: shortcuts, ResNet-110 on CIFAR-10",
        "table1",
        _SHORTCUTS,
        "cifar10/resnet110-{}",
    ),
    "figure6": _figure(
        "Fig. 6: activations, on CIFAR-10",
        "table2",
        {
            "ResNet-110": "110-bn_after_addition 110-original",
            "ResNet-164": "164-full_preactivation 164-original",
        },
    ),
    "eighth1": _figure(
        "Fig. 3 with ResNet-56 and an eighth of the schedule: shortcuts, on CIFAR-10",
        "eighth1",
        _SHORTCUTS,
        "cifar10/resnet56-{}-eighth",
    ),
    "eighth2": _figure(
        "Fig. 1 and 6 with ResNet-56 and an eighth of the schedule, on CIFAR-10",
        "eighth2",
        _ACTIVATIONS,
        "cifar10/resnet56-{}-eighth",
    ),
    "digits": _figure(
        "Fig. 1 and 6 in small, on digits",
        "digits2",
        _ACTIVATIONS,
        "digits/resnet110-{}",
    ),
    "shortcuts": _figure(
        "Ten years of shortcuts, on digits",
        "shortcuts",
        {
            "2016: something on the path": "scaling exclusive gating conv1x1 identity",
            "2020 to 2025: scaled branches": "skip_init layer_scale depth_scaling identity",
            "2024 and 2025: the path again": "orthogonal orthogonal-map decayed identity",
            "2024 to 2026: streams": "hyper-none hyper-sinkhorn hyper-permutations identity",
        },
        "digits/resnet110-preact-{}",
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


def measured(figure: Figure, groups: Groups) -> dict[str, list[str]]:
    """Return the panels of a figure, each with the names of its trials that have runs.

    A baseline, a trial that all panels share, is not enough to draw a panel.
    """
    shared = _shared(figure)
    available = {
        title: [name for name in names if groups.get(name)]
        for title, names in figure.panels.items()
    }
    return {title: names for title, names in available.items() if set(names) - shared}


def _shared(figure: Figure) -> set[str]:
    """Return the trials that all panels share; none if there is one panel."""
    panels = list(figure.panels.values())
    return set.intersection(*map(set, panels)) if len(panels) > 1 else set()


def colours(figure: Figure, panels: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the colour of each trial: the shared ones have the first colours in all
    panels, the others have the next ones of their panel.
    """
    shared = sorted(_shared(figure))
    orders = [
        [*shared, *(name for name in names if name not in shared)] for names in panels.values()
    ]
    return {name: style.colour(i) for order in orders for i, name in enumerate(order)}


def curves(figure: Figure, labels: Mapping[str, str], groups: Groups, path: Path) -> None:
    """Draw training curves: test error solid, training loss dashed, medians with the
    range of the runs. A test error that is measured once is a point. If runs of a trial
    were on different devices, or of different lengths, the largest group is drawn.

    Args:
        figure: A figure with at least one measured panel.
        labels: Name of a trial to its name in the legends.
        groups: Name of a trial to its runs.
        path: Path of the PNG file.

    Raises:
        ImportError: without matplotlib.
    """
    panels = measured(figure, groups)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    longest = max(map(len, panels.values()))
    height = 3.7 + 0.25 * longest  # of a panel with its legend
    picture = style.new_figure(7.2 if columns == 1 else 11.0, 1.0 + height * rows)
    style.heading(picture, f"{figure.title} (median and range of the runs)")
    grid = list(picture.subplots(rows, columns, squeeze=False).flat)
    shown = colours(figure, panels)
    drawn = {name: largest(groups[name]) for names in panels.values() for name in names}
    top = _top(list(drawn.values()))
    for axes, (title, trials) in zip(grid, panels.items(), strict=False):
        _panel(axes, title, {shown[name]: drawn[name] for name in trials})
        axes.set_ylim(0, top)
        axes.legend(
            [style.sample({"color": shown[name], "linewidth": 2.5}) for name in trials],
            [labels[name] for name in trials],
            loc="upper left",
            bbox_to_anchor=(0, -0.16),
            frameon=False,
            fontsize=style.TICK,
            labelcolor=style.INK,
        )
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    looks = {"Test error": TEST, "Training loss": TRAINING}
    style.legend(
        picture,
        {label: style.sample({"color": style.GREY, **look}) for label, look in looks.items()},
    )
    picture.savefig(path, format="png", dpi=110)


def _top(groups: Sequence[Sequence[Record]]) -> float:
    """Return the upper end of the axis of errors, the same in all panels."""
    tops = [0.0]
    for records in groups:
        iterations, (_, _, high) = band(records, "test_error")
        if len(iterations):
            tops.append(float(np.percentile(high[iterations >= BEGINNING * iterations[-1]], PEAKS)))
    return min(100.0, 1.15 * max(tops)) or 100.0


def _panel(axes, title: str, runs: Mapping[str, Sequence[Record]]) -> None:
    """Draw trials, one colour each: errors on the left axis, losses on the right one."""
    style.styled(axes, title, "Iteration", "Test error (%)")
    losses = style.styled(axes.twinx(), "", "", "Training loss")
    losses.spines["left"].set_visible(False)
    losses.grid(False)
    axes.set_zorder(losses.get_zorder() + 1)  # errors are drawn over losses
    axes.patch.set_visible(False)
    medians = []
    for colour, records in runs.items():
        for target, name, look in ((axes, "test_error", TEST), (losses, "train_loss", TRAINING)):
            iterations, (low, median, high) = band(records, name)
            target.fill_between(iterations, low, high, color=colour, alpha=0.15, linewidth=0)
            style.lines(target, {"_": (iterations, median)}, **{**look, "color": colour})
        medians.append(median)
    style.decades(losses, medians)
    ends = [
        max(record.curves["iteration"], default=1)
        for records in runs.values()
        for record in records
    ]
    axes.set_xlim(0, 1.01 * max(ends))
