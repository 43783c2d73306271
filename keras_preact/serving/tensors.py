"""Tensors of requests and answers: the inputs and outputs of signatures, and JSON
values as arrays.
"""

import base64
import itertools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from keras_preact.preprocessing import InputRange
from keras_preact.serving.errors import RequestError

DEFAULT_SIGNATURE = "serving_default"

# Lists and objects need far more memory and time than their two characters: without a limit, 30 MB
# of "[]," stop the server for seconds. An image of 224 x 224 pixels as nested lists has 50,000.
MAX_CONTAINERS = 1_000_000
#: Largest pixel of any image: that of 16 bits.
LARGEST = 2**16 - 1
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
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    expected: InputRange | None = None

    def check(self, array: np.ndarray) -> np.ndarray:
        """Return `array` as an input: float32, or texts, which are arrays of objects.

        Raises:
            RequestError: for another shape or dtype, no example, or numbers that are
                not finite in float32.
        """
        is_text = array.dtype.kind == "O"
        if is_text != (self.dtype == "string"):
            received = "texts" if is_text else array.dtype.name
            raise RequestError(f"`{self.name}` must hold {self.dtype}. Received: {received}")
        fits = len(array.shape) == len(self.shape) and all(
            wanted in (None, length) for length, wanted in zip(array.shape, self.shape, strict=True)
        )
        if not fits or 0 in array.shape:
            raise RequestError(
                f"`{self.name}` must have the shape {shown(self.shape)}, with at least one "
                f"example. Received: {shown(array.shape)[:200]}"
            )
        if is_text:
            return array
        with np.errstate(over="ignore", invalid="ignore"):
            result = np.ascontiguousarray(array, self.dtype)
        if not np.isfinite(result).all():
            finite = np.isfinite(result.reshape(len(result), -1)).all(axis=1)
            raise RequestError(
                f"`{self.name}` must hold finite numbers that fit {self.dtype}. Received: another "
                f"number in example {finite.argmin()}"
            )
        return result

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
            too many lists.
    """
    containers = body.count(b"[") + body.count(b"{")
    if containers > MAX_CONTAINERS:
        raise RequestError(
            f"The JSON holds {containers} lists and objects; the limit is {MAX_CONTAINERS}. Send "
            "fewer rows at once, encoded images as base64, or binary tensors of the Open "
            "Inference Protocol."
        )
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        hint = ""
        if body.startswith((b"\x89PNG", b"\xff\xd8\xff")):
            hint = ' An image file goes into {"examples": [{"image_bytes": {"b64": "BASE64"}}]}.'
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


def from_json(value: Any, name: str, dtype: str) -> np.ndarray:
    """Return a JSON value as an array with an axis for each depth of lists. Numbers are
    float64 for a floating-point dtype, texts are bytes.

    Raises:
        RequestError: if the lists are ragged, or a value does not fit the dtype.
    """
    shape: list[int] = []
    leaves = [value]
    while leaves and isinstance(leaves[0], list):
        if len(shape) == MAX_AXES:
            raise RequestError(f"The lists of `{name}` must be nested at most {MAX_AXES} deep.")
        if set(map(type, leaves)) != {list} or len(lengths := set(map(len, leaves))) > 1:
            length = len(leaves[0])
            other = next(one for one in leaves if type(one) is not list or len(one) != length)
            raise RequestError(
                f"`{name}` must hold lists of equal lengths at each depth. Received: "
                f"{described(leaves[0])} and {described(other)} in axis {len(shape)}"
            )
        shape += lengths
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


def _to_bytes(value: Any, name: str) -> bytes:
    """Return a text in UTF-8, or the bytes that base64 holds, with or without padding."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and list(value) == ["b64"] and isinstance(value["b64"], str):
        text = value["b64"]
        try:
            return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
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
        keys = ", ".join(shortened(json.dumps(key)) for key in itertools.islice(value, 5))
        return f"an object with the keys {keys}" if value else "an empty object"
    prefix = "the text " if isinstance(value, str) else ""
    return prefix + shortened(json.dumps(value))


def shortened(text: str) -> str:
    """Return at most 80 characters of a text that a client sent."""
    return text if len(text) <= 80 else text[:77] + "..."


def shown(shape: tuple[int | None, ...]) -> str:
    """Return a shape as text: `(any, 32, 32, 3)`."""
    return f"({', '.join('any' if length is None else str(length) for length in shape)})"
