"""Training over time: loss and error as in Fig. 1 and 6 of the paper, and the health of
gradients, updates and activations.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_preact.analysis.figures import _style
from keras_preact.health.ranges import HEALTHY_RANGES

#: Name of a column to its numbers.
Columns = Mapping[str, Sequence[float] | np.ndarray]


def training_curves(histories: Mapping[str, Columns], measured_on: str = "test") -> Any:
    """Draw the training loss (left) and the error in percent (right) by epoch.

    Args:
        histories: Label of a run to its history: column to values, one per epoch, as
            `model.fit` returns them or a run's history.csv has them: `loss`, and for
            the error `val_accuracy`, or `accuracy` if there is none.
        measured_on: What `val_accuracy` is measured on: `"test"`, `"validation"`.

    Returns:
        A `matplotlib.figure.Figure`; the first axes has the losses, the second the
        errors.

    Raises:
        ValueError: for no history, or one without a loss.

    Example:

    >>> from keras_preact.analysis import figures
    >>> figure = figures.training_curves({"digits": {"loss": [2.0, 0.5], "val_accuracy": [0.5, 0.9]}})
    >>> figure.axes[1].lines[0].get_ydata().round(6).tolist()
    [50.0, 10.0]

    Source: Fig. 1 and 6 of arXiv 1603.05027.
    """
    for label, history in histories.items():
        if not len(history.get("loss", ())):
            raise ValueError(
                f"A history needs a `loss`. Received: {label!r} with "
                f"{', '.join(history) or 'no columns'}"
            )
    if not histories:
        raise ValueError("There must be a history to draw. Received: an empty mapping")
    kinds = {"val_accuracy": measured_on, "accuracy": "training"}
    metric = next(
        (name for name in kinds if all(_measured(history, name) for history in histories.values())),
        None,
    )
    figure = _style.new_figure(7.0 if metric is None else 9.0, 4.0)
    panels = figure.subplots(1, 1 if metric is None else 2, squeeze=False)[0]
    epochs = {label: np.arange(1, len(history["loss"]) + 1) for label, history in histories.items()}
    losses = {label: np.asarray(history["loss"], "float64") for label, history in histories.items()}
    ends = [loss[-1] for loss in losses.values()]
    _style.styled(
        panels[0], f"Training loss: {_style.spread(ends)} at the end", "Epoch", "Training loss"
    )
    _style.lines(panels[0], {label: (epochs[label], loss) for label, loss in losses.items()})
    _style.decades(panels[0], losses.values())
    if metric is not None:
        kind = kinds[metric]
        errors = {
            label: 100 * (1 - np.asarray(history[metric], "float64"))
            for label, history in histories.items()
        }
        best = _style.spread([float(np.nanmin(error)) for error in errors.values()], ".2f")
        _style.styled(
            panels[1], f"Lowest {kind} error: {best} %", "Epoch", f"{kind.capitalize()} error (%)"
        )
        _style.lines(panels[1], {label: (epochs[label], error) for label, error in errors.items()})
        panels[1].set_ylim(bottom=0)
    for axes in panels:
        _style.by_depth(axes)
    _style.name_lines(figure, *panels)
    return figure


def _measured(history: Columns, metric: str) -> bool:
    return bool(np.isfinite(np.asarray(history.get(metric, ()), "float64")).any())


#: Columns of `TrainingHealth` for the whole network.
_NETWORK = ("gradient_norm", "layer_gradient_ratio")
#: Label to colour.
_HUES = {
    "network": _style.INK,
    "least": _style.COLOURS[5],
    "median": _style.COLOURS[0],
    "largest": _style.COLOURS[1],
}
#: What the figures are, at their axes.
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

    Of the network: norm of the gradient, and its ratio between first and last unit. Of
    the kernels, least, median and largest: `||update|| / ||weight||`, `||gradient|| /
    ||weight||`, and where they were measured mean and standard deviation of the inputs.

    Args:
        table: Columns of the CSV file that `TrainingHealth(csv=...)` writes, each of
            one length.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: for a table without the columns of `TrainingHealth`, or without a
            line.
    """
    steps = np.asarray(table.get("step", ()), "float64")
    if not steps.size or not all(name in table for name in _NETWORK):
        raise ValueError(
            "A table of training health has `step`, "
            f"{', '.join(f'`{name}`' for name in _NETWORK)} and at least one line. Received: "
            f"{len(table)} columns, {steps.size} lines"
        )
    figures = _health_figures(table)
    rows = (len(figures) + 1) // 2
    figure = _style.new_figure(9.0, 0.6 + 2.4 * rows)
    panels = figure.subplots(rows, 2, sharex=True, squeeze=False).ravel()
    for axes, (name, series) in zip(panels, figures.items(), strict=False):
        figure_name = HEALTHY_RANGES[name].figure
        _style.styled(axes, f"{figure_name[0].upper()}{figure_name[1:]}", "", _UNITS[name])
        for label, values in series.items():
            _style.lines(axes, {label: (steps, values)}, color=_HUES[label])
        if HEALTHY_RANGES[name].low > 0:
            _style.decades(axes, series.values())
        _shade(axes, name, np.concatenate(list(series.values())))
    for axes in panels[len(figures) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(figures) - 2) : len(figures)]:
        axes.set_xlabel("Update")
        axes.tick_params(labelbottom=True)
    handles = {line.get_label(): line for axes in panels for line in axes.lines}
    _style.legend(figure, handles | {"healthy range": panels[0].patches[0]})
    return figure


def _health_figures(table: Columns) -> dict[str, dict[str, np.ndarray]]:
    """Return figure, a key of `HEALTHY_RANGES`, to label to values."""
    found = {name: {"network": np.asarray(table[name], "float64")} for name in _NETWORK}
    columns = {
        figure: {
            name.split("/", 1)[1]: np.asarray(values, "float64")
            for name, values in table.items()
            if name.startswith(figure + "/")
        }
        for figure in (
            "gradient_norm",
            "weight_norm",
            "update_norm",
            "activation_mean",
            "activation_std",
        )
    }
    kernels = [name for name in columns["weight_norm"] if name.endswith("kernel")]
    for figure, norms in (
        ("update_ratio", columns["update_norm"]),
        ("gradient_weight_ratio", columns["gradient_norm"]),
    ):
        if kernels:
            weights = np.stack([columns["weight_norm"][name] for name in kernels])
            found[figure] = _spread(
                np.stack([norms[name] for name in kernels]) / np.where(weights > 0, weights, np.nan)
            )
    for figure in ("activation_mean", "activation_std"):
        if columns[figure]:
            found[figure] = _spread(np.stack(list(columns[figure].values())))
    return found


def _spread(values: np.ndarray) -> dict[str, np.ndarray]:
    """Return least, median and most of each column of `values`, nan where it has none."""
    masked = np.ma.masked_invalid(values)
    spread = {"least": masked.min(0), "median": np.ma.median(masked, 0), "largest": masked.max(0)}
    return {
        label: np.ma.filled(np.ma.asarray(each, "float64"), np.nan)
        for label, each in spread.items()
    }


def _shade(axes, name: str, values: np.ndarray) -> None:
    """Shade the healthy range of a figure, without making the axes longer than the
    values and the range's nearer end ask.
    """
    row = HEALTHY_RANGES[name]
    axes.axhspan(row.low, row.high, color=_style.COLOURS[2], alpha=0.15, zorder=0, linewidth=0)
    finite = values[np.isfinite(values)]
    if axes.get_yscale() == "log":
        finite = finite[finite > 0]
    if finite.size:
        low, high = min(finite.min(), row.high), max(finite.max(), row.low)
        if axes.get_yscale() == "log":
            axes.set_ylim(low / 1.5, high * 1.5)
        else:
            margin = 0.1 * (high - low or abs(high) or 1.0)
            axes.set_ylim(low - margin, high + margin)
