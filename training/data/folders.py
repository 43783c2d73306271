"""Find the images in a folder, and the broken ones among them."""

import collections
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import tensorflow as tf

from keras_preact.backend import tf_data

from ..errors import UserError, command
from .readers import Files

#: Endings of the files that are read, and Pillow's names of their formats. MPO: a JPEG file with
#: several pictures, as some phones write it.
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
FORMATS = ("BMP", "JPEG", "MPO", "PNG", "WEBP")
#: Folders that systems make among the images, besides those whose name begins with a dot: of
#: archives from macOS, of network storage, of disks and of Python.
HIDDEN = (
    *("__MACOSX", "@eaDir", "@Recycle", "#recycle", "$RECYCLE.BIN", "System Volume Information"),
    *("lost+found", "__pycache__"),
)
EMBEDDED = f"The embedded default needs neither network nor files: {command('train', 'digits')}"


def images(folder: Path, skip_broken: bool, say: Callable[[str], object]) -> list[Path]:
    """Return the images CLASS/IMAGE of `folder`, in order. Files and folders that begin with
    a dot, and those of `HIDDEN`, are left out without a message.

    With `skip_broken`, the header of every file is read, and every image is decoded once,
    by the decoder of the training. Otherwise, no file is read.

    Args:
        folder: Folder of a split, such as FOLDER/train.
        skip_broken: Leave out broken images.
        say: Called with a message about files that are left out.

    Raises:
        UserError: for a folder without images.
    """
    files = _files(folder)
    paths = [path for path in files if _is_read(path, folder)]
    if not paths:
        raise UserError(
            f"{folder} holds no images: expected {folder}/CLASS/IMAGE with "
            f"{', '.join(SUFFIXES)}. {EMBEDDED}"
        )
    others = collections.Counter(
        path.suffix.lower() for path in files if not _is_read(path, folder)
    )
    if others:
        counts = ", ".join(
            f"{count:,} {suffix or 'without ending'}" for suffix, count in others.most_common()
        )
        say(
            f"Files of {folder} that are not read: {counts}. Images are CLASS/IMAGE with "
            f"{', '.join(SUFFIXES)}; convert the others."
        )
    if not skip_broken:
        return paths
    broken = _broken(paths, decode=True)
    if broken:
        say(f"Left out {_named(broken)}")
    if len(broken) == len(paths):
        raise UserError(f"Every image of {folder} is broken: {_named(broken)}")
    return [path for path in paths if path not in broken]


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in HIDDEN


def _files(folder: Path) -> list[Path]:
    """Return all files at any depth in order, without hidden files and folders."""

    def fail(error: OSError):
        raise UserError(f"Cannot read the folder {error.filename}: {error.strerror}") from error

    found: list[Path] = []
    # a class may be a link to a folder, which os.walk does not enter
    tops = [path for path in folder.glob("*") if path.is_symlink() and not _is_hidden(path.name)]
    for top in filter(Path.is_dir, (folder, *tops)):
        for parent, inside, names in os.walk(top, onerror=fail):
            inside[:] = [name for name in inside if not _is_hidden(name)]
            found += [Path(parent, name) for name in names if not _is_hidden(name)]
    return sorted(found)


def check_headers(paths: Iterable[Path]) -> None:
    """Check the headers of images.

    Raises:
        UserError: with the number of broken images and the first of them.
    """
    _check(_broken(list(paths), decode=False))


def check_decodable(paths: Iterable[Path]) -> None:
    """Check that images can be decoded.

    Raises:
        UserError: with the number of broken images and the first of them.
    """
    _check(_broken(list(paths), decode=True))


def _broken(paths: list[Path], decode: bool) -> dict[Path, str]:
    """Return broken images with their faults, from the headers and, if `decode`, from the
    pixels.
    """
    broken = {path: fault for path in paths if (fault := _fault(path))}
    if decode:
        sound = [path for path in paths if path not in broken]
        broken |= dict.fromkeys(_undecodable(sound), "it cannot be decoded")
    return broken


def _is_read(path: Path, folder: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.parent.parent == folder


def _fault(path: Path) -> str | None:
    """Return what is wrong with a file according to its header, None if nothing is."""
    from PIL import Image

    if not path.is_file():  # opening a pipe would wait
        return "it is not a file"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                if image.format not in FORMATS:
                    return f"its content is {image.format}, not JPEG, PNG, BMP or WebP"
                if image.format == "WEBP" and getattr(image, "is_animated", False):
                    return "it is an animated WebP: save one of its pictures as PNG"
                if image.format == "BMP" and not _is_plain(image):
                    return "it is a BMP with a palette, 16 bits or compression: save it as PNG"
                image.verify()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels"
    except Image.UnidentifiedImageError:
        return "it is not an image"
    except Exception as error:  # Pillow's readers raise errors of many kinds for a broken file
        return str(error) or type(error).__name__
    return None


def _is_plain(image) -> bool:
    """Return whether the decoder of the training reads a BMP as Pillow does."""
    codec, _, _, (layout, *_) = image.tile[0]
    return codec == "raw" and layout in ("L", "BGR", "BGRX", "BGRA")


def _undecodable(paths: list[Path]) -> list[Path]:
    """Return the images that the decoder of the training refuses."""
    if not paths:
        return []
    reader = Files(paths, [0] * len(paths))

    def decode(element):
        return element, tf.shape(reader.decode(reader.fetch(element)[0]))

    numbers = reader.rows().map(decode, num_parallel_calls=tf_data.CALLS, deterministic=False)
    numbers = tf_data.untuned(numbers.ignore_errors(log_warning=False))
    decoded = {i for i, _ in numbers.as_numpy_iterator()}
    return [path for i, path in enumerate(paths) if i not in decoded]


def _named(broken: dict[Path, str]) -> str:
    """Return the number of broken images, and the first of them."""
    path = min(broken)
    if len(broken) == 1:
        return f"1 broken image: {path}: {broken[path]}."
    return f"{len(broken):,} broken images. The first is {path}: {broken[path]}."


def _check(broken: dict[Path, str]) -> None:
    if broken:
        which = "it" if len(broken) == 1 else "them"
        raise UserError(
            f"Found {_named(broken)} Repair or remove {which}, or leave {which} out with "
            "--data.skip-broken."
        )
