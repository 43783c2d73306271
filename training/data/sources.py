"""Where images come from: scikit-learn's digits, TensorFlow Datasets, a folder."""

import dataclasses
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from keras_preact import _checks
from keras_preact.preprocessing import PREPROCESSING, Preprocessing
from training.cli import UserError
from training.config import Data

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
EMBEDDED = "The embedded default needs neither network nor files: python -m training.train digits"


@dataclasses.dataclass(frozen=True)
class Split:
    """A part of a data set.

    Args:
        size: Number of images.
        open: Returns a tf.data.Dataset of (image, label): uint8 (height, width, channels), and an integer,
            always in the same order.
    """

    size: int
    open: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class ImageData:
    """A data set of images with classes.

    Args:
        name: As in `Data.name`.
        classes: Class names; a label is an index into them.
        channels: Of every image.
        size: Height and width, where all images have the same; None where they differ and are resized.
        preprocessing: Mean and std of the pixels, and how images are brought to the network's size.
        train, test: The splits.
        holdout: Training images set aside, if any; they are not in `train`.
    """

    name: str
    classes: tuple[str, ...]
    channels: int
    size: int | None
    preprocessing: Preprocessing
    train: Split
    test: Split
    holdout: Split | None = None


def load(data: Data) -> ImageData:
    """Open a data set.

    Raises:
        ValueError: for an unknown name, a data set that is neither prepared nor can be downloaded, an unreadable image, a
            holdout that leaves nothing.
    """
    return _checks.lookup(SOURCES, data.name, "data.name")(data)


def _check_holdout(holdout: int, size: int) -> None:
    if not 0 <= holdout < size:
        raise UserError(f"--data.holdout must leave some of the {size} training images. Received: {holdout}")


def _from_arrays(images: np.ndarray, labels: np.ndarray) -> Split:
    def open_arrays():
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((images, labels))

    return Split(len(images), open_arrays)


def _digits(data: Data) -> ImageData:
    """1,797 images of 8 x 8 pixels; 360 of them, the same share of every class, are the test set, always the same ones."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype("uint8")[..., None]
    labels = digits.target.astype("int64")
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    holdout = None
    if data.holdout:
        _check_holdout(data.holdout, len(train_x))
        train_x, holdout_x, train_y, holdout_y = train_test_split(
            train_x, train_y, test_size=data.holdout, stratify=train_y, random_state=0
        )
        holdout = _from_arrays(holdout_x, holdout_y)
    return ImageData(
        name="digits",
        classes=tuple(map(str, digits.target_names)),
        channels=1,
        size=8,
        preprocessing=PREPROCESSING["digits"],
        train=_from_arrays(train_x, train_y),
        test=_from_arrays(test_x, test_y),
        holdout=holdout,
    )


def _tfds(data: Data) -> ImageData:
    import absl.logging
    import tensorflow_datasets as tfds

    absl.logging.set_verbosity(absl.logging.ERROR)  # an unprepared data set gets our message alone
    builder = tfds.builder(data.name, data_dir=data.dir)
    if not builder.is_prepared():
        _check_can_prepare(builder)
        builder.download_and_prepare()
    test, preprocessing = ("validation", "imagenet") if data.name == "imagenet2012" else ("test", data.name)
    return _from_builder(data, builder, test, PREPROCESSING[preprocessing])


def _folder(data: Data) -> ImageData:
    import tensorflow_datasets as tfds

    if data.dir is None or not data.dir.is_dir():
        raise UserError(f"--data.dir must name a folder with train/CLASS/IMAGE and test/CLASS/IMAGE. Received: {data.dir}")
    for split in ("train", "test"):
        _check_images(data.dir / split)
    builder = tfds.ImageFolder(str(data.dir), shape=(None, None, 3))
    return _from_builder(data, builder, "test", PREPROCESSING["imagenet"])


def _from_builder(data: Data, builder, test: str, preprocessing: Preprocessing) -> ImageData:
    info = builder.info
    sizes = {name: split.num_examples for name, split in info.splits.items()}
    _check_holdout(data.holdout, sizes["train"])
    cut = sizes["train"] - data.holdout

    def split(name: str, start: int, stop: int) -> Split:
        def open_split():
            import tensorflow_datasets as tfds

            if data.name == "folder":  # no slices there
                rows = builder.as_dataset(split=name, shuffle_files=False).skip(start).take(stop - start)
            else:
                read = tfds.ReadConfig(interleave_cycle_length=1)  # one order, whatever the machine
                rows = builder.as_dataset(split=f"{name}[{start}:{stop}]", shuffle_files=False, read_config=read)
            return rows.map(lambda row: (row["image"], row["label"]))

        return Split(stop - start, open_split)

    height, _, channels = info.features["image"].shape
    return ImageData(
        name=data.name,
        classes=tuple(info.features["label"].names),
        channels=channels,
        size=height,
        preprocessing=preprocessing,
        train=split("train", 0, cut),
        test=split(test, 0, sizes[test]),
        holdout=split("train", cut, sizes["train"]) if data.holdout else None,
    )


def _check_can_prepare(builder) -> None:
    """Raise a UserError at once where preparing would fail after minutes of retries."""
    load = f"tfds.load('{builder.name}', data_dir='DIR')"
    advice = (
        f"The data set {builder.name} is not prepared in the data dir {builder.data_path}. To prepare it, run with network: "
        f'python -c "import tensorflow_datasets as tfds; {load}", and give --data.dir DIR.'
    )
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        manual = Path(builder.data_path).parents[1] / "downloads" / "manual"
        if not (manual.is_dir() and any(manual.iterdir())):
            raise UserError(f"{advice} Its archives have to be put into {manual} by hand first. {EMBEDDED}")
        return
    url = next(iter(builder.url_infos))
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5).close()
    except OSError as error:  # urllib's errors are OSErrors
        raise UserError(f"{advice} It cannot be downloaded now: {url}: {error}. {EMBEDDED}") from error


def _check_images(folder: Path) -> None:
    """Check that `folder` holds classes of images, and that each image can be opened."""
    from PIL import Image

    paths = [path for path in sorted(folder.glob("*/*")) if path.suffix.lower() in IMAGE_SUFFIXES]
    if not paths:
        raise UserError(
            f"{folder} holds no images: expected {folder}/CLASS/IMAGE with {', '.join(IMAGE_SUFFIXES)}. {EMBEDDED}"
        )
    for path in paths:
        try:
            with Image.open(path) as image:
                image.verify()
        except (OSError, SyntaxError) as error:  # what Pillow raises for a file that is no image, or a broken one
            raise UserError(f"Unreadable image {path}: {error}. Mend or remove it.") from error


#: `Data.name` to a function that opens it.
SOURCES: Mapping[str, Callable[[Data], ImageData]] = MappingProxyType(
    {"digits": _digits, "cifar10": _tfds, "cifar100": _tfds, "imagenet2012": _tfds, "folder": _folder}
)
