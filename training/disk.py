"""Write files and folders, completely or not at all."""

import contextlib
import dataclasses
import hashlib
import json
import math
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import UserError, writing


def make(folder: Path, option: str | None = None) -> None:
    """Make a folder, and those that it is in, if they do not exist. Check that files can be
    written to it: a command must not find that out after its work.

    Args:
        folder: The folder.
        option: Option that names it, for the error.

    Raises:
        UserError: if that is not possible, with the reason.
    """
    with writing(folder, option):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def make_place(file: Path | None, option: str) -> None:
    """Make the folder of a file as `make` does, if the file is given. The file may exist.

    Raises:
        UserError: if the file cannot be written, with the reason.
    """
    if file is None:
        return
    if file.is_dir():
        raise UserError(f"Cannot write {file}: it is a folder. Give another {option}.")
    make(file.parent, option)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` afterwards: `path` is
    never half-written.

    Raises:
        UserError: if it cannot be written, with the reason.
    """
    from keras_preact import atomic  # brings Keras, which a help text must not

    with writing(path), atomic.replacing(path) as temporary:
        yield temporary


def write_json(path: Path, value: dict, indent: int | None = 2) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=indent, default=str) + "\n")


def short_hash(file: BinaryIO) -> str:
    """Return 16 digits of the SHA-256 of an open file, from its position to its end."""
    return hashlib.file_digest(file, "sha256").hexdigest()[:16]  # type: ignore[arg-type]


def plain(value: Any, digits: int | None = None, exact: Collection[str] = ()) -> Any:
    """Convert numbers, arrays, dataclasses and collections of them to JSON's types. Floats
    that are not finite become None; with `digits`, others are rounded to so many
    significant digits, except for those under the names in `exact`.
    """

    def of(name: str, item: Any) -> Any:
        return plain(item, None if name in exact else digits, exact)

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: of(name, getattr(value, name)) for name in names}
    if hasattr(value, "tolist"):  # NumPy
        return plain(value.tolist(), digits, exact)
    if hasattr(value, "items"):
        return {str(key): of(key, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, digits, exact) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else float(f"{value:.{digits}g}")
    return value
