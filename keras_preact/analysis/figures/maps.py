"""Draw images with the maps of `kp.analysis.grad_cam`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_preact.analysis.figures import style


def class_maps(images: np.ndarray, maps: np.ndarray, titles: Sequence[str] = ()) -> Any:
    """Draw images in a row, and below each its map as a colour over the image in grey.

    Args:
        images: Images `(n, height, width, channels)` with 1 or 3 channels. Each image
            is scaled so that its values range from 0 to 1.
        maps: Maps `(n, height, width)`, see `kp.analysis.grad_cam`. The colours of a
            map go from 0 to its largest value.
        titles: A title for each image, such as its class.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: for other shapes, or another number of titles.

    Example:

    >>> import numpy as np
    >>> from keras_preact.analysis import figures
    >>> figure = figures.class_maps(np.zeros((2, 8, 8, 3)), np.ones((2, 8, 8)), ["cat", "dog"])
    >>> [axes.get_title() for axes in figure.axes]
    ['cat', 'dog', '', '']
    """
    images, maps = np.asarray(images, "float64"), np.asarray(maps)
    titles = list(titles) or [""] * len(images)
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or maps.shape != images.shape[:3]:
        raise ValueError(
            "`images` must have shape (n, height, width, 1 or 3), `maps` (n, height, width). "
            f"Received: {images.shape} and {maps.shape}"
        )
    if len(titles) != len(images):
        raise ValueError(
            f"There must be a title for each image. Received: {len(titles)} titles for "
            f"{len(images)} images"
        )
    figure = style.new_figure(1.5 * max(len(images), 2), 3.2)
    grid = figure.subplots(2, len(images), squeeze=False)
    for image, heat, title, (above, below) in zip(images, maps, titles, grid.T, strict=True):
        low, high = image.min(), image.max()
        shown = (image - low) / ((high - low) or 1.0)
        grey = shown.mean(axis=-1)
        above.imshow(grey if shown.shape[-1] == 1 else shown, cmap="gray", vmin=0, vmax=1)
        below.imshow(grey, cmap="gray", vmin=0, vmax=1)
        below.imshow(heat, cmap="inferno", alpha=0.55, vmin=0, vmax=heat.max() or 1.0)
        above.set_title(title, fontsize=style.SMALL, color=style.INK)
        above.set_axis_off()
        below.set_axis_off()
    return figure
