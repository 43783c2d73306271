"""Draw the singular values of Jacobians."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style
from keras_preact.analysis.jacobians import Spectrum

BINS = 40
#: A singular value below this share of the largest is rounding: derivatives are float32.
ROUNDING = 1e-6


def singular_values(spectra: Mapping[str, Spectrum]) -> Any:
    """Draw singular values in descending order (left) and their histogram (right), on
    logarithmic axes.

    Args:
        spectra: Label to what `kp.analysis.spectrum` returned. Values of 0, up to
            rounding, are counted in the title but not shown.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: if no value is above 0, or one is not finite.

    Example:

    >>> import numpy as np
    >>> from keras_preact.analysis import figures
    >>> from keras_preact.analysis.jacobians import Spectrum
    >>> values = np.array([2.0, 1.0, 0.5])
    >>> figure = figures.singular_values({"unit": Spectrum(values, (3, 3), exact=True)})
    >>> figure.axes[0].lines[0].get_ydata().tolist()
    [2.0, 1.0, 0.5]
    """
    largest = float(np.concatenate([[0.0], *(each.values for each in spectra.values())]).max())
    if not 0 < largest < np.inf:
        raise ValueError(
            "The singular values must be finite, and one of them above 0. Received: "
            f"{len(spectra)} spectra; the largest value is {largest}"
        )
    values = {label: spectrum.values for label, spectrum in spectra.items()}
    shown = {label: sigma[sigma > ROUNDING * largest] for label, sigma in values.items()}
    every = np.concatenate(list(shown.values()))
    total = sum(map(len, values.values()))
    zeros = f", {total - len(every)} of {total} at 0" if len(every) < total else ""
    figure = style.new_figure(9.0, 3.9)
    left, right = figure.subplots(1, 2)
    style.styled(left, f"Singular values: {style.spread(every)}{zeros}", "Rank", "Singular value")
    ranks = {label: np.arange(1, len(sigma) + 1) for label, sigma in values.items()}
    style.lines(left, {label: (ranks[label], sigma) for label, sigma in values.items()})
    left.set_ylim(every.min() / 1.5, every.max() * 1.5)
    style.logarithmic(left)
    style.styled(
        right, "How many are how large", "Singular value (1: size is kept)", "Number of values"
    )
    for axes, draw in ((left, left.axhline), (right, right.axvline)):
        draw(1.0, color=style.LINE, linewidth=0.8, zorder=1)
        axes.margins(x=0.02)
    edges = np.geomspace(every.min() / 1.05, every.max() * 1.05, BINS + 1)
    for i, (label, sigma) in enumerate(shown.items()):
        counts = np.histogram(sigma, edges)
        right.stairs(*counts, color=style.colour(i), fill=True, alpha=0.35, label=label)
    right.set_xscale("log")
    style.plain_numbers(right.xaxis)
    right.set_yscale("symlog", linthresh=1.0)
    right.set_ylim(bottom=0)
    style.legend(figure)
    return figure
