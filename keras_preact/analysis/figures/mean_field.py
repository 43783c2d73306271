"""Mean-field theory: phases of wide networks, depth scales and maps of correlations."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style
from keras_preact.analysis.mean_field import MeanField, PhaseDiagram

WEIGHT = r"Weight variance $\sigma_w^2$"
BIAS = r"Bias variance $\sigma_b^2$"


def phases(diagram: PhaseDiagram, networks: Mapping[str, tuple[float, float]] | None = None) -> Any:
    """Draw chi, the factor on a gradient's squared norm per layer, over both variances,
    with a line at chi = 1.

    Args:
        diagram: What `kp.analysis.phase_diagram` returned for at least two variances of
            each kind.
        networks: Label to the variances of a network's weights and biases, for points.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: for a diagram of one variance.

    Example:

    >>> from keras_preact.analysis import figures
    >>> from keras_preact.analysis.mean_field import phase_diagram
    >>> diagram = phase_diagram("tanh", [0.5, 1.0, 2.0], [0.0, 0.1])
    >>> figure = figures.phases(diagram, {"He": (2.0, 0.0)})
    >>> figure.axes[0].get_ylabel()
    'Bias variance $\\\\sigma_b^2$'

    Source: Fig. 1 of arXiv 1611.01232.
    """
    _check_grid(diagram)
    figure = style.new_figure(7.0, 4.6)
    from matplotlib.colors import TwoSlopeNorm

    title = f"Gradients explode in {100 * np.mean(diagram.chi > 1):.0f} % of the plane"
    axes = style.styled(figure.subplots(), title, WEIGHT, BIAS)
    axes.grid(False)
    factor = np.log10(np.clip(diagram.chi.T, 1e-3, 1e3))
    end = max(float(np.abs(factor).max()), 0.1)
    grid = (diagram.weight_variances, diagram.bias_variances)
    look = {"cmap": "RdBu_r", "norm": TwoSlopeNorm(0.0, -end, end)}
    picture = axes.pcolormesh(*grid, factor, shading="nearest", rasterized=True, **look)
    style.colour_bar(figure, axes, picture, r"$\log_{10} \chi$ (below 0: gradients vanish)")
    if factor.min() < 0 < factor.max():
        axes.contour(*grid, factor, levels=[0.0], colors=style.ON_MAP, linewidths=1.4)
    points = {}
    for i, (label, point) in enumerate((networks or {}).items()):
        [points[label]] = axes.plot(
            *([value] for value in point),
            color=(style.ON_MAP, *style.COLOURS)[i],
            marker="o",
            markersize=8,
            linestyle="",
            markeredgecolor="white",
            clip_on=False,
            label=label,
        )
    if points:
        style.legend(figure, points)
    return figure


def depth_scales(diagram: PhaseDiagram) -> Any:
    """Draw xi_c, the number of layers over which a correlation lasts, by the weight
    variance, one line per bias variance. See `phases`.

    Nothing is drawn at criticality, where xi_c is infinite. Source: Fig. 2 of arXiv
    1611.01232.
    """
    _check_grid(diagram)
    shown = np.unique(np.linspace(0, len(diagram.bias_variances) - 1, 5).round().astype(int))
    scales = np.where(np.isfinite(diagram.xi_c), diagram.xi_c, np.nan)
    series = {f"bias variance {diagram.bias_variances[i]:.2g}": scales[:, i] for i in shown}
    finite = scales[:, shown][~np.isnan(scales[:, shown])]
    lasting = f"{style.spread(finite)} layers" if finite.size else "for ever"
    figure = style.new_figure()
    axes = figure.subplots()
    style.styled(axes, f"Correlations last {lasting}", WEIGHT, r"Depth scale $\xi_c$ (layers)")
    style.lines(axes, {name: (diagram.weight_variances, each) for name, each in series.items()})
    style.decades(axes, series.values())
    style.name_lines(figure, axes)
    return figure


def correlation_maps(fields: Mapping[str, MeanField]) -> Any:
    """Draw the correlation of two examples after a unit against that before it, at the
    length that the network converges to.

    Args:
        fields: Label to a `kp.analysis.MeanField` without normalisation. If the network
            converges to the length 0 or to infinity, the length is 1.

    Raises:
        ValueError: for no network, or one with normalisation.

    Source: Fig. 2 of arXiv 1606.05340.
    """
    style.need(fields)
    c = np.linspace(0, 1, 41)
    series, slopes = {}, []
    for label, field in fields.items():
        length = field.q_star if 0 < field.q_star < math.inf else 1.0
        series[label] = (c, np.array([field.c_map(float(value), length) for value in c]))
        slopes.append(field.slope(1.0, length))
    title = f"Slope at 1: {style.spread(slopes)} (above 1: examples grow apart)"
    figure = style.new_figure(5.2, 5.0)
    axes = figure.subplots()
    style.styled(axes, title, "Correlation before a unit", "Correlation after it")
    axes.plot((0, 1), (0, 1), color=style.LINE, linewidth=0.8, zorder=1)
    style.lines(axes, series, marker="")
    axes.set_aspect("equal")
    style.name_lines(figure, axes)
    return figure


def _check_grid(diagram: PhaseDiagram) -> None:
    if min(diagram.chi.shape) < 2:
        raise ValueError(
            "A diagram needs at least two weight variances and two bias variances. "
            f"Received: {diagram.chi.shape[0]} and {diagram.chi.shape[1]}"
        )
