"""Checks of arguments, with errors that say what was received and what would work."""

import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

#: Names of options in other libraries to their names here.
OTHER_NAMES = {
    "act_layer": "activation",
    "drop_path_rate": "stochastic_depth",
    "drop_rate": "dropout",
    "in_chans": "input_shape",
    "norm_layer": "normalization",
    "num_classes": "classes",
    "pretrained": "weights",
    "width": "width_factor",
}


def plain(value: Any) -> Any:
    """Return NumPy's numbers, also inside lists, tuples and dictionaries, as Python's: a
    file cannot hold others. Other values are returned as they are.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value


def nearest(name: object, names: Iterable[str]) -> str:
    """Return `Did you mean ...? Available: ...` for an unknown `name`."""
    names = list(names)
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    close = close or [known for known in names if str(name) and str(name) in known][:3]
    hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}Available: {', '.join(names)}."


def unknown_option(name: str, names: Iterable[str]) -> str:
    """Return the message for an option that is not in `names`."""
    if name in OTHER_NAMES:
        return f"Unknown option {name!r}. Did you mean {OTHER_NAMES[name]}=...?"
    return f"Unknown option {name!r}. {nearest(name, names)}"


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


def flag(value: object, argument: str) -> None:
    """Check an option that is on or off: a word such as "no" would count as on."""
    one_of(value, (True, False), argument)


def is_int(value: Any) -> bool:
    """Whether a value is a whole number of Python or NumPy; a bool is none."""
    return isinstance(plain(value), int) and not isinstance(plain(value), bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number of Python or NumPy; a bool is none."""
    return is_int(value) or isinstance(plain(value), float)


def finite(value: Any, argument: str) -> None:
    if not is_number(value) or not math.isfinite(value):
        raise ValueError(f"`{argument}` must be a finite number. Received: {argument}={value!r}")


def not_negative(value: Any, argument: str) -> None:
    if not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(
            f"`{argument}` must be a finite number that is not negative. Received: "
            f"{argument}={value!r}"
        )


def positive(value: Any, argument: str) -> None:
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(
            f"`{argument}` must be a finite number above 0. Received: {argument}={value!r}"
        )


def positive_int(value: Any, argument: str) -> None:
    if not is_int(value) or value < 1:
        raise ValueError(f"`{argument}` must be a positive integer. Received: {argument}={value!r}")


def path(value: Any, argument: str) -> None:
    """Raise a ValueError unless `value` is a path. An empty one would be the current folder."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError(f"`{argument}` must be a path. Received: {argument}={value!r}")


def order_of_axes(shape: Sequence[int | None], data_format: str) -> None:
    """Raise an error if images have the channels first, but `data_format` says last, or
    the reverse.
    """
    if len(shape) != 3:
        return
    first, last = (shape[i] in (1, 3) for i in (0, -1))
    meant = "channels_first" if first else "channels_last"
    if first != last and meant != data_format:
        other = (*shape[1:], shape[0]) if first else (shape[-1], *shape[:-1])
        raise ValueError(
            f"Are the channels {'first' if first else 'last'}? Then give data_format={meant!r}, or "
            f"input_shape={other}. Received: input_shape={tuple(shape)}, "
            f"data_format={data_format!r}"
        )


def fraction(value: Any, argument: str) -> None:
    """Check a rate: a number in [0, 1)."""
    if not is_number(value) or not 0 <= value < 1:
        raise ValueError(f"`{argument}` must be a number in [0, 1). Received: {argument}={value!r}")
