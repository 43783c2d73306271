"""Singular values of Jacobians."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_preact.analysis.figures import _style
from keras_preact.analysis.jacobians import Spectrum

BINS = 40
#: Share of the largest singular value below which one is rounding: derivatives are float32.
ROUNDING = 1e-6


def singular_values(spectra: Mapping[str, Spectrum]) -> Any:
    """Draw singular values in descending order (left) and how many of them are how
    large (right), on logarithmic axes.

    Args:
        spectra: Label to what `kp.analysis.spectrum` returned. Values of 0, up to
            rounding, are counted, but not shown.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: for no spectrum, or spectra without a value above 0.

    Example:

    >>> import numpy as np
    >>> from keras_preact.analysis import figures
    >>> from keras_preact.analysis.jacobians import Spectrum
    >>> figure = figures.singular_values({"unit": Spectrum(np.array([2.0, 1.0, 0.5]), (3, 3), exact=True)})
    >>> figure.axes[0].lines[0].get_ydata().tolist()
    [2.0, 1.0, 0.5]
    """
    largest = max((float(each.values[0]) for each in spectra.values()), default=0.0)
    if not largest > 0:
        raise ValueError(
            f"There must be a singular value above 0 to draw. Received: {len(spectra)} spectra"
        )
    shown = {
        label: each.values[each.values > ROUNDING * largest] for label, each in spectra.items()
    }
    every = np.concatenate(list(shown.values()))
    total = sum(len(each.values) for each in spectra.values())
    zeros = f", {total - len(every)} of {total} at 0" if len(every) < total else ""
    title = f"Singular values: {_style.spread(every)}{zeros}"
    figure = _style.new_figure(9.0, 3.9)
    left, right = figure.subplots(1, 2)
    _style.styled(left, title, "Rank", "Singular value")
    _style.lines(
        left,
        {
            label: (np.arange(1, len(each.values) + 1), each.values)
            for label, each in spectra.items()
        },
    )
    left.set_yscale("log", nonpositive="mask")
    left.set_ylim(every.min() / 1.5, every.max() * 1.5)
    for axes, draw in ((left, left.axhline), (right, right.axvline)):
        draw(1.0, color=_style.LINE, linewidth=0.8, zorder=1)
        axes.margins(x=0.02)
    _style.styled(
        right, "How many are how large", "Singular value (1: size is kept)", "Number of values"
    )
    low, high = every.min() / 1.05, every.max() * 1.05
    edges = np.geomspace(low, high, BINS + 1)
    for i, (label, values) in enumerate(shown.items()):
        right.stairs(
            *np.histogram(values, edges), color=_style.colour(i), fill=True, alpha=0.35, label=label
        )
    right.set_xscale("log")
    right.set_yscale("symlog", linthresh=1.0)
    right.set_ylim(bottom=0)
    _style.name_lines(figure, left)
    return figure
