"""Checks what a client sent before anything is computed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_preact.serving.errors import RequestError
from keras_preact.serving.tensors import Signature, TensorSpec


def find_signature(signatures: Mapping[str, Signature], name: str) -> Signature:
    """Return a signature by name, or raise a RequestError that names those there are."""
    if name not in signatures:
        raise RequestError(
            f"The model has no signature {name!r}. It has: {', '.join(sorted(signatures))}."
        )
    return signatures[name]


def take(signature: Signature, inputs: Mapping[str, Any]) -> tuple[TensorSpec, np.ndarray]:
    """Return the one input of a signature, its form checked: strings or numbers, of the
    right shape, at least one example.

    Raises:
        RequestError: which says what was received and what would work.
    """
    [spec] = signature.inputs
    if set(inputs) != {spec.name}:
        received = ", ".join(map(repr, sorted(inputs))) or "none"
        raise RequestError(
            f"The signature {signature.name!r} takes one input, `{spec.name}`. Received: "
            f"{received}."
        )
    if spec.dtype == "string":
        return spec, _strings(spec, inputs[spec.name])
    values = np.asarray(inputs[spec.name])
    if values.dtype.kind not in "iuf":
        raise RequestError(
            f"`{spec.name}` must hold numbers. Received: values of the type {values.dtype.name}."
        )
    _check_shape(spec, values.shape)
    return spec, values


def to_float32(spec: TensorSpec, values: np.ndarray) -> np.ndarray:
    """Return numbers as float32.

    Raises:
        RequestError: for those that are not finite, or too large for float32; it says
            in which example they are.
    """
    with np.errstate(over="ignore"):  # it becomes infinite, and is found
        values = np.ascontiguousarray(values, np.float32)
    finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if not finite.all():
        raise RequestError(
            f"`{spec.name}` must hold finite numbers that fit into float32. Received: another one "
            f"in example {finite.argmin()}."
        )
    return values


def _strings(spec: TensorSpec, values: Sequence[bytes] | np.ndarray) -> np.ndarray:
    items = np.empty(len(values), object) if isinstance(values, Sequence) else np.asarray(values)
    if isinstance(values, Sequence):
        items[:] = values
    _check_shape(spec, items.shape)
    for i, item in enumerate(items):
        if not isinstance(item, bytes):
            raise RequestError(
                f"`{spec.name}` must hold bytes: each the content of an image file. Received: a "
                f"value of the type {type(item).__name__} as number {i}."
            )
    return items


def _check_shape(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    wanted = ", ".join("any" if n is None else str(n) for n in spec.shape[1:])
    fits = len(shape) == len(spec.shape) and all(
        w in (None, n) for n, w in zip(shape[1:], spec.shape[1:], strict=True)
    )
    if not fits:
        text = f"(examples, {wanted})" if wanted else "(examples,)"
        raise RequestError(
            f"`{spec.name}` must have the shape {text}. Received: the shape {shape}."
        )
    if 0 in shape:
        raise RequestError(
            f"`{spec.name}` must hold at least one example. Received: the shape {shape}."
        )
