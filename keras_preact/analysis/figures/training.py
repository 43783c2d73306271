"""Training over time: loss and error (Fig. 1 and 6 of the paper), and training health."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style
from keras_preact.health.ranges import HEALTHY_RANGES, Range

#: Name of a column to its values.
Columns = Mapping[str, Sequence[float] | np.ndarray]


def training_curves(histories: Mapping[str, Columns], measured_on: str = "test") -> Any:
    """Draw the training loss (left) and the error in percent (right) by epoch.

    Args:
        histories: Label of a run to its history: name of a column to values, one per
            epoch, as in `model.fit(...).history` or a run's history.csv. The error
            comes from `val_accuracy`, or from `accuracy` if that is missing.
        measured_on: The data of `val_accuracy`: `"test"` or `"validation"`.

    Returns:
        A `matplotlib.figure.Figure`. The first axes show the losses, the second the
        errors.

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
    for label, history in histories.items():
        if not len(history.get("loss", ())):
            raise ValueError(
                f"A history needs a `loss`. Received: {label!r} with "
                f"{', '.join(history) or 'no columns'}"
            )
    kinds = {"val_accuracy": measured_on, "accuracy": "training"}
    metric = next((name for name in kinds if _is_measured(histories, name)), None)
    figure = style.new_figure(7.0 if metric is None else 9.0, 4.0)
    panels = figure.subplots(1, 1 if metric is None else 2, squeeze=False)[0]
    losses = {label: _numbers(history["loss"]) for label, history in histories.items()}
    lasts = style.spread(loss[-1] for loss in losses.values())
    style.styled(panels[0], f"Training loss: {lasts} at the end", "Epoch", "Training loss")
    style.lines(panels[0], {label: (_epochs(loss), loss) for label, loss in losses.items()})
    style.decades(panels[0], losses.values())
    if metric is not None:
        errors = {
            label: 100 * (1 - _numbers(history[metric])) for label, history in histories.items()
        }
        best = style.spread([float(np.nanmin(error)) for error in errors.values()], ".2f")
        title, label = f"Lowest {kinds[metric]} error: {best} %", f"{kinds[metric]} error (%)"
        style.styled(panels[1], title, "Epoch", label[0].upper() + label[1:])
        style.lines(panels[1], {label: (_epochs(error), error) for label, error in errors.items()})
        panels[1].set_ylim(bottom=0)
    for axes in panels:
        style.by_depth(axes)
    style.name_lines(figure, *panels)
    return figure


def _numbers(column: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.asarray(column, "float64")


def _epochs(values: np.ndarray) -> np.ndarray:
    return np.arange(1, len(values) + 1)


def _is_measured(histories: Mapping[str, Columns], metric: str) -> bool:
    """Whether every history has a value of the metric."""
    columns = [_numbers(history.get(metric, ())) for history in histories.values()]
    return all(np.isfinite(column).any() for column in columns)


#: Columns of `TrainingHealth` for the whole network.
_NETWORK = ("gradient_norm", "layer_gradient_ratio")
#: Label to colour.
_HUES = {
    "network": style.INK,
    "least": style.COLOURS[5],
    "median": style.COLOURS[0],
    "largest": style.COLOURS[1],
}
#: Figure, a key of `HEALTHY_RANGES`, to the label of its axis.
_UNITS = {
    "gradient_norm": "Norm",
    "layer_gradient_ratio": "Ratio",
    "update_ratio": "Ratio",
    "gradient_weight_ratio": "Ratio",
    "activation_mean": "Mean",
    "activation_std": "Standard deviation",
}


def training_health(table: Columns) -> Any:
    """Draw the figures of `kp.TrainingHealth` over the updates, each with its healthy
    range shaded.

    For the network: norm of the gradient, and its ratio between first and last unit.
    For the kernels, least, median and largest: `||update|| / ||weight||`, `||gradient||
    / ||weight||`, and, if measured, mean and standard deviation of the inputs.

    Args:
        table: Columns of the CSV file that `TrainingHealth(csv=...)` writes, all of one
            length.

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
    found = _health_figures(table)
    rows = (len(found) + 1) // 2
    figure = style.new_figure(9.0, 0.6 + 2.4 * rows)
    panels = figure.subplots(rows, 2, sharex=True, squeeze=False).ravel()
    for axes, (name, series) in zip(panels, found.items(), strict=False):
        title = HEALTHY_RANGES[name].figure
        style.styled(axes, title[0].upper() + title[1:], "", _UNITS[name])
        for label, values in series.items():
            style.lines(axes, {label: (steps, values)}, color=_HUES[label])
        if HEALTHY_RANGES[name].low > 0:
            style.decades(axes, series.values())
        _shade(axes, HEALTHY_RANGES[name], np.concatenate(list(series.values())))
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(found) - 2) : len(found)]:
        axes.set_xlabel("Update")
        axes.tick_params(labelbottom=True)
    handles = {line.get_label(): line for axes in panels for line in axes.lines}
    style.legend(figure, handles | {"healthy range": panels[0].patches[0]})
    return figure


def _health_figures(table: Columns) -> dict[str, dict[str, np.ndarray]]:
    """Return figure, a key of `HEALTHY_RANGES`, to label to values."""
    found = {name: {"network": _numbers(table[name])} for name in _NETWORK}

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
            found[figure] = _spread(above / np.where(below > 0, below, np.nan))
    for figure in ("activation_mean", "activation_std"):
        if measured := columns(figure):
            found[figure] = _spread(np.stack(list(measured.values())))
    return found


def _spread(values: np.ndarray) -> dict[str, np.ndarray]:
    """Return the least, the median and the largest value of each column, NaN if it has
    none.
    """
    masked = np.ma.masked_invalid(values)
    spread = {"least": masked.min(0), "median": np.ma.median(masked, 0), "largest": masked.max(0)}
    return {
        label: np.ma.filled(np.ma.asarray(each, "float64"), np.nan)
        for label, each in spread.items()
    }


def _shade(axes, healthy: Range, values: np.ndarray) -> None:
    """Shade a healthy range. The axes show the values and the nearer end of the range."""
    axes.axhspan(
        healthy.low, healthy.high, color=style.COLOURS[2], alpha=0.15, zorder=0, linewidth=0
    )
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
