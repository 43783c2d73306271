"""The directory of a served model: numbered versions and a card. Each appears complete
or not at all.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from keras_preact import _checks, atomic
from keras_preact.export.version import (
    BUILT,
    CARD,
    HIGHEST,
    OWN_CARD,
    VersionError,
    name_problem,
    numbered,
    obstacle,
    sha256,
)


def next_version(directory: Path) -> int:
    return max(numbered(directory), default=0) + 1


def check_version(directory: Path, version: int | None) -> None:
    """Raise a ValueError for a version that cannot be written."""
    if problem := obstacle(directory):
        raise VersionError(directory, problem)
    name = directory.resolve().name
    if problem := name_problem(name):
        raise ValueError(f"`directory` needs another name. {problem} Received: {name!r}")
    following = next_version(directory)
    if version is not None:
        _checks.positive_int(version, "version")
    if (following if version is None else version) > HIGHEST:
        raise ValueError(
            f"`version` must be at most {HIGHEST}. Received: version={version}; the next "
            f"free version of {directory} is {following}"
        )
    if version in numbered(directory):
        raise ValueError(
            f"{directory} has a version {version}, and a version is never overwritten. The "
            f"next free one is {following}, which is used if no version is given."
        )


@contextlib.contextmanager
def workshop(directory: Path) -> Iterator[Path]:
    """Yield a hidden folder inside `directory` to build a version in, and remove it
    afterwards, as in `atomic.workshop`. `directory` and its parents are removed too if
    they were made here and are empty.
    """
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with atomic.workshop(directory, BUILT) as temporary:
            yield temporary
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def publish(temporary: Path, directory: Path, version: int | None, card: dict) -> Path:
    """Give the SavedModel in `temporary / "version"` its card, move it to its number in
    `directory`, and return the new path.

    Each version holds its own card. `directory` holds a copy of the highest version's,
    also if several processes publish at once.
    """
    built = temporary / "version"
    files = {
        path.relative_to(built).as_posix(): sha256(path)
        for path in sorted(built.rglob("*"))
        if path.is_file()
    }
    while True:
        number = next_version(directory) if version is None else version
        text = (
            json.dumps(card | {"version": number, "files": files}, indent=2, allow_nan=False) + "\n"
        )
        (built / OWN_CARD).parent.mkdir(exist_ok=True)
        (built / OWN_CARD).write_text(text, encoding="utf-8")
        _sync(temporary)
        target = directory / str(number)
        if target.exists():  # an empty folder would be replaced silently
            check_version(directory, version)
            continue
        try:
            built.rename(target)
        except OSError:
            if not target.exists():
                raise
            continue  # another process took the number just now
        break
    try:
        atomic.sync(directory)
        _update_card(directory)
    except BaseException:
        target.rename(built)
        with contextlib.suppress(OSError):
            _update_card(directory)
        raise
    return target


def _update_card(directory: Path) -> None:
    """Make the card beside the versions a copy of the highest one's, if that has a card.
    Other processes do so, too: the one that writes last finds all versions.
    """
    done: int | None = -1
    while (highest := max(numbered(directory), default=None)) != done:
        done = highest
        if highest is None:
            (directory / CARD).unlink(missing_ok=True)
            continue
        card = numbered(directory)[highest] / OWN_CARD
        if card.is_file():
            with atomic.replacing(directory / CARD) as temporary:
                temporary.write_bytes(card.read_bytes())


def _sync(folder: Path) -> None:
    """Write every file and folder below `folder` to the disk."""
    for path, _, files in os.walk(folder):
        for name in files:
            atomic.sync(Path(path) / name)
        atomic.sync(Path(path))
