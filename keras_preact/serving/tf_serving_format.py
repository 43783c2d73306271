"""TensorFlow Serving's JSON: requests to arrays, arrays to answers."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from keras_preact.serving import json_body, values
from keras_preact.serving.errors import RequestError
from keras_preact.serving.json_body import described
from keras_preact.serving.tensors import Signature, TensorSpec, highest

DEFAULT_SIGNATURE = "serving_default"


@dataclass(frozen=True)
class Call:
    """A signature to run. `by_rows`: asked for as a list of rows, and so answered."""

    signature: str
    inputs: dict[str, np.ndarray]
    by_rows: bool


def parse_predict(body: bytes, signatures: Mapping[str, Signature]) -> Call:
    """Read the body of a `:predict` request.

    Raises:
        RequestError: if it is not one, or does not fit the signature that it names.
    """
    document = json_body.parse(body)
    signature = _signature(document, signatures)
    formats = [key for key in ("instances", "inputs") if key in document]
    if len(formats) != 1:
        raise RequestError(
            "The body must hold either `instances`, a list of rows, or `inputs`, the tensors. "
            f"Received: {described(document)}"
        )
    by_rows = formats == ["instances"]
    columns = (
        _columns(document["instances"], signature)
        if by_rows
        else _tensors(document["inputs"], signature)
    )
    inputs = {spec.name: values.to_array(columns[spec.name], spec) for spec in signature.inputs}
    return Call(signature.name, inputs, by_rows)


def dump_predict(outputs: Mapping[str, np.ndarray], by_rows: bool) -> bytes:
    """Write the answer to a `:predict` request."""
    tensors = {name: _encoded(name, array) for name, array in outputs.items()}
    answer: Any
    if not by_rows:
        answer = {"outputs": next(iter(tensors.values())) if len(tensors) == 1 else tensors}
    elif len(tensors) == 1:
        answer = {"predictions": next(iter(tensors.values()))}
    else:
        answer = {
            "predictions": [
                dict(zip(tensors, row, strict=True)) for row in zip(*tensors.values(), strict=True)
            ]
        }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def parse_classify(body: bytes, signatures: Mapping[str, Signature]) -> Call:
    """Read the body of a `:classify` request: examples that all have `image_bytes`, or
    all the float `images`.

    Raises:
        RequestError: if it is not one, or the model takes no such examples.
    """
    document = json_body.parse(body)
    _signature(
        document, signatures
    )  # the examples choose it, but a wrong one is no typing error to pass over
    examples, context = document.get("examples"), document.get("context", {})
    if not (
        isinstance(examples, list)
        and examples
        and all(isinstance(example, dict) for example in examples)
    ):
        raise RequestError(
            f"`examples` must be a list of at least one object. Received: {described(examples)}"
        )
    if not isinstance(context, dict):
        raise RequestError(
            f"`context` must be an object, what all examples share. Received: {described(context)}"
        )
    # Encoded images have a signature of their own, which knows the classes; pixels go through the
    # default one.
    ways = {
        specs[0].name: (name, specs[0])
        for name in ("predict_bytes", DEFAULT_SIGNATURE)
        if name in signatures and len(specs := signatures[name].inputs) == 1
    }
    keys = {frozenset(context.keys() | example.keys()) for example in examples}
    feature = next(iter(next(iter(keys))), None)
    if len(keys) != 1 or keys != {frozenset([feature])} or feature not in ways:
        raise RequestError(
            "Each of `examples` must hold one value, in all of them the same one of "
            f"{', '.join(ways)}. Received: {described(examples[0])} first"
        )
    name, spec = ways[feature]
    column = [(context | example)[feature] for example in examples]
    return Call(name, {feature: _feature(column, spec)}, by_rows=True)


def dump_classify(outputs: Mapping[str, np.ndarray], classes: list[str], top_k: int) -> bytes:
    """Write the answer to a `:classify` request: for each example its most probable
    classes, highest first.
    """
    if "classes" in outputs:
        labels, scores = outputs["classes"].tolist(), outputs["scores"]
    else:
        indices, scores = highest(outputs["probabilities"], top_k)
        labels = [[classes[index] for index in row] for row in indices]
    results = [list(zip(*pair, strict=True)) for pair in zip(labels, scores, strict=True)]
    return orjson.dumps({"results": results}, option=orjson.OPT_SERIALIZE_NUMPY)


def _signature(document: dict[str, Any], signatures: Mapping[str, Signature]) -> Signature:
    name = document.get("signature_name", DEFAULT_SIGNATURE)
    # An empty name is what a client's unset field says.
    signature = signatures.get(name or DEFAULT_SIGNATURE) if isinstance(name, str) else None
    if signature is None:
        raise RequestError(
            f"`signature_name` must be one of {', '.join(sorted(signatures))}. Received: "
            f"{described(name)}"
        )
    return signature


def _columns(rows: Any, signature: Signature) -> dict[str, list]:
    """Return the values of each input from a list of rows."""
    if not (isinstance(rows, list) and rows):
        raise RequestError(
            f"`instances` must be a list of at least one row. Received: {described(rows)}"
        )
    names = {spec.name for spec in signature.inputs}
    if len(names) == 1 and not any(_is_named(row) for row in rows):
        return {signature.inputs[0].name: rows}
    for row in rows:
        if not isinstance(row, dict) or row.keys() != names:
            raise RequestError(
                f"Each of `instances` must be an object with the inputs of {signature.name}, "
                f"{_quoted(signature)}"
                f"{', or all of them its value alone' if len(names) == 1 else ''}. Received: "
                f"{described(row)}"
            )
    return {name: [row[name] for row in rows] for name in names}


def _tensors(inputs: Any, signature: Signature) -> dict[str, Any]:
    names = {spec.name for spec in signature.inputs}
    if len(names) == 1 and not _is_named(inputs):
        return {signature.inputs[0].name: inputs}
    if not isinstance(inputs, dict) or inputs.keys() != names:
        raise RequestError(
            f"`inputs` must be an object with the inputs of {signature.name}, {_quoted(signature)}"
            f"{', or its value alone' if len(names) == 1 else ''}. Received: {described(inputs)}"
        )
    return inputs


def _is_named(value: Any) -> bool:
    """Whether a value is an object of named inputs, and not one of encoded bytes."""
    return isinstance(value, dict) and value.keys() != {values.BASE64_KEY}


def _quoted(signature: Signature) -> str:
    return " and ".join(f"`{spec.name}`" for spec in signature.inputs)


def _feature(column: list, spec: TensorSpec) -> np.ndarray:
    """Return the values of one feature of all examples: with their own axes, or flat as
    in a tf.train.Example.
    """
    lengths = spec.shape[1:]
    flat = all(
        isinstance(value, list) and value and not isinstance(value[0], list) for value in column
    )
    if flat and spec.dtype == "string":
        return values.to_array(column, TensorSpec(spec.name, spec.dtype, (None, 1))).ravel()
    if flat and len(lengths) > 1 and None not in lengths:
        size = values.size(lengths)  # type: ignore[arg-type]
        rows = values.to_array(column, TensorSpec(spec.name, spec.dtype, (None, size)))
        if rows.shape[1] != size:
            raise RequestError(
                f"`{spec.name}` must have {size} numbers, or lists for the shape "
                f"{values.shown(lengths)}. Received: {rows.shape[1]} numbers"
            )
        return rows.reshape(-1, *lengths)
    return values.to_array(column, spec)


def _encoded(name: str, array: np.ndarray) -> Any:
    if name.endswith("_bytes") and array.dtype.kind == "O":
        encode = np.frompyfunc(
            lambda value: {values.BASE64_KEY: base64.b64encode(value).decode()}, 1, 1
        )
        return encode(array).tolist()
    return values.to_json(array)
