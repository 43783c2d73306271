"""The layout of exported models, for everything that reads or writes them: a model's
folder holds versions, folders with a number for their name and a SavedModel in them.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

#: The file that makes a folder a SavedModel.
GRAPH = "saved_model.pb"
#: The highest version: TensorFlow Serving keeps a version in 64 bits.
HIGHEST = 2**63 - 1
#: Start of the name of a hidden folder in which an export is built.
BUILT = ".export-"
#: Number of folders that are looked into if none is a version: a data set may have millions.
MOST = 100

_RULE = f"a folder with a whole number for its name, such as 1, and {GRAPH} in it"


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a folder holds.

    Args:
        versions: Paths of the versions by number, in ascending order. Leading zeros do
            not count: `0001` is version 1.
        models: Folders that hold versions themselves: the folder is no model, but holds
            models.
        problem: What is wrong and what to do, in sentences about "it" that name no
            other folder; empty for a model with versions.
    """

    versions: dict[int, Path]
    models: list[Path]
    problem: str


def number_of(name: str) -> int | None:
    """Return the version that a name stands for, if it is a whole number from 0 to
    `HIGHEST`: in ASCII digits, perhaps with leading zeros.
    """
    digits = name.lstrip("0")
    if not (name.isascii() and name.isdecimal() and len(digits) <= len(str(HIGHEST))):
        return None
    number = int(digits or "0")
    return number if number <= HIGHEST else None


def numbered(folder: Path) -> dict[int, Path]:
    """Return the entries of a folder that a version's number names, complete or not, in
    ascending order. Of several names of a number, the shortest counts.

    Raises:
        OSError: if the folder exists and cannot be read.
    """
    return _numbered(folder, entries(folder))


def name_problem(name: str) -> str:
    """Return what is wrong with a model's name, empty if nothing is."""
    if ":" in name:
        return "A colon ends a model's name in the addresses of /v1, TensorFlow Serving's."
    return "Folders whose names start with a dot are not served." if name.startswith(".") else ""


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what `os.walk` yields, in the folders behind links too: a volume of
    Kubernetes links each entry of a version. A link to a folder above it is not followed.
    """
    above: dict[str, frozenset[str]] = {}
    for path, folders, names in os.walk(folder, followlinks=True):
        parents = above.get(os.path.dirname(path), frozenset())
        own = os.path.realpath(path)
        if own in parents:
            folders.clear()
            continue
        above[path] = parents | {own}
        yield path, folders, names


def files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, without hidden ones."""
    for path, folders, names in walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(path, name) for name in names if not name.startswith("."))


def entries(folder: Path, hidden: bool = False) -> list[str]:
    """Return the names in a folder, sorted, without hidden ones. There are none in a
    file, or in a folder that does not exist.

    Raises:
        OSError: if the folder exists and cannot be read.
    """
    try:
        return sorted(name for name in os.listdir(folder) if hidden or not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def layout(folder: Path) -> Layout:
    """Return the versions in a folder, or what is wrong with it.

    Raises:
        OSError: if the folder exists and cannot be read, or changed while it was read.
    """
    names = entries(folder)
    complete = [
        name for name in names if number_of(name) is not None and GRAPH in entries(folder / name)
    ]
    versions = _numbered(folder, complete)
    models: list[Path] = []
    problem = ""
    if len(versions) < len(complete):
        ignored = sorted({*complete} - {path.name for path in versions.values()})
        problem = (
            f"It has two folders for one version: {_listed(ignored)} does not count. Remove it, or "
            "give it another number."
        )
    if not versions and not any(name.startswith(BUILT) for name in entries(folder, hidden=True)):
        some = [folder / name for name in names[:MOST]]
        models = [path for path in some if _holds_versions(path)]
        misnamed = [path for path in some if os.path.isfile(path / GRAPH)]
        problem = _problem(folder, names, models, misnamed)
    # If a version is replaced between the listing and the look into its folder, neither the old nor
    # the new one would be found.
    if entries(folder) != names:
        raise OSError(f"its entries changed while they were read: {folder}")
    return Layout(versions, models, problem)


def _problem(folder: Path, names: list[str], models: list[Path], misnamed: list[Path]) -> str:
    """Return what is wrong with a folder without versions, and what to do. `misnamed`
    are its folders that are SavedModels.
    """
    if GRAPH in names and number_of(folder.name) is not None:
        return f"It is itself a version, {folder.name}. Use the folder above it, the model."
    if GRAPH in names:
        return (
            f"It holds {GRAPH} itself, but a version is {_RULE}. Move its content into a folder 1 "
            "inside it; or give it a number for its name, if it is a version."
        )
    if models:
        return (
            f"It holds models, not versions: {_listed(models)}. Use it as the folder of models, or "
            "one of them as the model."
        )
    if misnamed:
        return (
            f"It holds {GRAPH} in {_listed(misnamed)}, but a version is {_RULE}; the highest is "
            f"{HIGHEST}. Give it another name, 1 for example."
        )
    if incomplete := [name for name in names if number_of(name) is not None]:
        return f"There is no {GRAPH} in {_listed(incomplete)}. Copy or export the version again."
    found = _listed(names) or "nothing"
    return f"It has no version, which is {_RULE}. Found: {found}. Export a model into it."


def _holds_versions(folder: Path) -> bool:
    try:
        return any(GRAPH in entries(path) for path in numbered(folder).values())
    except OSError:  # nobody asked for this folder
        return False


def _numbered(folder: Path, names: list[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for name in sorted(names, key=len):
        number = number_of(name)
        if number is not None:
            found.setdefault(number, folder / name)
    return dict(sorted(found.items()))


def _listed(paths: Sequence[Path | str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(repr(os.path.basename(path)) for path in paths[:3]) + more
