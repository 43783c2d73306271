"""Tables of a run: history.csv, first_losses.csv, health.csv."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import disk
from ..errors import UserError, reading

#: Columns of history.csv by name, with one number per epoch.
Columns = Mapping[str, np.ndarray]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of the same columns as a CSV file, completely or not at all."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    with disk.replacing(path) as temporary:
        temporary.write_text(text.getvalue())


def read(path: Path) -> Columns:
    """Return the columns of a history.csv, or no columns if there is no such file.

    Raises:
        UserError: for a file that is not a table with a column `loss`.
    """
    with reading(f"{path} is damaged"):
        columns = read_table(path)
    if columns and "loss" not in columns:
        raise UserError(
            f"{path} is damaged or not a history: it has no column loss. Its columns: "
            f"{', '.join(columns)}"
        )
    return columns


def read_table(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a CSV file of numbers, with NaN for other cells. Return no
    columns if there is no file.
    """
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        name: np.array([_number(row[name]) for row in rows]) for name in (rows[0] if rows else {})
    }


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:  # CSVLogger writes NA
        return math.nan


def measured(columns: Columns, name: str) -> bool:
    """Return whether a column exists and holds a finite number."""
    return bool(np.isfinite(columns.get(name, np.zeros(0))).any())
