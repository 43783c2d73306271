"""Draw the depth scales of wide plain networks in mean-field theory."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style
from keras_preact.analysis.mean_field import MeanField


def depth_scales(
    activation: str,
    weight_variances: Sequence[float] | np.ndarray,
    bias_variances: Sequence[float] | np.ndarray = (0.0,),
    networks: Mapping[str, float] | None = None,
) -> Any:
    """Draw xi, the number of layers over which a gradient's squared norm changes by a
    factor of e in a wide plain network, against the weight variance.

    Args:
        activation: A name in `keras_preact.analysis.mean_field.ACTIVATIONS`.
        weight_variances: Values of the horizontal axis. Nothing is drawn at
            criticality, where xi is infinite.
        bias_variances: Bias variances, with one line each.
        networks: Label to the weight variance of a network, for a vertical line.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: as `kp.analysis.MeanField`.

    Example:

    >>> from keras_preact.analysis import figures
    >>> figure = figures.depth_scales("relu", [1.0, 1.8, 2.2, 3.0], networks={"He": 2.0})
    >>> figure.axes[0].lines[0].get_ydata().round(1).tolist()
    [1.4, 9.5, 10.5, 2.5]

    Source: Fig. 2 of arXiv 1611.01232.
    """
    series = {
        f"bias variance {bias:.2g}": np.array(
            [MeanField(activation, float(weight), float(bias)).xi for weight in weight_variances]
        )
        for bias in bias_variances
    }
    series = {name: np.where(np.isfinite(xi), xi, np.nan) for name, xi in series.items()}
    figure = style.new_figure()
    axes = figure.subplots()
    finite = np.concatenate(list(series.values()))
    lasting = style.spread(finite[~np.isnan(finite)]) if np.isfinite(finite).any() else "all"
    style.styled(
        axes,
        f"Gradients keep their size over {lasting} layers",
        r"Weight variance times fan-in, $\sigma_w^2$",
        r"Depth scale $\xi$ (layers)",
    )
    style.lines(axes, {name: (weight_variances, xi) for name, xi in series.items()})
    for i, (label, variance) in enumerate((networks or {}).items(), len(series)):
        axes.axvline(variance, label=label, **style.look(i))
    style.decades(axes, series.values())
    style.legend(figure)
    return figure
