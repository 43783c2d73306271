"""Text for people: times in words, and tables."""

import itertools
from collections.abc import Sequence


def duration(seconds: float) -> str:
    """Return a time in its two largest units: `12 s`, `1 min 40 s`, `2 h 5 min`, `3 d 4
    h`.
    """
    whole = round(seconds)
    for (unit, size), (next_unit, next_size) in itertools.pairwise(_UNITS):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // next_size} {next_unit}"
    return f"{whole} s"


_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def aligned(rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table as text: one line per row, or one per column if a line would be
    longer than `width`.
    """
    text = _lines(rows)
    return (
        text if max(map(len, text.splitlines())) <= width else _lines(list(zip(*rows, strict=True)))
    )


def _lines(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose head is the first row."""
    lines = ["|".join(["", *(f" {cell.replace('|', '/')} " for cell in row), ""]) for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
