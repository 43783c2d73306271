"""Mean and standard deviation of a split's pixels."""

import numpy as np
import tensorflow as tf

from keras_preact.backend import tf_data

from .order import Order
from .readers import Arrays, Reader

#: Number of images that are measured if a split is not in memory.
SAMPLE = 2_000
#: Number of images in memory whose pixels are counted at a time.
CHUNK = 4096
#: Decimal places of the results.
DIGITS = 4


def mean_and_std(reader: Reader) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std of every channel, in pixel values from 0 to 255.

    All pixels are measured if the images are in memory. Otherwise at most `SAMPLE`
    images are read at their own size, the same ones every time. Each image counts the
    same, as it does after it is resized. The std of a constant channel is 1.
    """
    images = _chunks(reader.images) if isinstance(reader, Arrays) else _sample(reader)
    levels = np.arange(256.0)
    weights, total = np.float64(0), 0
    for chunk, count in images:
        histograms = [
            np.bincount(chunk[..., channel].ravel(), minlength=256)
            for channel in range(chunk.shape[-1])
        ]
        weights = weights + np.array(histograms) * (count * chunk.shape[-1] / chunk.size)
        total += count
    shares = weights / total
    mean = shares @ levels
    std = np.sqrt((shares * (levels - mean[:, None]) ** 2).sum(axis=1))
    std[std == 0] = 1
    return tuple(map(float, mean.round(DIGITS))), tuple(map(float, std.round(DIGITS)))


def _chunks(images: np.ndarray):
    for start in range(0, len(images), CHUNK):
        chunk = images[start : start + CHUNK]
        yield chunk, len(chunk)


def _sample(reader: Reader):
    chosen = np.zeros(reader.size, bool)
    chosen[Order(reader.size, 0).permutation(0)[:SAMPLE]] = True
    wanted = tf.constant(chosen)
    elements = reader.rows().enumerate().filter(lambda number, element: wanted[number])
    images = elements.map(
        lambda number, element: reader.decode(reader.fetch(element)[0]),
        num_parallel_calls=tf_data.CALLS,
    )
    for image in tf_data.untuned(images).as_numpy_iterator():
        yield image, 1
