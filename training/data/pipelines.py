"""Training batches as a function of the seed and the global step alone: order,
augmentation and size.

Step `t` holds the images from place `t * batch_size` on, in an endless sequence of
permutations. The random numbers of its augmentation are drawn for the whole batch, or
for each image from its place. A process takes its rows only after that, so a batch does
not depend on the step at which a run starts or on the number of processes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_preact.backend import tf_data

from ..errors import UserError
from . import crops, images, order, resident
from .finishing import finished
from .image_data import ImageData
from .mixing import Mixing
from .rand_augment import RandAugment
from .readers import LABELS, LAST, Arrays, Fake, Reader

#: Function of a step and rows. It returns the tf.data.Dataset of batches from this step on, with
#: these rows of each batch.
Opener = Callable[[int, np.ndarray], Any]

#: Augmentations of one image, by name.
AUGMENTATIONS: Mapping[str, Callable] = {
    "none": images.resize,
    "pad_crop_flip": images.pad_crop_flip,
    "resized_crop_flip": images.resized_crop_flip,
}


@dataclasses.dataclass(frozen=True)
class TrainingStream:
    """An endless stream of training batches.

    Args:
        batch_size: Images in a batch, over all processes.
        open: Makes the data set; call `dataset` instead, which checks the arguments.
    """

    batch_size: int
    open: Opener

    def dataset(self, start: int = 0, rows: slice = slice(None)):
        """Return an endless tf.data.Dataset of batches (images, labels).

        Pixels are from 0 to 255: uint8 if images in memory keep their size, else float32.
        Labels are integers, or with mixup or CutMix the shares of the classes, float32.

        Args:
            start: The global step of the first batch.
            rows: Images of every batch to return, such as the ones for one process.

        Raises:
            ValueError: for a negative `start`, or `rows` without an image.
        """
        if start < 0:
            raise ValueError(f"`start` must not be negative. Received: {start}")
        return tf_data.untuned(self.open(start, images.numbers(rows, self.batch_size)))


def training_stream(
    data: ImageData,
    batch_size: int,
    augmentation: str,
    size: int | None,
    seed: int,
    padding: str = "mean",
    *,
    border: int = crops.BORDER,
    flip: str = "random",
    rand_augment: tuple[int, int] | None = None,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    on_device: bool = False,
) -> TrainingStream:
    """Return the training batches of a data set.

    The data set `fake` repeats one random batch, whatever the augmentation. With mixup
    or CutMix its labels are shares of the classes too.

    Args:
        data: The data set; its training split is used.
        batch_size: Images per batch, over all processes.
        augmentation: A name from `AUGMENTATIONS`.
        size: Height and width of the returned images; None: their own size.
        seed: Seed of order and augmentation, not negative.
        padding: See `crops.pad`, for pad_crop_flip.
        border: Pixels to pad with on every side, for pad_crop_flip.
        flip: Which images an augmentation mirrors: `"random"`, half of them; `"none"`; for
            pad_crop_flip also `"alternating"`, each image in every other epoch.
        rand_augment: Number of operations on every image after the augmentation, and
            their magnitude; see `RandAugment`.
        mixup, cutmix: See `Mixing`.
        on_device: Whether batches hold the codes of `resident.Cut` instead of images.

    Raises:
        UserError: for a batch larger than the split, a batch of one image with mixup or
            CutMix, and images that differ in size without `size`. For `on_device` and flips
            that alternate, also if images are resized, or do not fit into memory.
    """
    is_cropped = augmentation == "pad_crop_flip"
    size = size or data.size
    fake = isinstance(data.train, Fake)
    if not 0 < batch_size <= data.train.size:
        raise UserError(
            f"--batch-size, or each part of it with --accumulate, must be 1 to {data.train.size}, "
            f"the number of training images. Received: {batch_size}"
        )
    if size is None:
        raise UserError(f"The images of {data.name} differ in size: choose one with --data.size.")
    alter = RandAugment(*rand_augment, seed, data.preprocessing.mean) if rand_augment else None
    mixing = Mixing(mixup, cutmix, seed, len(data.classes)) if mixup or cutmix else None
    if mixing is not None and batch_size == 1:
        raise UserError(
            "--data.mixup and --data.cutmix need at least 2 images in a batch, and in each part "
            "with --accumulate. Received: 1 image"
        )
    keeps_size = augmentation != "resized_crop_flip" and size == data.size
    held = data.in_memory if keeps_size else None
    if flip == "alternating" and held is None and not fake:
        raise UserError(
            "--data.flip alternating is for images in memory that keep their size. Use --data.flip "
            "random for these."
        )
    if on_device and (fake or held is None or alter is not None or mixing is not None):
        raise UserError(
            "--data.on-device is for images in memory that keep their size, with "
            "--data.augmentation none or pad_crop_flip and without RandAugment, mixup and "
            "CutMix. Remove it, or the other options of --data."
        )
    if fake:
        shape = (batch_size, size, size, data.channels)
        opener = _one_batch(shape, len(data.classes), seed, mixing is not None)
        return TrainingStream(batch_size, opener)
    stream: Opener
    if held is None:
        augment = _of_one_image(augmentation, data, padding, border, flip)
        stream = _one_by_one(data, batch_size, augment, size, seed)
    else:
        inputs: Callable = held.images.__getitem__
        if on_device:
            inputs = functools.partial(resident.encode, border=border)
        elif is_cropped:
            padded = crops.pad(held.images, data.preprocessing.mean, padding, border)
            inputs = crops.PadCropFlip(padded, border)
        stream = _in_memory(held, batch_size, seed, inputs, border if is_cropped else None, flip)
    if alter is not None or mixing is not None:
        stream = finished(stream, batch_size, alter, mixing)
    return TrainingStream(batch_size, stream)


def check_options(augmentation: str, border: int, flip: str) -> None:
    """Check that the options of an augmentation fit together.

    Raises:
        UserError: for an option of pad_crop_flip with another augmentation.
    """
    pad_crop_flip_only = {
        "flip alternating": flip == "alternating",
        f"border {border}": border != crops.BORDER,
    }
    for option, is_given in pad_crop_flip_only.items():
        if is_given and augmentation != "pad_crop_flip":
            raise UserError(
                f"--data.{option} needs --data.augmentation pad_crop_flip. Received: {augmentation}"
            )


def _of_one_image(
    augmentation: str, data: ImageData, padding: str, border: int, flip: str
) -> images.Augmentation:
    options: dict[str, Any] = {} if augmentation == "none" else {"flip": flip != "none"}
    if augmentation == "pad_crop_flip":
        options |= {"colour": crops.colour(data.preprocessing.mean, padding), "border": border}
    return functools.partial(AUGMENTATIONS[augmentation], **options)


def _one_batch(shape: tuple[int, ...], classes: int, seed: int, shares: bool) -> Opener:
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, shape, "uint8")
    labels = random.integers(0, classes, shape[0]).astype(LABELS)
    if shares:
        labels = np.eye(classes, dtype="float32")[labels]

    def open_stream(start: int, rows: np.ndarray):
        return tf.data.Dataset.from_tensors((pixels[rows], labels[rows])).repeat()

    return open_stream


def _in_memory(
    held: Arrays,
    batch_size: int,
    seed: int,
    inputs: Callable[..., np.ndarray],
    border: int | None,
    flip: str,
) -> Opener:
    """Make each batch as a whole, in NumPy.

    Args:
        held: The decoded training split.
        batch_size: Images per batch, over all processes.
        seed: Seed of order and augmentation.
        inputs: Function of the numbers of images and, if they are cropped, of top, left
            and flip of the crops. It returns the inputs of the network.
        border: Pixels on every side of images that are cropped; None: images are not
            cropped.
        flip: See `training_stream`.
    """
    ordered = order.Order(held.size, seed)
    if flip == "alternating":
        first_flips = order.generator(seed, order.FLIPS, 0).integers(0, 2, held.size).astype(bool)

    def batch(step: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = step * batch_size + rows
        images = ordered(places)
        if border is None:
            return inputs(images), held.labels[images]
        random = order.generator(seed, order.AUGMENTATION, int(step))
        top, left, flips = (number[rows] for number in crops.draw(random, batch_size, border))
        if flip == "alternating":
            flips = first_flips[images] ^ (places // held.size % 2).astype(bool)
        elif flip == "none":
            flips = np.zeros_like(flips)
        return inputs(images, top, left, flips), held.labels[images]

    def open_stream(start: int, rows: np.ndarray):
        first = batch(start, rows)

        def make(step):
            dtypes = tuple(array.dtype for array in first)
            made = tf.numpy_function(lambda step: batch(step, rows), [step], dtypes, stateful=False)
            return tuple(map(tf.ensure_shape, made, (array.shape for array in first)))

        return tf.data.Dataset.range(start, LAST).map(make).prefetch(tf_data.PREFETCHED)

    return open_stream


def _one_by_one(
    data: ImageData, batch_size: int, augment: images.Augmentation, size: int, seed: int
) -> Opener:
    """Decode and augment image by image. An image at place `p` has the two seeds (seed,
    2 p) and (seed, 2 p + 1).
    """
    reader: Reader = data.in_memory or data.train

    def open_stream(start: int, rows: np.ndarray):

        def prepare(place, element):
            image, label = reader.fetch(element)
            return augment(
                reader, image, ((seed, 2 * place), (seed, 2 * place + 1)), data, size
            ), label

        first = start * batch_size
        elements = reader.shuffled(seed, first).enumerate(start=first)
        kept = images.keep(rows, batch_size)
        if kept is not None:
            elements = elements.filter(lambda place, element: kept(place))
        examples = elements.map(prepare, num_parallel_calls=tf_data.CALLS, deterministic=True)
        return examples.batch(len(rows), drop_remainder=True).prefetch(tf_data.PREFETCHED)

    return open_stream
