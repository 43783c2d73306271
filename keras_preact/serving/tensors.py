"""Tensors of requests and answers: the inputs and outputs of signatures, and JSON
values as arrays.
"""

import binascii
import itertools
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from keras_preact.preprocessing import InputRange
from keras_preact.serving.errors import RequestError

DEFAULT_SIGNATURE = "serving_default"

#: Limit on the memory that the values of a JSON body need, in bytes, beyond the body itself. Lists
#: and objects need far more memory and time than their two characters.
MAX_VALUE_BYTES = 100 * 2**20
#: Memory for each of these characters in JSON, in bytes: an object, a list, a value with its places
#: in lists and arrays, and half of a text. Measured with orjson on Python 3.11, and rounded up.
_COSTS = {b"{": 240, b"[": 80, b",": 52, b'"': 50}
#: Most values of a tensor in JSON whose shape is free: as many as fit into that memory.
MAX_VALUES = MAX_VALUE_BYTES // _COSTS[b","]
#: Largest pixel of any image: that of 16 bits.
LARGEST = 2**16 - 1
#: Where image files go in a request of `:classify`.
_FILES = '{"examples": [{"image_bytes": {"b64": "BASE64"}}]}'
#: More than any network takes, and fewer than NumPy can have.
MAX_AXES = 32


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a signature.

    Args:
        name: Name of the tensor.
        dtype: TensorFlow's name of its dtype: `"float32"`, `"string"`, `"int32"`, ...
        shape: Lengths of its axes; `None` is any length.
        expected: The range of its values, if the model card has it.
        smallest: Smallest lengths of the axes. Empty: 1.
        vocabulary: Number of tokens, if it holds tokens.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    expected: InputRange | None = None
    smallest: tuple[int, ...] = ()
    vocabulary: int | None = None

    @property
    def lengths(self) -> list[int]:
        """Lengths of its axes, with -1 for any."""
        return [-1 if length is None else length for length in self.shape]

    def check(self, array: np.ndarray) -> np.ndarray:
        """Return `array` as an input: numbers of its own dtype, or texts, which are arrays of
        objects.

        Raises:
            RequestError: for another shape or dtype, no example, or numbers that are not
                finite in its dtype, or do not fit it.
        """
        self.check_shape(array.shape)
        is_text, is_whole = array.dtype.kind == "O", self.dtype.startswith("int")
        if is_text != (self.dtype == "string") or (is_whole and array.dtype.kind == "f"):
            received = "texts" if is_text else array.dtype.name
            raise RequestError(f"`{self.name}` must hold {self.dtype}. Received: {received}")
        if is_text:
            return array
        if is_whole:
            return self._whole(array)
        with np.errstate(over="ignore", invalid="ignore"):
            result = np.ascontiguousarray(array, self.dtype)
        if not np.isfinite(result).all():
            finite = np.isfinite(result.reshape(len(result), -1)).all(axis=1)
            raise RequestError(
                f"`{self.name}` must hold finite numbers that fit {self.dtype}. Received: another "
                f"number in example {finite.argmin()}"
            )
        return result

    def _whole(self, array: np.ndarray) -> np.ndarray:
        limits = np.iinfo(self.dtype)
        lowest, highest = array.min(), array.max()
        if self.vocabulary is not None and not 0 <= lowest <= highest < self.vocabulary:
            raise RequestError(
                f"`{self.name}` must hold tokens from 0 to {self.vocabulary - 1}. Received: "
                f"numbers from {lowest} to {highest}"
            )
        if lowest < limits.min or highest > limits.max:
            raise RequestError(
                f"`{self.name}` must hold numbers that fit {self.dtype}. Received: numbers from "
                f"{lowest} to {highest}"
            )
        return np.ascontiguousarray(array, self.dtype)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Check the shape of an input.

        Raises:
            RequestError: if it has another shape, or no example.
        """
        fits = len(shape) == len(self.shape) and all(
            wanted in (None, length) for length, wanted in zip(shape, self.shape, strict=True)
        )
        if not fits or 0 in shape:
            raise RequestError(
                f"`{self.name}` must have the shape {shown(self.shape)}, with at least one "
                f"example. Received: {shown(shape)[:200]}"
            )
        if any(length < least for length, least in zip(shape, self.smallest, strict=False)):
            raise RequestError(
                f"`{self.name}` must have at least the shape {shown(self.smallest)}: smaller "
                f"inputs leave nothing to compute. Received: {shown(shape)[:200]}"
            )

    def most_values(self, rows: int) -> int:
        """Return the largest number of values in JSON of this many examples."""
        lengths = self.shape[1:]
        known = math.prod(length for length in lengths if length is not None)
        return MAX_VALUES if None in lengths else min(MAX_VALUES, rows * known)

    def warning(self, array: np.ndarray) -> str | None:
        """Return a warning for the client if the range of `array` is not as expected,
        else None. `array` is what `check` returned.
        """
        if self.expected is None:
            return None
        low, high = self.expected.bounds
        smallest, largest, span = float(array.min()), float(array.max()), high - low
        # nearly every request ends here: the exact test takes twenty times as long
        if low - span <= smallest and largest <= high + span and largest - smallest > span / 8:
            return None
        if self.expected.problem(array) is None:
            return None
        return (
            f"`{self.name}` has values from {smallest:.4g} to {largest:.4g}. This network expects "
            f"about {low:.4g} to {high:.4g}, so its answer is probably wrong."
        )

    def excess(self, example: np.ndarray) -> str | None:
        """Return a sentence if an example has values so large that a sound network may
        overflow, else None: no image has them, or none that fits the network.
        """
        if self.dtype.startswith("int"):  # tokens, which `check` compared with the vocabulary
            return None
        low, high = (-LARGEST, LARGEST) if self.expected is None else self.expected.bounds
        span = 0 if self.expected is None else high - low
        smallest, largest = float(example.min()), float(example.max())
        if low - span <= smallest and largest <= high + span:
            return None
        return (
            f"`{self.name}` has values from {smallest:.4g} to {largest:.4g} there; send about "
            f"{low:.4g} to {high:.4g}."
        )


@dataclass(frozen=True)
class Signature:
    """A function of a served model, from one tensor to tensors by name."""

    name: str
    input: TensorSpec
    outputs: Mapping[str, TensorSpec]


@dataclass(frozen=True)
class Call:
    """A signature to run on an input that fits it.

    Args:
        signature: Name of the signature.
        array: The input.
        warning: A warning for the client about the input, if any.
        form: Everything else that the answer depends on, in the API's own terms.
    """

    signature: str
    array: np.ndarray
    warning: str | None
    form: Any

    @classmethod
    def of(cls, signature: Signature, array: np.ndarray, form: Any = None) -> "Call":
        """Return a call of a signature, with its input checked."""
        array = signature.input.check(array)
        return cls(signature.name, array, signature.input.warning(array), form)


def signature_named(name: Any, signatures: Mapping[str, Signature]) -> Signature:
    """Return the signature with a name, which may be any JSON value.

    Raises:
        RequestError: if there is no such signature.
    """
    if not isinstance(name, str) or name not in signatures:
        raise RequestError(
            f"`signature_name` must be one of {', '.join(sorted(signatures))}. Received: "
            f"{described(name)}"
        )
    return signatures[name]


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the object that `body` holds.

    Raises:
        RequestError: if it is not JSON (NaN and Infinity are not), not an object, or has
            so many values that they need too much memory.
    """
    # This is known before anything is parsed. A text with one unusual character needs 4 bytes for
    # each of its characters.
    cost = sum(body.count(character) * size for character, size in _COSTS.items())
    if not body.isascii() or b"\\u" in body:
        cost += 4 * len(body)
    if cost > MAX_VALUE_BYTES:
        raise RequestError(
            f"The values in this JSON need up to {cost // 2**20} MiB of memory; the limit is "
            f"{MAX_VALUE_BYTES // 2**20} MiB. Send fewer rows at once, encoded images as base64, "
            "or binary tensors of the Open Inference Protocol."
        )
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        hint = ""
        if body.startswith((b"\x89PNG", b"\xff\xd8\xff", b"RIFF")):
            hint = f" An image file goes into {_FILES}."
        elif b"Content-Disposition: form-data" in body[:1000]:
            hint = f" It is a form. Send JSON with the image file in base64: {_FILES}."
        raise RequestError(
            f"The body is not JSON according to RFC 8259 (UTF-8, no NaN, no Infinity): {error}."
            + hint
        ) from None
    if not isinstance(document, dict):
        raise RequestError(f"The body must be a JSON object. Received: {described(document)}")
    return document


def fields(value: Any, known: Collection[str], where: str) -> dict[str, Any]:
    """Return the fields of a JSON object. Null is the same as no field.

    Args:
        value: Any JSON value.
        known: Names of the fields that the object may have.
        where: Place of the object in the request, such as `inputs.0`. Empty: the
            request itself.

    Raises:
        RequestError: if `value` is no object, or has another field: a client that sends
            it expects something of it.
    """
    place = f"`{where}`" if where else "The request"
    if not isinstance(value, dict):
        raise RequestError(f"{place} must be an object. Received: {described(value)}")
    other = next((name for name in value if name not in known and value[name] is not None), None)
    if other is not None:
        names = ", ".join(f"`{name}`" for name in known)
        raise RequestError(
            f"{place} may have the fields {names}, not {described(other)}. Received: "
            f"{described(value)}"
        )
    return {name: value[name] for name in known if value.get(name) is not None}


def from_json(value: Any, name: str, dtype: str, most: int) -> np.ndarray:
    """Return a JSON value as an array with an axis for each depth of lists. Numbers are
    float64 for a floating-point dtype, texts are bytes.

    Args:
        value: Any JSON value.
        name: The tensor's name, for errors.
        dtype: TensorFlow's name of its dtype.
        most: Largest number of values. More are refused before they are put together.

    Raises:
        RequestError: if the lists are ragged, there are too many values, or one does not
            fit the dtype.
    """
    shape: list[int] = []
    leaves = [value]
    while leaves and isinstance(leaves[0], list):
        if len(shape) == MAX_AXES:
            raise RequestError(f"The lists of `{name}` must be nested at most {MAX_AXES} deep.")
        first = leaves[0]
        if set(map(type, leaves)) != {list} or len(lengths := set(map(len, leaves))) > 1:
            other = next(one for one in leaves if type(one) is not list or len(one) != len(first))
            raise RequestError(
                f"`{name}` must hold lists of equal lengths at each depth. Received: "
                f"{described(first)} and {described(other)} in axis {len(shape)}"
            )
        shape += lengths
        if math.prod(shape) > most:
            raise RequestError(
                f"`{name}` may have at most {most} values here. Received: {math.prod(shape)} "
                f"values or lists of them, in the shape {shown(tuple(shape))[:200]}"
            )
        leaves = list(itertools.chain.from_iterable(leaves))
    if dtype == "string":
        return texts([_to_bytes(one, name) for one in leaves]).reshape(shape)
    target = np.dtype(dtype)
    allowed, wanted = ({int, float}, "numbers") if target.kind == "f" else ({int}, "whole numbers")
    if not allowed.issuperset(map(type, leaves)):
        other = next(one for one in leaves if type(one) not in allowed)
        is_file = isinstance(other, dict) and "b64" in other
        hint = '. For encoded images add "signature_name": "predict_bytes"' if is_file else ""
        raise RequestError(f"`{name}` must hold {wanted}. Received: {described(other)}{hint}")
    try:
        return np.array(leaves, np.float64 if target.kind == "f" else target).reshape(shape)
    except OverflowError:
        limits = np.iinfo(target)  # a number in JSON always fits float64
        other = next(one for one in leaves if not limits.min <= one <= limits.max)
        raise RequestError(
            f"`{name}` must hold numbers that fit {dtype}. Received: {other}"
        ) from None


def texts(values: list) -> np.ndarray:
    """Return bytes or texts as an array of objects with one axis."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


_SPACES = " \t\r\n"


def _to_bytes(value: Any, name: str) -> bytes:
    """Return a text in UTF-8, or the bytes that base64 holds, with or without padding."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and list(value) == ["b64"] and isinstance(value["b64"], str):
        text = value["b64"]
        try:
            # Line breaks, which many encoders write, do not count; others are not copied.
            if any(space in text for space in _SPACES):
                text = text.translate(dict.fromkeys(map(ord, _SPACES)))
            return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
        except ValueError:
            raise RequestError(
                f"`{name}` must hold base64, in its standard alphabet. Received: {described(text)}"
            ) from None
    raise RequestError(
        f'`{name}` must hold texts or {{"b64": "BASE64"}} objects. Received: {described(value)}'
    )


def described(value: Any) -> str:
    """Return a short phrase for a JSON value."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        keys = ", ".join(described_text(key) for key in itertools.islice(value, 5))
        return f"an object with the keys {keys}" if value else "an empty object"
    if isinstance(value, str):
        return f"the text {described_text(value)}"
    return json.dumps(value)


def described_text(text: str) -> str:
    """Return at most 80 characters of a text, as JSON."""
    return shortened(json.dumps(text[:80]))


def shortened(text: str) -> str:
    """Return at most 80 characters of a text that a client sent."""
    return text if len(text) <= 80 else text[:77] + "..."


def shown(shape: tuple[int | None, ...]) -> str:
    """Return a shape as text: `(any, 32, 32, 3)`."""
    return f"({', '.join('any' if length is None else str(length) for length in shape)})"
