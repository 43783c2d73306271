"""The Open Inference Protocol, version 2, over HTTP: the API of KServe and Triton, its
paths, its JSON and its binary tensors.
"""

import dataclasses
import importlib.metadata
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import orjson
import pydantic
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keras_preact.serving import tensors
from keras_preact.serving.errors import NotFound, RequestError, Unavailable
from keras_preact.serving.gate import inference, json_response, leased
from keras_preact.serving.tensors import (
    DEFAULT_SIGNATURE,
    Signature,
    TensorSpec,
    described,
    shortened,
    shown,
)

HEADER = "Inference-Header-Content-Length"
TEXT = "BYTES"
#: TensorFlow's dtypes and the protocol's.
DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "string": TEXT,
}
_DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}
_LENGTH = struct.Struct("<I")


class _Parameters(pydantic.BaseModel, frozen=True):  # hashable: a default is not copied
    signature_name: str | None = None
    binary_data_output: bool = False
    binary_data: bool | None = None
    binary_data_size: Annotated[int, Field(ge=0)] | None = None
    content_type: Any = None
    #: Triton's: so many best classes of an output instead of its numbers; 0: the numbers.
    classification: Annotated[int, Field(ge=0)] = 0


class _Output(pydantic.BaseModel):
    name: str
    parameters: _Parameters = _Parameters()


class _Input(_Output):
    datatype: Literal[tuple(DATATYPES.values())]  # type: ignore[valid-type]
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]]
    data: list | None = None


class _Infer(pydantic.BaseModel):
    """The JSON of an infer request."""

    inputs: Annotated[list[_Input], Field(min_length=1)]
    outputs: list[_Output] = []
    parameters: _Parameters = _Parameters()
    id: str | None = None


AnyOutput = TypeVar("AnyOutput", bound=_Output)


@dataclass(frozen=True)
class Call:
    """A signature to run. `outputs` are the tensors to answer; True: in binary.
    `classification`: of which to name the best classes, and how many. `warning`: what
    the client should know of the inputs.
    """

    signature: str
    inputs: dict[str, np.ndarray]
    outputs: dict[str, bool]
    id: str | None
    classification: dict[str, int] = dataclasses.field(default_factory=dict)
    warning: str | None = None


@inference
async def infer(request: Request, body: bytes, deadline: float) -> Response:
    """Compute the outputs that the request names; tensors are JSON, or bytes after it."""
    length = request.headers.get(HEADER, str(len(body)))
    if not (length.isascii() and length.isdecimal() and len(length) <= 18):
        raise RequestError(f"{HEADER} must be the length of the JSON, a whole number.")
    run = request.app.state.workers.run
    with leased(request) as servable:
        call = await run(len(body), parse, body, int(length), servable.signatures)
        outputs = await servable.predict(call.signature, call.inputs, deadline)
        for name, k in call.classification.items():
            outputs = outputs | {name: classified(outputs[name], k, name, servable.classes)}
        size = sum(outputs[name].nbytes for name in call.outputs)
        content, head = await run(size, dump, call, outputs, servable.name, servable.version)
    if head is None:
        return Response(content, media_type="application/json")
    return Response(content, media_type="application/octet-stream", headers={HEADER: str(head)})


async def server_metadata(request: Request) -> Response:
    """The server's name, version and extensions of the protocol."""
    try:
        version = importlib.metadata.version("keras-preact")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"  # run from its source tree
    return json_response(
        {"name": "keras-preact", "version": version, "extensions": ["binary_tensor_data"]}
    )


async def live(request: Request) -> Response:
    """200 as long as the process answers and no network is computed without end."""
    state = request.app.state
    repository, limit = state.repository, state.settings.hang_seconds
    for name in repository.names():
        for version in repository.available(name):
            with repository.lease(name, version) as servable:
                if servable.busy_seconds > limit:
                    raise Unavailable(
                        f"Version {version} of {name} has computed one batch for more than "
                        f"{limit:g} seconds."
                    )
    return json_response({"live": True})


async def ready(request: Request) -> Response:
    """503 until a model is available, and after the server is told to stop."""
    state = request.app.state
    is_ready = not state.stopping and state.repository.ready()
    return json_response({"ready": is_ready}, 200 if is_ready else 503)


async def model_metadata(request: Request) -> Response:
    """The tensors of the default signature, where clients look for a model's, and those
    of each under `signatures`.
    """
    with leased(request) as servable:
        versions = [str(n) for n in request.app.state.repository.available(servable.name)]
        signatures = {
            name: {side: _described(getattr(signature, side)) for side in ("inputs", "outputs")}
            for name, signature in servable.signatures.items()
        }
        about = {"name": servable.name, "versions": versions, "platform": "tensorflow_savedmodel"}
        return json_response(about | signatures[DEFAULT_SIGNATURE] | {"signatures": signatures})


async def model_ready(request: Request) -> Response:
    """200 if the model, or the version that the path names, is available."""
    try:
        with leased(request) as servable:
            return json_response({"name": servable.name, "ready": True})
    except (NotFound, Unavailable) as error:
        name = shortened(request.path_params["name"])
        return json_response({"name": name, "ready": False, "error": error.message}, error.status)


def parse(body: bytes, json_length: int, signatures: Mapping[str, Signature]) -> Call:
    """Read the body of an infer request.

    Args:
        body: JSON, and the bytes of the binary tensors in the order of the inputs.
        json_length: Bytes of the JSON.
        signatures: Those of the model.

    Raises:
        RequestError: if it is not one, or fits no signature.
    """
    data = memoryview(body)
    if json_length > len(data):
        raise RequestError(
            f"The body must have the {json_length} bytes of JSON announced. Received: {len(data)} "
            "bytes"
        )
    rest = data[json_length:]
    document = tensors.validated(_Infer, tensors.parse_json(data[:json_length]))
    given = _by_name(document.inputs, "inputs")
    wanted = _by_name(document.outputs, "outputs")
    signature = _signature(document.parameters.signature_name, signatures, set(given), set(wanted))

    arrays = {}
    for name, tensor in given.items():
        size = tensor.parameters.binary_data_size
        if size is not None and size > len(rest):
            raise RequestError(
                f"`binary_data_size` of `{name}` must be a number of the {len(rest)} bytes left "
                f"after the JSON. Received: {size}"
            )
        binary = None if size is None else rest[:size]
        arrays[name], rest = _tensor(tensor, signature.inputs[name], binary), rest[size or 0 :]
    if len(rest):
        raise RequestError(
            f"The body holds {len(rest)} bytes after the JSON that no input's `binary_data_size` "
            "claims."
        )
    by_default = document.parameters.binary_data_output
    outputs = {
        name: by_default if one.parameters.binary_data is None else one.parameters.binary_data
        for name, one in wanted.items()
    }
    arrays = signature.check(arrays)
    return Call(
        signature.name,
        arrays,
        outputs or dict.fromkeys(signature.outputs, by_default),
        document.id,
        {name: k for name, one in wanted.items() if (k := one.parameters.classification)},
        signature.warning(arrays),
    )


def classified(scores: np.ndarray, k: int, name: str, classes: list[str]) -> np.ndarray:
    """Return the `k` best classes of each row as Triton writes them, score:index:class.

    Raises:
        RequestError: if the output has no score for each class.
    """
    if scores.ndim != 2 or scores.dtype.kind != "f" or scores.shape[1] != len(classes):
        raise RequestError(
            f"`classification` needs an output with a score for each class. Received: `{name}`"
        )
    indices, values = tensors.highest(scores, k)
    found = [
        [f"{value:f}:{index}:{classes[index]}" for value, index in zip(*row, strict=True)]
        for row in zip(values, indices, strict=True)
    ]
    return np.array(found, dtype=object)


def dump(
    call: Call, outputs: Mapping[str, np.ndarray], model: str, version: int
) -> tuple[bytes, int | None]:
    """Write the answer.

    Returns:
        The body, and the length of its JSON if binary tensors follow.
    """
    described_outputs, tail = [], []
    for name, binary in call.outputs.items():
        array = outputs[name]
        datatype = TEXT if array.dtype.kind == "O" else DATATYPES[array.dtype.name]
        tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": array.shape}
        if binary:
            tail.append(to_bytes(array))
            tensor["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            tensor["data"] = tensors.to_json(array.ravel())
        described_outputs.append(tensor)
    answer: dict[str, Any] = {
        "model_name": model,
        "model_version": str(version),
        "outputs": described_outputs,
    }
    if call.id is not None:
        answer["id"] = call.id
    if call.warning is not None:
        answer["parameters"] = {"warning": call.warning}
    head = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join([head, *tail]), len(head) if tail else None


def to_bytes(array: np.ndarray) -> bytes:
    """Return the values in order, little-endian. A text follows the four bytes of its
    length.
    """
    if array.dtype.kind != "O":
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    texts = (text.encode() if isinstance(text, str) else text for text in array.ravel().tolist())
    return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))


def from_bytes(data: memoryview, datatype: str, count: int, name: str) -> np.ndarray:
    """Return `count` values as an array of one axis.

    Raises:
        RequestError: if `data` does not hold exactly as many.
    """
    if datatype == TEXT:
        return _texts(data, count, name)
    dtype = np.dtype(_DTYPES[datatype]).newbyteorder("<")
    if len(data) != count * dtype.itemsize:
        raise RequestError(
            f"`{name}` must have {count * dtype.itemsize} bytes, for {count} values of "
            f"{datatype}. Received: {len(data)} bytes"
        )
    if datatype == "BOOL" and any(bytes(data).translate(None, b"\0\1")):
        raise RequestError(f"`{name}` must hold bytes 0 and 1, to be BOOL.")
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="), copy=False)


def _texts(data: memoryview, count: int, name: str) -> np.ndarray:
    found: list[bytes] = []
    at = 0
    while len(found) < count and at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        end = at + _LENGTH.size + length
        if end > len(data):
            break
        found.append(bytes(data[end - length : end]))
        at = end
    if at != len(data) or len(found) != count:
        raise RequestError(
            f"`{name}` must have {count} elements, each after the four bytes of its length, and "
            f"nothing more. Received: {len(data)} bytes, of which the first {at} hold "
            f"{len(found)} elements"
        )
    return tensors.texts(found)


def _described(specs: Mapping[str, TensorSpec]) -> list[dict[str, Any]]:
    return [
        {
            "name": spec.name,
            "datatype": DATATYPES[spec.dtype],
            "shape": [-1 if length is None else length for length in spec.shape],
        }
        for spec in specs.values()
    ]


def _by_name(objects: Sequence[AnyOutput], key: str) -> dict[str, AnyOutput]:
    found = {one.name: one for one in objects}
    if len(found) < len(objects):
        raise RequestError(f"Each of `{key}` must have a `name` of its own.")
    return found


def _signature(
    named: str | None, signatures: Mapping[str, Signature], given: set[str], wanted: set[str]
) -> Signature:
    """Return the signature that the request names, or the first, the default one before
    others, that has these inputs and outputs.
    """
    if named is not None:
        candidates = [tensors.signature_named(named, signatures)]
    else:
        names = sorted(signatures, key=lambda name: (name != DEFAULT_SIGNATURE, name))
        candidates = [signatures[name] for name in names]
    for signature in candidates:
        if given == signature.inputs.keys() and wanted <= signature.outputs.keys():
            return signature
    known = "; ".join(
        f"{one.name}: {' and '.join(one.inputs)} to {', '.join(one.outputs)}" for one in candidates
    )
    received = f"inputs {', '.join(map(described, sorted(given)[:5]))}"
    if wanted:
        received += f" and outputs {', '.join(map(described, sorted(wanted)[:5]))}"
    raise RequestError(
        f"The inputs and outputs must be those of one signature ({known}). Received: {received}"
    )


def _tensor(tensor: _Input, spec: TensorSpec, binary: memoryview | None) -> np.ndarray:
    """Return an input as an array of its own datatype and shape."""
    name, shape, count = tensor.name, tensor.shape, math.prod(tensor.shape)
    if len(shape) != len(spec.shape):
        raise RequestError(
            f"`shape` of `{name}` must have {len(spec.shape)} numbers, for {shown(spec.shape)}. "
            f"Received: {shown(tuple(shape))[:200]}"
        )
    if binary is not None and tensor.data is None:
        return from_bytes(binary, tensor.datatype, count, name).reshape(shape)
    if binary is not None or tensor.data is None:
        raise RequestError(f"`{name}` must have either `data` or the parameter `binary_data_size`.")
    flat = tensors.from_json(tensor.data, name, _DTYPES[tensor.datatype]).ravel()
    if flat.size != count:
        raise RequestError(
            f"`{name}` must have {count} values, as its `shape` says. Received: {flat.size} values"
        )
    if tensor.datatype == TEXT and tensor.parameters.content_type == "base64":
        flat = tensors.texts([tensors.from_base64(text.decode(), name) for text in flat])
    return flat.reshape(shape)


def _routes(path: str) -> list[Route]:
    return [
        Route(path, model_metadata),
        Route(f"{path}/ready", model_ready),
        Route(f"{path}/infer", infer, methods=["POST"]),
    ]


routes = [
    Route("/v2", server_metadata),
    Route("/v2/health/live", live),
    Route("/v2/health/ready", ready),
    *_routes("/v2/models/{name}"),
    *_routes("/v2/models/{name}/versions/{version}"),
]
