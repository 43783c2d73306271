"""TensorFlow Serving's REST API: its paths and its JSON."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keras_preact.serving import json_rows, tensors
from keras_preact.serving.batching import Outputs
from keras_preact.serving.errors import NotFound, RequestError
from keras_preact.serving.gate import inference, json_response, leased, version_of
from keras_preact.serving.servable import Servable
from keras_preact.serving.tensors import DEFAULT_SIGNATURE, Call, Signature, TensorSpec, described


class _ModelName(StringConvertor):
    """A model's name in a path: the text before the method's colon."""

    regex = "[^/:]+"


register_url_convertor("model", _ModelName())


async def model_status(request: Request) -> Response:
    """The states of a model's versions, or of the one that the path names."""
    name, version = request.path_params["name"], version_of(request)
    versions = request.app.state.repository.status(name)
    statuses = [
        {
            "version": str(status.version),
            "state": status.state,
            "status": {"error_code": status.error_code, "error_message": status.error_message},
        }
        for status in versions
        if version in (None, status.version)
    ]
    if not statuses:
        known = [status.version for status in versions]
        raise NotFound(f"Model {name!r} has the versions {known}. Received: version {version}")
    return json_response({"model_version_status": statuses})


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
    """Every model and each of its versions, with what a person needs to choose one and send
    it an image; a model itself is described by its highest available version. TensorFlow
    Serving has no such list.
    """
    repository = request.app.state.repository
    entries = []
    for name in repository.names():
        status = repository.status(name)
        available = [one.servable for one in status if one.state == "AVAILABLE"]
        versions = [
            {"version": str(one.version), "state": one.state} | _about(one.servable)
            for one in status
        ]
        about = _about(available[-1] if available else None)
        entries.append({"name": name, "versions": versions} | about)
    return json_response({"models": entries})


def _about(servable: Servable | None) -> dict[str, Any]:
    """Describe a version. None: it is not loaded, and nothing is known about it."""
    if servable is None:
        return {"classes": None, "input": None, "takes_images": False}
    return {
        "classes": len(servable.classes),
        "input": {"shape": servable.signatures[DEFAULT_SIGNATURE].input.shape},
        "takes_images": "predict_bytes" in servable.signatures,
    }


def parse_predict(request: Request, body: bytes, servable: Servable) -> Call:
    """Read the body of a `:predict` request. The call's `form` says whether the
    request, and so the answer, is a list of rows.

    Raises:
        RequestError: if the body is not such a request, or does not fit the signature
            that it names.
    """
    call = _of_regular_rows(body, servable)
    if call is not None:
        return call
    known = ("signature_name", "instances", "inputs")
    document = tensors.fields(tensors.parse_json(body), known, "")
    signature = _signature(document, servable.signatures)
    formats = [key for key in ("instances", "inputs") if key in document]
    if len(formats) != 1:
        raise RequestError(
            "The body must hold either `instances`, a list of rows, or `inputs`, the tensors. "
            f"Received: {described(document)}"
        )
    [key] = formats
    content, name = document[key], signature.input.name
    if key == "instances":
        if not (isinstance(content, list) and content):
            raise RequestError(
                f"`instances` must be a list of at least one row. Received: {described(content)}"
            )
        servable.check_rows(len(content))
        content = [_value(row, name) for row in content]
    else:
        content = _value(content, name)
        if isinstance(content, list):
            servable.check_rows(len(content))
    array = _from_json(content, signature.input, servable)
    return Call.of(signature, array, key == "instances")


def _of_regular_rows(body: bytes, servable: Servable) -> Call | None:
    """Return the call of a body that holds rows of numbers and at most the name of a
    signature, None for every other body.
    """
    found = json_rows.split(body)
    if found is None or found[1] not in ("instances", "inputs"):
        return None
    document, key, text = found
    name = document.pop("signature_name", None)
    name = DEFAULT_SIGNATURE if name is None or name == "" else name
    if document or not isinstance(name, str) or name not in servable.signatures:
        return None
    signature = servable.signatures[name]
    lengths = [length for length in signature.input.shape[1:] if length is not None]
    if signature.input.dtype != "float32" or len(lengths) != len(signature.input.shape) - 1:
        return None
    array = json_rows.read(text, lengths, servable.batcher.max_batch_size)
    return None if array is None else Call.of(signature, array, key == "instances")


@inference(parse_predict)
def predict(servable: Servable, call: Call, outputs: Outputs) -> Response:
    """Write a signature's outputs in the form of the request: one object per example,
    or one tensor per output. A single output is written without its name.
    """
    answer: Any = outputs
    if len(outputs) == 1:
        [answer] = outputs.values()
    elif call.form:
        rows = zip(*outputs.values(), strict=True)
        answer = [dict(zip(outputs, row, strict=True)) for row in rows]
    return _answer({"predictions" if call.form else "outputs": answer}, call)


def parse_classify(request: Request, body: bytes, servable: Servable) -> Call:
    """Read the body of a `:classify` request: examples that all have `image_bytes`, or
    all have the float `images`.

    Raises:
        RequestError: if the body is not such a request, or the model takes no such
            examples.
    """
    known = ("signature_name", "examples", "context")
    document, signatures = tensors.fields(tensors.parse_json(body), known, ""), servable.signatures
    _signature(document, signatures)  # the examples choose it, but a wrong name is an error
    examples, context = document.get("examples", document), document.get("context", {})
    if isinstance(examples, list):
        servable.check_rows(len(examples))
    if not (isinstance(examples, list) and examples and {*map(type, examples)} == {dict}):
        raise RequestError(
            f"`examples` must be a list of at least one object. Received: {described(examples)}"
        )
    if not isinstance(context, dict):
        raise RequestError(f"`context` must be an object. Received: {described(context)}")
    # Encoded images have a signature of their own, which knows the classes; pixels go through the
    # default one.
    ways = {
        signatures[name].input.name: signatures[name]
        for name in ("predict_bytes", DEFAULT_SIGNATURE)
        if name in signatures
    }
    # An object may have a million keys: it is not copied for each example.
    is_small = len(context) < 2 and all(len(one) < 2 for one in examples)
    merged = [context | one for one in examples] if is_small else []
    name = next((name for name in ways if all({*one} == {name} for one in merged)), None)
    if name is None or not merged:
        received = examples[0] or context
        raise RequestError(
            "Each of `examples` must hold one value, and all of them the same one of "
            f"{', '.join(ways)}. Received: {described(received)} first"
        )
    spec = ways[name].input
    array = _from_json([one[name] for one in merged], spec, servable)
    lengths = spec.lengths[1:]
    if array.ndim == 2 and math.prod(lengths) == array.shape[1]:
        array = array.reshape(-1, *lengths)  # flat, as in a tf.train.Example
    return Call.of(ways[name], array)


@inference(parse_classify)
def classify(servable: Servable, call: Call, outputs: Outputs) -> Response:
    """Name the most probable classes of each example, highest first."""
    if "classes" not in outputs:
        outputs = servable.best(outputs["probabilities"])
    pairs = zip(outputs["classes"], outputs["scores"], strict=True)
    return _answer({"results": [list(zip(*pair, strict=True)) for pair in pairs]}, call)


def _answer(content: dict[str, Any], call: Call) -> Response:
    return json_response(content if call.warning is None else content | {"warning": call.warning})


def _signature(document: dict[str, Any], signatures: Mapping[str, Signature]) -> Signature:
    name = document.get("signature_name", "")
    # Clients send an empty name for an unset field.
    return tensors.signature_named(DEFAULT_SIGNATURE if name == "" else name, signatures)


def _from_json(value: Any, spec: TensorSpec, servable: Servable) -> np.ndarray:
    most = spec.most_values(servable.batcher.max_batch_size)
    return tensors.from_json(value, spec.name, spec.dtype, most)


def _value(content: Any, name: str) -> Any:
    """Return the value of an input that a client sent with or without the input's name."""
    return content[name] if isinstance(content, dict) and content.keys() == {name} else content


def _routes(path: str) -> list[Route]:
    return [
        Route(f"{path}:predict", predict, methods=["POST"]),
        Route(f"{path}:classify", classify, methods=["POST"]),
        Route(path, model_status),
        Route(f"{path}/metadata", model_metadata),
    ]


routes = [
    *_routes("/v1/models/{name:model}"),
    *_routes("/v1/models/{name:model}/versions/{version:model}"),
    *_routes("/v1/models/{name:model}/labels/{label:model}"),
    Route("/v1/models", models),
]
