"""Several views of an image, whose logits are averaged."""

from collections.abc import Callable
from typing import Literal

import numpy as np

Views = Literal["one", "flip", "flip_shift"]
#: Words of the report for each choice of views.
VIEWS: dict[str, str] = {"one": "", "flip": ", 2 views each", "flip_shift": ", 6 views each"}


def average_logits(
    logits: Callable[[np.ndarray], np.ndarray], images: np.ndarray, views: Views
) -> np.ndarray:
    """Return the mean logits of some views of images (batch, height, width, channels). The
    images that are not moved count twice.
    """
    if views == "one":
        return logits(images)
    plain = (logits(images) + logits(np.ascontiguousarray(images[:, :, ::-1]))) / 2
    if views == "flip":
        return plain
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    moved = [
        average_logits(logits, np.ascontiguousarray(view), "flip")
        for view in (padded[:, :-2, :-2], padded[:, 2:, 2:])
    ]
    return plain / 2 + sum(moved) / 4
