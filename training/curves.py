"""Learning curves of runs as a picture: loss, error and learning rate by epoch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style

from .cli import UserError
from .histories import Columns, errors, measured

#: From this number of epochs on, the axis of errors leaves out the steep beginning, this share of
#: the epochs, and rare peaks, what is above this percentile of the rest.
LONG, BEGINNING, PEAKS = 20, 0.1, 98
#: Curves of a run: beginning of the columns' names to look.
KINDS: Mapping[str, dict[str, Any]] = {
    "": {"linestyle": "--", "linewidth": 1.2, "alpha": 0.8},
    "val_": {"linestyle": "-", "linewidth": 1.7},
}


def draw(
    histories: Mapping[str, Columns], path: Path, title: str, measured_on: str = "validation"
) -> None:
    """Draw the learning curves of runs: one colour per run, training dashed, validation
    solid.

    Args:
        histories: Label of a run to the columns of its history. `loss` is required;
            `accuracy`, `val_loss`, `val_accuracy`, `learning_rate` and `epoch`, which
            counts from 0, are drawn if they are there. A single run has a colour for
            each of the two.
        path: The PNG file.
        title: Title of the picture.
        measured_on: Name of the images of `val_loss` and `val_accuracy`, such as
            held-out.

    Raises:
        UserError: for a history without an epoch.
    """
    for label, columns in histories.items():
        if not measured(columns, "loss"):
            raise UserError(f"{label} has no history yet: there is no epoch with a loss to draw.")
    rates = any(measured(columns, "learning_rate") for columns in histories.values())
    figure = style.new_figure(11.0, 5.6 if rates else 4.4)
    layout = [["loss", "error"], ["rate", "rate"]] if rates else [["loss", "error"]]
    panels = figure.subplot_mosaic(layout, height_ratios=[5, 1.5][: len(layout)])
    style.heading(figure, title)
    names = {
        kind: name
        for kind, name in {"": "training", "val_": measured_on}.items()
        if _has(histories, f"{kind}loss")
    }
    looks = f" (dashed: {', solid: '.join(names.values())})" if len(histories) > 1 else ""
    lasts = style.spread(float(columns["loss"][-1]) for columns in histories.values())
    style.styled(panels["loss"], f"Last training loss: {lasts}", "Epoch", f"Loss{looks}")
    style.styled(panels["error"], _heading(histories, measured_on), "Epoch", "Error (%)")
    for i, (label, columns) in enumerate(histories.items()):
        for j, (kind, look) in enumerate(KINDS.items()):
            look = look | {"color": style.colour(1 - j if len(histories) == 1 else i)}
            name = "_"
            if len(histories) == 1:
                name = names.get(kind, name)
            elif kind == "val_" or not measured(columns, "val_loss"):
                name = label
            _curve(panels["loss"], name, columns, columns.get(f"{kind}loss"), look)
            _curve(panels["error"], name, columns, errors(columns, kind), look)
        if rates:
            colour = style.GREY if len(histories) == 1 else style.colour(i)
            _curve(
                panels["rate"],
                "_",
                columns,
                columns.get("learning_rate"),
                {"color": colour, "linewidth": 1.2},
            )
    losses = [
        columns[f"{kind}loss"]
        for columns in histories.values()
        for kind in KINDS
        if f"{kind}loss" in columns
    ]
    style.decades(panels["loss"], losses)
    panels["error"].set_ylim(0, _highest(histories) or 1)
    if rates:
        style.styled(panels["rate"], "", "Epoch", "Learning rate").set_ylim(bottom=0)
    last = max(float(np.nanmax(_epochs(columns))) for columns in histories.values())
    for axes in panels.values():
        style.by_depth(axes)
        axes.set_xlim(0, 1.02 * last)
    style.name_lines(figure, panels["loss"], panels["error"])
    figure.savefig(path, format="png", dpi=110)


def _epochs(columns: Columns) -> np.ndarray:
    return columns["epoch"] + 1 if "epoch" in columns else np.arange(1, len(columns["loss"]) + 1)


def _has(histories: Mapping[str, Columns], name: str) -> bool:
    return any(measured(columns, name) for columns in histories.values())


def _curve(
    axes, name: str, columns: Columns, values: np.ndarray | None, look: Mapping[str, Any]
) -> None:
    if values is not None:
        style.lines(axes, {name: (_epochs(columns), values)}, **look)


def _heading(histories: Mapping[str, Columns], measured_on: str) -> str:
    """Return the title of the errors: the lowest of held-out images, which choose the
    epoch. Others choose nothing: their last ones.
    """
    for kind, name in (("val_", measured_on), ("", "training")):
        found = [
            error for columns in histories.values() if (error := errors(columns, kind)) is not None
        ]
        if found:
            lowest = kind == "val_" and measured_on != "test"
            values = [float(np.nanmin(error) if lowest else error[-1]) for error in found]
            which = "Lowest" if lowest else "Last"
            return f"{which} {name} error: {style.spread(values, '.2f')} %"
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
                tops.append(
                    float(np.percentile(later[np.isfinite(later)], PEAKS))
                    if np.isfinite(later).any()
                    else 0.0
                )
    return 1.1 * max(tops)
