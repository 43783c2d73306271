"""A data set of images with classes, and the choice of its held-out images."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_preact.preprocessing import Preprocessing

from ..config import Data
from ..errors import UserError
from . import broken
from .pixels import mean_and_std
from .readers import LABELS, Arrays, Files, Reader

#: Decoded splits up to this many bytes are decoded once and held in memory.
CACHE_BYTES = 2 * 2**30


@dataclasses.dataclass(frozen=True)
class ImageData:
    """A data set of images with classes.

    Args:
        name: Its name in `Data.name`.
        classes: Class names; a label is an index into them.
        channels: Channels of every image.
        size: Height and width, if all images have the same; None if they differ and are
            resized.
        standard: How images are resized for a network. Its mean and std are used if
            `measured` is false.
        train, test: The splits.
        holdout: Training images set aside, if any; they are not in `train`.
        measured: Whether mean and std are measured on the training split.
        notes: Warnings about the images, in sentences.
        origins: Where the splits come from, if a person may not expect it, in sentences.
        broken: Image files that were left out, with their faults.
    """

    name: str
    classes: tuple[str, ...]
    channels: int
    size: int | None
    standard: Preprocessing
    train: Reader
    test: Reader
    holdout: Reader | None = None
    measured: bool = True
    notes: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    broken: Mapping[Path, str] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """Check all splits as far as possible before an image is decoded, not each one when
        it is used.

        Raises:
            UserError: for broken images, as `name_broken_images` does.
        """
        with self.name_broken_images():
            for split in (self.train, self.holdout, self.test):
                if split is not None:
                    split.check()

    @contextlib.contextmanager
    def name_broken_images(self) -> Iterator[None]:
        """Find all broken image files if one is found inside this block: all headers are
        read and all images decoded.

        That is not done before, because decoding a large folder takes long.

        Raises:
            UserError: with the number of broken files and the first of them.
        """
        try:
            yield
        except (tf.errors.InvalidArgumentError, broken.BrokenImages):
            splits = (self.train, self.holdout, self.test)
            broken.check(
                [path for split in splits if isinstance(split, Files) for path in split.paths]
            )
            raise

    @functools.cached_property
    def preprocessing(self) -> Preprocessing:
        """Preprocessing of a network that is trained on this data set: `standard`, if
        `measured` with the mean and std of the training split's pixels.
        """
        if not self.measured:
            return self.standard
        with self.name_broken_images():
            mean, std = mean_and_std(self.in_memory or self.train)
        return dataclasses.replace(self.standard, mean=mean, std=std)

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Number of training images of each class."""
        return np.bincount(self.train.all_labels(), minlength=len(self.classes))

    @functools.cached_property
    def class_weights(self) -> dict[int, float]:
        """Weight of each class number with which all classes count alike. The mean weight
        of the training images is 1.
        """
        counts = self.counts
        weights = self.train.size / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return dict(enumerate(weights.tolist()))

    @functools.cached_property
    def in_memory(self) -> Arrays | None:
        """The training split, decoded, if it has one size and fits into `CACHE_BYTES`."""
        return self._decoded(self.train)

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of the name and all images and labels of both splits.

        Raises:
            UserError: for images that do not fit into memory.
        """
        digest = hashlib.sha256(self.name.encode())
        for split in (self.train, self.test):
            arrays = self._decoded(split)
            if arrays is None:
                raise UserError(
                    f"{self.name} has images of several sizes, or too many for the memory."
                )
            for array, dtype in ((arrays.images, "u1"), (arrays.labels, "<i8")):
                digest.update(str(array.shape).encode())
                digest.update(np.ascontiguousarray(array, dtype).data)
        return digest.hexdigest()

    def _decoded(self, split: Reader) -> Arrays | None:
        if isinstance(split, Arrays):
            return split
        if self.size is None or split.size * self.size**2 * self.channels > CACHE_BYTES:
            return None
        images = np.empty((split.size, self.size, self.size, self.channels), "uint8")
        labels = np.empty(split.size, LABELS)
        start = 0
        for batch, batch_labels in split.open().batch(256).as_numpy_iterator():
            stop = start + len(batch)
            images[start:stop], labels[start:stop] = batch, batch_labels
            start = stop
        return Arrays(images, labels)


def as_it_is(size: int, channels: int) -> Preprocessing:
    """Return the preprocessing of images of one size; mean and std are measured."""
    return Preprocessing((0.0,) * channels, (1.0,) * channels, size)


def held_out(holdout: float, size: int) -> int:
    """Return how many of `size` training images `--data.holdout` sets aside: a number
    of images, or a share below 1.
    """
    count = max(1, round(holdout * size)) if 0 < holdout < 1 else holdout
    if not 0 <= count < size or count != int(count):
        raise UserError(
            "--data.holdout must be 0, a share below 1 or a number of images that leaves some of "
            f"the {size} for training. Received: {holdout:g}"
        )
    return int(count)


def own_held_out(data: Data, images: str) -> str:
    """Return a sentence about validation images that a data set has beside its test images:
    with `--data.holdout`, they are held out in place of training images.
    """
    if data.holdout:
        return f"Held-out images: {images}, in place of --data.holdout."
    return f"Not used: {images}. With --data.holdout 0.1, these are the held-out images."


def held_out_mask(data: Data, labels: np.ndarray) -> np.ndarray:
    """Return which training images are held out, as bool: the same share of every class."""
    held = np.zeros(len(labels), bool)
    held[list(_of_every_class(labels.tolist(), held_out(data.holdout, len(labels))))] = True
    return held


def _of_every_class(labels: Sequence[Any], count: int) -> set[int]:
    """Return the numbers of `count` images, drawn at random, the same share of every
    class.
    """
    drawn: dict[Any, list[int]] = {}
    for i in np.random.default_rng(0).permutation(len(labels)).tolist():
        drawn.setdefault(labels[i], []).append(i)
    quantiles = {
        i: (rank + 0.5) / len(numbers)
        for numbers in drawn.values()
        for rank, i in enumerate(numbers)
    }
    return set(sorted(quantiles, key=lambda i: (quantiles[i], i))[:count])
