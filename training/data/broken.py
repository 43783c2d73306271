"""Broken image files: found by their headers and by decoding them, and named."""

import contextlib
import io
import os
import stat
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import tensorflow as tf

from keras_preact.backend import tf_data

from ..errors import UserError
from .readers import Files

#: Pillow's names of the formats that are read. MPO: a JPEG file with several pictures, as some
#: phones write it.
FORMATS = ("BMP", "JPEG", "MPO", "PNG", "WEBP")
#: Broken images that a message names.
NAMED = 3
#: What stands for a file that looks cut off. Only decoding shows whether it is.
_SHORT = "it may be cut off"
#: How a JPEG begins, and bytes that are read of a file at first: more than most headers have.
_JPEG, _HEAD = b"\xff\xd8", 16 * 1024


class BrokenImages(UserError):
    """Some images are broken. Others, which were not decoded, may be broken too."""


def check_headers(paths: Sequence[Path]) -> None:
    """Check the headers of images, and whether files are cut off.

    Raises:
        BrokenImages: with the number of these broken images and the first of them.
    """
    _check(faults(paths, decode=False), BrokenImages)


def check(paths: Sequence[Path]) -> None:
    """Check the headers of images and decode them all, in one pass.

    Raises:
        UserError: with the number of broken images, the first of them, and a file that
            lists all if there are more.
    """
    _check(faults(paths), UserError)


def faults(paths: Sequence[Path], decode: bool = True) -> dict[Path, str]:
    """Return broken images with their faults, sorted.

    Args:
        paths: Image files.
        decode: Decode every image, by the decoder of the training. Otherwise the headers
            are read, and only files that look cut off are decoded.
    """
    from PIL import Image

    # one thread: with more, they wait for each other, and a million files take three times as long
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        found = {path: _fault(path) for path in paths}
    broken = {path: fault for path, fault in found.items() if fault not in (None, _SHORT)}
    doubtful = [path for path in paths if path not in broken and (decode or found[path])]
    broken |= dict.fromkeys(_undecodable(doubtful), "it cannot be decoded")
    return dict(sorted(broken.items()))


def named(broken: Mapping[Path, str]) -> str:
    """Return the number of broken images, and the first of them with their faults."""
    first = "; ".join(f"{path}: {fault}" for path, fault in list(broken.items())[:NAMED])
    more = f"; and {len(broken) - NAMED:,} more" if len(broken) > NAMED else ""
    return f"{len(broken):,} broken image{'s' * (len(broken) > 1)}: {first}{more}."


def lines(broken: Mapping[Path, str]) -> bytes:
    """Return the content of a file that lists broken images: path, tab, fault."""
    return b"".join(
        os.fsencode(path) + f"\t{' '.join(fault.split())}\n".encode()
        for path, fault in broken.items()
    )


def _check(broken: Mapping[Path, str], kind: type[UserError]) -> None:
    if not broken:
        return
    which = "it" if len(broken) == 1 else "them"
    raise kind(
        f"Found {named(broken)}{_listed(broken)} Repair or remove {which}, or leave {which} out "
        "with --data.skip-broken."
    )


def _listed(broken: Mapping[Path, str]) -> str:
    """Write a list of broken images that a message does not name all, and return where it
    is. There is no run directory yet, and the folder of the images is not ours.
    """
    if len(broken) <= NAMED:
        return ""
    with contextlib.suppress(OSError):  # the message is more important than the list
        folder = tempfile.mkdtemp(prefix="keras-preact-")
        path = Path(folder, "broken.txt")
        path.write_bytes(lines(broken))
        return f" All of them are listed in {path}."
    return ""


def _fault(path: Path) -> str | None:
    """Return what is wrong with a file according to its header, None if nothing is, or
    `_SHORT`.
    """
    from PIL import Image

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait
            return "it is not a file"
        with path.open("rb") as file:
            start = file.read(_HEAD)
            file.seek(0)
            problem = _problem(file, start)
            return problem or (_SHORT if _is_short(file, start) else None)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels"
    except Image.UnidentifiedImageError:
        return "it is not an image"
    except Exception as error:  # Pillow's readers raise errors of many kinds for a broken file
        return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _problem(file: BinaryIO, start: bytes) -> str | None:
    """Return what is wrong with a file, as far as Pillow reads it. `start` is its start."""
    from PIL import Image

    if start.startswith(_JPEG):
        # the header may be longer
        with contextlib.suppress(Exception), Image.open(io.BytesIO(start)) as image:
            if image.format in FORMATS:
                return None
    with Image.open(file) as image:
        if image.format not in FORMATS:
            return f"its content is {image.format}, not JPEG, PNG, BMP or WebP"
        if image.format == "WEBP" and getattr(image, "is_animated", False):
            return "it is an animated WebP: save one of its pictures as PNG"
        if image.format == "BMP" and not _is_plain(image):
            return "it is a BMP with a palette, 16 bits or compression: save it as PNG"
        image.verify()
    return None


def _is_plain(image) -> bool:
    """Return whether the decoder of the training reads a BMP as Pillow does."""
    codec, _, _, (layout, *_) = image.tile[0]
    return codec == "raw" and layout in ("L", "BGR", "BGRX", "BGRA")


def _is_short(file: BinaryIO, start: bytes) -> bool:
    """Return whether a file may be cut off: a JPEG does not end with its last marker, or
    another one is shorter than its header says. Pillow reads a PNG to its end.
    """
    length = file.seek(0, os.SEEK_END)
    if start.startswith(_JPEG):
        file.seek(max(length - 2, 0))
        return file.read() != b"\xff\xd9"
    if start.startswith(b"RIFF"):
        return length < 8 + int.from_bytes(start[4:8], "little")
    return start.startswith(b"BM") and length < int.from_bytes(start[2:6], "little")


def _undecodable(paths: Sequence[Path]) -> Iterable[Path]:
    """Return the images that the decoder of the training refuses."""
    if not paths:
        return []
    reader = Files(list(paths), [0] * len(paths), Path())

    def decode(element):
        return element, tf.shape(reader.decode(reader.fetch(element)[0]))

    numbers = reader.rows().map(decode, num_parallel_calls=tf_data.CALLS, deterministic=False)
    numbers = tf_data.untuned(numbers.ignore_errors(log_warning=False))
    decoded = {i for i, _ in numbers.as_numpy_iterator()}
    return [path for i, path in enumerate(paths) if i not in decoded]
