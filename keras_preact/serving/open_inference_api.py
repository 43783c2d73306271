"""The Open Inference Protocol, version 2, over HTTP, which KServe and Triton use: its
paths, its JSON and its binary tensors.
"""

import functools
import importlib.metadata
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keras_preact.export.version import class_scores
from keras_preact.serving import tensors
from keras_preact.serving.batching import Outputs
from keras_preact.serving.errors import RequestError, Unavailable
from keras_preact.serving.gate import as_json, inference, json_response, leased
from keras_preact.serving.servable import Servable
from keras_preact.serving.tensors import DEFAULT_SIGNATURE, MAX_AXES, Call, Signature, TensorSpec

HEADER = "Inference-Header-Content-Length"
#: Extensions of the protocol that are served, by Triton's names for them.
EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration", "statistics"]
TEXT = "BYTES"
_LENGTH = struct.Struct("<I")
#: Largest number of characters of a request's id, which its answer repeats.
MAX_ID = 1000
_SHARED = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")

_DATATYPES = (*(f"{u}INT{n}" for u in ("", "U") for n in (8, 16, 32, 64)), "FP16", "FP32", "FP64")

_NO_MEMORY = "shares no memory with its clients. Send the tensor, or receive it, in the body."
_NO_STATE = "keeps no state between requests: each is answered alone. Remove the parameter."
#: Parameters of the protocol and its extensions, for each part of a request. A type: the parameter
#: is served. A text: it would change the answer, and why this server refuses it. None: it does not
#: change the answer, and is ignored.
PARAMETERS: Mapping[str, Mapping[str, type | str | None]] = {
    "request": {
        "signature_name": str,
        "binary_data_output": bool,
        **dict.fromkeys(("sequence_id", "sequence_start", "sequence_end"), _NO_STATE),
        **dict.fromkeys(("priority", "timeout", "headers", "content_type")),
    },
    "input": {
        "binary_data_size": int,
        **dict.fromkeys(_SHARED, _NO_MEMORY),
        "content_type": None,
    },
    "output": {
        "binary_data": bool,
        "classification": int,
        **dict.fromkeys(_SHARED, _NO_MEMORY),
        "content_type": None,
    },
}
_WORDS = {str: "a text", bool: "true or false", int: "a whole number", list: "a list"}


@dataclass(frozen=True)
class _Input:
    """The input of a request; either its values or the size of their bytes is given."""

    name: str
    datatype: str
    shape: list[int]
    data: list | None
    binary_size: int | None

    @classmethod
    def of(cls, value: Any) -> "_Input":
        """Return an input from its JSON."""
        where = "inputs.0"
        known = ("name", "datatype", "shape", "data", "parameters")
        given = tensors.fields(value, known, where)
        datatype = _required(given, "datatype", str, where)
        if datatype not in (*_DATATYPES, TEXT):
            names = ", ".join((*_DATATYPES, TEXT))
            raise _refused(f"{where}.datatype", f"must be one of {names}", datatype)
        shape = _required(given, "shape", list, where)
        if len(shape) > MAX_AXES:
            raise _refused(f"{where}.shape", f"must hold at most {MAX_AXES} items", shape)
        for axis, length in enumerate(shape):
            if type(length) is not int or not 0 < length < 2**31:
                wanted = "must be a whole number greater than 0 and below 2147483648"
                raise _refused(f"{where}.shape.{axis}", wanted, length)
        size = _parameters(given, "input", where).get("binary_data_size")
        if size is not None and size < 0:
            raise _refused(f"{where}.parameters.binary_data_size", "must be 0 or more", size)
        name, data = _required(given, "name", str, where), _typed(given, "data", list, where)
        return cls(name, datatype, shape, data, size)


async def server_metadata(request: Request) -> Response:
    """The server's name, version and extensions of the protocol."""
    try:
        version = importlib.metadata.version("keras-preact")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"  # run from its source tree
    return json_response({"name": "keras-preact", "version": version, "extensions": EXTENSIONS})


async def live(request: Request) -> Response:
    """200 while the process answers and no batch takes longer than `hang_seconds`."""
    state = request.app.state
    limit = state.settings.hang_seconds
    for servable in state.repository.servables():
        if servable.batcher.busy_seconds > limit:
            raise Unavailable(
                f"Version {servable.version} of {servable.name} has computed one batch for more "
                f"than {limit:g} seconds."
            )
    return json_response({"live": True})


async def ready(request: Request) -> Response:
    """503 until a model is available, and again while the server stops."""
    state = request.app.state
    is_ready = not state.stopping and bool(state.repository.servables())
    return json_response({"ready": is_ready}, 200 if is_ready else 503)


async def model_metadata(request: Request) -> Response:
    """The tensors of the default signature, where clients look for a model's tensors,
    and the tensors of all signatures under `signatures`.
    """
    with leased(request) as servable:
        signatures = {
            name: {
                "inputs": [_described(one.input)],
                "outputs": [_described(spec) for spec in one.outputs.values()],
            }
            for name, one in servable.signatures.items()
        }
        versions = [str(n) for n in request.app.state.repository.available(servable.name)]
        about = {"name": servable.name, "versions": versions, "platform": "tensorflow_savedmodel"}
        return json_response(about | signatures[DEFAULT_SIGNATURE] | {"signatures": signatures})


async def model_ready(request: Request) -> Response:
    """200 if the model, or the version that the path names, is available."""
    with leased(request) as servable:
        return json_response({"name": servable.name, "ready": True})


def parse(request: Request, body: bytes, servable: Servable) -> Call:
    """Read an infer request: JSON, perhaps followed by the bytes of a binary tensor.
    The call's `form` holds the wanted outputs by name, and the request's own id.

    Raises:
        RequestError: if the body is not an infer request, or fits no signature.
    """
    length = request.headers.get(HEADER, str(len(body)))
    is_number = length.isascii() and length.isdecimal() and len(length) <= 18
    if not is_number or int(length) > len(body):
        raise RequestError(
            f"{HEADER} must be the length of the JSON that the body begins with. Received: "
            f"{tensors.shortened(length)} for a body of {len(body)} bytes"
        )
    head = int(length)
    document = tensors.parse_json(body if head == len(body) else body[:head])
    known = ("id", "model_name", "inputs", "outputs", "parameters")
    given = tensors.fields(document, known, "")
    model = _typed(given, "model_name", str, "")  # KServe's client repeats the path's
    if model not in (None, servable.name):
        raise _refused("model_name", f"must be {servable.name}, as in the path", model)
    request_id = _typed(given, "id", str, "")
    if request_id is not None and len(request_id) > MAX_ID:
        raise _refused("id", f"must have at most {MAX_ID} characters", request_id)
    parameters = _parameters(given, "request", "")
    inputs, outputs = _required(given, "inputs", list, ""), _typed(given, "outputs", list, "") or []
    if len(inputs) != 1:
        raise _refused("inputs", "must hold exactly one tensor", inputs)
    most = max(len(one.outputs) for one in servable.signatures.values())
    if len(outputs) > most:
        raise _refused("outputs", f"must hold at most {most} items", outputs)
    tensor = _Input.of(inputs[0])
    wanted = _outputs(outputs, parameters.get("binary_data_output", False))
    signature = _signature(
        parameters.get("signature_name"), tensor.name, wanted, servable.signatures
    )
    if not wanted:
        binary = parameters.get("binary_data_output", False)
        wanted = dict.fromkeys(signature.outputs, _Output(binary))
    for name, output in wanted.items():
        if output.most and signature.outputs[name].dtype == "string":
            where = f"outputs.{list(wanted).index(name)}.parameters.classification"
            raise RequestError(f"`{where}`: it is for numbers. Received: {name}, which has texts")
    servable.check_rows(max(tensor.shape[:1], default=0))
    signature.input.check_shape(tuple(tensor.shape))
    array = _tensor(tensor, memoryview(body)[head:])
    return Call.of(signature, array, (wanted, request_id))


@dataclass(frozen=True)
class _Output:
    """How a request wants an output: in binary or in JSON, and all of its values, or as many
    of the largest ones with their classes (`most`).
    """

    binary: bool
    most: int = 0


def _outputs(outputs: list, by_default: bool) -> dict[str, _Output]:
    """Return the outputs that a request names."""
    wanted: dict[str, _Output] = {}
    for number, value in enumerate(outputs):
        where = f"outputs.{number}"
        given = tensors.fields(value, ("name", "parameters"), where)
        name = _required(given, "name", str, where)
        if name in wanted:
            raise _refused(f"{where}.name", "must not be the name of another output, too", name)
        parameters = _parameters(given, "output", where)
        most = parameters.get("classification", 0)
        if most < 0:
            raise _refused(f"{where}.parameters.classification", "must be 0 or more", most)
        wanted[name] = _Output(parameters.get("binary_data", by_default), most)
    return wanted


def _parameters(given: Mapping[str, Any], part: str, where: str) -> dict[str, Any]:
    """Return the served parameters of a part of a request.

    Raises:
        RequestError: for a parameter that would change the answer, or an unknown one.
    """
    known, where = PARAMETERS[part], _inside(where, "parameters")
    values = tensors.fields(given.get("parameters", {}), known, where)
    for name, value in values.items():
        meaning = known[name]
        # 0, false and an empty text switch an extension off
        if isinstance(meaning, str) and value not in (0, ""):
            raise RequestError(
                f"`{where}.{name}`: this server {meaning} Received: {tensors.described(value)}"
            )
    return {
        name: _typed(values, name, kind, where)
        for name, kind in known.items()
        if isinstance(kind, type) and name in values
    }


def _required(given: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    value = _typed(given, name, kind, where)
    if value is None:
        raise _refused(_inside(where, name), f"must be {_WORDS[kind]}", None)
    return value


def _typed(given: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """Return a field, None if it is absent."""
    value = given.get(name)
    if value is not None and type(value) is not kind:  # true is no whole number
        raise _refused(_inside(where, name), f"must be {_WORDS[kind]}", value)
    return value


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _refused(where: str, wanted: str, value: Any) -> RequestError:
    received = "nothing" if value is None else tensors.described(value)
    return RequestError(f"`{where}`: it {wanted}. Received: {received}")


def _signature(
    chosen: str | None,
    name: str,
    outputs: Mapping[str, _Output],
    signatures: Mapping[str, Signature],
) -> Signature:
    """Return the signature with this input and these outputs. If the request chooses no
    signature, the default one is tried first, then the others.
    """
    if chosen is not None:
        candidates = [tensors.signature_named(chosen, signatures)]
    else:
        candidates = sorted(signatures.values(), key=lambda one: one.name != DEFAULT_SIGNATURE)
    for signature in candidates:
        if name == signature.input.name and outputs.keys() <= signature.outputs.keys():
            return signature
    known = "; ".join(f"{s.name}: {s.input.name} to {', '.join(s.outputs)}" for s in candidates)
    received = ", ".join(tensors.described(one) for one in [name, *[*outputs][:5]])
    raise RequestError(
        f"The input and outputs must belong to one signature ({known}). Received: {received}"
    )


def _tensor(tensor: _Input, binary: memoryview) -> np.ndarray:
    """Return an input as an array of its own datatype and shape."""
    name, shape, count = tensor.name, tensor.shape, math.prod(tensor.shape)
    size = tensor.binary_size
    if (size is None) == (tensor.data is None):
        raise RequestError(
            f"`{name}` must have either `data` or the parameter `binary_data_size`. Received: "
            f"{'neither' if size is None else 'both'}"
        )
    if (size or 0) != len(binary):
        raise RequestError(
            f"`binary_data_size` of `{name}` must be the number of bytes after the JSON. Received: "
            f"{size or 0} for {len(binary)} bytes"
        )
    if tensor.data is None:
        return from_bytes(binary, tensor.datatype, count, name).reshape(shape)
    flat = tensors.from_json(tensor.data, name, _dtype(tensor.datatype), count).ravel()
    if flat.size != count:
        raise RequestError(
            f"`{name}` must have {count} values, as its `shape` says. Received: {flat.size} values"
        )
    return flat.reshape(shape)


def from_bytes(data: memoryview, datatype: str, count: int, name: str) -> np.ndarray:
    """Return `count` values as an array of one axis.

    Raises:
        RequestError: if `data` does not hold exactly `count` values.
    """
    if datatype == TEXT:
        elements: list[bytes] = []
        start = 0
        while len(elements) < count and start + _LENGTH.size <= len(data):
            end = start + _LENGTH.size + _LENGTH.unpack_from(data, start)[0]
            elements.append(bytes(data[start + _LENGTH.size : end]))
            start = end
        if start != len(data) or len(elements) != count:
            raise RequestError(
                f"`{name}` must have {count} elements, each after the four bytes of its length, "
                f"and nothing more. Received: {len(data)} bytes"
            )
        return tensors.texts(elements)
    dtype = np.dtype(_dtype(datatype))
    if len(data) != count * dtype.itemsize:
        raise RequestError(
            f"`{name}` must have {count * dtype.itemsize} bytes, for {count} values of "
            f"{datatype}. Received: {len(data)} bytes"
        )
    return np.frombuffer(data, dtype)


def to_bytes(array: np.ndarray) -> bytes:
    """Return the values in order. Each text follows the four bytes of its length."""
    if array.dtype.kind != "O":
        return array.tobytes()
    texts = [text.encode() for text in array.ravel().tolist()]
    return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))


@inference(parse)
def infer(servable: Servable, call: Call, outputs: Outputs) -> Response:
    """Write the outputs that the request names, as JSON or as bytes after the JSON."""
    wanted, request_id = call.form
    answer: dict[str, Any] = {"model_name": servable.name, "model_version": str(servable.version)}
    if request_id is not None:
        answer["id"] = request_id
    if call.warning is not None:
        answer["parameters"] = {"warning": call.warning}
    described: list[dict[str, Any]] = []
    tail = []
    for name, output in wanted.items():
        array = _largest(servable, name, outputs[name], output.most)
        datatype = _datatype_of(array.dtype)
        tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": array.shape}
        if output.binary:
            tail.append(to_bytes(array))
            tensor["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            tensor["data"] = array.ravel()
        described.append(tensor)
    answer["outputs"] = described
    if not tail:
        return json_response(answer)
    head = as_json(answer)
    headers = {HEADER: str(len(head))}
    return Response(b"".join([head, *tail]), media_type="application/octet-stream", headers=headers)


def _largest(servable: Servable, name: str, array: np.ndarray, most: int) -> np.ndarray:
    """Return the largest values of each example as texts `VALUE:INDEX:CLASS`, as Triton
    writes them, without a class if the output has no entry for each class. If `most` is 0,
    return the array.
    """
    if not most:
        return array
    if name == "probabilities":  # of both classes of a binary classifier
        array = class_scores(array, len(servable.classes))
    rows = array.reshape(len(array), -1)
    is_of_classes = name in servable.signatures[DEFAULT_SIGNATURE].outputs
    labels = [f":{one}" for one in servable.classes] if is_of_classes else []
    if rows.shape[1] != len(labels):
        labels = [""] * rows.shape[1]
    order = (-rows).argsort(axis=1, kind="stable")[:, :most]
    texts = [
        f"{row[i]!s}:{i}{labels[i]}"
        for row, largest in zip(rows, order, strict=True)
        for i in largest
    ]
    return tensors.texts(texts).reshape(order.shape)


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": _datatype(spec.dtype), "shape": spec.lengths}


def _dtype(datatype: str) -> str:
    """Return TensorFlow's name of a datatype of the protocol."""
    return "string" if datatype == TEXT else datatype.lower().replace("fp", "float")


def _datatype(dtype: str) -> str:
    """Return the protocol's name of a dtype of TensorFlow or NumPy."""
    return TEXT if dtype in ("string", "object") else dtype.upper().replace("FLOAT", "FP")


@functools.lru_cache
def _datatype_of(dtype: np.dtype) -> str:
    return _datatype(dtype.name)  # NumPy computes the name each time


def _routes(path: str) -> list[Route]:
    return [
        Route(f"{path}/infer", infer, methods=["POST"]),
        Route(path, model_metadata),
        Route(f"{path}/ready", model_ready),
    ]


routes = [
    *_routes("/v2/models/{name}"),
    *_routes("/v2/models/{name}/versions/{version}"),
    Route("/v2", server_metadata),
    Route("/v2/health/live", live),
    Route("/v2/health/ready", ready),
]
