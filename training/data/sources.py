"""Where images come from: scikit-learn's digits, TensorFlow Datasets, a folder, a file of
arrays, a random batch.
"""

import contextlib
import dataclasses
import functools
import hashlib
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_preact.preprocessing import PREPROCESSING, Preprocessing

from ..cli import UserError, lookup, reading
from ..config import Data
from . import folders
from .pixels import mean_and_std
from .readers import Arrays, Fake, Files, Reader, Records

#: Distinct images of the data set `fake`.
FAKE_IMAGES = 64

#: Before the name of any data set of images with classes in TensorFlow Datasets.
TFDS = "tfds:"

#: Names of the arrays in an .npz file, as Keras and as MedMNIST have them.
ARRAYS = ("x_train y_train x_test y_test", "train_images train_labels test_images test_labels")

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
        standard: How images are brought to a network's size. Its mean and std are used
            if `measured` is false.
        train, test: The splits.
        holdout: Training images set aside, if any; they are not in `train`.
        measured: Whether mean and std are those of the training split.
        notes: What a person should know of the images, in sentences.
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

    @contextlib.contextmanager
    def naming_broken_images(self) -> Iterator[None]:
        """Name the broken image files if one cannot be decoded inside of this block.

        Nothing is checked before that: a full decoding of a large folder takes long.

        Raises:
            UserError: that names them.
        """
        try:
            yield
        except tf.errors.InvalidArgumentError:
            splits = (self.train, self.holdout, self.test)
            folders.check_decodable(
                path for split in splits if isinstance(split, Files) for path in split.paths
            )
            raise

    @functools.cached_property
    def preprocessing(self) -> Preprocessing:
        """What a network trained on this does with its images, with the mean and std of
        the training split's pixels.
        """
        if not self.measured:
            return self.standard
        with self.naming_broken_images():
            mean, std = mean_and_std(self.held or self.train)
        return dataclasses.replace(self.standard, mean=mean, std=std)

    @functools.cached_property
    def class_weights(self) -> dict[int, float]:
        """Class number to the weight with which all classes count alike; the mean weight
        of the training images is 1.
        """
        counts = np.bincount(self.train.all_labels(), minlength=len(self.classes))
        weights = self.train.size / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return dict(enumerate(weights.tolist()))

    @functools.cached_property
    def held(self) -> Arrays | None:
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
        labels = np.empty(split.size, "int64")
        start = 0
        for some, classes in split.open().batch(256).as_numpy_iterator():
            images[start : start + len(some)], labels[start : start + len(some)] = some, classes
            start += len(some)
        return Arrays(images, labels)


def load(data: Data) -> ImageData:
    """Open a data set.

    Raises:
        ValueError: for an unknown name, a data set that is neither prepared nor can be
            downloaded, an unreadable image, a holdout that leaves nothing.
    """
    if data.name.startswith(TFDS):
        return _tfds(data)
    return lookup(SOURCES, data.name, "data.name")(data)


def _held_out(holdout: float, size: int) -> int:
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


def _digits(data: Data) -> ImageData:
    """1,797 images of 8 x 8 pixels; 360 of them, the same share of every class, are the
    test set, always the same ones.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype("uint8")[..., None]
    labels = digits.target.astype("int64")
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=360, stratify=labels, random_state=0
    )
    holdout = None
    if held := _held_out(data.holdout, len(train_x)):
        train_x, holdout_x, train_y, holdout_y = train_test_split(
            train_x, train_y, test_size=held, stratify=train_y, random_state=0
        )
        holdout = Arrays(holdout_x, holdout_y)
    return ImageData(
        name="digits",
        classes=tuple(map(str, digits.target_names)),
        channels=1,
        size=8,
        standard=PREPROCESSING["digits"],
        train=Arrays(train_x, train_y),
        test=Arrays(test_x, test_y),
        holdout=holdout,
    )


def _tfds(data: Data) -> ImageData:
    import absl.logging
    import tensorflow_datasets as tfds

    absl.logging.set_verbosity(absl.logging.ERROR)  # an unprepared data set gets our message alone
    name = data.name.removeprefix(TFDS)
    try:
        builder = tfds.builder(name, data_dir=data.dir)
    except tfds.core.DatasetNotFoundError as error:
        raise UserError(f"TensorFlow Datasets has no data set {name}.") from error
    if not builder.is_prepared():
        _check_can_prepare(builder)
        builder.download_and_prepare()
    sizes = {name: split.num_examples for name, split in builder.info.splits.items()}
    features: dict[str, Any] = dict(builder.info.features.items())
    image: Any = features.get("image")
    label: Any = features.get("label")
    test = next((split for split in ("test", "validation") if split in sizes), None)
    if "train" not in sizes or test is None or image is None or not hasattr(label, "names"):
        raise UserError(
            f"{data.name} must have images with one label of a class, for training and for test. "
            f"Received: splits {', '.join(sizes)}; features {', '.join(features)}"
        )
    held = _held_out(data.holdout, sizes["train"])
    cut = sizes["train"] - held
    height, width, channels = image.shape
    size = height if height == width else None
    imagenet = name == "imagenet2012"
    return ImageData(
        name=data.name,
        classes=tuple(label.names),
        channels=channels,
        size=size,
        standard=PREPROCESSING["imagenet"] if size is None else _as_it_is(size, channels),
        train=Records(builder, f"train[:{cut}]"),
        test=Records(builder, "validation" if imagenet else test),
        holdout=Records(builder, f"train[{cut}:]") if held else None,
        measured=not imagenet,
    )


def _as_it_is(size: int, channels: int) -> Preprocessing:
    """Return the preprocessing of images of one size; mean and std are measured."""
    return Preprocessing((0.0,) * channels, (1.0,) * channels, size)


def _npz(data: Data) -> ImageData:
    if data.dir is None or not data.dir.is_file():
        raise UserError(f"--data.dir must name an .npz file. Received: {data.dir}")
    with reading(f"{data.dir} is no file of np.savez"), np.load(data.dir) as file:
        arrays = {name: file[name] for name in file.files}
    names = next((own.split() for own in ARRAYS if set(own.split()) <= set(arrays)), None)
    if names is None:
        raise UserError(
            f"{data.dir} must hold the arrays {' or '.join(ARRAYS)}. Received: {', '.join(arrays)}"
        )
    train_x, train_y, test_x, test_y = (arrays[name] for name in names)
    train_x, test_x = (each[..., None] if each.ndim == 3 else each for each in (train_x, test_x))
    train_y, test_y = (each.squeeze(-1) if each.ndim == 2 else each for each in (train_y, test_y))
    for images, labels, name in ((train_x, train_y, names[0]), (test_x, test_y, names[2])):
        if (
            images.dtype != np.uint8
            or images.ndim != 4
            or images.shape[1] != images.shape[2]
            or images.shape[1:] != train_x.shape[1:]
            or labels.dtype.kind not in "iu"
            or labels.shape != images.shape[:1]
        ):
            raise UserError(
                f"{name} must be uint8, square images of one size, (images, size, size, channels), "
                f"with a class number each. Received: {images.dtype} {images.shape} and labels "
                f"{labels.dtype} {labels.shape}"
            )
    classes = int(train_y.max()) + 1
    if train_y.min() < 0 or test_y.min() < 0 or test_y.max() >= classes:
        raise UserError(
            "Labels must be class numbers from 0, all of them in training. Received: "
            f"{train_y.min()} to {train_y.max()}, for test {test_y.min()} to {test_y.max()}"
        )
    held = np.zeros(len(train_y), bool)
    held[list(_of_every_class(train_y.tolist(), _held_out(data.holdout, len(train_y))))] = True
    _, size, _, channels = train_x.shape
    return ImageData(
        name="npz",
        classes=tuple(map(str, range(classes))),
        channels=channels,
        size=size,
        standard=_as_it_is(size, channels),
        train=Arrays(train_x[~held], train_y[~held]),
        test=Arrays(test_x, test_y),
        holdout=Arrays(train_x[held], train_y[held]) if held.any() else None,
    )


def _folder(data: Data) -> ImageData:
    if data.dir is None or not data.dir.is_dir():
        raise UserError(
            "--data.dir must name an existing folder with train/CLASS/IMAGE and test/CLASS/IMAGE. "
            f"Received: {data.dir}"
        )
    notes: list[str] = []
    train, test = (
        folders.images(data.dir / split, data.skip_broken, notes.append)
        for split in ("train", "test")
    )
    classes = sorted({path.parent.name for path in train})
    unknown = sorted({path.parent.name for path in test} - set(classes))
    if unknown:
        raise UserError(
            f"{data.dir} has test images of a class without training images: "
            f"{', '.join(unknown)}. Add some to {data.dir / 'train' / unknown[0]}, or remove "
            f"{data.dir / 'test' / unknown[0]}."
        )
    if len(classes) == 1:
        raise UserError(
            f"{data.dir} has one class, {classes[0]}; a classifier needs two or more. Make a "
            f"folder for each class in {data.dir / 'train'} and {data.dir / 'test'}."
        )
    count = _held_out(data.holdout, len(train))
    held = _of_every_class([path.parent.name for path in train], count)

    def files(paths: list[Path]) -> Files:
        return Files(paths, [classes.index(path.parent.name) for path in paths])

    return ImageData(
        name="folder",
        classes=tuple(classes),
        channels=3,
        size=None,
        standard=PREPROCESSING["imagenet"],
        train=files([path for i, path in enumerate(train) if i not in held]),
        test=files(test),
        holdout=files([path for i, path in enumerate(train) if i in held]) if held else None,
        notes=tuple(notes),
    )


def _of_every_class(labels: Sequence[Any], count: int) -> set[int]:
    """Return the numbers of `count` images, drawn at random, the same share of every
    class.
    """
    drawn: dict[Any, list[int]] = {}
    for i in np.random.default_rng(0).permutation(len(labels)).tolist():
        drawn.setdefault(labels[i], []).append(i)
    places = {
        i: (rank + 0.5) / len(numbers)
        for numbers in drawn.values()
        for rank, i in enumerate(numbers)
    }
    return set(sorted(places, key=lambda i: (places[i], i))[:count])


def _fake(data: Data) -> ImageData:
    """Random pixels, `FAKE_IMAGES` over and over: to measure a network with an input
    that takes no time.
    """
    size = data.size or 32
    held = _held_out(data.holdout, 50_000)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (FAKE_IMAGES, size, size, 3), "uint8")
    labels = rng.integers(0, 10, FAKE_IMAGES)
    return ImageData(
        name="fake",
        classes=tuple(map(str, range(10))),
        channels=3,
        size=size,
        standard=Preprocessing(
            (127.5,) * 3, (73.9003,) * 3, size
        ),  # those of uniform numbers from 0 to 255
        train=Fake(images, labels, 50_000 - held),
        test=Fake(images, labels, 10_000),
        holdout=Fake(images, labels, held) if held else None,
        measured=False,
    )


def _check_can_prepare(builder) -> None:
    """Raise a UserError at once where preparing would fail after minutes of retries."""
    load = f"tfds.load('{builder.name}', data_dir='DIR')"
    advice = (
        f"The data set {builder.name} is not prepared in the data dir {builder.data_path}. To "
        "prepare it, run with network: "
        f'python -c "import tensorflow_datasets as tfds; {load}", and give --data.dir DIR.'
    )
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        manual = Path(builder.data_path).parents[1] / "downloads" / "manual"
        if not (manual.is_dir() and any(manual.iterdir())):
            raise UserError(
                f"{advice} Its archives have to be put into {manual} by hand first. "
                f"{folders.EMBEDDED}"
            )
        return
    url = next(iter(builder.url_infos), None)
    if url is None:
        return
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5).close()
    except OSError as error:  # urllib's errors are OSErrors
        raise UserError(
            f"{advice} It cannot be downloaded now: {url}: {error}. {folders.EMBEDDED}"
        ) from error


#: `Data.name` to a function that opens it.
SOURCES: Mapping[str, Callable[[Data], ImageData]] = {
    "digits": _digits,
    "cifar10": _tfds,
    "cifar100": _tfds,
    "imagenet2012": _tfds,
    "folder": _folder,
    "npz": _npz,
    "fake": _fake,
}
