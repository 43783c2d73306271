"""A residual network as an ensemble of paths: errors without some units, and how long
the paths are.
"""

from typing import Any

import numpy as np

from keras_preact.analysis.ensemble import Lesions
from keras_preact.analysis.figures import _style


def lesion_errors(lesions: Lesions) -> Any:
    """Draw the error against the number of removed units: one point per measurement, a
    line through the means.

    Args:
        lesions: What `kp.analysis.lesions` returned. If each unit was removed by
            itself, the errors are drawn by unit.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: for no measurement.

    Example:

    >>> import numpy as np
    >>> from keras_preact.analysis import figures
    >>> from keras_preact.analysis.ensemble import Lesions
    >>> found = Lesions(("unit1", "unit2"), ((0,), (1,), (0, 1)), np.array([0.5, 0.25, 0.75]), 0.125)
    >>> figures.lesion_errors(found).axes[0].lines[0].get_ydata().tolist()  # without 0, 1 and 2 units, in percent
    [12.5, 37.5, 75.0]

    Source: Fig. 3 and 5 of arXiv 1605.06431.
    """
    if not lesions.dropped:
        raise ValueError("There must be a measurement to draw. Received: no removed units")
    figure = _style.new_figure()
    errors = 100 * np.asarray(lesions.error)
    whole = 100 * lesions.intact_error
    counts = np.array([len(each) for each in lesions.dropped])
    if lesions.dropped == tuple((i,) for i in range(len(lesions.units))):
        worst = int(errors.argmax())
        title = f"Error without one unit: {_style.spread(errors, '.3g')} %, highest without {lesions.units[worst]}"
        axes = _style.styled(figure.subplots(), title, "Removed unit $l$", "Error (%)")
        _style.lines(
            axes, {"without the unit": (np.arange(len(errors)), errors)}, marker="o", markersize=3.5
        )
        axes.axhline(
            whole,
            color=_style.GREY,
            linestyle="--",
            linewidth=1.2,
            label=f"whole network: {whole:.3g} %",
        )
        axes.set_ylim(bottom=0)
        _style.stages(axes, lesions.units)
    else:
        levels = np.unique(counts)
        means = [errors[counts == level].mean() for level in levels]
        title = f"Error with all {len(lesions.units)} units: {whole:.3g} %, without {levels[-1]} of them: {means[-1]:.3g} %"
        axes = _style.styled(figure.subplots(), title, "Number of removed units", "Error (%)")
        _style.lines(axes, {"mean": (np.array([0, *levels]), np.array([whole, *means]))})
        axes.scatter(
            counts,
            errors,
            s=30,
            color=_style.colour(0),
            alpha=0.5,
            linewidths=0,
            label="one set of units",
        )
        axes.set_ylim(bottom=0)
    _style.by_depth(axes)
    _style.name_lines(figure, axes)
    return figure


def path_length_shares(shares: np.ndarray) -> Any:
    """Draw which share of all paths is how long.

    Args:
        shares: What `kp.analysis.path_lengths` returned, `(units + 1,)`.

    Raises:
        ValueError: for what is no distribution over lengths.
    """
    shares = np.asarray(shares, "float64")
    if shares.ndim != 1 or len(shares) < 2 or not np.isclose(shares.sum(), 1):
        raise ValueError(
            "`shares` must be those of 2 lengths or more, with a sum of 1. Received: "
            f"shape={shares.shape}"
        )
    lengths = np.arange(len(shares))
    mean = float(lengths @ shares)
    deviation = float(np.sqrt((lengths - mean) ** 2 @ shares))
    inside = np.abs(lengths - mean) <= 2 * deviation
    figure = _style.new_figure()
    title = f"{100 * shares[inside].sum():.1f} % of the paths go through {lengths[inside][0]} to {lengths[inside][-1]} branches"
    axes = _style.styled(
        figure.subplots(), title, "Length of a path (branches)", "Share of the paths (%)"
    )
    _style.shares(axes.yaxis)
    axes.bar(
        lengths,
        shares,
        width=0.9,
        color=[_style.colour(0) if each else _style.BLUE for each in inside],
    )
    _style.by_depth(axes)
    return figure
