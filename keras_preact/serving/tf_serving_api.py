"""TensorFlow Serving's REST API: its paths and its JSON."""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keras_preact.serving import tensors
from keras_preact.serving.errors import NotFound, RequestError, Unavailable
from keras_preact.serving.gate import inference, json_response, leased, version_of
from keras_preact.serving.tensors import DEFAULT_SIGNATURE, Signature, described


class _ModelName(StringConvertor):
    """A model's name in a path: the text before the method's colon."""

    regex = "[^/:]+"


register_url_convertor("model", _ModelName())


@dataclass(frozen=True)
class Call:
    """A signature to run. `by_rows`: the request is a list of rows, and so is the answer.
    `warning`: what the client should know of the inputs.
    """

    signature: str
    inputs: dict[str, np.ndarray]
    by_rows: bool
    warning: str | None = None


@inference
async def predict(request: Request, body: bytes, deadline: float) -> Response:
    """Compute a signature's outputs: one object per example, or one tensor per output,
    in the form of the request.
    """
    run = request.app.state.workers.run
    with leased(request) as servable:
        call = await run(len(body), parse_predict, body, servable.signatures)
        outputs = await servable.predict(call.signature, call.inputs, deadline)
        size = sum(array.nbytes for array in outputs.values())
        content = await run(size, dump_predict, outputs, call.by_rows, call.warning)
    return Response(content, media_type="application/json")


@inference
async def classify(request: Request, body: bytes, deadline: float) -> Response:
    """Name the most probable classes of each example, highest first."""
    with leased(request) as servable:
        call = await request.app.state.workers.run(
            len(body), parse_classify, body, servable.signatures
        )
        outputs = await servable.predict(call.signature, call.inputs, deadline)
        content = dump_classify(outputs, servable.classes, servable.top_k, call.warning)
    return Response(content, media_type="application/json")


async def regress(request: Request) -> Response:
    """Refuse: TensorFlow Serving has it for other kinds of models."""
    raise RequestError(
        "The models here are classifiers, without a regression: ask for :predict or :classify."
    )


async def unknown_method(request: Request) -> Response:
    """Refuse, and name the methods that exist."""
    raise RequestError(
        "A model has the methods predict and classify. Received: "
        f"{request.path_params['method'][:40]}"
    )


async def model_status(request: Request) -> Response:
    """The states of a model's versions, or of the one that the path names."""
    name, version = request.path_params["name"], version_of(request)
    found = [
        {
            "version": str(status.version),
            "state": status.state,
            "status": {"error_code": status.error_code, "error_message": status.error_message},
        }
        for status in request.app.state.repository.status(name)
        if version in (None, status.version)
    ]
    if not found:
        raise NotFound(f"{name} has no version {version}.")
    return json_response({"model_version_status": found})


async def model_metadata(request: Request) -> Response:
    """The signatures, as TensorFlow describes them."""
    with leased(request) as servable:
        version = str(servable.version)
        return json_response(
            {
                "model_spec": {"name": servable.name, "signature_name": "", "version": version},
                "metadata": {"signature_def": {"signature_def": servable.signature_defs}},
            }
        )


async def models(request: Request) -> Response:
    """Every model, with what a person needs to choose one and send it an image.
    TensorFlow Serving has no such list.
    """
    repository = request.app.state.repository
    found = []
    for name in repository.names():
        about: dict[str, Any] = {
            "name": name,
            "versions": [
                {"version": str(status.version), "state": status.state}
                for status in repository.status(name)
            ],
            "classes": None,
            "input": None,
            "takes_images": False,
        }
        try:
            with repository.lease(name) as servable:
                [spec] = servable.signatures[DEFAULT_SIGNATURE].inputs.values()
                about["classes"] = len(servable.classes)
                about["input"] = {"shape": spec.shape}
                about["takes_images"] = "predict_bytes" in servable.signatures
        except (NotFound, Unavailable):
            pass  # the states say it
        found.append(about)
    return json_response({"models": found})


def parse_predict(body: bytes, signatures: Mapping[str, Signature]) -> Call:
    """Read the body of a `:predict` request.

    Raises:
        RequestError: if it is not one, or does not fit the signature that it names.
    """
    document = tensors.parse_json(body)
    signature = _signature(document, signatures)
    formats = [key for key in ("instances", "inputs") if key in document]
    if len(formats) != 1:
        raise RequestError(
            "The body must hold either `instances`, a list of rows, or `inputs`, the tensors. "
            f"Received: {described(document)}"
        )
    [key] = formats
    given = document[key]
    if key == "instances":
        columns = _columns(given, signature)
    elif len(signature.inputs) == 1 and not _is_named(given):
        columns = dict.fromkeys(signature.inputs, given)
    else:
        columns = _named(given, "`inputs`", signature)
    arrays = {
        name: tensors.from_json(columns[name], name, spec.dtype)
        for name, spec in signature.inputs.items()
    }
    arrays = signature.check(arrays)
    return Call(signature.name, arrays, key == "instances", signature.warning(arrays))


def dump_predict(
    outputs: Mapping[str, np.ndarray], by_rows: bool, warning: str | None = None
) -> bytes:
    """Write the answer to a `:predict` request."""
    values = {name: _encoded(name, array) for name, array in outputs.items()}
    alone = next(iter(values.values())) if len(values) == 1 else None
    answer: Any
    if not by_rows:
        answer = {"outputs": values if alone is None else alone}
    elif alone is not None:
        answer = {"predictions": alone}
    else:
        rows = zip(*values.values(), strict=True)
        answer = {"predictions": [dict(zip(values, row, strict=True)) for row in rows]}
    return _dumped(answer, warning)


def parse_classify(body: bytes, signatures: Mapping[str, Signature]) -> Call:
    """Read the body of a `:classify` request: examples that all have `image_bytes`, or
    all the float `images`.

    Raises:
        RequestError: if it is not one, or the model takes no such examples.
    """
    document = tensors.parse_json(body)
    _signature(document, signatures)  # the examples choose it, but a wrong one is a mistake
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
            f"`context` must be an object, which all examples share. Received: {described(context)}"
        )
    # Encoded images have a signature of their own, which knows the classes; pixels go through the
    # default one.
    ways = {
        feature: signatures[name]
        for name in ("predict_bytes", DEFAULT_SIGNATURE)
        if name in signatures and len(signatures[name].inputs) == 1
        for feature in signatures[name].inputs
    }
    keys = {frozenset(context.keys() | example.keys()) for example in examples}
    feature = next((name for name in ways if keys == {frozenset([name])}), None)
    if feature is None:
        raise RequestError(
            "Each of `examples` must hold one value, in all of them the same one of "
            f"{', '.join(ways)}. Received: {described(examples[0])} first"
        )
    signature = ways[feature]
    spec = signature.inputs[feature]
    array = tensors.from_json(
        [(context | example)[feature] for example in examples], feature, spec.dtype
    )
    lengths = [-1 if length is None else length for length in spec.shape[1:]]
    if array.ndim == 2 and math.prod(lengths) == array.shape[1]:
        array = array.reshape(-1, *lengths)  # flat, as in a tf.train.Example
    arrays = signature.check({feature: array})
    return Call(signature.name, arrays, by_rows=True, warning=signature.warning(arrays))


def dump_classify(
    outputs: Mapping[str, np.ndarray],
    classes: list[str],
    top_k: int,
    warning: str | None = None,
) -> bytes:
    """Write the answer to a `:classify` request: for each example its most probable
    classes, highest first.
    """
    if "classes" in outputs:
        labels, scores = outputs["classes"].tolist(), outputs["scores"]
    else:
        indices, scores = tensors.highest(outputs["probabilities"], top_k)
        labels = [[classes[index] for index in row] for row in indices]
    results = [list(zip(*pair, strict=True)) for pair in zip(labels, scores, strict=True)]
    return _dumped({"results": results}, warning)


def _dumped(answer: dict[str, Any], warning: str | None) -> bytes:
    if warning is not None:
        answer["warning"] = warning
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def _signature(document: dict[str, Any], signatures: Mapping[str, Signature]) -> Signature:
    name = document.get("signature_name", DEFAULT_SIGNATURE)
    # Clients send an empty name for an unset field.
    return tensors.signature_named(DEFAULT_SIGNATURE if name == "" else name, signatures)


def _columns(rows: Any, signature: Signature) -> dict[str, Any]:
    """Return the values of each input from a list of rows."""
    if not (isinstance(rows, list) and rows):
        raise RequestError(
            f"`instances` must be a list of at least one row. Received: {described(rows)}"
        )
    if len(signature.inputs) == 1 and not any(map(_is_named, rows)):
        return dict.fromkeys(signature.inputs, rows)
    rows = [_named(row, "Each of `instances`", signature) for row in rows]
    return {name: [row[name] for row in rows] for name in signature.inputs}


def _named(value: Any, what: str, signature: Signature) -> dict[str, Any]:
    if not (isinstance(value, dict) and value.keys() == signature.inputs.keys()):
        names = " and ".join(f"`{name}`" for name in signature.inputs)
        alone = ", or its value alone" if len(signature.inputs) == 1 else ""
        raise RequestError(
            f"{what} must be an object with the inputs of {signature.name}, {names}{alone}. "
            f"Received: {described(value)}"
        )
    return value


def _is_named(value: Any) -> bool:
    """Whether a value is an object of named inputs, and not one of encoded bytes."""
    return isinstance(value, dict) and value.keys() != {tensors.BASE64_KEY}


def _encoded(name: str, array: np.ndarray) -> Any:
    if name.endswith("_bytes") and array.dtype.kind == "O":
        encode = np.frompyfunc(
            lambda value: {tensors.BASE64_KEY: base64.b64encode(value).decode()}, 1, 1
        )
        return encode(array).tolist()
    return tensors.to_json(array)


def _routes(path: str) -> list[Route]:
    methods: dict[str, Any] = {"predict": predict, "classify": classify, "regress": regress}
    return [
        *(
            Route(f"{path}:{method}", endpoint, methods=["POST"])
            for method, endpoint in methods.items()
        ),
        Route(f"{path}:{{method}}", unknown_method, methods=["POST"]),
        Route(path, model_status),
        Route(f"{path}/metadata", model_metadata),
    ]


routes = [
    Route("/v1/models", models),
    *_routes("/v1/models/{name:model}"),
    *_routes("/v1/models/{name:model}/versions/{version:model}"),
    *_routes("/v1/models/{name:model}/labels/{label:model}"),
]
