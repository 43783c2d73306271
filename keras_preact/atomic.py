"""Write files so that a reader sees the old file or the whole new one, never a part."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path in the same folder, and rename it to `path` afterwards.

    The content is on the disk before the file gets its name. After an error the
    temporary file is removed, and `path` is as before.

    Raises:
        OSError: if the file cannot be written.

    Example:

    >>> import pathlib, tempfile
    >>> from keras_preact import atomic
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "metrics.json")
    ...     with atomic.replacing(path) as temporary:
    ...         _ = temporary.write_text("{}")
    ...     path.read_text()
    '{}'
    """
    path = Path(path)
    first, _, endings = path.name.partition(".")  # some writers require the full .weights.h5
    suffix = f".{endings}" if endings else ""
    handle, name = tempfile.mkstemp(prefix=f".{first}-", suffix=suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)  # mkstemp makes private files
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Write a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
