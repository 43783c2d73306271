"""The Open Inference Protocol's JSON and binary tensors: requests to arrays, arrays to
answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from keras_preact.serving import datatypes, json_body, values
from keras_preact.serving.errors import RequestError
from keras_preact.serving.json_body import described
from keras_preact.serving.tensors import Signature, TensorSpec

DEFAULT_SIGNATURE = "serving_default"


@dataclass(frozen=True)
class Call:
    """A signature to run, and what to answer: `outputs` says of each tensor wanted
    whether it goes out in binary.
    """

    signature: str
    inputs: dict[str, np.ndarray]
    outputs: dict[str, bool]
    id: str | None


def parse(body: bytes, json_length: int | None, signatures: Mapping[str, Signature]) -> Call:
    """Read the body of an infer request.

    Args:
        body: JSON, and the bytes of the binary tensors in the order of the inputs.
        json_length: Bytes of the JSON, as `Inference-Header-Content-Length` says.
            `None`: all.
        signatures: Those of the model.

    Raises:
        RequestError: if it is not one, or fits no signature.
    """
    data = memoryview(body)
    json_length = len(data) if json_length is None else json_length
    if json_length > len(data):
        raise RequestError(
            f"The body must have the {json_length} bytes of JSON announced. Received: {len(data)} "
            "bytes"
        )
    document = json_body.parse(data[:json_length])
    identity = document.get("id")
    if not isinstance(identity, str | None):
        raise RequestError(f"`id` must be a text. Received: {described(identity)}")
    parameters = _parameters(document, "the request")
    given = _named(document.get("inputs"), "inputs")
    wanted = _named(document.get("outputs", []), "outputs")
    signature = _signature(parameters, signatures, set(given), set(wanted))

    inputs, rest = {}, data[json_length:]
    for spec_name, tensor in given.items():
        spec = next(spec for spec in signature.inputs if spec.name == spec_name)
        size = _parameters(tensor, spec_name).get("binary_data_size")
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(rest):
                raise RequestError(
                    f"`binary_data_size` of `{spec_name}` must be a number of the {len(rest)} "
                    f"bytes left after the JSON. Received: {described(size)}"
                )
            inputs[spec_name], rest = _tensor(tensor, spec, rest[:size]), rest[size:]
        else:
            inputs[spec_name] = _tensor(tensor, spec, None)
    if len(rest):
        raise RequestError(
            f"The body holds {len(rest)} bytes after the JSON that no input's `binary_data_size` "
            "claims."
        )

    binary = _flag(parameters, "binary_data_output", False)
    outputs = {
        name: _flag(_parameters(tensor, name), "binary_data", binary)
        for name, tensor in wanted.items()
    }
    return Call(
        signature.name,
        inputs,
        outputs or {spec.name: binary for spec in signature.outputs},
        identity,
    )


def dump(
    call: Call, outputs: Mapping[str, np.ndarray], model: str, version: int
) -> tuple[bytes, int | None]:
    """Write the answer. Returns the body, and the length of its JSON where binary
    tensors follow.
    """
    tensors, tail = [], []
    for name, binary in call.outputs.items():
        array = outputs[name]
        tensor: dict[str, Any] = {
            "name": name,
            "datatype": datatypes.name_of(array),
            "shape": array.shape,
        }
        if binary:
            tail.append(datatypes.to_bytes(array))
            tensor["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            tensor["data"] = values.to_json(array.ravel())
        tensors.append(tensor)
    answer = {"model_name": model, "model_version": str(version), "outputs": tensors}
    if call.id is not None:
        answer["id"] = call.id
    head = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join([head, *tail]), len(head) if tail else None


def describe(signature: Signature) -> dict[str, list[dict[str, Any]]]:
    """Return a signature's tensors as the protocol's metadata has them."""

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        shape = [-1 if length is None else length for length in spec.shape]
        return {"name": spec.name, "datatype": datatypes.NAMES[spec.dtype], "shape": shape}

    return {
        "inputs": [tensor(spec) for spec in signature.inputs],
        "outputs": [tensor(spec) for spec in signature.outputs],
    }


def _named(tensors: Any, key: str) -> dict[str, dict]:
    """Return the objects of a list by their names."""
    if not isinstance(tensors, list) or (key == "inputs" and not tensors):
        raise RequestError(
            f"`{key}` must be a list of objects with a `name`. Received: {described(tensors)}"
        )
    found: dict[str, dict] = {}
    for tensor in tensors:
        name = tensor.get("name") if isinstance(tensor, dict) else None
        if not isinstance(name, str) or name in found:
            raise RequestError(
                f"Each of `{key}` must be an object with a `name` of its own. Received: "
                f"{described(tensor)}"
            )
        found[name] = tensor
    return found


def _signature(
    parameters: dict, signatures: Mapping[str, Signature], given: set[str], wanted: set[str]
) -> Signature:
    """Return the signature asked for, or the first, the default one before others, that
    has these inputs and outputs.
    """
    asked = parameters.get("signature_name")
    if asked is not None and not (isinstance(asked, str) and asked in signatures):
        raise RequestError(
            f"`signature_name` must be one of {', '.join(sorted(signatures))}. Received: "
            f"{described(asked)}"
        )
    candidates = (
        [asked]
        if asked is not None
        else sorted(signatures, key=lambda name: (name != DEFAULT_SIGNATURE, name))
    )
    for name in candidates:
        inputs, outputs = (
            {spec.name for spec in side}
            for side in (signatures[name].inputs, signatures[name].outputs)
        )
        if given == inputs and wanted <= outputs:
            return signatures[name]
    known = "; ".join(
        f"{name}: {' and '.join(spec.name for spec in signatures[name].inputs)} to "
        f"{', '.join(spec.name for spec in signatures[name].outputs)}"
        for name in candidates
    )
    received = f"inputs {', '.join(map(described, sorted(given)[:5]))}"
    if wanted:
        received += f" and outputs {', '.join(map(described, sorted(wanted)[:5]))}"
    raise RequestError(
        f"The inputs and outputs must be those of one signature ({known}). Received: {received}"
    )


def _tensor(tensor: dict, spec: TensorSpec, data: memoryview | None) -> np.ndarray:
    """Return an input as an array of the signature's dtype."""
    name, datatype, shape = spec.name, tensor.get("datatype"), tensor.get("shape")
    if not isinstance(datatype, str) or datatype not in datatypes.DTYPES:
        raise RequestError(
            f"`datatype` of `{name}` must be one of {', '.join(datatypes.DTYPES)}. Received: "
            f"{described(datatype)}"
        )
    if not (
        isinstance(shape, list)
        and all(type(length) is int and 0 <= length < 2**31 for length in shape)
    ):
        raise RequestError(
            f"`shape` of `{name}` must be a list of whole numbers, 0 or more. Received: "
            f"{described(shape)}"
        )
    if len(shape) != len(spec.shape):
        raise RequestError(
            f"`shape` of `{name}` must have {len(spec.shape)} numbers, for "
            f"{values.shown(spec.shape)}. Received: {values.shown(tuple(shape))[:200]}"
        )
    count = values.size(tuple(shape))
    if (data is None) is ("data" not in tensor):
        raise RequestError(f"`{name}` must have either `data` or the parameter `binary_data_size`.")
    flat = (
        _from_json(tensor, name, datatype)
        if data is None
        else datatypes.from_bytes(data, datatype, count, name)
    )
    if flat.size != count:
        raise RequestError(
            f"`{name}` must have {count} values, as its `shape` says. Received: {flat.size} values"
        )
    return values.cast(flat, name, spec.dtype).reshape(shape)


def _from_json(tensor: dict, name: str, datatype: str) -> np.ndarray:
    """Return the values of `data`, flat or nested; those of BYTES may be base64 where
    `content_type` says so.
    """
    data = tensor["data"]
    if not isinstance(data, list):
        raise RequestError(f"`data` of `{name}` must be a list. Received: {described(data)}")
    flat = values.flat_array(data, name, datatypes.DTYPES[datatype])
    if datatype == datatypes.TEXT and _parameters(tensor, name).get("content_type") == "base64":
        flat[:] = [values.from_base64(text.decode(), name) for text in flat]
    return flat


def _parameters(owner: dict, name: str) -> dict:
    parameters = owner.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(
            f"`parameters` of {name} must be an object. Received: {described(parameters)}"
        )
    return parameters


def _flag(parameters: dict, name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"`{name}` must be true or false. Received: {described(value)}")
    return value
