"""Which files of a folder are images. Reads no file, and needs neither TensorFlow nor Keras."""

import collections
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

#: Endings of the files that are images.
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
#: Folders that systems make among the images, besides those whose name begins with a dot: of
#: archives from macOS, of network storage, of disks and of Python.
HIDDEN = (
    *("__MACOSX", "@eaDir", "@Recycle", "#recycle", "$RECYCLE.BIN", "System Volume Information"),
    *("lost+found", "__pycache__"),
)
#: Gets the error of a folder that cannot be read.
Failed = Callable[[OSError], object]


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def folders(folder: Path, failed: Failed) -> list[Path]:
    """Return the visible folders in a folder, sorted."""
    return [Path(entry.path) for entry in _visible(folder, failed) if _is_folder(entry)]


def files(folder: Path, failed: Failed) -> list[Path]:
    """Return the visible files at any depth, sorted. Links to folders are followed, except
    from inside these folders.
    """
    # the entries of a folder are sorted, and so are all paths by their parts
    return list(_files(folder, failed, ()))


def _files(folder: Path, failed: Failed, above: Sequence[str]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    if real in above:
        return
    for entry in _visible(folder, failed):
        if _is_folder(entry):
            yield from _files(Path(entry.path), failed, (*above, real))
        else:
            yield Path(entry.path)


def _visible(folder: Path, failed: Failed) -> list[os.DirEntry]:
    """Return the entries of a folder, sorted, without those that begin with a dot and those
    of `HIDDEN`.
    """
    visible: list[os.DirEntry] = []
    try:
        with os.scandir(folder) as entries:
            visible += [entry for entry in entries if not _is_hidden(entry.name)]
    except OSError as error:
        failed(error)
    return sorted(visible, key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry) -> bool:
    # a link in a circle is an error for entry.is_dir
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in HIDDEN


def endings(paths: Iterable[Path]) -> str:
    """Return the number of files of each ending in words: `2 .txt, 1 without ending`."""
    counts = collections.Counter(path.suffix.lower() for path in paths)
    return ", ".join(
        f"{count:,} {suffix or 'without ending'}" for suffix, count in counts.most_common()
    )
