"""A data set in a folder of one's own: its splits, its classes and its images."""

import dataclasses
import functools
import hashlib
import itertools
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from keras_preact.preprocessing import PREPROCESSING

from .. import image_paths
from ..cli.terminal import some
from ..config import Data
from ..errors import UserError, check_utf8, command
from ..image_paths import SUFFIXES
from . import broken
from .image_data import ImageData, held_out_mask, own_held_out
from .readers import Files

#: Names of the folders of the splits, in lower case.
SPLITS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "val": ("val", "valid", "validation"),
}
EMBEDDED = f"The recipe for digits needs no network and no files: {command('train', 'digits')}"


@dataclasses.dataclass(frozen=True)
class Split:
    """Images of a folder that has a folder for each class.

    Args:
        folder: The folder.
        paths: FOLDER/CLASS/IMAGE, or FOLDER/CLASS/SUBFOLDER/IMAGE at any depth, sorted.
    """

    folder: Path
    paths: list[Path]

    def inside(self, path: Path) -> tuple[str, ...]:
        """Return the parts of an image's path inside the folder: class, ..., image."""
        return path.parts[len(self.folder.parts) :]

    @functools.cached_property
    def classes(self) -> list[str]:
        """The class of each image."""
        return [self.inside(path)[0] for path in self.paths]

    def chosen(self, mask: np.ndarray) -> "Split":
        """Return the images for which `mask` is true."""
        return Split(self.folder, list(itertools.compress(self.paths, mask)))


def load(data: Data) -> ImageData:
    """Open the folder `data.dir`.

    The test images are those of `test`, else of `val`, else a share of each class. With
    both folders, `val` is held out. No file is read, except with `skip_broken`: then all
    are read and decoded once, after everything else was checked.

    Raises:
        UserError: for a folder without images or without test images, with one class, or
            with a class that has no training images; if all images are broken.
    """
    if data.dir is None or not data.dir.is_dir():
        raise UserError(
            "--data.dir must name an existing folder with train/CLASS/IMAGE and test/CLASS/IMAGE, "
            f"or with CLASS/IMAGE. Received: {data.dir or 'nothing'}"
        )
    notes: list[str] = []
    faults: dict[Path, str] = {}
    layout = _layout(data)
    found = {split: _images(folder, notes.append) for split, folder in layout.items()}
    splits = _divided(data, found)
    if data.skip_broken:
        faults = broken.faults([path for images in found.values() for path in images.paths])
    if faults:
        notes.append(f"Left out {broken.named(faults)}")
        splits = _divided(data, _without(found, faults))
    # a class may have held-out images alone
    classes = sorted({name for images in splits.values() for name in images.classes})
    numbers = {name: i for i, name in enumerate(classes)}
    check = [] if data.skip_broken else [broken.check_headers]
    readers = {
        split: Files(
            images.paths, [numbers[name] for name in images.classes], images.folder, *check
        )
        for split, images in splits.items()
    }
    return ImageData(
        name="folder",
        classes=tuple(classes),
        channels=3,
        size=None,
        standard=PREPROCESSING["imagenet"],
        train=readers["train"],
        test=readers["test"],
        holdout=readers.get("holdout"),
        notes=tuple(notes),
        origins=tuple(_origins(data, layout, splits)),
        broken=faults,
    )


def check_share(data: Data) -> None:
    """Check that a folder needs the option `--data.test`.

    Raises:
        UserError: for a folder with test images of its own.
    """
    if data.test and data.dir is not None and data.dir.is_dir():
        own = _own_test(_splits(data.dir))
        if own is not None:
            raise UserError(
                f"--data.test takes a share of each class as test images, but {own} holds test "
                f"images already. Remove the option. Received: --data.test {data.test:g}"
            )


# --- Folders


def _layout(data: Data) -> dict[str, Path]:
    """Return the folders of the splits `train`, `test` and `holdout`. Without `test`, the
    test images are a share of `train`.
    """
    folder = data.dir
    assert folder is not None
    found = _splits(folder)
    layout = {"train": found.get("train", folder)}
    test = _own_test(found)
    if test is not None:
        if "train" not in found:
            raise UserError(f"{folder} has the folder {test.name}, but no folder train.")
        layout["test"] = test
        own = _own_held_out(found)
        if own is not None and data.holdout:
            layout["holdout"] = own
    elif not data.test and (names := [top.name for top in _folders(layout["train"])]):
        deeper = None if "train" in found else _deeper(folder)
        if deeper is not None:
            raise UserError(
                f"{folder} has no folder train, but {deeper} has: "
                f"--data.dir {shlex.quote(str(deeper))}"
            )
        raise UserError(
            f"{folder} has no test images: it has no folder test or val. To test a fifth of the "
            f"images of each class ({some(names)}), add --data.test 0.2."
        )
    return layout


def _splits(folder: Path) -> dict[str, Path]:
    """Return the folders of splits in a folder, by the keys of `SPLITS`."""
    found: dict[str, Path] = {}
    tops = _folders(folder)
    for top in tops:
        for split, names in SPLITS.items():
            if top.name.lower() not in names:
                continue
            if split in found:
                raise UserError(
                    f"{folder} has the folders {found[split].name} and {top.name}, which mean the "
                    "same. Rename or remove one of them."
                )
            found[split] = top
    if "train" in found and len(tops) > len(found) and not _folders(found["train"]):
        return {}  # a class of trains, beside cars and ships
    return found


def _own_test(splits: Mapping[str, Path]) -> Path | None:
    return splits.get("test", splits.get("val"))


def _own_held_out(splits: Mapping[str, Path]) -> Path | None:
    return splits.get("val") if "test" in splits else None


def _deeper(folder: Path) -> Path | None:
    """Return a folder inside, at most two levels deep, that has the folders of splits."""
    for top in _folders(folder):
        for inside in (top, *_folders(top)):
            train = _splits(inside).get("train")
            if train is not None and _folders(train):
                return inside
    return None


def _folders(folder: Path) -> list[Path]:
    return image_paths.folders(folder, _fail)


def _fail(error: OSError):
    raise UserError(f"Cannot read the folder {error.filename}: {error.strerror}") from error


# --- Images


def _images(folder: Path, say: Callable[[str], object]) -> Split:
    """Return the images of a folder. Hidden files and folders are left out without a
    message.

    Args:
        folder: Folder with a folder for each class, such as FOLDER/train.
        say: Called with a message about other files, which are not read.

    Raises:
        UserError: for a folder without images.
    """
    files = image_paths.files(folder, _fail)
    images = Split(folder, files)
    is_read = np.array(
        [image_paths.is_image(path) and len(images.inside(path)) > 1 for path in files], bool
    )
    if not is_read.any():
        raise UserError(
            f"{folder} holds no images: expected {folder}/CLASS/IMAGE with "
            f"{', '.join(SUFFIXES)}. {EMBEDDED}"
        )
    if others := images.chosen(~is_read).paths:
        say(
            f"Files of {folder} that are not read: {image_paths.endings(others)}. Images are "
            f"CLASS/IMAGE with {', '.join(SUFFIXES)}; convert the others."
        )
    return images.chosen(is_read)


def _without(found: Mapping[str, Split], faults: Mapping[Path, str]) -> dict[str, Split]:
    """Return the images that are not broken."""
    sound = {}
    for split, images in found.items():
        sound[split] = images.chosen(np.array([path not in faults for path in images.paths]))
        if not sound[split].paths:
            raise UserError(f"Every image of {images.folder} is broken: {broken.named(faults)}")
    return sound


# --- Splits


def _divided(data: Data, found: Mapping[str, Split]) -> dict[str, Split]:
    """Return the images of every split: test and held-out images without a folder of their
    own are taken out of the training images.
    """
    _check_classes(data, found)
    splits = dict(found)

    def take(split: str, mask: np.ndarray) -> None:
        splits[split] = splits["train"].chosen(mask)
        splits["train"] = splits["train"].chosen(~mask)

    if "test" not in splits:
        take("test", _share_of_every_class(splits["train"], data.test))
    if "holdout" not in splits:
        held = held_out_mask(data, np.array(splits["train"].classes))
        if held.any():
            take("holdout", held)
    return splits


def _check_classes(data: Data, found: Mapping[str, Split]) -> None:
    train = found["train"]
    classes = sorted(set(train.classes))
    for name in classes:
        check_utf8(name, f"The name of a class in {data.dir}")
    for split, images in found.items():
        unknown = sorted(set(images.classes) - set(classes))
        if unknown:
            raise UserError(
                f"{data.dir} has {'held-out' if split == 'holdout' else split} images of a class "
                f"without training images: {', '.join(unknown)}. Add some to "
                f"{train.folder / unknown[0]}, or remove {images.folder / unknown[0]}."
            )
    if len(classes) == 1:
        raise UserError(f"{data.dir} has one class, {classes[0]}; {_more_classes(data, train)}")


def _more_classes(data: Data, train: Split) -> str:
    """Return what to do about a folder with one class."""
    place = train.folder / train.classes[0]
    names = [inside.name for inside in _folders(place)]
    if train.folder == data.dir:
        deeper = _deeper(train.folder) or (place if names else None)
        if deeper is not None:
            return f"if the classes are in {deeper}, give --data.dir {shlex.quote(str(deeper))}"
    elif names:
        return f"if the folders in it ({some(names)}) are the classes, move them up."
    return f"a classifier needs two or more. Make a folder for each class in {train.folder}."


def _share_of_every_class(images: Split, share: float) -> np.ndarray:
    """Return which images are test images, as bool: at least one of every class.

    In every class, they are the first ones in the order of a hash of their path. So they
    are the same in every run, and of the images before, an added one moves one at most.
    """
    numbers: dict[str, list[int]] = {}
    for i, name in enumerate(images.classes):
        numbers.setdefault(name, []).append(i)
    single = [name for name, ones in numbers.items() if len(ones) == 1]
    if single:
        raise UserError(
            "With --data.test, every class needs two images or more: one to train, one to test. "
            f"One image has: {some(single)}. Add images, or remove the class from {images.folder}."
        )

    def rank(i: int) -> bytes:
        return hashlib.sha256(os.fsencode("/".join(images.inside(images.paths[i])))).digest()

    test = np.zeros(len(images.paths), bool)
    for ones in numbers.values():
        count = min(max(1, round(share * len(ones))), len(ones) - 1)
        test[sorted(ones, key=rank)[:count]] = True
    return test


def _origins(data: Data, layout: Mapping[str, Path], splits: Mapping[str, Split]) -> Iterator[str]:
    """Yield where the splits come from, if a person may not expect it."""
    if "test" not in layout:
        total = sum(len(images.paths) for images in splits.values())
        yield (
            f"Test images: {len(splits['test'].paths):,} of {total:,}, a share of {data.test:g} of "
            f"each class, the same in every run (--data.test)."
        )
    elif layout["test"].name.lower() in SPLITS["val"]:
        yield f"Test images: {layout['test']}, because there is no folder test."
    own = _own_held_out(_splits(data.dir)) if data.dir is not None else None
    if own is not None:
        yield own_held_out(data, str(own))
    nested = sum(len(each.inside(path)) > 2 for each in splits.values() for path in each.paths)
    if nested:
        several = f"{nested:,} images are in subfolders of their classes."
        yield several if nested > 1 else "1 image is in a subfolder of its class."
