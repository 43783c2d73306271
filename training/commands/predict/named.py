"""The image files that a person names: files, folders and patterns."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ... import image_paths


class Named(NamedTuple):
    """An image file to classify, or a name that leads to none.

    Args:
        path: The file.
        problem: Why there is no image, empty if nothing is known.
    """

    path: str
    problem: str = ""


def find(names: Sequence[Path]) -> tuple[list[Named], str]:
    """Return the files that names of files, folders and patterns mean, each once.

    A folder means the images in it at any depth, without hidden ones. A pattern, such as
    `photos/*.jpg` or `photos/**/*.png`, means what a shell makes of it, if no file has
    its name.

    Returns:
        The files, and the number of the other files in the folders, in words.
    """
    found: dict[str, Named] = {}
    others: list[Path] = []
    for name in names:
        for each in _expanded(name, others):
            found.setdefault(os.path.abspath(each.path), each)
    return list(found.values()), image_paths.endings(others)


def _expanded(name: Path, others: list[Path]) -> Iterator[Named]:
    pattern = str(name)
    matches = [pattern]
    if glob.escape(pattern) != pattern and not os.path.lexists(name):
        matches = sorted(glob.glob(pattern, recursive=True))
        if not matches:
            yield Named(pattern, "no file matches this pattern")
    for match in matches:
        if os.path.isdir(match):
            yield from _inside(Path(match), others)
        else:
            yield Named(match)


def _inside(folder: Path, others: list[Path]) -> Iterator[Named]:
    failures: list[OSError] = []
    files = image_paths.files(folder, failures.append)
    images = [path for path in files if image_paths.is_image(path)]
    others += [path for path in files if not image_paths.is_image(path)]
    for error in failures:
        yield Named(str(error.filename), error.strerror or str(error))
    for path in images:
        # to read a pipe would wait
        is_odd = os.path.exists(path) and not os.path.isfile(path)
        yield Named(str(path), "it is not a file" if is_odd else "")
    if not images and not failures:
        endings = ", ".join(image_paths.SUFFIXES)
        yield Named(str(folder), f"the folder holds no images ({endings})")
