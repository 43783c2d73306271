"""Draw a logit as a sum over units."""

from typing import Any

import numpy as np

from keras_preact.analysis.contributions import Contributions
from keras_preact.analysis.figures import style

UNIT = "Unit of the last stage (0: all before the stage)"


def logit_contributions(contributions: Contributions) -> Any:
    """Draw what each unit of the last stage adds to the logits: the mean over the images
    as a bar, each image as a point.

    Args:
        contributions: What `kp.analysis.contributions` returned.

    Returns:
        A `matplotlib.figure.Figure`. Its first bar is all that comes from before the
        stage, its last one the bias of the head.

    Raises:
        ImportError: without matplotlib.

    Example:

    >>> import numpy as np
    >>> from keras_preact.analysis import figures
    >>> from keras_preact.analysis.contributions import Contributions
    >>> one, two = np.array([1.0, 3.0]), np.array([[0.5, 0.5], [2.0, 4.0]])
    >>> parts = Contributions(("unit1", "unit2"), np.array([0, 1]), one, two, -one, two.sum(0))
    >>> axes = figures.logit_contributions(parts).axes[0]
    >>> [float(bar.get_height()) for bar in axes.patches]
    [2.0, 0.5, 3.0, -2.0]

    Source: Eq. 4 of arXiv 1603.05027.
    """
    rows = np.array([contributions.start, *contributions.residual, contributions.bias])
    units, means = contributions.units, rows.mean(axis=1)
    most = units[int(means[1:-1].argmax())]
    title = (
        f"{most} adds most to the logit: {means[1:-1].max():.3g} of "
        f"{contributions.logits.mean():.3g} (mean of {rows.shape[1]} images)"
    )
    figure = style.new_figure()
    axes = style.styled(figure.subplots(), title, UNIT, "Part of the logit")
    places = np.arange(len(rows))
    colours = [style.BLUE, *[style.colour(0)] * len(units), style.BLUE]
    axes.bar(places, means, width=0.9, color=colours)
    point = {"s": 14, "color": style.EDGE, "alpha": 0.5, "linewidths": 0, "zorder": 3}
    axes.scatter(np.repeat(places, rows.shape[1]), rows.ravel(), **point)
    axes.axhline(0, color=style.LINE, linewidth=0.8, zorder=1)
    step = -(-len(units) // 9)
    numbers = np.arange(0, len(units) + 1, step)
    numbers = numbers[places[-1] - numbers > 0.05 * len(rows)]  # apart from the word
    axes.set_xticks([*numbers, places[-1]], [*map(str, numbers), "bias"])
    return figure
