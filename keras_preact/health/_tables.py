"""Repair CSV files after an interrupted run."""

import csv
import os
from pathlib import Path

from keras_preact import atomic


def drop_rows(path: str | os.PathLike, column: str, beyond: float) -> None:
    """Drop the rows of a CSV file whose number in `column` is above `beyond`, and an
    incomplete last line.

    The file is replaced as a whole or stays as it is. A missing file stays missing.

    Raises:
        ValueError: for a file without the column.
    """
    path = Path(path)
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines:
        return
    columns = _cells(lines[0])
    if column not in columns:
        raise ValueError(f"{path} has no column {column!r}. Received: {', '.join(columns[:8])}")
    place = columns.index(column)
    kept = [
        line for line in lines[1:] if line.endswith(b"\n") and float(_cells(line)[place]) <= beyond
    ]
    if len(kept) + 1 == len(lines):
        return
    mode = path.stat().st_mode & 0o777
    with atomic.replacing(path) as temporary:
        temporary.write_bytes(b"".join([lines[0], *kept]))
    path.chmod(mode)


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode()]))
