"""Reads a directory of models: each model's versions, and the files of a version."""

import os
from pathlib import Path

#: The path, size and time of the last change of each file and folder.
Files = frozenset[tuple[str, int, int]]


def models(directory: Path) -> dict[str, dict[int, Path] | OSError]:
    """Return the paths of each model's versions, or the error of a folder that could
    not be read.

    `directory` holds folders of models, or is itself one model. A version is a folder
    with a number for its name and a `saved_model.pb` in it. Everything else is ignored.

    Raises:
        OSError: if `directory` exists and cannot be read.
    """
    directory = Path(os.path.abspath(directory))  # "." has a name too
    if own := versions(directory):
        return {directory.name: own}
    found: dict[str, dict[int, Path] | OSError] = {}
    for name in _names(directory):
        try:
            in_folder: dict[int, Path] | OSError = versions(directory / name)
        except OSError as error:
            in_folder = error
        if in_folder:
            found[name] = in_folder
    return found


def versions(folder: Path) -> dict[int, Path]:
    """Return the paths of a model's versions.

    Raises:
        OSError: if it cannot be read, or changed each time it was.
    """
    numbers = _numbers(folder)
    for _ in range(10):
        found = {
            int(name): folder / name
            for name in reversed(numbers)
            if _is_there(folder / name / "saved_model.pb")
        }
        # If a version went and another came between the list and the look at its entries, neither
        # would be found.
        before, numbers = numbers, _numbers(folder)
        if numbers == before:
            return found
    raise OSError(f"its entries changed each time they were read: {folder}")


def files(folder: Path) -> Files:
    """Return a value that changes with anything in a version's folder.

    Raises:
        OSError: if it cannot be read.
    """
    found = []
    pending = [os.fspath(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                # The target of a link, unless it does not exist yet.
                status = entry.stat(follow_symlinks=os.path.exists(entry))
                found.append((entry.path, status.st_size, status.st_mtime_ns))
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return frozenset(found)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry for entry in os.listdir(folder) if not entry.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _numbers(folder: Path) -> list[str]:
    return [name for name in _names(folder) if name.isascii() and name.isdecimal()]


def _is_there(path: Path) -> bool:
    """Return whether `path` is there; unlike `Path.exists`, raise the error if that
    cannot be told.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
