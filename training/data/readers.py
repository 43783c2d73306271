"""Read images from memory, files or the records of TensorFlow Datasets, in order or
shuffled, and decode them as late as possible.

A reader's data sets hold elements, such as the number of an image. `fetch` turns an
element into the image, which may still be encoded, and its label. `decode` turns this
image into pixels. Elements that are filtered or skipped before that cost almost
nothing.
"""

import functools
import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_preact.backend import tf_data

from ..errors import UserError
from .order import SHARDS, Order

#: Number of undecoded records in memory from which the next one is drawn.
SHUFFLE_BUFFER = 10_000
#: Number of shards that are read at a time, and of records that each of them gives in turn.
CYCLE, BLOCK = 16, 16
LAST = np.iinfo("int64").max
#: Number of encoded images that are read for a hash. It also has the labels of all images, or the
#: names and sizes of all files.
HASHED = 64
#: Dtype of labels. JAX has no other integers unless it is asked for them, and warns.
LABELS = "int32"


class Reader:
    """The images of a split. In this class, elements are the numbers of images, which can
    be read in any order.
    """

    #: Number of images.
    size: int
    #: Whether `fetch` returns encoded images.
    encoded: bool
    #: Whether `all_labels` is fast: no image is read for it.
    knows_labels = False

    @functools.cached_property
    def hash(self) -> str:
        """A hash of the images that is fast: of many files, only names and sizes are read. It
        is the same on every machine.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Check what can be checked before an image is decoded, unless it was checked before.

        Raises:
            UserError: for a broken image.
        """

    def fetch(self, element) -> tuple[Any, Any]:
        """Return the image of an element, uint8 (height, width, channels) or encoded, and
        its label.
        """
        raise NotImplementedError

    def decode(self, image) -> Any:
        """Return a fetched image as uint8 (height, width, channels)."""
        raise NotImplementedError

    def all_labels(self) -> np.ndarray:
        """Return the labels of all images, in the order of `rows`."""
        labels = self.rows().map(lambda element: self.fetch(element)[1])
        return np.array(list(labels.as_numpy_iterator()), LABELS)

    def rows(self) -> Any:
        """Return a tf.data.Dataset of all elements, always in the same order."""
        return tf.data.Dataset.range(self.size)

    def open(self, keep: Callable[[Any], Any] | None = None) -> Any:
        """Return a tf.data.Dataset of (image, label): uint8 (height, width, channels), and
        an integer, always in the same order.

        Args:
            keep: Function of an image's number in that order. Images for which it is
                false are left out, and not decoded.
        """
        rows = self.rows()
        if keep is not None:
            kept = rows.enumerate().filter(lambda number, element: keep(number))
            rows = kept.map(lambda number, element: element)
        return self._decoded(rows)

    def sample(self, count: int) -> Any:
        """Return a tf.data.Dataset like that of `open`, of at most `count` images, always
        the same ones. They are from the whole split: images of a folder, and of many
        arrays, are sorted by class.
        """
        return self._decoded(self.chosen(count))

    def chosen(self, count: int) -> Any:
        """Return a tf.data.Dataset of the elements of a `sample`, in a random order."""
        return tf.data.Dataset.from_tensor_slices(self._drawn(count))

    def _drawn(self, count: int) -> np.ndarray:
        """Return the numbers of the images of a `sample`."""
        return Order(self.size, 0).permutation(0)[:count]

    def _decoded(self, elements: Any) -> Any:
        def read(element):
            image, label = self.fetch(element)
            return self.decode(image), label

        return tf_data.untuned(elements.map(read, num_parallel_calls=tf_data.CALLS))

    def shuffled(self, seed: int, place: int) -> Any:
        """Return an endless tf.data.Dataset of elements from `place` on, with another
        permutation in each epoch.
        """
        order = Order(self.size, seed)
        first, done = divmod(place, self.size)

        def epoch(number):
            permutation = tf.numpy_function(order.permutation, [number], tf.int64, stateful=False)
            permutation = tf.ensure_shape(permutation, (self.size,))
            return tf.data.Dataset.from_tensor_slices(
                permutation[tf.where(number == first, done, 0) :]
            )

        return tf.data.Dataset.range(first, LAST).flat_map(epoch)


class Arrays(Reader):
    """Images and labels in memory.

    Args:
        images: uint8 (n, height, width, channels).
        labels: Integers (n,).
    """

    encoded = False
    knows_labels = True

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self.images, self.labels = images, np.asarray(labels, LABELS)
        self.size = len(images)

    @functools.cached_property
    def hash(self):
        return _hash(f"{self.size} {self.images.shape}", self.images, self.labels)

    def all_labels(self):
        return np.resize(self.labels, self.size)  # those of a few images repeat, as in `Fake`

    @functools.cached_property
    def _tensors(self):
        return _constants(self.images, self.labels)

    def fetch(self, element):
        images, labels = self._tensors
        return images[element], labels[element]

    def decode(self, image):
        return image


class Fake(Arrays):
    """A few images that repeat, as if there were many."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, size: int):
        super().__init__(images, labels)
        self.size = size

    def fetch(self, element):
        return super().fetch(element % len(self.images))


class Encoded(Reader):
    """Encoded images, which can be read in any order.

    Args:
        labels: Integers, one per image.
        shape: Height, width and channels of every image, None if they differ.
    """

    encoded = True
    knows_labels = True

    def __init__(self, labels: Sequence[int], shape: tuple[int | None, int | None, int]):
        self.labels, self.shape = labels, shape
        self.size = len(labels)

    def all_labels(self):
        return np.array(self.labels, LABELS)  # without reading the images

    def decode(self, image):
        def read(channels: int):
            return tf.io.decode_image(image, channels=channels, expand_animations=False)

        channels = self.shape[-1]
        if channels == 3:
            # three channels of a WebP file with transparency are an error, unlike those of a PNG
            pixels = tf.cond(_is_still_webp(image), lambda: read(0)[..., :3], lambda: read(3))
        else:
            pixels = read(channels)
        return tf.ensure_shape(pixels, self.shape)


def _is_still_webp(image):
    """Return whether an encoded image is a WebP file without animation.

    Animations must never be decoded with a free number of channels: TensorFlow 2.21 writes
    beyond its memory then. With three channels, it refuses them.
    """
    start = tf.io.decode_raw(tf.strings.substr(image, 0, 21), tf.uint8, fixed_length=21)
    is_webp, is_extended = (
        tf.reduce_all(start[place : place + 4] == list(mark))
        for place, mark in ((8, b"WEBP"), (12, b"VP8X"))
    )
    return is_webp & ~(is_extended & (start[20] & 2 > 0))


class Files(Encoded):
    """Image files, read as RGB.

    Args:
        paths: Paths of the images.
        labels: Integers, one per image.
        folder: Folder that the images are in. The hash has their paths inside it.
        check: Called with the paths before the first image is read. It takes minutes for a
            million files, of which a command may need few.
    """

    def __init__(
        self,
        paths: list[Path],
        labels: list[int],
        folder: Path,
        check: Callable[[list[Path]], object] = lambda paths: None,
    ):
        super().__init__(labels, (None, None, 3))
        self.paths = paths
        self._folder = folder
        self._check = check

    def check(self):
        self._check(self.paths)
        self._check = lambda paths: None

    def rows(self):
        self.check()
        return super().rows()

    def chosen(self, count):
        self.check()
        return super().chosen(count)

    def shuffled(self, seed, place):
        self.check()
        return super().shuffled(seed, place)

    @functools.cached_property
    def hash(self):
        self.check()
        parts = len(self._folder.parts)
        names = (f"{'/'.join(path.parts[parts:])} {os.stat(path).st_size}" for path in self.paths)
        some = self.paths[:: -(-self.size // HASHED)]
        return _hash(*names, *(path.read_bytes() for path in some))

    @functools.cached_property
    def _tensors(self):
        return _constants([os.fsencode(path) for path in self.paths], self.all_labels())

    def fetch(self, element):
        paths, labels = self._tensors
        return tf.io.read_file(paths[element]), labels[element]


class Rows(Encoded):
    """Images that a Python function reads.

    Args:
        read: Function from the number of an image to its bytes.
        labels, shape: See `Encoded`.
    """

    def __init__(
        self,
        read: Callable[[int], bytes],
        labels: Sequence[int],
        shape: tuple[int | None, int | None, int],
    ):
        super().__init__(labels, shape)
        self._read = read

    @functools.cached_property
    def hash(self):
        some = map(self._read, range(0, self.size, -(-self.size // HASHED)))
        return _hash(self.all_labels(), *some)

    @functools.cached_property
    def _tensors(self):
        return _constants(self.all_labels())

    def fetch(self, element):
        (labels,) = self._tensors
        image = tf.numpy_function(self._read, [element], tf.string, stateful=False)
        return tf.ensure_shape(image, ()), labels[element]


class Records(Reader):
    """Records of TensorFlow Datasets: images encoded as they were stored.

    An epoch shuffles the shards, reads some at a time and draws the next record from a
    buffer. To resume within an epoch, earlier records are read but not decoded.

    Args:
        builder: Builder of the prepared data set.
        split: Name of the split, such as `train[100:200]`.
    """

    encoded = True

    def __init__(self, builder, split: str):
        if builder.info.file_format.value != "tfrecord":
            raise UserError(
                f"{builder.name} is stored as {builder.info.file_format.value}: prepare it as "
                "tfrecord, which is the default."
            )
        self._features = builder.info.features
        self._name = builder.info.full_name
        self._shards = builder.info.splits[split].file_instructions
        self.size = builder.info.splits[split].num_examples

    @functools.cached_property
    def hash(self):
        shards = (
            f"{Path(shard.filename).name} {shard.skip} {shard.take}" for shard in self._shards
        )
        return _hash(self._name, *shards)

    @functools.cached_property
    def _tensors(self):
        numbers = (
            np.array([getattr(shard, key) for shard in self._shards], "int64")
            for key in ("skip", "take")
        )
        return _constants([str(shard.filename) for shard in self._shards], *numbers)

    def rows(self):
        return tf.data.Dataset.from_tensor_slices(self._tensors).flat_map(_records)

    def chosen(self, count):
        # The first records may have all one class: a data set may be prepared without shuffling.
        numbers = self._drawn(count)
        ends = np.cumsum([shard.take for shard in self._shards])
        places = np.searchsorted(ends, numbers, side="right")
        starts = np.array([shard.skip + shard.take for shard in self._shards]) - ends
        inside = numbers + starts[places]
        files = [shard.filename for shard in self._shards]
        spans = {i: _spans(Path(files[i]), inside[places == i].max()) for i in np.unique(places)}
        found = [(files[i], *spans[i][record]) for i, record in zip(places, inside, strict=True)]

        def read(i: int) -> bytes:
            path, start, length = found[i]
            with open(path, "rb") as file:
                file.seek(start)
                return file.read(length)

        def record(i):
            return tf.ensure_shape(tf.numpy_function(read, [i], tf.string, stateful=False), ())

        return tf.data.Dataset.range(len(found)).map(record)

    def shuffled(self, seed: int, place: int):
        order = Order(len(self._shards), seed, SHARDS)
        first, done = divmod(place, self.size)

        def epoch(number):
            # sets the seed of this function's graph alone: the order must not depend on the
            # global seed
            tf.random.set_seed(1)
            buffer_seed = tf.random.stateless_uniform(
                (), (seed, number), maxval=LAST, dtype=tf.int64
            )
            shards = tf.numpy_function(order.permutation, [number], tf.int64, stateful=False)
            shards = tf.ensure_shape(shards, (len(self._shards),))
            shards = tf.data.Dataset.from_tensor_slices(
                tuple(tf.gather(tensor, shards) for tensor in self._tensors)
            )
            records = shards.interleave(
                _records,
                cycle_length=CYCLE,
                block_length=BLOCK,
                num_parallel_calls=tf_data.CALLS,
                deterministic=True,
            )
            buffer = min(self.size, SHUFFLE_BUFFER)
            return records.shuffle(buffer, seed=buffer_seed).skip(
                tf.where(number == first, np.int64(done), np.int64(0))
            )

        return tf.data.Dataset.range(first, LAST).flat_map(epoch)

    def fetch(self, element):
        import tensorflow_datasets as tfds

        skip = {"image": tfds.decode.SkipDecoding()}
        row = self._features.deserialize_example(element, decoders=skip)
        return row["image"], tf.cast(row["label"], LABELS)

    def decode(self, image):
        return self._features["image"].decode_example(image)


def _records(path, skip, take):
    return tf.data.TFRecordDataset(path).skip(skip).take(take)


def _spans(path: Path, last: int) -> list[tuple[int, int]]:
    """Return the place and the length, in bytes, of each record of a TFRecord file up to the
    last one that is needed. Only the lengths before the records are read.
    """
    places, place = [], 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            for _ in range(last + 1):
                # a record is its length, the checksum of the length, the data and their checksum
                (length,) = struct.unpack_from("<Q", content, place)
                places.append((place + 12, length))
                place += 12 + length + 4
        except struct.error as error:
            raise UserError(f"{path} is damaged: prepare the data set again.") from error
    return places


def _hash(*parts: str | bytes | np.ndarray) -> str:
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            # names of files may have any bytes
            part = part.encode(errors="surrogateescape") + b"\n"
        digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).data)
    return digest.hexdigest()[:16]


def _constants(*arrays) -> tuple:
    """Return tensors in the host's memory. All functions of a data set can use them, even
    if one of these functions makes them.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        return tuple(map(tf.constant, arrays))
