"""Training batches as a function of the seed and the global step alone: order,
augmentation and size.

Step `t` holds places `t * batch_size` and up of an endless sequence of permutations.
The numbers of its augmentation are drawn for the whole batch, or image by image from
its place, and only then are a process' rows taken: a batch is the same wherever a run
starts, and however many processes share it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_preact.backend import tf_data

from ..cli import UserError, lookup
from . import crops, images, order, resident
from .finishing import Finished
from .mixing import Mixing
from .rand_augment import RandAugment
from .readers import LAST, Fake, Reader
from .sources import ImageData

#: Name to what is done with every image. pad_crop_flip, the paper's for CIFAR, is done with whole
#: batches, in NumPy.
AUGMENTATIONS: Mapping[str, images.Augmentation | None] = {
    "none": images.resize,
    "pad_crop_flip": None,
    "resized_crop_flip": images.resized_crop_flip,
}

#: `Data.flip` to whether an image is flipped in every other epoch.
FLIPS: Mapping[str, bool] = {"random": False, "alternating": True}


@dataclasses.dataclass(frozen=True)
class TrainingStream:
    """An endless stream of training batches.

    Args:
        batch_size: Images in a batch, over all processes.
        image_shape: Height, width and channels of the images that leave.
        open: Makes the data set of `dataset`, which checks the arguments.
    """

    batch_size: int
    image_shape: tuple[int, int, int]
    open: Callable[[int, np.ndarray], Any] = dataclasses.field(repr=False)

    def dataset(self, start: int = 0, rows: slice = slice(None)):
        """Return an endless tf.data.Dataset of batches (images, labels).

        Pixels are from 0 to 255: uint8 where images leave at their own size, else
        float32. Labels are integers, or with mixup or CutMix the shares of the classes,
        float32.

        Args:
            start: The global step of the first batch.
            rows: Which images of every batch, those of one process.

        Raises:
            ValueError: for a negative `start`, or `rows` that hold no image.
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

    The data set `fake` gives one random batch again and again, whatever the
    augmentation; with mixup or CutMix its labels have the form that they have there.

    Args:
        data: The data set; its training split is used.
        batch_size: Images a batch, over all processes.
        augmentation: A name from `AUGMENTATIONS`.
        size: Height and width of the images that leave; None: as they are.
        seed: Of order and augmentation, not negative.
        padding: A name from `crops.PADDINGS`, for pad_crop_flip.
        border: Pixels to pad with on every side, for pad_crop_flip.
        flip: For pad_crop_flip: `"random"`, or `"alternating"`: each image in every other
            epoch.
        rand_augment: Operations on every image, behind the augmentation, and their
            magnitude; see `RandAugment`.
        mixup, cutmix: See `Mixing`.
        on_device: Whether batches hold the codes of `resident.Cut` instead of images.

    Raises:
        ValueError: for an unknown augmentation or padding, a batch larger than the
            split, or of one image that is to be mixed, a negative seed, numbers that
            `RandAugment` or `Mixing` do not take, and for pad_crop_flip on images that
            have another size, or differ in size, or do not fit into memory.
    """
    augment = lookup(AUGMENTATIONS, augmentation, "augmentation")
    pad = lookup(crops.PADDINGS, padding, "padding")
    if not 0 < batch_size <= data.train.size:
        raise ValueError(
            f"`batch_size` must be 1 to {data.train.size}, the training images. Received: "
            f"batch_size={batch_size}"
        )
    if seed < 0:
        raise ValueError(f"`seed` must not be negative. Received: {seed}")
    size = size or data.size
    fake = isinstance(data.train.reader, Fake)
    alternate = lookup(FLIPS, flip, "flip")
    if alternate and augment is not None:
        raise UserError(
            f"--data.flip {flip} needs --data.augmentation pad_crop_flip. Received: {augmentation}"
        )
    if border < 1:
        raise UserError(f"--data.border must be at least 1. Received: {border}")
    if border != crops.BORDER and augment is not None:
        raise UserError(
            f"--data.border {border} needs --data.augmentation pad_crop_flip. Received: "
            f"{augmentation}"
        )
    if augment is None and not fake:
        _check_one_size(data, size)
    if size is None:
        raise ValueError(f"The images of {data.name} differ in size: give `size`.")
    shape = (size, size, data.channels)
    alter = RandAugment(*rand_augment, seed, data.preprocessing.mean) if rand_augment else None
    mixing = Mixing(mixup, cutmix, seed, len(data.classes)) if mixup or cutmix else None
    if mixing is not None and batch_size == 1:
        raise UserError(
            "--data.mixup and --data.cutmix mix the images of a batch, or part of one. Received: "
            "1 image"
        )
    if on_device:
        if fake or alter is not None or mixing is not None or not _in_memory(data, augment, size):
            raise UserError(
                "--data.on-device is for images in memory that keep their size, with "
                "--data.augmentation none or pad_crop_flip and nothing else. Remove it, or the "
                "other options of --data."
            )
        return TrainingStream(
            batch_size, shape, Codes(data, batch_size, seed, augment is None, alternate, border)
        )
    if fake:
        return TrainingStream(
            batch_size,
            shape,
            _one_batch(batch_size, shape, len(data.classes), seed, mixing is not None),
        )
    if augment is None:
        open_stream: Callable[[int, np.ndarray], Any] = InMemory(
            data, batch_size, seed, pad, alternate, border
        )
    elif augmentation == "none" and _in_memory(data, augment, size):
        open_stream = InMemory(data, batch_size, seed, None)
    else:
        open_stream = _one_by_one(data, batch_size, augment, size, seed)
    if alter is not None or mixing is not None:
        open_stream = Finished(open_stream, batch_size, alter, mixing)
    return TrainingStream(batch_size, shape, open_stream)


def _check_one_size(data: ImageData, size: int | None) -> None:
    if data.size is None:
        raise ValueError(
            "augmentation='pad_crop_flip' is for images of one size; use 'resized_crop_flip' for "
            "these."
        )
    if data.size != size:
        raise UserError(
            f"--data.augmentation pad_crop_flip keeps the images at {data.size} x {data.size} "
            f"pixels: it does not go with --data.size. Received: --data.size {size}"
        )
    if data.held is None:
        raise ValueError(
            "augmentation='pad_crop_flip' is for images that fit into memory; use "
            "'resized_crop_flip' for these."
        )


def _in_memory(data: ImageData, augment: Any, size: int) -> bool:
    keeps_size = augment in (None, images.resize) and size == data.size
    return keeps_size and data.held is not None


def _one_batch(
    batch_size: int, shape: tuple[int, int, int], classes: int, seed: int, shares: bool
) -> Callable[[int, np.ndarray], Any]:
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (batch_size, *shape), "uint8")
    labels = random.integers(0, classes, batch_size)
    if shares:
        labels = np.eye(classes, dtype="float32")[labels]

    def open_stream(start: int, rows: np.ndarray):
        import tensorflow as tf

        return tf.data.Dataset.from_tensors((pixels[rows], labels[rows])).repeat()

    return open_stream


class Drawn:
    """Opens streams of batches that are made in NumPy, each as a whole.

    Args:
        data: The data set; its decoded training split is used.
        batch_size: Images per batch, over all processes.
        seed: Seed of order and augmentation.
        augment: Whether images are cropped and flipped.
        alternate: Whether an image is flipped in every other epoch, not at random.
        border: Pixels on every side of a padded image.
    """

    def __init__(
        self,
        data: ImageData,
        batch_size: int,
        seed: int,
        augment: bool,
        alternate: bool = False,
        border: int = crops.BORDER,
    ):
        assert data.held is not None
        self._held = data.held
        self._batch_size, self._seed, self._augment = batch_size, seed, augment
        self._border = border
        self._order = order.Order(len(data.held), seed)
        self._first_flips = (
            order.generator(seed, order.FLIPS, 0).integers(0, 2, len(data.held)).astype(bool)
            if alternate
            else None
        )

    def draw(self, step: int, rows: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Return the numbers of a step's images, of these rows, and their crops: top,
        left and flip, or nothing.
        """
        places = step * self._batch_size + rows
        images = self._order(places)
        if not self._augment:
            return images, ()
        random = order.generator(self._seed, order.AUGMENTATION, int(step))
        top, left, flip = (
            number[rows] for number in crops.draw(random, self._batch_size, self._border)
        )
        if self._first_flips is not None:
            flip = self._first_flips[images] ^ (places // len(self._held) % 2).astype(bool)
        return images, (top, left, flip)

    def inputs(self, images: np.ndarray, crop: tuple[np.ndarray, ...]) -> np.ndarray:
        """Return what the network gets of these crops."""
        raise NotImplementedError

    def batch(self, step: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and labels of a step's batch, of these rows."""
        images, crop = self.draw(step, rows)
        return self.inputs(images, crop), self._held.labels[images]

    def __call__(self, start: int, rows: np.ndarray):
        """Return the tf.data.Dataset of the batches from `start` on."""
        import tensorflow as tf

        inputs, labels = self.batch(start, rows)

        def make(step):
            batch = tf.numpy_function(
                lambda step: self.batch(step, rows),
                [step],
                (inputs.dtype, labels.dtype),
                stateful=False,
            )
            return tuple(map(tf.ensure_shape, batch, (inputs.shape, labels.shape)))

        return tf.data.Dataset.range(start, LAST).map(make).prefetch(tf_data.PREFETCHED)


class InMemory(Drawn):
    """Batches of images, uint8.

    Args:
        pad: Function that pads the images, which are then cropped and flipped. None:
            images as they are.
    """

    def __init__(
        self,
        data: ImageData,
        batch_size: int,
        seed: int,
        pad: Callable | None,
        alternate: bool = False,
        border: int = crops.BORDER,
    ):
        super().__init__(data, batch_size, seed, pad is not None, alternate, border)
        self._crop_flip = (
            None
            if pad is None
            else crops.PadCropFlip(pad(self._held.images, data.preprocessing.mean, border), border)
        )

    def inputs(self, images, crop):
        return (
            self._held.images[images] if self._crop_flip is None else self._crop_flip(images, *crop)
        )


class Codes(Drawn):
    """Batches of codes, int32: the same images as those of `InMemory`."""

    def inputs(self, images, crop):
        top, left, flip = crop or (None, None, False)
        return resident.encode(images, top, left, flip, self._border)


def _one_by_one(
    data: ImageData, batch_size: int, augment: images.Augmentation, size: int, seed: int
) -> Callable[[int, np.ndarray], Any]:
    """Decode and augment image by image; the seeds of one are `seed` and twice its
    place, and one more.
    """
    reader: Reader = data.held or data.train.reader

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
