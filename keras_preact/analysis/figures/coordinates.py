"""Draw a coordinate check: how far the first updates move networks of several sizes."""

from collections.abc import Mapping
from typing import Any

from keras_preact.analysis.coordinates import CoordinateCheck
from keras_preact.analysis.figures import style


def coordinate_changes(checks: Mapping[str, CoordinateCheck], size: str = "Layers") -> Any:
    """Draw how far x_L moves by the first updates against the size of the network: one
    panel per check, one line per number of updates.

    Args:
        checks: Name of a parametrisation to what `kp.analysis.coordinate_check` returned.
        size: What the sizes are, for the axis.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: for no check.

    Example:

    >>> import numpy as np
    >>> from keras_preact.analysis import CoordinateCheck, figures
    >>> change = np.array([[0.5], [2.0]])
    >>> check = CoordinateCheck((20, 80), (1,), np.ones(2), change)
    >>> axes = figures.coordinate_changes({"ordinary": check}).axes[0]
    >>> axes.lines[0].get_ydata().tolist()
    [0.5, 2.0]

    Source: Fig. 5 of arXiv 2203.03466.
    """
    style.need(checks, "check")
    figure = style.new_figure(1.2 + 3.2 * len(checks), 4.2)
    style.heading(figure, "Change of $x_L$ by the first updates: flat if one rate serves all sizes")
    panels = figure.subplots(1, len(checks), sharey=True, squeeze=False)[0]
    for i, (axes, (name, check)) in enumerate(zip(panels, checks.items(), strict=True)):
        title = f"{name}\n{size.lower()}$^{{{check.exponents[-1]:.2f}}}$, {check.steps[-1]} updates"
        style.styled(axes, title, size, "" if i else "RMS change of $x_L$")
        lines = {
            f"{step} update{'s' * (step > 1)}": (check.sizes, check.change[:, t])
            for t, step in enumerate(check.steps)
        }
        style.lines(axes, lines, marker="o", markersize=3.5)
        axes.set_xscale("log")
        axes.set_xticks(check.sizes, [f"{each:,}" for each in check.sizes])
        axes.minorticks_off()
        style.logarithmic(axes)
    style.legend(figure)
    return figure
