"""Folders that come about as a whole, and files in pieces below a size."""

import contextlib
import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ..cli import UserError

#: Bytes a zip file takes for itself, and for a member beside its contents and twice its name.
ZIP_BYTES, MEMBER_BYTES = 22, 30 + 46

T = TypeVar("T")


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Give a temporary folder beside `output` to fill, which becomes `output` if all
    goes well, and is removed if not.

    Raises:
        UserError: where `output` holds something already.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists and is not empty: give another folder, or remove it.")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes private folders
        if output.exists():
            output.rmdir()
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def described(path: Path) -> dict[str, Any]:
    """Return size and hash of a file, as manifests have them."""
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def limit(piece_mib: int) -> int:
    """Return the bytes of a piece.

    Raises:
        UserError: for less than 1 MiB.
    """
    if piece_mib < 1:
        raise UserError(f"--piece-mib must be positive. Received: {piece_mib}")
    return piece_mib * 2**20


def packed(items: Iterable[tuple[int, T]], room: int) -> list[list[T]]:
    """Return items, in their order, in groups that take no more than `room`; each comes
    with what it takes, at most that.
    """
    groups: list[list[T]] = []
    left = 0
    for cost, item in items:
        if cost > left:
            groups.append([])
            left = room
        groups[-1].append(item)
        left -= cost
    return groups


def write_zips(
    members: Iterable[tuple[str, bytes]], folder: Path, stem: str, below: int
) -> list[Path]:
    """Write files, in their order, into FOLDER/STEM-0.zip, STEM-1.zip and so on.

    Args:
        members: Name and contents of each file.
        folder: Where the pieces go.
        stem: Of their names.
        below: Bytes; every piece has fewer.

    Raises:
        UserError: for a file that is too large for a piece.
    """

    def costs() -> Iterator[tuple[int, tuple[str, bytes]]]:
        for name, contents in members:
            # where deflating does not help, it adds 5 bytes to 16 kB
            cost = len(contents) + len(contents) // 1000 + 2 * len(name) + MEMBER_BYTES + 16
            if ZIP_BYTES + cost >= below:
                raise UserError(
                    f"A piece of fewer than {below:,} bytes has no room for {name}, "
                    f"{len(contents):,} bytes."
                )
            yield cost, (name, contents)

    written = []
    for number, piece in enumerate(packed(costs(), below - ZIP_BYTES - 1)):
        written.append(folder / f"{stem}-{number}.zip")
        with zipfile.ZipFile(written[-1], "w") as archive:
            for name, contents in piece:
                method = zipfile.ZIP_STORED if name.endswith(".whl") else zipfile.ZIP_DEFLATED
                archive.writestr(
                    zipfile.ZipInfo(name), contents, method
                )  # whose date is always the same
    return written
