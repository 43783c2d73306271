"""Tensors of requests and answers: what a signature takes and gives, and JSON values as
arrays of it.
"""

import base64
import binascii
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson
import pydantic

from keras_preact.preprocessing import InputRange
from keras_preact.serving.errors import RequestError

BASE64_KEY = "b64"
DEFAULT_SIGNATURE = "serving_default"

# Lists and objects need far more memory and time than their two characters: without a limit, 30 MB
# of "[]," stop the server for seconds. An image of 224 x 224 pixels as nested lists has 50,000.
MAX_CONTAINERS = 1_000_000

_MAX_AXES = 32
_PART = 50_000

# The JSON values that each kind of dtype takes, and their name in a sentence.
_JSON_TYPES: dict[str, tuple[set[type], str]] = {
    "b": ({bool}, "true or false"),
    "i": ({int}, "whole numbers"),
    "u": ({int}, "whole numbers"),
    "f": ({int, float}, "numbers"),
}
# The kinds of arrays that each kind of dtype takes.
_CASTS = {"f": "iuf", "i": "iu", "u": "iu", "b": "b", "O": "O"}


Model = TypeVar("Model", bound=pydantic.BaseModel)


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a signature.

    Args:
        name: Its name.
        dtype: `"float32"`, `"string"`, `"int32"`, ...: TensorFlow's names.
        shape: Lengths of its axes; `None` is any length.
        expected: The range of its values, if the model card has it.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    expected: InputRange | None = None

    @functools.cached_property
    def _bounds(self) -> tuple[float, float]:
        assert self.expected is not None
        return self.expected.bounds  # which takes 20 us

    def check(self, array: np.ndarray) -> np.ndarray:
        """Return `array` with this dtype. Texts are arrays of objects, which are bytes.

        Raises:
            RequestError: for another shape, no example, or values that do not fit the
                dtype. Floating-point numbers must be finite.
        """
        dtype = np.dtype(object if self.dtype == "string" else self.dtype)
        if array.dtype.kind not in _CASTS[dtype.kind]:
            received = "texts" if array.dtype.kind == "O" else array.dtype.name
            raise RequestError(f"`{self.name}` must hold {self.dtype}. Received: {received}")
        fits = len(array.shape) == len(self.shape) and all(
            wanted in (None, length) for length, wanted in zip(array.shape, self.shape, strict=True)
        )
        if not fits or 0 in array.shape:
            raise RequestError(
                f"`{self.name}` must have the shape {shown(self.shape)}, with at least one "
                f"example. Received: {shown(array.shape)[:200]}"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            result = np.ascontiguousarray(array, dtype)
        if dtype.kind == "f":
            if not np.isfinite(result).all():
                finite = np.isfinite(result.reshape(len(result), -1)).all(axis=1)
                raise RequestError(
                    f"`{self.name}` must hold finite numbers that fit {self.dtype}. Received: "
                    f"another one in example {finite.argmin()}"
                )
        elif dtype != array.dtype and (wrong := result != array).any():
            raise RequestError(
                f"`{self.name}` must hold numbers that fit {self.dtype}. Received: "
                f"{array[wrong].flat[0]}"
            )
        return result

    def warning(self, array: np.ndarray) -> str | None:
        """Return what the client should know of the range of `array`, which `check`
        returned; None if it is as expected.
        """
        if self.expected is None:
            return None
        low, high = self._bounds
        found, span = (float(array.min()), float(array.max())), high - low
        # nearly every request ends here: the exact test takes twenty times as long
        if low - span <= found[0] and found[1] <= high + span and found[1] - found[0] > span / 8:
            return None
        if self.expected.problem(array) is None:
            return None
        return (
            f"`{self.name}` has values from {found[0]:.4g} to {found[1]:.4g}. This network expects "
            f"about {low:.4g} to {high:.4g}, so its answer is probably wrong."
        )


@dataclass(frozen=True)
class Signature:
    """A function of a served model: tensors to tensors, by name."""

    name: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    def check(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the inputs with the dtypes of the signature.

        Raises:
            RequestError: if one is missing, unknown, or does not fit.
        """
        if arrays.keys() != self.inputs.keys():
            raise RequestError(
                f"The signature {self.name} takes {' and '.join(self.inputs)}. Received: "
                f"{', '.join(sorted(arrays)) or 'nothing'}"
            )
        return {name: spec.check(arrays[name]) for name, spec in self.inputs.items()}

    def warning(self, arrays: Mapping[str, np.ndarray]) -> str | None:
        """Return what the client should know of the range of checked inputs, or None."""
        warnings = (spec.warning(arrays[name]) for name, spec in self.inputs.items())
        return next(filter(None, warnings), None)


def signature_named(name: Any, signatures: Mapping[str, Signature]) -> Signature:
    """Return the signature of a name, which may be any JSON value.

    Raises:
        RequestError: if there is none.
    """
    if not isinstance(name, str) or name not in signatures:
        raise RequestError(
            f"`signature_name` must be one of {', '.join(sorted(signatures))}. Received: "
            f"{described(name)}"
        )
    return signatures[name]


def parse_json(body: bytes | memoryview) -> dict[str, Any]:
    """Return the object that `body` holds.

    Raises:
        RequestError: if it is not JSON (NaN and Infinity are not), not an object, or has
            too many lists.
    """
    body = bytes(body)
    if not body.strip():
        raise RequestError("The request has no body; a JSON object was expected.")
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
        if bytes(body[:4]).startswith((b"\x89PNG", b"\xff\xd8\xff")):
            raise RequestError(
                "The body is an image file, not JSON. Send "
                '{"examples": [{"image_bytes": {"b64": "BASE64"}}]} to :classify, with the file in '
                "base64."
            ) from None
        raise RequestError(
            f"The body is not JSON according to RFC 8259 (UTF-8, no NaN, no Infinity): {error}."
        ) from None
    if not isinstance(document, dict):
        raise RequestError(f"The body must be a JSON object. Received: {described(document)}")
    return document


def validated(model: type[Model], document: dict[str, Any]) -> Model:
    """Return a JSON object as a `model`, without conversions.

    Raises:
        RequestError: if it does not fit; it names the first such value.
    """
    try:
        return model.model_validate(document, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        received = described(first["input"])
        raise RequestError(f"`{place[:200]}`: {first['msg']}. Received: {received}") from None


def from_json(value: Any, name: str, dtype: str) -> np.ndarray:
    """Return a JSON value as an array with an axis for each depth of lists. Numbers are
    float64 for a floating-point dtype, texts are bytes.

    Raises:
        RequestError: if the lists are ragged, or a value does not fit the dtype.
    """
    shape: list[int] = []
    level = [value]
    while level and list in (kinds := _kinds(level)):
        if kinds != {list}:
            raise RequestError(f"`{name}` must hold lists or values at each depth, not both.")
        if len(shape) == _MAX_AXES:
            raise RequestError(f"The lists of `{name}` must be nested at most {_MAX_AXES} deep.")
        lengths = set(map(len, level))
        if len(lengths) > 1:
            raise RequestError(
                f"The lists of `{name}` must have equal lengths at each depth. Received: lists of "
                f"{min(lengths)} and {max(lengths)} values"
            )
        shape.append(lengths.pop())
        flat: list = []
        for part in _parts(level):
            flat.extend(itertools.chain.from_iterable(part))
        level = flat
    return _from_leaves(level, name, dtype).reshape(shape)


def to_json(array: np.ndarray) -> Any:
    """Return numbers as they are, for orjson, and texts as nested lists of `str`.

    Raises:
        RequestError: for bytes that are not text.
    """
    if array.dtype.kind != "O":
        return np.ascontiguousarray(array)
    try:
        return np.frompyfunc(lambda text: text.decode() if isinstance(text, bytes) else text, 1, 1)(
            array
        ).tolist()
    except UnicodeDecodeError:
        raise RequestError(
            "JSON cannot hold the bytes of an output: ask for it in binary."
        ) from None


def texts(values: list) -> np.ndarray:
    """Return bytes or texts as an array of objects with one axis."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def from_base64(text: str, name: str) -> bytes:
    """Decode base64 with or without its padding.

    Raises:
        RequestError: if it is not base64.
    """
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(
            f"`{name}` must hold base64, in its standard alphabet. Received: {described(text)}"
        ) from None


def highest(probabilities: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes with the highest probabilities, int32 `(n, k)`, and these
    probabilities. The first of equal classes comes first.
    """
    indices = (-probabilities).argsort(axis=-1, kind="stable")[:, :k].astype(np.int32)
    return indices, probabilities[np.arange(len(probabilities))[:, np.newaxis], indices]


def described(value: Any) -> str:
    """Return a short phrase for a JSON value."""
    if isinstance(value, str):
        return f"the text {_quoted(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        keys = ", ".join(map(_quoted, itertools.islice(value, 5)))
        more = ", ..." if len(value) > 5 else ""
        return f"an object with the keys {keys}{more}" if value else "an empty object"
    text = json.dumps(value)
    return text if value is None or isinstance(value, bool) else f"the number {text}"


def shortened(name: str) -> str:
    """Return a name that a client sent, at most 80 characters of it."""
    return name if len(name) <= 80 else name[:77] + "..."


def shown(shape: tuple[int | None, ...]) -> str:
    """Return a shape as text: `(any, 32, 32, 3)`."""
    return f"({', '.join('any' if length is None else str(length) for length in shape)})"


def _quoted(text: str) -> str:
    return json.dumps(text if len(text) <= 40 else text[:37] + "...")


def _parts(values: list) -> Iterator[list]:
    """Give a list in parts. One call on millions of values would hold Python's lock, and
    with it the event loop, for as long as it takes.
    """
    for start in range(0, len(values), _PART):
        yield values[start : start + _PART]


def _kinds(values: list) -> set[type]:
    kinds: set[type] = set()
    for part in _parts(values):
        kinds.update(map(type, part))
    return kinds


def _from_leaves(values: list, name: str, dtype: str) -> np.ndarray:
    if dtype == "string":
        return texts([_to_bytes(value, name) for value in values])
    to = np.dtype(dtype)
    allowed, kind = _JSON_TYPES[to.kind]
    if not allowed.issuperset(_kinds(values)):
        other = next(value for value in values if type(value) not in allowed)
        hint = ""
        if isinstance(other, dict) and BASE64_KEY in other:
            hint = '. For encoded images add "signature_name": "predict_bytes"'
        raise RequestError(f"`{name}` must hold {kind}. Received: {described(other)}{hint}")
    try:
        kept = np.float64 if to.kind == "f" else to
        return np.concatenate(
            [np.empty(0, kept), *(np.array(part, dtype=kept) for part in _parts(values))]
        )
    except OverflowError:
        low, high = np.iinfo(to).min, np.iinfo(to).max
        raise RequestError(
            f"`{name}` must hold numbers from {low} to {high}, to fit {dtype}."
        ) from None


def _to_bytes(value: Any, name: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and list(map(type, value.values())) == [str] and BASE64_KEY in value:
        return from_base64(value[BASE64_KEY], name)
    raise RequestError(
        f'`{name}` must hold texts or {{"b64": "BASE64"}} objects. Received: {described(value)}'
    )
