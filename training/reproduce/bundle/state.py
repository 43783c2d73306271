"""The state of unfinished runs in pieces: a tar file cut into parts, put together only
where all of them are whole.
"""

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from ... import runs
from ...cli import UserError
from ..pieces import described, limit, new_folder

FORMAT = 1
MANIFEST = "state.json"


class _Parts(io.RawIOBase):
    """A file to write to, cut into files of `size` bytes."""

    def __init__(self, folder: Path, size: int):
        super().__init__()
        self.parts: list[dict[str, Any]] = []
        self._folder, self._size = folder, size
        self._room = 0
        self._digest = hashlib.sha256()

    def write(self, contents: Any, /) -> int:
        rest = memoryview(contents)
        while rest:
            if not self._room:
                self.finish()
                self.parts.append({"file": f"state-{len(self.parts):04}.part", "bytes": 0})
                self._room, self._digest = self._size, hashlib.sha256()
            now, rest = rest[: self._room], rest[self._room :]
            part = self.parts[-1]
            with (self._folder / part["file"]).open("ab") as file:
                file.write(now)
            self._digest.update(now)
            self._room -= len(now)
            part["bytes"] += len(now)
        return len(contents)

    def finish(self) -> None:
        """Note the hash of the last part."""
        if self.parts:
            self.parts[-1]["sha256"] = self._digest.hexdigest()


def pack_state(run_folder: Path, output: Path, piece_mib: int = 16) -> list[Path]:
    """Write a folder, such as runs/reproduce, in pieces that can be fetched one by one.

    Without this module, `cat state-*.part | tar x` puts them together.

    Args:
        run_folder: With the runs; nothing may write to it meanwhile.
        output: A new folder, for `state-0000.part` and so on, and state.json.
        piece_mib: MiB that no piece has more of.

    Returns:
        The files, state.json first.

    Raises:
        UserError: for a folder that is not there, an output that holds something.
    """
    if not run_folder.is_dir():
        raise UserError(f"{run_folder} is no folder with runs.")
    size = limit(piece_mib)
    with new_folder(output) as folder:
        parts = _Parts(folder, size)
        with tarfile.open(fileobj=parts, mode="w|") as archive:
            archive.add(run_folder, ".")
        parts.finish()
        runs.write_json(folder / MANIFEST, {"format": FORMAT, "parts": parts.parts})
    print(f"Written: {output}, {len(parts.parts)} pieces and {MANIFEST}")
    return [output / MANIFEST, *(output / part["file"] for part in parts.parts)]


def unpack_state(pieces: Path, run_folder: Path) -> None:
    """Put the folder together that `pack_state` has cut: all of it or nothing.

    Args:
        pieces: Folder with all pieces and state.json.
        run_folder: What becomes of them, new or empty.

    Raises:
        UserError: naming the pieces that are missing or damaged; for a folder that
            holds something.
    """
    parts = _parts(pieces)
    if missing := [part["file"] for part in parts if not (pieces / part["file"]).is_file()]:
        raise UserError(
            f"{pieces} lacks {', '.join(missing)}, of {len(parts)} pieces: copy what is missing."
        )
    damaged = [
        part["file"]
        for part in parts
        if part != {"file": part["file"], **described(pieces / part["file"])}
    ]
    if damaged:
        raise UserError(
            f"{pieces}: damaged, or of another state: {', '.join(damaged)}. Copy them again."
        )
    with new_folder(run_folder) as folder, tempfile.TemporaryFile(dir=run_folder.parent) as whole:
        for part in parts:
            with (pieces / part["file"]).open("rb") as file:
                shutil.copyfileobj(file, whole)
        whole.seek(0)
        with tarfile.open(fileobj=whole) as archive:
            archive.extractall(folder, filter="data")
    print(f"Written: {run_folder}")


def _parts(pieces: Path) -> list[dict[str, Any]]:
    path = pieces / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{pieces} lacks {MANIFEST}, which names the pieces of a state: copy it too."
        )
    try:
        manifest = json.loads(path.read_text())
        parts = [
            {key: part[key] for key in ("file", "bytes", "sha256")} for part in manifest["parts"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}. Copy it again.") from error
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path} has format {manifest.get('format')}; this version reads {FORMAT}.")
    return parts
