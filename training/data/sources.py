"""Where images come from: scikit-learn's digits, TensorFlow Datasets, Hugging Face, a folder,
a file of arrays, a function, a random batch.
"""

import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_preact.preprocessing import PREPROCESSING, Preprocessing

from .. import functions
from ..config import HUGGING_FACE, TFDS, Data
from ..errors import UserError, nearest, reading
from . import folders, hugging_face
from .image_data import ImageData, as_it_is, held_out, held_out_mask, own_held_out
from .readers import Arrays, Fake, Records

#: Distinct images of the data set `fake`.
FAKE_IMAGES = 64

#: Names of the arrays in an .npz file, as Keras and as MedMNIST have them, and of their validation
#: images and labels.
ARRAYS = {
    "x_train y_train x_test y_test": "x_val y_val",
    "train_images train_labels test_images test_labels": "val_images val_labels",
}


def load(data: Data) -> ImageData:
    """Open a data set.

    Raises:
        UserError: for an unknown name, a data set that is neither prepared nor can be
            downloaded, an unreadable image, a single class, or a holdout that leaves no
            training image.
    """
    if data.dir is not None and (data.name in WITHOUT_FOLDER or data.is_function):
        raise UserError(
            f"--data.dir is for other data than {data.name}, which has no folder: choose them "
            f"with --data.name, such as folder or npz. Received: {data.dir}"
        )
    found = _open(data)
    if len(found.classes) < 2:
        raise UserError(
            f"{data.dir or data.name} has one class, {found.classes[0]}: a classifier needs two or "
            "more."
        )
    return found


def _open(data: Data) -> ImageData:
    if data.name.startswith(TFDS):
        return _tfds(data)
    if data.name.startswith(HUGGING_FACE):
        return hugging_face.load(data)
    if data.is_function:
        return _function(data)
    if data.name not in SOURCES:
        forms = (*SOURCES, f"{TFDS}NAME", f"{HUGGING_FACE}NAME", "MODULE:FUNCTION")
        raise UserError(f"Unknown --data.name: {data.name!r}. {nearest(data.name, forms)}")
    return SOURCES[data.name](data)


def _digits(data: Data) -> ImageData:
    """1,797 images of 8 x 8 pixels. The test set is always the same 360 of them, with the
    same share of every class.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype("uint8")[..., None]
    labels = digits.target
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=360, stratify=labels, random_state=0
    )
    holdout = None
    if held := held_out(data.holdout, len(train_x)):
        if not len(digits.target_names) <= held <= len(train_x) - len(digits.target_names):
            raise UserError(
                f"--data.holdout must hold out 10 of the {len(train_x)} digits or more, one of "
                f"each class, and leave as many. Received: {data.holdout:g}"
            )
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

    absl.logging.set_verbosity(
        absl.logging.ERROR
    )  # show only our message for an unprepared data set
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
            f"{data.name} must have images with one class label each, for training and for test. "
            f"Received: splits {', '.join(sizes)}; features {', '.join(features)}"
        )
    imagenet = name == "imagenet2012"
    own = test == "test" and "validation" in sizes and not imagenet  # its own held-out images
    held = 0 if own else held_out(data.holdout, sizes["train"])
    cut = sizes["train"] - held
    holdout = Records(builder, f"train[{cut}:]") if held else None
    height, width, channels = image.shape
    size = height if height == width else None
    return ImageData(
        name=data.name,
        classes=tuple(label.names),
        channels=channels,
        size=size,
        standard=PREPROCESSING["imagenet"] if size is None else as_it_is(size, channels),
        train=Records(builder, f"train[:{cut}]"),
        test=Records(builder, "validation" if imagenet else test),
        holdout=Records(builder, "validation") if own and data.holdout else holdout,
        measured=not imagenet,
        notes=(
            f"{data.name} was prepared without shuffling: its last {held:,} training images are "
            "held out, perhaps of few classes.",
        )
        * (builder.info.disable_shuffling and held > 0),
        origins=(own_held_out(data, f"the split validation of {data.name}"),) * own,
    )


def _npz(data: Data) -> ImageData:
    if data.dir is None or not data.dir.is_file():
        received = data.dir or "nothing"
        raise UserError(f"--data.dir must name an existing .npz file. Received: {received}")
    with reading(f"{data.dir} is not a file of np.savez"), np.load(data.dir) as file:
        arrays = {name: file[name] for name in file.files}
    row = next((row for row in ARRAYS if set(row.split()) <= set(arrays)), None)
    if row is None:
        raise UserError(
            f"{data.dir} must hold the arrays {' or '.join(ARRAYS)}. Received: {', '.join(arrays)}"
        )
    names, own = row.split(), ARRAYS[row].split()
    names += own if set(own) <= set(arrays) else []
    pairs = zip(names[::2], names[1::2], strict=True)
    return _in_memory(data, {x: (arrays[x], arrays[y]) for x, y in pairs})


def _function(data: Data) -> ImageData:
    """Call the user's `MODULE:FUNCTION`. It returns the same as the `load_data` of Keras'
    data sets, and may add class names. Instead of a pair of arrays, it may return an
    iterable of images with their labels.
    """
    function = functions.find(data.name, "data.name", "my_data:load_data")
    with functions.users_code(data.name):
        returned = function()
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        raise UserError(
            f"{data.name} must return (x_train, y_train), (x_test, y_test), and may add class "
            f"names. Received: {returned!r:.200}"
        )
    splits = {}
    for split, pair in zip(("training", "test"), returned, strict=False):
        with reading(f"{data.name} must return pairs of images and labels"):
            splits[f"The {split} split of {data.name}"] = _pair(pair)
    return _in_memory(data, splits, *returned[2:])


def _pair(split) -> tuple[np.ndarray, np.ndarray]:
    """Return a pair of arrays, or make one from an iterable of an image and its label."""
    if not isinstance(split, tuple | list):
        split = zip(*map(tuple, split), strict=True)
    images, labels = map(np.array, split)
    return images, labels


def _in_memory(
    data: Data,
    splits: Mapping[str, tuple[np.ndarray, np.ndarray]],
    classes: Sequence[str] | None = None,
) -> ImageData:
    """Return a data set of arrays.

    Args:
        data: Its options.
        splits: Name of each split, for messages, to its images and labels: to train, to
            test and perhaps to hold out.
        classes: Names of the classes; None: their numbers.
    """
    shaped = {
        name: (x[..., None] if x.ndim == 3 else x, y[:, 0] if y.shape[1:] == (1,) else y)
        for name, (x, y) in splits.items()
    }
    (train_x, train_y), test, *own = shaped.values()
    for name, (images, labels) in shaped.items():
        if (
            images.dtype != np.uint8
            or images.ndim != 4
            or not images.size
            or images.shape[1] != images.shape[2]
            or images.shape[1:] != train_x.shape[1:]
            or labels.dtype.kind not in "iu"
            or labels.shape != images.shape[:1]
        ):
            raise UserError(
                f"{name} must be square uint8 images of one size, (images, size, size, channels), "
                f"one or more, with one class number each. Received: {images.dtype} "
                f"{images.shape} and labels {labels.dtype} {labels.shape}"
            )
    names = tuple(map(str, range(int(train_y.max()) + 1) if classes is None else classes))
    ranges = [(labels.min(), labels.max()) for _, labels in shaped.values()]
    if min(map(min, ranges)) < 0 or max(map(max, ranges)) >= len(names):
        of = ("", "for test ", "to hold out ")
        received = (
            f"{words}{low} to {high}" for words, (low, high) in zip(of, ranges, strict=False)
        )
        raise UserError(
            f"Labels must be class numbers from 0 to {len(names) - 1}. Received: "
            f"{', '.join(received)}"
        )
    held = held_out_mask(data, train_y) & (not own)
    holdout = Arrays(train_x[held], train_y[held]) if held.any() else None
    _, size, _, channels = train_x.shape
    return ImageData(
        name=data.name,
        classes=names,
        channels=channels,
        size=size,
        standard=as_it_is(size, channels),
        train=Arrays(train_x[~held], train_y[~held]),
        test=Arrays(*test),
        holdout=Arrays(*own[0]) if own and data.holdout else holdout,
        origins=tuple(own_held_out(data, f"{name} of {data.dir}") for name in list(splits)[2:]),
    )


def _fake(data: Data) -> ImageData:
    """`FAKE_IMAGES` random images that repeat: to measure a network with an input that
    takes no time.
    """
    size = data.size or 32
    held = held_out(data.holdout, 50_000)
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
        ),  # mean and std of uniform integers from 0 to 255
        train=Fake(images, labels, 50_000 - held),
        test=Fake(images, labels, 10_000),
        holdout=Fake(images, labels, held) if held else None,
        measured=False,
    )


def _check_can_prepare(builder) -> None:
    """Raise a UserError at once if preparing would fail after minutes of retries."""
    load = f"tfds.load('{builder.name}', data_dir='DIR')"
    advice = (
        f"The data set {builder.name} is not prepared in {builder.data_path}. Prepare it on a "
        f'machine with a network: python -c "import tensorflow_datasets as tfds; {load}". Then '
        "give --data.dir DIR."
    )
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        manual = Path(builder.data_path).parents[1] / "downloads" / "manual"
        if not (manual.is_dir() and any(manual.iterdir())):
            raise UserError(
                f"{advice} First put its archives into {manual} by hand. {folders.EMBEDDED}"
            )
        return
    url = next(iter(builder.url_infos), None)
    if url is None:
        return
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5).close()
    except OSError as error:  # urllib's errors are OSErrors
        raise UserError(
            f"{advice} Here it cannot be downloaded ({url}: {error}). {folders.EMBEDDED}"
        ) from error


#: Functions that open a data set, by `Data.name`.
SOURCES: Mapping[str, Callable[[Data], ImageData]] = {
    "digits": _digits,
    "cifar10": _tfds,
    "cifar100": _tfds,
    "imagenet2012": _tfds,
    "folder": folders.load,
    "npz": _npz,
    "fake": _fake,
}
#: Those that read no files.
WITHOUT_FOLDER = ("digits", "fake")
