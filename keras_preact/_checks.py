"""Checks of arguments, with errors that say what was received and what would work."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def nearest(name: object, names: Iterable[str]) -> str:
    """Return `Did you mean ...? Available: ...` for an unknown `name`."""
    names = list(names)
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    close = close or [known for known in names if str(name) and str(name) in known][:3]
    hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}Available: {', '.join(names)}."


def lookup(table: Mapping[str, T], name: object, argument: str) -> T:
    """Return `table[name]`, or raise a ValueError that names the nearest keys."""
    if isinstance(name, str) and name in table:
        return table[name]
    raise ValueError(f"Unknown {argument}. {nearest(name, table)} Received: {argument}={name!r}")


def one_of(value: object, allowed: Iterable[object], argument: str) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(
            f"`{argument}` must be one of {', '.join(map(repr, allowed))}. Received: "
            f"{argument}={value!r}"
        )


def positive_int(value: object, argument: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{argument}` must be a positive integer. Received: {argument}={value!r}")


def fraction(value: object, argument: str) -> None:
    """Check a rate: a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"`{argument}` must be a number in [0, 1). Received: {argument}={value!r}")
