"""Crops that are made on the device equal crops that are made on the host, to the last
bit.
"""

import keras
import numpy as np
import pytest
from keras import ops

from tests.training import images as pictures
from training.data import crops, training_stream
from training.data.resident import Cut
from training.errors import UserError

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()


def random_images(count: int, height: int, width: int, channels: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, channels), "uint8")


def compiled(function):
    """Return the function as the backend compiles it; torch does not compile it."""
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    return function


@pytest.mark.parametrize(
    ("shape", "augmentation", "padding", "border"),
    [
        ((6, 6, 3), "pad_crop_flip", "mean", 4),
        ((5, 9, 1), "pad_crop_flip", "reflect", 2),
        ((9, 5, 3), "pad_crop_flip", "mean", 1),
        ((8, 8, 3), "none", "mean", 4),
    ],
)
def test_a_batch_has_the_pixels_of_the_pipeline(shape, augmentation, padding, border):
    images = random_images(12, *shape)
    data = pictures.in_memory(images)
    options = {"padding": padding, "border": border}
    plain = training_stream(data, 5, augmentation, None, 11, **options)
    stream = training_stream(data, 5, augmentation, None, 11, on_device=True, **options)
    padded = crops.pad(images, data.preprocessing.mean, padding, border)
    cut = compiled(Cut(padded, border))
    batches = zip(pictures.batches(plain, 6, 1), pictures.batches(stream, 6, 1), strict=True)
    for (pixels, labels), (codes, found) in batches:  # an epoch ends within step 2
        cropped = ops.convert_to_numpy(cut(codes))
        assert (codes.dtype, cropped.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(cropped, pixels)
        np.testing.assert_array_equal(found, labels)


@pytest.mark.parametrize("shape", [(2**31 // 162 + 1, 1, 1, 1), (2**15, 256, 256, 3)])
def test_too_many_images(shape):
    padded = np.broadcast_to(np.zeros((1, 1, 1, 1), "uint8"), shape)  # this takes one byte
    with pytest.raises(UserError, match=f"Too many images for the device: {shape[0]:,}"):
        Cut(padded)
