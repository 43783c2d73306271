"""From a split to batches: order, augmentation and size, each a function of the seed alone.

Images leave as float32 pixels from 0 to 255; the network itself subtracts the mean and divides by the standard deviation.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from keras_preact import _checks
from training.data.sources import ImageData, Split

#: Decoded splits up to this many bytes are kept in memory, and shuffled as a whole.
CACHE_BYTES = 2 * 2**30
SHUFFLE_BUFFER = 10_000
PADDING = 4


def training_batches(data: ImageData, batch_size: int, augmentation: str, size: int | None, seed: int):
    """Return an endless tf.data.Dataset of full batches, (float32 images, labels), in an order that follows from `seed`.

    Every image gets random numbers of its own, drawn from `seed` and its place in the stream. One epoch's images all come
    before the next one's; a batch may hold some of both.

    Args:
        data: The data set; its training split is used.
        batch_size: Images a batch.
        augmentation: A name from `AUGMENTATIONS`.
        size: Height and width of the images that leave; None: as they are.
        seed: Of order and augmentation.

    Raises:
        ValueError: for an unknown augmentation, or a batch larger than the split.
    """
    import tensorflow as tf

    augment = _checks.lookup(AUGMENTATIONS, augmentation, "augmentation")
    if not 0 < batch_size <= data.train.size:
        raise ValueError(
            f"`batch_size` must be 1 to {data.train.size}, the training images. Received: batch_size={batch_size}"
        )
    if augmentation == "pad_crop_flip" and data.size is None:
        raise ValueError("augmentation='pad_crop_flip' is for images of one size; use 'resized_crop_flip' for these.")
    rows = data.train.open()
    fits = data.size is not None and data.train.size * data.size**2 * data.channels <= CACHE_BYTES
    if fits:
        rows = rows.cache()
    rows = rows.shuffle(data.train.size if fits else min(data.train.size, SHUFFLE_BUFFER), seed=seed).repeat()
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=False).batch(2, drop_remainder=True)

    def prepare(row, image_seed):
        image, label = row
        return augment(tf.cast(image, tf.float32), image_seed, data, size), label

    batches = tf.data.Dataset.zip(rows, seeds).map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    return batches.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def evaluation_batches(data: ImageData, split: Split, batch_size: int, size: int | None):
    """Return the images of `split` once, in order, as a tf.data.Dataset of batches; the last may be smaller."""
    import tensorflow as tf

    def prepare(image, label):
        return _resize_and_center(tf.cast(image, tf.float32), None, data, size), label

    batches = split.open().map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    return batches.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def _resize_and_center(image, seed, data: ImageData, size: int | None):
    """Scale the shorter side to as much more than `size` as the data set's preprocessing says, and cut out the centre."""
    import tensorflow as tf

    if size is None or data.size == size:
        return image
    shorter = round(size * (data.preprocessing.resize or data.preprocessing.size) / data.preprocessing.size)
    shape = tf.cast(tf.shape(image)[:2], tf.float32)
    scaled = tf.cast(tf.round(shape * (shorter / tf.reduce_min(shape))), tf.int32)
    image = tf.image.resize(image, scaled, method="bilinear", antialias=True)
    return tf.ensure_shape(tf.image.resize_with_crop_or_pad(image, size, size), (size, size, data.channels))


def _pad_crop_flip(image, seed, data: ImageData, size: int | None):
    """Pad 4 pixels of the mean colour on every side, cut out the old size anywhere, flip half of the images.

    The paper's augmentation for CIFAR; the released code normalises first and pads with zeros, which is the mean colour.
    """
    import tensorflow as tf

    mean = tf.constant(data.preprocessing.mean, tf.float32)
    shape = image.shape
    image = tf.pad(image - mean, [[PADDING, PADDING], [PADDING, PADDING], [0, 0]]) + mean
    image = tf.image.stateless_random_crop(image, shape, seed=seed)
    return tf.image.stateless_random_flip_left_right(image, seed=seed + 1)


def _resized_crop_flip(image, seed, data: ImageData, size: int | None):
    """Cut out 8 to 100 % of the image at an aspect ratio of 3/4 to 4/3, scale it to `size`, flip half of the images.

    The "scale and aspect ratio" augmentation of Table 5, that of fb.resnet.torch.
    """
    import tensorflow as tf

    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros((1, 1, 4)),
        seed=seed,
        area_range=(0.08, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        min_object_covered=0.0,
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    image = tf.slice(image, begin, extent)
    image = tf.image.resize(image, (size, size), method="bilinear", antialias=True)
    image = tf.ensure_shape(image, (size, size, data.channels))
    return tf.image.stateless_random_flip_left_right(image, seed=seed + 1)


#: Name to a function of a float32 image, its seed, the data set and the size wanted.
AUGMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"none": _resize_and_center, "pad_crop_flip": _pad_crop_flip, "resized_crop_flip": _resized_crop_flip}
)
