"""Text for people: a line that is rewritten, what fits into a terminal, times in words, tables."""

import itertools
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TextIO

_NONE: Mapping[str, str] = MappingProxyType({})


class Line:
    """A stream of lines; where it is a terminal, the last one can be rewritten."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.terminal = stream.isatty()
        self._text = ""

    def draw(self, pieces: Mapping[str, str], least_needed: Sequence[str] = (), shorter: Mapping[str, str] = _NONE) -> None:
        """Write what fits into the width of the terminal, in place of what was drawn before."""
        self._replace(fitting(pieces, columns(self.stream) - 1, least_needed, shorter))

    def permanent(self, text: str, redraw: bool = False) -> None:
        """Write a line that stays, in place of what was drawn before, or above it."""
        drawn = self._text
        self._replace(text)
        self.end()
        if redraw and drawn:
            self._replace(drawn)

    def end(self) -> None:
        """Leave the line as it stands."""
        if self._text:
            self.stream.write("\n")
            self.stream.flush()
        self._text = ""

    def _replace(self, text: str) -> None:
        start = "\r" if self._text else ""
        self.stream.write(start + text.ljust(len(self._text)))
        self.stream.flush()
        self._text = text


def columns(stream: Any) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # no terminal after all
        return 80


def fitting(pieces: Mapping[str, str], width: int, least_needed: Sequence[str], shorter: Mapping[str, str]) -> str:
    """Join the pieces; where they are longer than `width`, in shorter words and without those needed least."""
    kept = dict(pieces)
    if len(_joined(kept)) > width:
        for word, instead in shorter.items():
            kept = {name: text.replace(word, instead) for name, text in kept.items()}
    for name in least_needed:
        if len(_joined(kept)) > width:
            kept.pop(name, None)
    return _joined(kept)[:width]


def _joined(pieces: Mapping[str, str]) -> str:
    return "  ".join(filter(None, pieces.values()))


def duration(seconds: float) -> str:
    """Return a time in the two largest units that it has: `12 s`, `1 min 40 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = round(seconds)
    for (unit, size), (next_unit, next_size) in itertools.pairwise(_UNITS):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // next_size} {next_unit}"
    return f"{whole} s"


_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def aligned(rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table as text: a line a row, or, where one of them is longer than `width`, a line a column."""
    text = _lines(rows)
    return text if max(map(len, text.splitlines())) <= width else _lines(list(zip(*rows, strict=True)))


def _lines(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, with the first row as its head."""
    lines = ["|".join(["", *(f" {cell.replace('|', '/')} " for cell in row), ""]) for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
