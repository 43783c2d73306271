"""The paper's augmentation for CIFAR, exact and fast: images decoded and padded once,
cropped by copying whole rows.
"""

import numpy as np

#: Pixels on every side of an image, as in the paper.
BORDER = 4


def offsets(border: int) -> int:
    """Return the number of offsets that a crop can have along a side."""
    return 2 * border + 1


def pad(
    images: np.ndarray, mean: tuple[float, ...], padding: str, border: int = BORDER
) -> np.ndarray:
    """Return uint8 images (n, height, width, channels) with `border` more pixels on every
    side.

    Args:
        images: The images.
        mean: Their mean colour.
        padding: `"mean"`, as in the released code, which normalises first and then pads
            with zeros; `"black"` or `"reflect"`.
        border: Pixels to add.
    """
    sides = ((0, 0), (border, border), (border, border), (0, 0))
    added = colour(mean, padding)
    if added is None:
        return np.ascontiguousarray(np.pad(images, sides, mode="reflect"))
    padded = np.pad(images, sides)
    outside = np.pad(np.zeros(images.shape[1:3], bool), border, constant_values=True)
    padded[:, outside] = added
    return padded


def colour(mean: tuple[float, ...], padding: str) -> np.ndarray | None:
    """Return the colour of the pixels that `pad` adds, whole numbers from 0 to 255; None if it
    reflects the image.
    """
    if padding == "reflect":
        return None
    return np.rint(mean if padding == "mean" else np.zeros(len(mean))).astype("float32")


class PadCropFlip:
    """Cuts crops of the original size out of padded images, and flips some of them.

    Args:
        padded: uint8 images (n, height, width, channels), `border` pixels larger on
            every side than their crops.
        border: Pixels that were added on every side.
    """

    def __init__(self, padded: np.ndarray, border: int = BORDER):
        n, height, width, self._channels = padded.shape
        self._width = width - 2 * border
        shape = (n, offsets(border), offsets(border), height - 2 * border)
        # [image, top, left] holds the rows of that crop, one item each: copying items is many times
        # faster than copying bytes
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
        """Return one crop of each image of `indices`. `top`, `left` and `flip` hold for
        each crop its offsets, from 0 to twice the border, and whether it is flipped.
        """
        crops = self._rows[indices, top, left]
        pixels = crops.view(f"V{self._channels}").reshape(*crops.shape, self._width)
        pixels[flip] = pixels[flip][:, :, ::-1]
        return pixels.view("uint8").reshape(*pixels.shape, self._channels)


def draw(
    random: np.random.Generator, count: int, border: int = BORDER
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw top, left and flip of `count` crops. All combinations, 2 * 81 with the paper's
    border, are equally likely.
    """
    top, left = random.integers(0, offsets(border), (2, count))
    return top, left, random.integers(0, 2, count).astype(bool)
