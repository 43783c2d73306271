"""The images of a trial: in memory, and in archives that travel to machines without
TensorFlow.

An archive of a data set is NAME-images-0.zip, NAME-images-1.zip and so on. Each piece
holds mosaics, lossless WebP files of many images each, and manifest.json: the classes,
shapes and fingerprint of the whole, the piece's number, and of each of its mosaics the
file, the split and the labels, row by row. Reading needs NumPy and Pillow.
"""

import dataclasses
import functools
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .. import data, runs
from ..cli import UserError
from ..config import Data
from ..data.readers import Arrays
from ..data.statistics import mean_and_std
from .pieces import MEMBER_BYTES, ZIP_BYTES, packed

FORMAT = 1
#: Bytes that every piece stays below.
PIECE_BYTES = 55 * 2**20
#: Images of a mosaic, and of one of its rows.
MOSAIC, COLUMNS = 500, 20
#: Environment variable with the folder that `load` takes where it is given none.
FOLDER = "KERAS_PREACT_DATA"
MANIFEST = "manifest.json"
SPLITS = ("train", "test")


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """A data set in memory.

    Args:
        name: Such as `cifar10`.
        classes: Their names; a label is an index into them.
        train_x, test_x: uint8 (n, height, width, channels).
        train_y, test_y: int64 (n,).
    """

    name: str
    classes: tuple[str, ...]
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the name, the shapes and every array, in hexadecimal digits."""
        digest = hashlib.sha256(self.name.encode())
        for array, dtype in (
            (self.train_x, "u1"),
            (self.train_y, "<i8"),
            (self.test_x, "u1"),
            (self.test_y, "<i8"),
        ):
            digest.update(str(array.shape).encode())
            digest.update(np.ascontiguousarray(array, dtype).data)
        return digest.hexdigest()

    @property
    def mean(self) -> tuple[float, ...]:
        """Of every channel of the training images, from 0 to 255."""
        return self._statistics[0]

    @property
    def std(self) -> tuple[float, ...]:
        """Of every channel of the training images."""
        return self._statistics[1]

    @functools.cached_property
    def _statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return mean_and_std(Arrays(self.train_x, self.train_y))


def load(name: str, folder: Path | None = None) -> Images:
    """Return a data set: from its archive in the folder if there is one, else as
    `training.data` finds it.

    Args:
        name: digits, cifar10 or cifar100.
        folder: With an archive, or TensorFlow Datasets' data dir; by default what the
            environment variable `FOLDER` names.

    Raises:
        UserError: for an archive that is incomplete or damaged, an unknown name, data
            that is neither there nor can be had.

    Example:
        ```python
        >>> from training.reproduce import images
        >>> images.load("digits").train_x.shape
        (1437, 8, 8, 1)

        ```
    """
    if folder is None and os.environ.get(FOLDER):
        folder = Path(os.environ[FOLDER])
    if folder is not None and pieces(name, folder):
        return read(name, folder)
    opened = data.load(Data(name, dir=folder))
    train, test = opened.held, dataclasses.replace(opened, train=opened.test).held
    if train is None or test is None:
        raise UserError(
            f"{name} has images of several sizes, or too many for the memory; digits, cifar10 and "
            "cifar100 fit."
        )
    return Images(name, opened.classes, train.images, train.labels, test.images, test.labels)


def pieces(name: str, folder: Path) -> list[Path]:
    """Return the pieces of an archive that are in the folder, in the order of their
    numbers.
    """
    numbered = {
        path: path.stem.removeprefix(f"{name}-images-")
        for path in folder.glob(f"{name}-images-*.zip")
    }
    return sorted(
        (path for path, number in numbered.items() if number.isdigit()),
        key=lambda path: int(numbered[path]),
    )


def write_archive(images: Images, folder: Path, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Write a data set's archive; the same images and Pillow give the same bytes.

    Args:
        images: With one or three channels.
        folder: Where the pieces go; it is made if needed.
        piece_bytes: Every piece has fewer.

    Raises:
        UserError: for images of other shapes, a folder with an archive of that name, a
            limit that one mosaic is too large for.
    """
    *_, channels = shape = images.train_x.shape[1:]
    if len(shape) != 3 or channels not in (1, 3) or images.test_x.shape[1:] != shape:
        raise UserError(
            "Images must be (n, height, width, 1 or 3), both splits alike. "
            f"Received: {images.train_x.shape} and {images.test_x.shape}"
        )
    if there := pieces(images.name, folder):
        raise UserError(
            f"{folder} has an archive of {images.name} already: remove "
            f"{', '.join(p.name for p in there)} first."
        )
    common = {
        "format": FORMAT,
        "name": images.name,
        "classes": list(images.classes),
        "shape": list(shape),
        "images": {split: len(getattr(images, f"{split}_y")) for split in SPLITS},
        "fingerprint": images.fingerprint,
    }
    spent = (
        ZIP_BYTES + MEMBER_BYTES + 2 * len(MANIFEST) + len(json.dumps(common)) + 100
    )  # for the numbers of the piece

    def costs() -> Iterator[tuple[int, tuple[dict, bytes]]]:
        for described, encoded in _mosaics(images):
            cost = (
                len(encoded)
                + MEMBER_BYTES
                + 2 * len(described["file"])
                + len(json.dumps(described))
                + 2
            )
            if spent + cost >= piece_bytes:
                raise UserError(
                    f"A piece must have room for {spent + cost:,} bytes. Received: "
                    f"piece_bytes={piece_bytes:,}"
                )
            yield cost, (described, encoded)

    groups = packed(costs(), piece_bytes - spent - 1)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, mosaics in enumerate(groups):
        piece = {
            "piece": number,
            "pieces": len(groups),
            "mosaics": [described for described, _ in mosaics],
        }
        members = [(MANIFEST, json.dumps(common | piece).encode())]
        members += [(described["file"], encoded) for described, encoded in mosaics]
        written.append(folder / f"{images.name}-images-{number}.zip")
        with runs.replacing(written[-1]) as temporary, zipfile.ZipFile(temporary, "w") as archive:
            for name, contents in members:
                archive.writestr(zipfile.ZipInfo(name), contents)  # whose date is always the same
    return written


def _mosaics(images: Images) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield each mosaic's part of the manifest and its file, as WebP."""

    def encode(split: str, start: int) -> tuple[dict[str, Any], bytes]:
        x, y = (getattr(images, f"{split}_{part}")[start : start + MOSAIC] for part in "xy")
        described = {"file": f"{split}-{start:06}.webp", "split": split, "labels": y.tolist()}
        pixels = _joined(x)
        buffer = io.BytesIO()
        # quality 75 is an effort here; a higher one takes 3 times as long for a thousandth of the
        # size
        picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert(
            "RGB"
        )
        picture.save(buffer, "webp", lossless=True, method=4, quality=75)
        return described, buffer.getvalue()

    places = [
        (split, start)
        for split in SPLITS
        for start in range(0, len(getattr(images, f"{split}_y")), MOSAIC)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(encode, *zip(*places, strict=True))


def _joined(x: np.ndarray) -> np.ndarray:
    """Return images (n, h, w, c) as one (rows * h, COLUMNS * w, c), black where the
    last row has no more.
    """
    count, height, width, channels = x.shape
    rows = -(-count // COLUMNS)
    grid = np.zeros((rows, COLUMNS, height, width, channels), "uint8")
    grid.reshape(-1, height, width, channels)[:count] = x
    return grid.transpose(0, 2, 1, 3, 4).reshape(rows * height, COLUMNS * width, channels)


def _parted(mosaic: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Return the images (n, h, w, c) of a mosaic, with the black ones at its end;
    greyscale is the first channel.
    """
    height, width, channels = shape
    grid = mosaic[..., :channels].reshape(-1, height, COLUMNS, width, channels)
    return grid.transpose(0, 2, 1, 3, 4).reshape(-1, height, width, channels)


def read(name: str, folder: Path) -> Images:
    """Return the data set of an archive, checked against its fingerprint.

    Raises:
        UserError: naming the piece that is missing or damaged, or the folder if the
            pieces are of different archives.
    """
    found = pieces(name, folder)
    if not found:
        raise UserError(
            f"{folder} has no archive of {name}: expected {name}-images-0.zip and those that "
            "belong to it."
        )
    contents = [_read_piece(path) for path in found]
    first = contents[0][0]
    whole = {f"{name}-images-{number}.zip" for number in range(first["pieces"])}
    if missing := sorted(whole - {path.name for path in found}):
        raise UserError(
            f"{folder} lacks {', '.join(missing)} of {len(whole)} pieces: copy what is missing."
        )
    parts: dict[str, list] = {f"{split}_{part}": [] for split in SPLITS for part in "xy"}
    for (manifest, mosaics), path in zip(contents, found, strict=True):
        if (
            any(manifest[key] != first[key] for key in ("name", "fingerprint", "pieces"))
            or path.name not in whole
        ):
            raise UserError(
                f"{found[0]} and {path} are pieces of different archives: copy all pieces of one."
            )
        for described, x in zip(manifest["mosaics"], mosaics, strict=True):
            parts[f"{described['split']}_x"].append(x)
            parts[f"{described['split']}_y"].append(np.array(described["labels"], "int64"))
    images = Images(
        first["name"],
        tuple(first["classes"]),
        **{key: np.concatenate(part) for key, part in parts.items()},
    )
    if images.fingerprint != first["fingerprint"] or images.name != name:
        raise UserError(
            f"{folder}: the images of {name} do not match their fingerprint. Copy the archive "
            "again."
        )
    return images


def _read_piece(path: Path) -> tuple[dict, list[np.ndarray]]:
    """Return a piece's manifest and the images of its mosaics."""
    mosaics = []
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read(MANIFEST))
            known = manifest["format"] == FORMAT
            for described in manifest["mosaics"] if known else ():
                with Image.open(io.BytesIO(archive.read(described["file"]))) as image:
                    pixels = np.asarray(image.convert("RGB"))
                mosaics.append(
                    _parted(pixels, tuple(manifest["shape"]))[: len(described["labels"])]
                )
    # damage can make anything of a zip file: another method, a password, a place before its start
    except Exception as error:
        raise UserError(f"{path} is damaged: {error}. Copy it again.") from error
    if not known:
        raise UserError(f"{path} has format {manifest['format']}; this version reads {FORMAT}.")
    return manifest, mosaics
