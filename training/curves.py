"""Learning curves of runs as a picture: loss, error and learning rate by epoch."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_preact.analysis.figures import _style

from .analyze.subjects import read_table
from .cli import UserError

#: Name of a column of history.csv to its numbers, one an epoch.
Columns = Mapping[str, np.ndarray]
#: From this number of epochs on, the steep beginning and rare peaks may leave the axis of errors, which is then of the rest:
LONG = 20
#: the errors behind this share of the epochs,
BEGINNING = 0.1
#: and this percentile of them.
PEAKS = 98
#: Curves of a run: beginning of the columns' names to look.
KINDS: Mapping[str, dict[str, Any]] = {
    "": {"linestyle": "--", "linewidth": 1.2, "alpha": 0.8},
    "val_": {"linestyle": "-", "linewidth": 1.7},
}


def draw(history: Path | Sequence[Mapping[str, Any]], path: Path, title: str, measured_on: str = "validation") -> None:
    """Draw the learning curves of a run.

    Args:
        history: Its history.csv, or the rows of it: column to number. There must be a `loss`; of `accuracy`, `val_loss`,
            `val_accuracy`, `learning_rate` and `epoch`, which counts from 0, what is there is drawn.
        path: Of the PNG file.
        title: Stands above.
        measured_on: What `val_loss` and `val_accuracy` are measured on.

    Raises:
        UserError: for a history without an epoch, or a file that is no such table.
    """
    if isinstance(history, Path):
        columns = read(history)
    else:
        names = dict.fromkeys(name for row in history for name in row)
        columns = {name: np.array([row.get(name, np.nan) for row in history], "float64") for name in names}
    draw_runs({title: columns}, path, title, measured_on)


def draw_runs(histories: Mapping[str, Columns], path: Path, title: str, measured_on: str = "validation") -> None:
    """Draw the learning curves of runs: a colour a run, training dashed, what it was validated on solid.

    Args:
        histories: Label of a run to the columns of its history. A single run has a colour for each of the two.
        path, title, measured_on: As those of `draw`.

    Raises:
        UserError: for a history without an epoch.
    """
    for label, columns in histories.items():
        if not measured(columns, "loss"):
            raise UserError(f"{label} has no history yet: there is no epoch with a loss to draw.")
    rates = any(measured(columns, "learning_rate") for columns in histories.values())
    figure = _style.new_figure(11.0, 5.6 if rates else 4.4)
    layout = [["loss", "error"], ["rate", "rate"]] if rates else [["loss", "error"]]
    panels = figure.subplot_mosaic(layout, height_ratios=[5, 1.3][: len(layout)])
    figure.suptitle(title, x=0.012, ha="left")
    _style.styled(panels["loss"], "Loss", "epoch")
    _style.styled(panels["error"], _heading(histories, measured_on), "epoch", "%")
    for i, columns in enumerate(histories.values()):
        for j, (kind, look) in enumerate(KINDS.items()):
            look = look | {"color": _style.colour(1 - j if len(histories) == 1 else i)}
            _curve(panels["loss"], columns, columns.get(f"{kind}loss"), look)
            _curve(panels["error"], columns, errors(columns, kind), look)
        if rates:
            colour = _style.GREY if len(histories) == 1 else _style.colour(i)
            _curve(panels["rate"], columns, columns.get("learning_rate"), {"color": colour, "linewidth": 1.2})
    losses = [columns[f"{kind}loss"] for columns in histories.values() for kind in KINDS if f"{kind}loss" in columns]
    _style.decades(panels["loss"], losses)
    _plain_numbers(panels["loss"])
    panels["error"].set_ylim(0, _highest(histories) or 1)
    if rates:
        _style.styled(panels["rate"], "Learning rate", "epoch").set_ylim(bottom=0)
    last = max(float(np.nanmax(_epochs(columns))) for columns in histories.values())
    for axes in panels.values():
        _style.by_depth(axes)
        axes.set_xlim(0, 1.02 * last)
    _explain(panels["loss"], histories, measured_on)
    _style.name_lines(figure, panels["loss"])
    figure.savefig(path, format="png", dpi=110)


def read(path: Path) -> Columns:
    """Return the columns of a history.csv; none where there is no such file.

    Raises:
        UserError: for a file that is no table with a column `loss`.
    """
    try:
        columns = read_table(path)
    except (csv.Error, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if columns and "loss" not in columns:
        raise UserError(f"{path} is damaged, or no history: it has no column loss. Its columns: {', '.join(columns)}")
    return columns


def measured(columns: Columns, name: str) -> bool:
    """Return whether a column is there and holds a number."""
    return bool(np.isfinite(columns.get(name, np.zeros(0))).any())


def errors(columns: Columns, kind: str) -> np.ndarray | None:
    """Return the errors in percent: `kind` is "" for those of training, "val_" for those of validation."""
    return 100 * (1 - columns[f"{kind}accuracy"]) if measured(columns, f"{kind}accuracy") else None


def _epochs(columns: Columns) -> np.ndarray:
    return columns["epoch"] + 1 if "epoch" in columns else np.arange(1, len(columns["loss"]) + 1)


def _curve(axes, columns: Columns, values: np.ndarray | None, look: Mapping[str, Any]) -> None:
    if values is not None:
        _style.lines(axes, {"_": (_epochs(columns), values)}, **look)


def _plain_numbers(axes) -> None:
    """Write 0.5, 1, 2 at a logarithmic axis, in place of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _heading(histories: Mapping[str, Columns], measured_on: str) -> str:
    """Return what stands above the errors: the lowest ones."""
    for kind, name in (("val_", measured_on), ("", "training")):
        found = [error for columns in histories.values() if (error := errors(columns, kind)) is not None]
        if found:
            return f"Error, lowest {name} {_style.spread([float(np.nanmin(error)) for error in found], '.2f')} %"
    return "Error"


def _highest(histories: Mapping[str, Columns]) -> float:
    """Return how far the axis of errors goes."""
    tops = [0.0]
    for columns in histories.values():
        for error in (errors(columns, kind) for kind in KINDS):
            if error is not None and len(error) < LONG:
                tops.append(float(np.nanmax(error)))
            elif error is not None:
                later = error[int(BEGINNING * len(error)) :]
                tops.append(float(np.percentile(later[np.isfinite(later)], PEAKS)) if np.isfinite(later).any() else 0.0)
    return 1.1 * max(tops)


def _explain(axes, histories: Mapping[str, Columns], measured_on: str) -> None:
    """Put what the legend says into the axes, as lines without a point."""
    for i, label in enumerate(histories if len(histories) > 1 else ()):
        axes.plot([], [], color=_style.colour(i), linewidth=2.5, label=label)
    names = {"": "training", "val_": measured_on}
    for j, (kind, look) in enumerate(KINDS.items()):
        if any(measured(columns, f"{kind}loss") for columns in histories.values()):
            colour = _style.colour(1 - j) if len(histories) == 1 else _style.GREY
            axes.plot([], [], color=colour, label=names[kind], **look)
