"""Draw training over time: loss and error (Fig. 1 and 6 of the paper), and health."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style
from keras_preact.health.ranges import HEALTHY_RANGES, Range

#: Name of a column to its values.
Columns = Mapping[str, Sequence[float] | np.ndarray]
#: Panel and kind of curves to run to its epochs and values.
Curves = Mapping[tuple[str, str], Mapping[str, tuple[np.ndarray, np.ndarray]]]

#: Column of a history to the panel and the kind of its curve.
CURVES = {
    "loss": ("loss", "training"),
    "val_loss": ("loss", "validation"),
    "accuracy": ("error", "training"),
    "val_accuracy": ("error", "validation"),
    "learning_rate": ("rate", "rate"),
}
#: Kind of a curve to its look, with the colour that it has if there is only one run.
LOOKS: Mapping[str, Mapping[str, Any]] = {
    "training": {"linestyle": "--", "linewidth": 1.2, "color": style.colour(1)},
    "validation": {"linestyle": "-", "linewidth": 1.7, "color": style.colour(0)},
    "rate": {"linestyle": "-", "linewidth": 1.2, "color": style.GREY},
}
#: For runs of at least `LONG` epochs, the axis of errors leaves out the steep beginning (this share
#: of the epochs) and rare peaks (errors above this percentile of the other epochs).
LONG, BEGINNING, PEAKS = 20, 0.1, 98


def training_curves(
    histories: Mapping[str, Columns], measured_on: str = "test", title: str = ""
) -> Any:
    """Draw the loss, the error in percent and the learning rate by epoch. Lines are
    dashed for the training images, and solid for others.

    Args:
        histories: Label of a run to its history: name of a column to values, one per
            epoch, as in `model.fit(...).history` or a run's history.csv. `loss` is
            required; `accuracy`, `val_loss`, `val_accuracy`, `learning_rate` and
            `epoch`, which counts from 0, are optional.
        measured_on: The images of `val_loss` and `val_accuracy`, such as `"held-out"`.
            The title names their lowest error. For `"test"` it names the last one,
            because test images must not choose an epoch.
        title: Title of the whole figure.

    Returns:
        A `matplotlib.figure.Figure`. The first axes show the losses. Axes for the
        errors and the learning rates follow if there are any.

    Raises:
        ValueError: for no history, or one without a loss.

    Example:

    >>> from keras_preact.analysis import figures
    >>> history = {"loss": [2.0, 0.5], "val_accuracy": [0.5, 0.9]}
    >>> figure = figures.training_curves({"digits": history})
    >>> figure.axes[1].lines[0].get_ydata().round(6).tolist()
    [50.0, 10.0]

    Source: Fig. 1 and 6 of arXiv 1603.05027.
    """
    style.need(histories, "history")
    curves = _curves(histories)
    last = style.spread(losses[-1] for _, losses in curves["loss", "training"].values())
    titles = {"loss": f"Last training loss: {last}", "error": _best(curves, measured_on)}
    labels = {"loss": "Loss", "error": "Error (%)", "rate": "Learning rate"}
    drawn = {panel for panel, _ in curves}
    above = [panel for panel in ("loss", "error") if panel in drawn]
    rows = [above, ["rate"] * len(above)] if "rate" in drawn else [above]
    figure = style.new_figure(5.5 * len(above), 4.4 if len(rows) == 1 else 5.6)
    style.heading(figure, title)
    panels = figure.subplot_mosaic(rows, height_ratios=[3, 1][: len(rows)])
    for panel, axes in panels.items():
        style.styled(axes, titles.get(panel, ""), "Epoch", labels[panel])

    names = {"training": "training", "validation": measured_on}
    hues = {} if len(histories) == 1 else {run: style.colour(i) for i, run in enumerate(histories)}
    handles = {run: style.sample({"color": hue, "linewidth": 2.5}) for run, hue in hues.items()}
    for (panel, kind), series in curves.items():
        look, name = LOOKS[kind], names.get(kind, kind)
        for run, points in series.items():
            run_look = {**look, "color": hues.get(run, look["color"])}
            style.lines(panels[panel], {f"{run}, {name}": points}, **run_look)
        if kind in names:
            handles[name] = style.sample({**look, "color": style.GREY if hues else look["color"]})

    style.decades(panels["loss"], [line.get_ydata() for line in panels["loss"].lines])
    if "error" in panels:
        panels["error"].set_ylim(0, _top(line.get_ydata() for line in panels["error"].lines))
    if "rate" in panels:
        panels["rate"].set_ylim(bottom=0)
    for axes in panels.values():
        style.by_depth(axes)
    style.legend(figure, handles)
    return figure


def _curves(histories: Mapping[str, Columns]) -> Curves:
    """Return every curve that has a finite value."""
    curves: dict[tuple[str, str], dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for run, history in histories.items():
        columns = {name: _numbers(history[name]) for name in CURVES if name in history}
        measured = [name for name, column in columns.items() if np.isfinite(column).any()]
        if "loss" not in measured:
            raise ValueError(
                f"A history needs a `loss`. Received: {run!r} with "
                f"{', '.join(history) or 'no columns'}"
            )
        epochs = _numbers(history.get("epoch", np.arange(len(columns["loss"])))) + 1
        for name in measured:
            panel, kind = CURVES[name]
            values = 100 * (1 - columns[name]) if panel == "error" else columns[name]
            curves.setdefault((panel, kind), {})[run] = epochs, values
    return curves


def _best(curves: Curves, measured_on: str) -> str:
    """Return the title of the errors."""
    for kind, name in (("validation", measured_on), ("training", "training")):
        errors = [values for _, values in curves.get(("error", kind), {}).values()]
        if errors:
            lowest = kind == "validation" and measured_on != "test"
            chosen = [float(np.nanmin(error) if lowest else error[-1]) for error in errors]
            return f"{'Lowest' if lowest else 'Last'} {name} error: {style.spread(chosen, '.2f')} %"
    return ""


def _top(errors: Iterable[np.ndarray]) -> float:
    """Return the upper limit of the axis of errors."""
    tops = []
    for error in errors:
        is_long = len(error) >= LONG
        later = error[int(BEGINNING * len(error)) :] if is_long else error
        later = later[np.isfinite(later)]
        if later.size:
            tops.append(float(np.percentile(later, PEAKS if is_long else 100)))
    return 1.1 * max(tops, default=0.0) or 1.0


def _numbers(column: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.asarray(column, "float64")


#: Columns of `TrainingHealth` for the whole network.
_NETWORK = ("gradient_norm", "layer_gradient_ratio")
#: Label to colour.
_HUES = {
    "network": style.INK,
    "least": style.COLOURS[5],
    "median": style.COLOURS[0],
    "largest": style.COLOURS[1],
}
#: Figure, a key of `HEALTHY_RANGES`, to the label of its axis; any other figure is a ratio.
_UNITS = {
    "gradient_norm": "Norm",
    "activation_mean": "Mean",
    "activation_std": "Standard deviation",
}


def training_health(table: Columns) -> Any:
    """Draw the figures of `kp.TrainingHealth` over the updates, each with its healthy
    range shaded.

    For the network, it draws the norm of the gradient, and its ratio between the first
    and the last unit. For the kernels, it draws the least, median and largest of
    `||update|| / ||weight||`, of `||gradient|| / ||weight||`, and, if measured, of the
    mean and the standard deviation of the inputs.

    Args:
        table: Columns of the CSV file that `TrainingHealth(csv=...)` writes, all of the
            same length.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: for a table without the columns of `TrainingHealth`, or without a
            row.
    """
    steps = _numbers(table.get("step", ()))
    if not steps.size or not all(name in table for name in _NETWORK):
        raise ValueError(
            "A table of training health has `step`, "
            f"{', '.join(f'`{name}`' for name in _NETWORK)} and at least one row. Received: "
            f"{len(table)} columns, {steps.size} rows"
        )
    shown = _health_figures(table)
    rows = (len(shown) + 1) // 2
    figure = style.new_figure(9.0, 0.6 + 2.4 * rows)
    panels = figure.subplots(rows, 2, sharex=True, squeeze=False).ravel()
    for axes, (name, series) in zip(panels, shown.items(), strict=False):
        title = HEALTHY_RANGES[name].figure
        style.styled(axes, title[0].upper() + title[1:], "", _UNITS.get(name, "Ratio"))
        for label, values in series.items():
            style.lines(axes, {label: (steps, values)}, color=_HUES[label])
        if HEALTHY_RANGES[name].low > 0:
            style.decades(axes, series.values())
        _shade(axes, HEALTHY_RANGES[name], np.concatenate(list(series.values())))
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(shown) - 2) : len(shown)]:
        axes.set_xlabel("Update")
        axes.tick_params(labelbottom=True)
    handles = {line.get_label(): line for axes in panels for line in axes.lines}
    spans = dict(zip(("healthy range", "no message"), panels[0].patches, strict=True))
    style.legend(figure, handles | spans)
    return figure


def _health_figures(table: Columns) -> dict[str, dict[str, np.ndarray]]:
    """Return the values by figure, a key of `HEALTHY_RANGES`, and by label."""
    figures = {name: {"network": _numbers(table[name])} for name in _NETWORK}

    def columns(figure: str) -> dict[str, np.ndarray]:
        start = f"{figure}/"
        return {
            name.removeprefix(start): _numbers(values)
            for name, values in table.items()
            if name.startswith(start)
        }

    weights, updates, gradients = map(columns, ("weight_norm", "update_norm", "gradient_norm"))
    kernels = [name for name in weights if name.endswith("kernel")]
    for figure, norms in (("update_ratio", updates), ("gradient_weight_ratio", gradients)):
        if kernels:
            below = np.stack([weights[name] for name in kernels])
            above = np.stack([norms[name] for name in kernels])
            figures[figure] = _spread(above / np.where(below > 0, below, np.nan))
    for figure in ("activation_mean", "activation_std"):
        if measured := columns(figure):
            figures[figure] = _spread(np.stack(list(measured.values())))
    return figures


def _spread(values: np.ndarray) -> dict[str, np.ndarray]:
    """Return the least, the median and the largest value of each column, NaN if it has
    none.
    """
    masked = np.ma.masked_invalid(values)
    spread = {"least": masked.min(0), "median": np.ma.median(masked, 0), "largest": masked.max(0)}
    return {
        label: np.ma.filled(np.ma.asarray(column, "float64"), np.nan)
        for label, column in spread.items()
    }


def _shade(axes, healthy: Range, values: np.ndarray) -> None:
    """Shade a healthy range, and lighter the margin in which there is no message. The axes
    show the values and the nearer end of the range.
    """
    for (low, high), alpha in (((healthy.low, healthy.high), 0.15), (healthy.silent, 0.07)):
        axes.axhspan(low, high, color=style.COLOURS[2], alpha=alpha, zorder=0, linewidth=0)
    is_log = axes.get_yscale() == "log"
    finite = values[np.isfinite(values) & ((values > 0) | (not is_log))]
    if not finite.size:
        return
    low, high = min(finite.min(), healthy.high), max(finite.max(), healthy.low)
    if is_log:
        axes.set_ylim(low / 1.5, high * 1.5)
    else:
        margin = 0.1 * (high - low or abs(high) or 1.0)
        axes.set_ylim(low - margin, high + margin)
