"""The paper's augmentation for CIFAR, exact and fast: images decoded and padded once,
cropped by copying whole rows.
"""

from collections.abc import Callable, Mapping

import numpy as np

PADDING = 4
#: Offsets of a crop along a side.
OFFSETS = 2 * PADDING + 1


def _colour(images: np.ndarray, colour: np.ndarray) -> np.ndarray:
    n, height, width, channels = images.shape
    padded = np.empty((n, height + 2 * PADDING, width + 2 * PADDING, channels), "uint8")
    padded[:] = colour
    padded[:, PADDING:-PADDING, PADDING:-PADDING] = images
    return padded


def _mean(images: np.ndarray, mean: tuple[float, ...]) -> np.ndarray:
    return _colour(images, np.rint(mean).astype("uint8"))


def _black(images: np.ndarray, mean: tuple[float, ...]) -> np.ndarray:
    return _colour(images, np.zeros(len(mean), "uint8"))


def _reflect(images: np.ndarray, mean: tuple[float, ...]) -> np.ndarray:
    sides = (PADDING, PADDING)
    return np.ascontiguousarray(np.pad(images, ((0, 0), sides, sides, (0, 0)), mode="reflect"))


#: `Data.padding` to a function of the images (n, height, width, channels) and their mean colour
#: that pads them with 4 pixels on every side. mean: what the released code does, which normalises
#: first and then pads with zeros.
PADDINGS: Mapping[str, Callable[[np.ndarray, tuple[float, ...]], np.ndarray]] = {
    "mean": _mean,
    "black": _black,
    "reflect": _reflect,
}


class PadCropFlip:
    """Cuts the old size out of padded images, anywhere, and flips half of them.

    Args:
        padded: uint8 images (n, height, width, channels), `PADDING` pixels larger on
            every side than what leaves.
    """

    def __init__(self, padded: np.ndarray):
        n, height, width, self._channels = padded.shape
        self._width = width - 2 * PADDING
        shape = (n, OFFSETS, OFFSETS, height - 2 * PADDING)
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
        """Return one crop of each image of `indices`: offsets from 0 to 8, and whether
        it is flipped, one number each.
        """
        crops = self._rows[indices, top, left]
        pixels = crops.view(f"V{self._channels}").reshape(*crops.shape, self._width)
        pixels[flip] = pixels[flip][:, :, ::-1]
        return pixels.view("uint8").reshape(*pixels.shape, self._channels)


def draw(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return top, left and flip of `count` crops, all of the 2 * 81 results equally
    likely.
    """
    top, left = random.integers(0, OFFSETS, (2, count))
    return top, left, random.integers(0, 2, count).astype(bool)
