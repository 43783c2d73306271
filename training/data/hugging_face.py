"""Data sets of Hugging Face, loaded with the package `datasets`."""

import functools
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from keras_preact.preprocessing import PREPROCESSING

from ..config import HUGGING_FACE, Data
from ..errors import UserError, reading
from .image_data import ImageData, as_it_is, held_out_mask, own_held_out
from .readers import Rows


def load(data: Data) -> ImageData:
    """Open `hf:NAME` or `hf:NAME:CONFIGURATION`: its first column of images and its first
    column of class labels.

    Raises:
        UserError: for a data set that cannot be loaded, or that lacks these columns or a
            test split, and for an image that cannot be read.
    """
    import datasets

    name, _, configuration = data.name.removeprefix(HUGGING_FACE).partition(":")
    try:
        splits = datasets.load_dataset(name, configuration or None, cache_dir=data.dir)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        local = "" if Path(name).exists() else f" There is no local folder {name}, either."
        raise UserError(f"The package datasets cannot load {name!r}: {error}.{local}") from error
    features = next(iter(splits.values())).features
    images, targets = (
        [column for column, feature in features.items() if isinstance(feature, feature_type)]
        for feature_type in (datasets.Image, datasets.ClassLabel)
    )
    labels = {key: np.array(split[targets[0]]) for key, split in splits.items() if targets}
    # the test images of a competition have the label -1
    known = [key for key in ("train", "test", "validation") if _all_known(labels.get(key))]
    if not images or "train" not in known or len(known) < 2:
        columns = ", ".join(f"{key} ({type(value).__name__})" for key, value in features.items())
        raise UserError(
            f"{data.name} must have images (Image) with a class (ClassLabel), in the splits train "
            "and test or validation. Dataset.cast_column makes a ClassLabel of integers. Received: "
            f"splits {', '.join(splits)}; columns {columns}"
        )
    encoded = datasets.Image(decode=False)
    tables = {
        key: splits[key].select_columns(images[0]).cast_column(images[0], encoded) for key in known
    }
    with reading(f"{data.name} has an image that cannot be read"):
        size, channels = _size_and_channels(
            _encoded(table, images[0], i) for table in tables.values() for i in range(len(table))
        )

    def rows(key: str, chosen: np.ndarray) -> Rows:
        table = tables[key].select(np.flatnonzero(chosen))
        read = functools.partial(_encoded, table, images[0])
        return Rows(read, labels[key][chosen], (size, size, channels))

    def whole(key: str) -> Rows:
        return rows(key, np.ones(len(labels[key]), bool))

    test, own = known[1], len(known) > 2  # its own held-out images
    held = held_out_mask(data, labels["train"]) & (not own)
    holdout = rows("train", held) if held.any() else None
    return ImageData(
        name=data.name,
        classes=tuple(features[targets[0]].names),
        channels=channels,
        size=size,
        standard=PREPROCESSING["imagenet"] if size is None else as_it_is(size, channels),
        train=rows("train", ~held),
        test=whole(test),
        holdout=whole("validation") if own and data.holdout else holdout,
        notes=()
        if len(targets) == 1
        else (f"{data.name} has classes in {', '.join(targets)}; {targets[0]} is used.",),
        origins=(own_held_out(data, f"the split validation of {data.name}"),) * own,
    )


def _all_known(labels: np.ndarray | None) -> bool:
    return labels is not None and len(labels) > 0 and bool((labels >= 0).all())


def _encoded(table, column: str, number: int) -> bytes:
    """Return the image in a row of a table, as it is stored."""
    image = table[int(number)][column]
    return image["bytes"] or Path(image["path"]).read_bytes()


def _size_and_channels(images: Iterable[bytes]) -> tuple[int | None, int]:
    """Return the common height and width of encoded images and their channels: 1 if all
    are grayscale, else 3.

    If images differ in size, or are not square, it stops reading and returns None and 3.
    """
    from PIL import Image

    sizes, modes = set(), set()
    for image in images:
        with Image.open(io.BytesIO(image)) as header:
            sizes |= set(header.size)
            modes.add(header.mode)
        if len(sizes) > 1:
            return None, 3
    return sizes.pop(), 1 if modes <= {"1", "L"} else 3
