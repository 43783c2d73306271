"""Training images in the memory of the device. A batch has one number per image, its
code, and the device cuts out the crops.

A code holds the number of an image, the offsets of its crop and whether it is flipped,
in 32 bits.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from ..errors import UserError
from . import crops


def encode(
    images: np.ndarray,
    top: Any = None,
    left: Any = None,
    flip: Any = False,
    border: int = crops.BORDER,
) -> np.ndarray:
    """Return the codes, int32, of crops of these images.

    Args:
        images: Numbers of the images.
        top, left: Offsets of the crops, 0 to twice the border; None: the middle.
        flip: Whether a crop is flipped.
        border: Pixels that were added to the images on every side.
    """
    top, left = (border if offset is None else offset for offset in (top, left))
    offsets = crops.offsets(border)
    return (((images * offsets + top) * offsets + left) * 2 + flip).astype("int32")


class Cut(keras.Layer):
    """Holds images on the device and turns codes `(batch,)` into crops `(batch, height,
    width, channels)`, float32, 0 to 255.

    Args:
        padded: uint8 images (n, height, width, channels), `border` pixels larger on
            every side than their crops.
        border: Pixels that were added on every side.

    Raises:
        UserError: if images or pixels are too many for 32 bits: about 13 million images
            with a border of 4, or 2 billion pixels.
    """

    def __init__(self, padded: np.ndarray, border: int = crops.BORDER, **kwargs):
        super().__init__(trainable=False, dtype="float32", **kwargs)
        n, self._height, self._width, channels = padded.shape
        self._border, self._offsets = border, crops.offsets(border)
        if n * max(2 * self._offsets**2, self._height * self._width) >= 2**31:
            raise UserError(
                f"Too many images for the device: {n:,} of {self._height} x {self._width} pixels "
                "with their border. Remove --data.on-device."
            )
        self.pixels = self.add_weight(
            shape=(n * self._height * self._width, channels),
            dtype="uint8",
            initializer="zeros",
            trainable=False,
            name="pixels",
        )
        self.pixels.assign(padded.reshape(-1, channels))

    def call(self, codes):
        codes = ops.cast(codes, "int32")
        quotient, flip = codes // 2, codes % 2
        quotient, left = quotient // self._offsets, quotient % self._offsets
        image, top = quotient // self._offsets, quotient % self._offsets
        rows = ops.arange(self._height - 2 * self._border, dtype="int32")
        width = self._width - 2 * self._border
        columns = ops.arange(width, dtype="int32")
        columns = columns + flip[:, None] * (width - 1 - 2 * columns) + left[:, None]
        rows = (image * self._height + top)[:, None] + rows
        pixels = rows[:, :, None] * self._width + columns[:, None, :]
        return ops.cast(ops.take(self.pixels, pixels, axis=0), "float32")
