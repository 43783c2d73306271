"""The paper's augmentation for CIFAR, exact and fast: images decoded and padded once,
cropped by copying whole rows.
"""

from collections.abc import Callable, Mapping

import numpy as np

#: Pixels on every side of an image, as in the paper.
BORDER = 4


def offsets(border: int) -> int:
    """Return how many offsets a crop has along a side."""
    return 2 * border + 1


def _colour(images: np.ndarray, colour: np.ndarray, border: int) -> np.ndarray:
    n, height, width, channels = images.shape
    padded = np.empty((n, height + 2 * border, width + 2 * border, channels), "uint8")
    padded[:] = colour
    padded[:, border : border + height, border : border + width] = images
    return padded


def _mean(images: np.ndarray, mean: tuple[float, ...], border: int = BORDER) -> np.ndarray:
    return _colour(images, np.rint(mean).astype("uint8"), border)


def _black(images: np.ndarray, mean: tuple[float, ...], border: int = BORDER) -> np.ndarray:
    return _colour(images, np.zeros(len(mean), "uint8"), border)


def _reflect(images: np.ndarray, mean: tuple[float, ...], border: int = BORDER) -> np.ndarray:
    sides = (border, border)
    return np.ascontiguousarray(np.pad(images, ((0, 0), sides, sides, (0, 0)), mode="reflect"))


#: `Data.padding` to a function of the images (n, height, width, channels), their mean colour and a
#: number of pixels, that pads them with so many on every side. mean: what the released code does,
#: which normalises first and then pads with zeros.
PADDINGS: Mapping[str, Callable[..., np.ndarray]] = {
    "mean": _mean,
    "black": _black,
    "reflect": _reflect,
}


class PadCropFlip:
    """Cuts the old size out of padded images, anywhere, and flips half of them.

    Args:
        padded: uint8 images (n, height, width, channels), `border` pixels larger on
            every side than what leaves.
        border: See above.
    """

    def __init__(self, padded: np.ndarray, border: int = BORDER):
        n, height, width, self._channels = padded.shape
        self._width = width - 2 * border
        shape = (n, offsets(border), offsets(border), height - 2 * border)
        # [image, top, left] are the rows of that crop, each one item: copying items is many times
        # faster than bytes
        image, row, column, _ = padded.strides
        self._rows = np.ndarray(
            shape,
            f"V{self._width * self._channels}",
            buffer=padded,
            strides=(image, row, column, row),
        )

    def __call__(
        self, indices: np.ndarray, top: np.ndarray, left: np.ndarray, flip: np.ndarray
    ) -> np.ndarray:
        """Return one crop of each image of `indices`: offsets from 0 to twice the border,
        and whether it is flipped, one number each.
        """
        crops = self._rows[indices, top, left]
        pixels = crops.view(f"V{self._channels}").reshape(*crops.shape, self._width)
        pixels[flip] = pixels[flip][:, :, ::-1]
        return pixels.view("uint8").reshape(*pixels.shape, self._channels)


def draw(
    random: np.random.Generator, count: int, border: int = BORDER
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return top, left and flip of `count` crops, all results (2 * 81 with the paper's
    border) equally likely.
    """
    top, left = random.integers(0, offsets(border), (2, count))
    return top, left, random.integers(0, 2, count).astype(bool)
