"""Text for people: times in words, and tables."""

import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence


def duration(seconds: float) -> str:
    """Return a time in its two largest units: `12 s`, `1 min 40 s`, `2 h 5 min`, `3 d 4
    h`.
    """
    whole = round(seconds)
    for (unit, size), (next_unit, next_size) in itertools.pairwise(_UNITS):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // next_size} {next_unit}"
    return f"{whole} s"


#: Names that a sentence lists.
NAMED = 10


def some(names: Sequence[str], most: int = NAMED) -> str:
    """Return the first names in words: `a, b and 90 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def printable(text: str) -> str:
    """Return a text without line breaks and other control characters, which names of files
    may have: they become escapes, such as `\\n`.
    """
    return re.sub(
        r"[\x00-\x1f\x7f-\x9f\u2028\u2029]",
        lambda found: found[0].encode("unicode_escape").decode(),
        text,
    )


def between_words(text: str) -> str:
    """Return a text whose long lines are broken between words, for a terminal. What a file
    or another program gets is not changed.
    """
    if not sys.stdout.isatty():
        return text
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(map(wrapper.fill, text.splitlines()))


_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def aligned(rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table as text: one line per row, or one per column if a line would be
    longer than `width`.
    """
    text = lines(rows)
    if max(map(len, text.splitlines())) <= width:
        return text
    return lines(list(zip(*rows, strict=True)))


def lines(rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Return a table as text, one line per row; columns of `numbers` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    adjust = [str.rjust if i in numbers else str.ljust for i in range(len(widths))]
    return "\n".join(
        "  ".join(
            justify(cell, width) for justify, cell, width in zip(adjust, row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with the first row as its header."""
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )
