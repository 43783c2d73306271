"""Draw a residual network as an ensemble of paths: errors without some units, and the
lengths of the paths.
"""

from typing import Any

import numpy as np

from keras_preact.analysis.ensemble import Lesions
from keras_preact.analysis.figures import style


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
    >>> errors = np.array([0.5, 0.25, 0.75])
    >>> lesions = Lesions(("unit1", "unit2"), ((0,), (1,), (0, 1)), errors, 0.125)
    >>> axes = figures.lesion_errors(lesions).axes[0]
    >>> axes.lines[0].get_ydata().tolist()  # without 0, 1 and 2 units, in percent
    [12.5, 37.5, 75.0]

    Source: Fig. 3 and 5 of arXiv 1605.06431.
    """
    if not lesions.dropped:
        raise ValueError("Nothing to draw: `lesions` has no measurement.")
    figure = style.new_figure()
    axes = figure.subplots()
    errors = 100 * np.asarray(lesions.error)
    whole = 100 * lesions.intact_error
    if lesions.dropped == tuple((i,) for i in range(len(lesions.units))):
        worst = lesions.units[int(errors.argmax())]
        title = f"Error without one unit: {style.spread(errors)} %, highest without {worst}"
        style.styled(axes, title, "Removed unit $l$", "Error (%)")
        series = {"without the unit": (np.arange(len(errors)), errors)}
        style.lines(axes, series, marker="o", markersize=3.5)
        label = f"whole network: {whole:.3g} %"
        axes.axhline(whole, color=style.GREY, linestyle="--", linewidth=1.2, label=label)
        style.stages(axes, lesions.units)
    else:
        counts = np.array([len(indices) for indices in lesions.dropped])
        levels = np.unique(counts)
        means = [errors[counts == level].mean() for level in levels]
        title = (
            f"Error with all {len(lesions.units)} units: {whole:.3g} %, without {levels[-1]} of "
            f"them: {means[-1]:.3g} %"
        )
        style.styled(axes, title, "Number of removed units", "Error (%)")
        style.lines(axes, {"mean": (np.array([0, *levels]), np.array([whole, *means]))})
        point = {"s": 30, "color": style.colour(0), "alpha": 0.5, "linewidths": 0}
        axes.scatter(counts, errors, label="one set of units", **point)
    axes.set_ylim(bottom=0)
    style.by_depth(axes)
    style.legend(figure)
    return figure


def path_length_shares(shares: np.ndarray) -> Any:
    """Draw the share of all paths that has each length.

    Args:
        shares: What `kp.analysis.path_lengths` returned, `(units + 1,)`.

    Raises:
        ValueError: if it is no distribution over lengths.
    """
    shares = np.asarray(shares, "float64")
    if shares.ndim != 1 or len(shares) < 2 or not np.isclose(shares.sum(), 1):
        raise ValueError(
            "`shares` must hold the shares of at least 2 lengths, with a sum of 1. Received: "
            f"shape={shares.shape}"
        )
    lengths = np.arange(len(shares))
    mean = float(lengths @ shares)
    deviation = float(np.sqrt((lengths - mean) ** 2 @ shares))
    inside = np.abs(lengths - mean) <= 2 * deviation
    most, ends = 100 * shares[inside].sum(), lengths[inside][[0, -1]]
    title = f"{most:.1f} % of the paths go through {ends[0]} to {ends[1]} branches"
    figure = style.new_figure()
    axes = figure.subplots()
    style.styled(axes, title, "Length of a path (branches)", "Share of the paths (%)")
    style.shares(axes.yaxis)
    colours = [style.colour(0) if is_inside else style.BLUE for is_inside in inside]
    axes.bar(lengths, shares, width=0.9, color=colours)
    style.by_depth(axes)
    return figure
