"""Write files so that a reader sees the old file or the whole new one, never a part."""

import contextlib
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path in the same folder, and rename it to `path` afterwards.

    The content is on the disk before the file gets its name. After an error the
    temporary file is removed, and `path` is as before. A new file has the permissions
    that the umask leaves, and a replaced one those that it had.

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
    temporary = path.with_name(f".{first}-{secrets.token_hex(8)}{suffix}")
    # the system applies the umask; the files of `tempfile` are private
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, 0o666))
    try:
        mode = (path if path.exists() else temporary).stat().st_mode & 0o777
        temporary.chmod(mode | 0o600)  # the owner has to write it
        yield temporary
        temporary.chmod(mode)  # some writers make the file again
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def workshop(folder: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder in `folder`, whose name starts with `prefix`, and remove it
    afterwards. First, those of processes that were killed are removed: a process holds a
    lock on its own, which ends with it.
    """
    import fcntl  # not on Windows

    for left in folder.glob(glob.escape(prefix) + 16 * "[0-9a-f]"):
        # one that is in use, or a file system without locks
        with contextlib.suppress(OSError):
            if not any(left.iterdir()):  # perhaps new, and not locked yet
                continue
            with _opened(left) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
    made = folder / f"{prefix}{secrets.token_hex(8)}"
    made.mkdir(0o700)
    try:
        with _opened(made) as descriptor:
            with contextlib.suppress(OSError):  # some file systems of clusters have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Yield a descriptor of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Write a file's content, or the names in a folder, to the disk."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)
