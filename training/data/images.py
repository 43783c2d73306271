"""Resize and augment images with TensorFlow functions, and read a split once, in order."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_preact.backend import tf_data
from keras_preact.preprocessing import resize_image, smoothly_resized

from .image_data import ImageData
from .readers import Reader

#: Function from a reader, a fetched image, two seeds, the data set and a size to pixels (size,
#: size, channels).
Augmentation = Callable[[Reader, Any, Any, ImageData, int], Any]

#: Pixels around a crop that are decoded with it: the colour at its edge is interpolated from its
#: neighbours outside.
MARGIN = 16
#: Divisors of height and width at which a JPEG can be decoded. This saves up to half of the time of
#: a large photograph. A crop keeps twice the pixels that it needs: the resizing smooths it.
SCALES = (1, 2, 4, 8)


def evaluation_batches(
    data: ImageData, split: Reader, batch_size: int, size: int | None, rows: slice = slice(None)
):
    """Return the images of `split` once, in order, as a tf.data.Dataset of batches; the
    last may be smaller.

    Pixels are from 0 to 255: uint8 if images keep their own size, else float32.

    Args:
        data: The data set.
        split: One of its splits.
        batch_size: Images per batch, over all processes.
        size: Height and width of the returned images; None: their own size.
        rows: Images of every batch to return, such as the ones for one process. The
            others are not decoded. If the last batch holds none of them, it is missing.

    Raises:
        ValueError: for `rows` without an image.
    """
    numbered = numbers(rows, batch_size)
    with data.name_broken_images():
        examples = split.open(keep(numbered, batch_size))
    examples = _resized(examples, data, size)
    return tf_data.untuned(examples.batch(len(numbered)).prefetch(tf_data.PREFETCHED))


def sample(
    data: ImageData, split: Reader, count: int, size: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `count` images of `split` and their labels, always the same ones.

    They are from the whole split, in a random order: the first images of a folder have all
    the same class. Pixels are as in `evaluation_batches`.
    """
    with data.name_broken_images():
        examples = _resized(split.sample(count), data, size)
        return next(tf_data.untuned(examples.batch(count)).as_numpy_iterator())


def _resized(examples, data: ImageData, size: int | None):
    if size in (None, data.size):
        return examples
    return examples.map(
        lambda image, label: (resize_and_center(image, data, size), label),
        num_parallel_calls=tf_data.CALLS,
    )


def numbers(rows: slice, batch_size: int) -> np.ndarray:
    """Return the numbers of the images in a batch that `rows` selects.

    Raises:
        ValueError: if there are none.
    """
    chosen = np.arange(batch_size)[rows]
    if not len(chosen):
        raise ValueError(
            f"`rows` must hold some of the {batch_size} images of a batch. Received: {rows}"
        )
    return chosen


def keep(chosen: np.ndarray, batch_size: int) -> Callable[[Any], Any] | None:
    """Return a function of a place in the stream: whether its image is one of the
    `chosen` numbers of its batch. None if all are chosen.
    """
    if len(chosen) == batch_size:
        return None
    mask = tf.constant(np.isin(np.arange(batch_size), chosen))
    return lambda place: mask[place % batch_size]


def resize_and_center(image, data: ImageData, size: int):
    """Resize an image to `size` with the data set's preprocessing, as float32."""
    return tf.ensure_shape(resize_image(image, data.standard, size), (size, size, data.channels))


def resize(reader: Reader, image, seeds, data: ImageData, size: int):
    """Decode and resize the image as at evaluation."""
    return resize_and_center(reader.decode(image), data, size)


def pad_crop_flip(
    reader: Reader,
    image,
    seeds,
    data: ImageData,
    size: int,
    *,
    colour: np.ndarray | None,
    border: int,
    flip: bool = True,
):
    """Resize the image as at evaluation, add `border` pixels on every side, cut out `size` x
    `size` pixels, and flip half of the images unless `flip` is False.

    `crops` does the same faster, for images in memory that keep their size. Without a
    `colour` of the added pixels, the image is reflected.
    """
    pixels = resize(reader, image, seeds, data, size)
    if colour is None:
        places = np.pad(np.arange(size), border, mode="reflect")
        padded = tf.gather(tf.gather(pixels, places), places, axis=1)
    else:
        sides = [[border, border], [border, border], [0, 0]]
        padded = tf.pad(pixels - colour, sides) + colour
    crop = tf.image.stateless_random_crop(padded, (size, size, data.channels), seed=seeds[0])
    return _flipped(crop, seeds, flip)


def resized_crop_flip(
    reader: Reader, image, seeds, data: ImageData, size: int, *, flip: bool = True
):
    """Cut out 8 to 100 % of the image at an aspect ratio of 3/4 to 4/3, resize it to
    `size`, and flip half of the images unless `flip` is False.

    The "scale and aspect ratio" augmentation of Table 5, as in fb.resnet.torch.
    """

    def box(shape):
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape,
            tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),  # an empty box would leave every image whole
            seed=seeds[0],
            area_range=(0.08, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            min_object_covered=0.0,
            max_attempts=10,
        )
        return begin, extent

    def cut_decoded():
        pixels = reader.decode(image)
        return tf.slice(pixels, *box(tf.shape(pixels)))

    def cut_jpeg():
        shape = tf.image.extract_jpeg_shape(image)
        begin, extent = (part[:2] for part in box(shape))
        spare = tf.reduce_min(extent) // (2 * size)
        fits = tf.searchsorted(SCALES, [spare], side="right")[0] - 1
        cuts = [functools.partial(cut_scaled, shape[:2], begin, extent, scale) for scale in SCALES]
        return tf.switch_case(tf.maximum(fits, 0), cuts)

    def cut_scaled(shape, begin, extent, scale: int):
        end = (begin + extent + scale // 2) // scale
        begin = (begin + scale // 2) // scale
        first = tf.maximum(begin - MARGIN, 0)
        last = tf.minimum(end + MARGIN, (shape + scale - 1) // scale)
        pixels = tf.image.decode_and_crop_jpeg(
            image, tf.concat([first, last - first], axis=0), data.channels, ratio=scale
        )
        begin, end = begin - first, end - first
        return pixels[begin[0] : end[0], begin[1] : end[1]]

    crop = tf.cond(tf.io.is_jpeg(image), cut_jpeg, cut_decoded) if reader.encoded else cut_decoded()
    crop = smoothly_resized(crop, (size, size))
    crop = tf.ensure_shape(crop, (size, size, data.channels))
    return _flipped(crop, seeds, flip)


def _flipped(image, seeds, flip: bool):
    return tf.image.stateless_random_flip_left_right(image, seed=seeds[1]) if flip else image
