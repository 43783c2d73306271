"""Images that stay where the network computes: a batch is a code for each image, and is
cut out there.

A code is an image's number, the place of its crop and whether it is flipped, in 32
bits. The host draws it as `pipelines.InMemory` draws a batch, so the images of a step
are the same; they are not copied from the host, and many steps can be computed without
it.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from ..cli import UserError
from . import crops, order

#: The code of an image as it is: the crop from its middle.
MIDDLE = crops.PADDING
_PLACES = crops.OFFSETS * crops.OFFSETS * 2


def encode(
    images: np.ndarray, top: Any = MIDDLE, left: Any = MIDDLE, flip: Any = False
) -> np.ndarray:
    """Return the codes, int32, of crops of images, of these numbers: offsets from 0 to
    8, and whether they are flipped.
    """
    return (((images * crops.OFFSETS + top) * crops.OFFSETS + left) * 2 + flip).astype("int32")


class Cut(keras.Layer):
    """Holds images on the device; from codes `(batch,)` to their crops `(batch, height,
    width, channels)`, float32, 0 to 255.

    Args:
        padded: uint8 images (n, height, width, channels), `crops.PADDING` pixels larger
            on every side than what leaves.

    Raises:
        UserError: for more images than codes can tell apart, 13 million of them, or
            pixels, 2 thousand million.
    """

    def __init__(self, padded: np.ndarray, **kwargs):
        super().__init__(trainable=False, dtype="float32", **kwargs)
        n, self._height, self._width, channels = padded.shape
        if n * max(_PLACES, self._height * self._width) >= 2**31:
            raise UserError(
                f"Too many images to stay on the device. Received: {n:,}, of {self._height} x "
                f"{self._width} pixels"
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


class Stream:
    """The batches of a run as codes and labels, functions of the seed and the step.

    Args:
        labels: Of the training images.
        batch_size: Images in a batch.
        seed: Of order and augmentation.
        augment: Whether images are cropped and flipped.
    """

    def __init__(self, labels: np.ndarray, batch_size: int, seed: int, augment: bool):
        self._labels = labels.astype("int32")
        self._batch_size, self._seed, self._augment = batch_size, seed, augment
        self._order = order.Order(len(labels), seed)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return codes and labels of a step's batch, int32."""
        images = self._order(step * self._batch_size + np.arange(self._batch_size))
        place: tuple = ()
        if self._augment:
            place = crops.draw(
                order.generator(self._seed, order.AUGMENTATION, step), self._batch_size
            )
        return encode(images, *place), self._labels[images]
