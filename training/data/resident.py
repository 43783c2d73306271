"""Images in the memory of the device: a batch is one number per image, its code, and
the device cuts the crops out.

A code holds the number of an image, the place of its crop and whether it is flipped, in
32 bits.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from ..cli import UserError
from . import crops

_PLACES = crops.OFFSETS * crops.OFFSETS * 2


def encode(
    images: np.ndarray, top: Any = crops.PADDING, left: Any = crops.PADDING, flip: Any = False
) -> np.ndarray:
    """Return the codes, int32, of crops of these images.

    Args:
        images: Numbers of the images.
        top, left: Offsets of the crops, 0 to 8. Default: the middle.
        flip: Whether a crop is flipped.
    """
    return (((images * crops.OFFSETS + top) * crops.OFFSETS + left) * 2 + flip).astype("int32")


class Cut(keras.Layer):
    """Holds images on the device and turns codes `(batch,)` into crops `(batch, height,
    width, channels)`, float32, 0 to 255.

    Args:
        padded: uint8 images (n, height, width, channels), `crops.PADDING` pixels larger
            on every side than their crops.

    Raises:
        UserError: for more images than codes can tell apart, 13 million, or 2 thousand
            million pixels.
    """

    def __init__(self, padded: np.ndarray, **kwargs):
        super().__init__(trainable=False, dtype="float32", **kwargs)
        n, self._height, self._width, channels = padded.shape
        if n * max(_PLACES, self._height * self._width) >= 2**31:
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
        rest, flip = codes // 2, codes % 2
        rest, left = rest // crops.OFFSETS, rest % crops.OFFSETS
        image, top = rest // crops.OFFSETS, rest % crops.OFFSETS
        rows = ops.arange(self._height - 2 * crops.PADDING, dtype="int32")
        width = self._width - 2 * crops.PADDING
        columns = ops.arange(width, dtype="int32")
        columns = columns + flip[:, None] * (width - 1 - 2 * columns) + left[:, None]
        rows = (image * self._height + top)[:, None] + rows
        pixels = rows[:, :, None] * self._width + columns[:, None, :]
        return ops.cast(ops.take(self.pixels, pixels, axis=0), "float32")
