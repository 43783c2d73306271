"""Mean-field theory: phases of wide networks, depth scales, and how correlations
travel.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_preact.analysis.figures import _style
from keras_preact.analysis.mean_field import MeanField, PhaseDiagram

WEIGHT = r"Weight variance $\sigma_w^2$"
BIAS = r"Bias variance $\sigma_b^2$"


def phases(diagram: PhaseDiagram, networks: Mapping[str, tuple[float, float]] | None = None) -> Any:
    """Draw chi, what a gradient's squared norm is multiplied by in each layer, over
    both variances; chi = 1 is a line.

    Args:
        diagram: What `kp.analysis.phase_diagram` returned, for two variances or more of
            each kind.
        networks: Label to the variances of weights and biases of a network: a point.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: for a diagram of one variance.

    Example:

    >>> from keras_preact.analysis import figures
    >>> from keras_preact.analysis.mean_field import phase_diagram
    >>> figure = figures.phases(phase_diagram("tanh", [0.5, 1.0, 2.0], [0.0, 0.1]), {"He": (2.0, 0.0)})
    >>> figure.axes[0].get_ylabel()
    'Bias variance $\\\\sigma_b^2$'

    Source: Fig. 1 of arXiv 1611.01232.
    """
    from matplotlib.colors import TwoSlopeNorm

    _check_grid(diagram)
    figure = _style.new_figure(7.0, 4.6)
    chaotic = float(np.mean(diagram.chi > 1))
    axes = _style.styled(
        figure.subplots(), f"Gradients explode in {100 * chaotic:.0f} % of the plane", WEIGHT, BIAS
    )
    axes.grid(False)
    factor = np.log10(np.clip(diagram.chi.T, 1e-3, 1e3))
    end = max(float(np.abs(factor).max()), 0.1)
    norm = TwoSlopeNorm(0.0, -end, end)
    grid = (diagram.weight_variances, diagram.bias_variances)
    picture = axes.pcolormesh(
        *grid, factor, cmap="RdBu_r", norm=norm, shading="nearest", rasterized=True
    )
    _style.colour_bar(figure, axes, picture, r"$\log_{10} \chi$ (below 0: gradients vanish)")
    if factor.min() < 0 < factor.max():
        axes.contour(*grid, factor, levels=[0.0], colors=_style.ON_MAP, linewidths=1.4)
    points = {}
    for i, (label, point) in enumerate((networks or {}).items()):
        look = {"marker": "o", "markersize": 8, "linestyle": "", "markeredgecolor": "white"}
        colour = (_style.ON_MAP, *_style.COLOURS)[i]
        [points[label]] = axes.plot(
            *([value] for value in point), color=colour, clip_on=False, label=label, **look
        )
    if points:
        _style.legend(figure, points)
    return figure


def depth_scales(diagram: PhaseDiagram) -> Any:
    """Draw xi_c, how many layers a correlation lasts, over the weight variance, a line
    for each bias variance.

    See `phases`. Where xi_c is infinite, at criticality, nothing is drawn. Source: Fig.
    2 of arXiv 1611.01232.
    """
    _check_grid(diagram)
    shown = np.unique(np.linspace(0, len(diagram.bias_variances) - 1, 5).round().astype(int))
    scales = np.where(np.isfinite(diagram.xi_c), diagram.xi_c, np.nan)
    series = {f"bias variance {diagram.bias_variances[i]:.2g}": scales[:, i] for i in shown}
    finite = scales[:, shown][~np.isnan(scales[:, shown])]
    lasting = f"{_style.spread(finite)} layers" if finite.size else "for ever"
    figure = _style.new_figure()
    axes = _style.styled(
        figure.subplots(), f"Correlations last {lasting}", WEIGHT, r"Depth scale $\xi_c$ (layers)"
    )
    _style.lines(
        axes, {label: (diagram.weight_variances, values) for label, values in series.items()}
    )
    _style.decades(axes, series.values())
    _style.name_lines(figure, axes)
    return figure


def correlation_maps(fields: Mapping[str, MeanField]) -> Any:
    """Draw the correlation of two examples after a unit over that before it, at the
    length that the network converges to.

    Args:
        fields: Label to a `kp.analysis.MeanField` without normalisation. Where the
            length is 0 or infinite it is 1 here.

    Raises:
        ValueError: for no network, or one with normalisation.

    Source: Fig. 2 of arXiv 1606.05340.
    """
    if not fields:
        raise ValueError("There must be a network to draw. Received: an empty mapping")
    figure = _style.new_figure(5.2, 5.0)
    c = np.linspace(0, 1, 41)
    lengths = {
        label: field.q_star if 0 < field.q_star < math.inf else 1.0
        for label, field in fields.items()
    }
    slopes = _style.spread(field.slope(1.0, lengths[label]) for label, field in fields.items())
    series = {
        label: (c, np.array([field.c_map(float(value), lengths[label]) for value in c]))
        for label, field in fields.items()
    }
    title = f"Slope at 1: {slopes} (above 1: examples grow apart)"
    axes = _style.styled(
        figure.subplots(), title, "Correlation before a unit", "Correlation after it"
    )
    axes.plot((0, 1), (0, 1), color=_style.LINE, linewidth=0.8, zorder=1)
    _style.lines(axes, series, marker="")
    axes.set_aspect("equal")
    _style.name_lines(figure, axes)
    return figure


def _check_grid(diagram: PhaseDiagram) -> None:
    if min(diagram.chi.shape) < 2:
        raise ValueError(
            "A diagram needs two weight variances and two bias variances at least. "
            f"Received: {diagram.chi.shape[0]} and {diagram.chi.shape[1]}"
        )
