"""Nested JSON values to arrays and back, by the rules of a tensor."""

import base64
import binascii
import itertools
import math
from typing import Any

import numpy as np

from keras_preact.serving.errors import RequestError
from keras_preact.serving.json_body import described
from keras_preact.serving.tensors import TensorSpec

BASE64_KEY = "b64"

# For each kind of dtype, what JSON values it takes and what a person calls them.
_KINDS: dict[str, tuple[set[type], str]] = {
    "b": ({bool}, "true or false"),
    "i": ({int}, "whole numbers"),
    "u": ({int}, "whole numbers"),
    "f": ({int, float}, "numbers"),
}


def to_array(value: Any, spec: TensorSpec) -> np.ndarray:
    """Return a JSON value as an array with as many axes as `spec` has, of its dtype;
    text becomes an object array of bytes.

    Raises:
        RequestError: if lists are ragged or not nested as deep as that, or a value is
            not one of the dtype.
    """
    leaves, shape = _flattened(value, spec)
    return _converted(leaves, spec.name, spec.dtype).reshape(shape)


def flat_array(values: list, name: str, dtype: str) -> np.ndarray:
    """Return numbers, truth values or texts, nested in lists of whatever form, as an
    array of one axis.

    Raises:
        RequestError: if a value is not one of the dtype.
    """
    while not {list}.isdisjoint(map(type, values)):
        if not {list}.issuperset(map(type, values)):
            raise RequestError(f"`{name}` must hold either lists or values. Received: both")
        values = list(itertools.chain.from_iterable(values))
    return _converted(values, name, dtype)


def to_json(array: np.ndarray) -> Any:
    """Return what orjson writes an array as: itself for numbers, nested lists of text
    for text.

    Raises:
        RequestError: for bytes that are no text.
    """
    if array.dtype.kind != "O":
        return np.ascontiguousarray(array)
    try:
        return np.frompyfunc(lambda text: text.decode() if isinstance(text, bytes) else text, 1, 1)(
            array
        ).tolist()
    except UnicodeDecodeError:
        raise RequestError(
            "An output is bytes that JSON cannot hold: ask for it in binary."
        ) from None


def _flattened(value: Any, spec: TensorSpec) -> tuple[list, tuple[int, ...]]:
    """Return the values that lists hold, in order, and the lists' lengths at each
    depth.
    """
    shape, level = [], [value]
    for axis in range(len(spec.shape)):
        if not {list}.issuperset(map(type, level)):
            other = next(item for item in level if type(item) is not list)
            raise RequestError(
                f"`{spec.name}` must be lists nested {len(spec.shape)} deep, for the shape "
                f"{shown(spec.shape)}. Received: {described(other)} at depth {axis}"
            )
        lengths = set(map(len, level))
        if len(lengths) > 1:
            raise RequestError(
                f"The lists of `{spec.name}` must be of equal length at each depth. Received: "
                f"lists of {min(lengths)} and {max(lengths)} values at depth {axis}"
            )
        shape.append(lengths.pop() if lengths else 0)
        level = list(itertools.chain.from_iterable(level))
    return level, tuple(shape)


def _converted(values: list, name: str, dtype: str) -> np.ndarray:
    if dtype == "string":
        array = np.empty(len(values), dtype=object)
        array[:] = [_to_bytes(value, name) for value in values]
        return array
    to = np.dtype(dtype)
    allowed, kind = _KINDS[to.kind]
    if not allowed.issuperset(map(type, values)):
        other = next(value for value in values if type(value) not in allowed)
        raise RequestError(
            f"`{name}` must hold {kind}, to fit {dtype}. Received: {described(other)}"
        )
    if to.kind in "iu":
        low, high = np.iinfo(to).min, np.iinfo(to).max
        if values and not low <= min(values) <= max(values) <= high:
            other = next(value for value in values if not low <= value <= high)
            raise RequestError(
                f"`{name}` must hold numbers from {low} to {high}, to fit {dtype}. Received: "
                f"{described(other)}"
            )
    return cast(np.array(values, dtype=np.float64 if to.kind == "f" else to), name, dtype)


def cast(array: np.ndarray, name: str, dtype: str) -> np.ndarray:
    """Return `array` as `dtype`.

    Raises:
        RequestError: if a value does not fit: text for numbers, fractions for whole
            numbers, numbers too large.
    """
    to = np.dtype(object if dtype == "string" else dtype)
    if array.dtype == to:
        return array
    if array.dtype.kind not in {"f": "iuf", "i": "iu", "u": "iu"}.get(to.kind, ""):
        raise RequestError(
            f"`{name}` must be {dtype}. Received: "
            f"{array.dtype if array.dtype.kind != 'O' else 'text'}"
        )
    with np.errstate(over="ignore"):
        result = array.astype(to)
    wrong = np.isinf(result) & np.isfinite(array) if to.kind == "f" else result != array
    if wrong.any():
        raise RequestError(
            f"`{name}` must hold numbers that fit {dtype}. Received: {array[wrong].flat[0]}"
        )
    return result


def _to_bytes(value: Any, name: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if (
        isinstance(value, dict)
        and value.keys() == {BASE64_KEY}
        and isinstance(value[BASE64_KEY], str)
    ):
        return from_base64(value[BASE64_KEY], name)
    raise RequestError(
        f'`{name}` must hold texts or {{"b64": "BASE64"}} objects. Received: {described(value)}'
    )


def from_base64(text: str, name: str) -> bytes:
    """Decode base64 with or without its padding.

    Raises:
        RequestError: if it is not that.
    """
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(
            f"`{name}` must hold base64, in its standard alphabet. Received: {described(text)}"
        ) from None


def shown(shape: tuple[int | None, ...]) -> str:
    """Return a shape as a sentence has it: `(any, 32, 32, 3)`."""
    return "(" + ", ".join("any" if length is None else str(length) for length in shape) + ")"


def size(shape: tuple[int, ...]) -> int:
    """Return how many values an array of this shape has."""
    return math.prod(shape)
