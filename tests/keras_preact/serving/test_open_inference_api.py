"""The Open Inference Protocol: JSON and binary tensors, against a
model computed by hand.
"""

import json
import re
import struct

import numpy as np
import pytest

from tests.keras_preact.serving import fakes

INFER = "/v2/models/toy/infer"
IMAGES = np.arange(8, dtype="float32").reshape(2, 2, 2, 1) / 4
TENSOR = {
    "name": "images",
    "datatype": "FP32",
    "shape": [2, 2, 2, 1],
    "data": IMAGES.ravel().tolist(),
}
FEATURES = {"outputs": [{"name": "features"}]}


def ask_binary(server, document, *parts, **tensor):
    """Send JSON with one input, and bytes after it."""
    if tensor:
        document = document | {"inputs": [TENSOR | tensor]}
        del document["inputs"][0]["data"]
    head = json.dumps(document).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return server.ask("POST", INFER, b"".join([head, *parts]), headers)


def outputs_of(answer):
    """Return the tensors of an answer by name, wherever they stand."""
    length = answer.headers["Inference-Header-Content-Length"]
    document = json.loads(answer.body if length is None else answer.body[: int(length)])
    rest = b"" if length is None else answer.body[int(length) :]
    kinds = {"FP32": "<f4", "INT32": "<i4", "BYTES": object}
    found = {}
    for tensor in document["outputs"]:
        size = tensor.get("parameters", {}).get("binary_data_size")
        if size is None:
            values = np.array(tensor["data"], kinds[tensor["datatype"]])
        elif tensor["datatype"] == "BYTES":
            texts, data = [], rest[:size]
            while data:
                (n,) = struct.unpack("<I", data[:4])
                texts, data = [*texts, data[4 : 4 + n].decode()], data[4 + n :]
            values = np.array(texts, object)
        else:
            values = np.frombuffer(rest[:size], kinds[tensor["datatype"]])
        rest = rest[size or 0 :]
        found[tensor["name"]] = values.reshape(tensor["shape"])
    assert not rest
    return found


LOGITS = [[image[0, 0, 0], image.sum(), 0] for image in IMAGES]


def test_an_answer_in_json(server):
    answer = server.ask("POST", INFER, {"id": "number 1", "inputs": [TENSOR]})
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    about = {"model_name": "toy", "model_version": "7", "id": "number 1"}
    assert answer.json.items() >= about.items()
    logits, probabilities = answer.json["outputs"]
    tensor = {"name": "probabilities", "datatype": "FP32", "shape": [2, 3]}
    assert probabilities.items() >= tensor.items()
    np.testing.assert_allclose(logits["data"], np.ravel(LOGITS))


def test_the_outputs_asked_for_choose_the_signature(server):
    answer = server.ask("POST", INFER, {"inputs": [TENSOR]} | FEATURES)
    assert outputs_of(answer).keys() == {"features"}
    np.testing.assert_array_equal(outputs_of(answer)["features"], IMAGES.reshape(2, 4))
    for data in (IMAGES.tolist(), IMAGES.reshape(4, 2).tolist()):  # data may be nested
        nested = server.ask("POST", INFER, {"inputs": [TENSOR | {"data": data}]} | FEATURES)
        assert nested.json == answer.json
    by_name = {"inputs": [TENSOR], "parameters": {"signature_name": "features"}}
    assert server.ask("POST", "/v2/models/toy/versions/7/infer", by_name).json == answer.json
    one = server.ask("POST", INFER, {"inputs": [TENSOR], "outputs": [{"name": "probabilities"}]})
    assert outputs_of(one).keys() == {"probabilities"}


@pytest.mark.parametrize(
    ("datatype", "dtype"),
    [("FP16", "<f2"), ("FP64", "<f8"), ("INT8", "i1"), ("INT64", "<i8"), ("UINT16", "<u2")],
)
def test_numbers_of_every_type_become_the_inputs(server, datatype, dtype):
    values = np.array([0, 1, 2, 3, 4, 5, 6, 127], dtype).reshape(IMAGES.shape)
    as_json = TENSOR | {"datatype": datatype, "data": values.tolist()}
    size = {"binary_data_size": values.nbytes}
    for answer in (
        server.ask("POST", INFER, {"inputs": [as_json]} | FEATURES),
        ask_binary(server, FEATURES, values.tobytes(), datatype=datatype, parameters=size),
    ):
        np.testing.assert_array_equal(outputs_of(answer)["features"], values.reshape(2, 4))


def test_binary_answers(server):
    document = {"inputs": [TENSOR], "parameters": {"binary_data_output": True}}
    plain = outputs_of(server.ask("POST", INFER, {"inputs": [TENSOR]}))
    answer = server.ask("POST", INFER, document)
    assert answer.headers["Content-Type"] == "application/octet-stream"
    for name, array in outputs_of(answer).items():
        np.testing.assert_array_equal(array, plain[name])
    # An output's own word counts more than the request's.
    logits = {"name": "logits", "parameters": {"binary_data": False}}
    document["outputs"] = [logits, {"name": "probabilities"}]
    answer = server.ask("POST", INFER, document)
    length = int(answer.headers["Inference-Header-Content-Length"])
    tensors = json.loads(answer.body[:length])["outputs"]
    assert ["data" in tensor for tensor in tensors] == [True, False]
    for name, array in outputs_of(answer).items():
        np.testing.assert_array_equal(array, plain[name])


@pytest.mark.parametrize(
    ("tensor", "tail"),
    [
        ({"data": ["12", "0"]}, []),
        ({"data": [{"b64": "MTI="}, "0"]}, []),
        ({"data": ["MTI=", "MA"], "parameters": {"content_type": "base64"}}, []),
        ({"parameters": {"binary_data_size": 11}}, [b"\2\0\0\0" + b"12" + b"\1\0\0\0" + b"0"]),
    ],
)
def test_images_as_bytes(server, tensor, tail):
    tensor = {"name": "image_bytes", "datatype": "BYTES", "shape": [2]} | tensor
    for binary in (False, True):
        answer = ask_binary(
            server, {"inputs": [tensor], "parameters": {"binary_data_output": binary}}, *tail
        )
        assert answer.status == 200, answer.body
        outputs = outputs_of(answer)
        assert outputs["classes"].tolist() == [["dog", "cat"], ["cat", "dog"]]
        assert outputs["indices"].tolist() == [[1, 0], [0, 1]]


REFUSED = [
    ({"inputs": []}, "`inputs`: .*at least 1 item"),
    ({"inputs": [TENSOR, TENSOR]}, "at most 1 item"),
    ({"inputs": [TENSOR | {"name": "nope"}]}, 'images to .*Received: the text "nope"'),
    ({"inputs": [TENSOR], "outputs": [{"name": "nope"}]}, "nope"),
    ({"inputs": [TENSOR], "outputs": [{"name": "features"}, {"name": "logits"}]}, "one signature"),
    ({"inputs": [TENSOR], "parameters": {"signature_name": 7}}, "signature_name`: .*Received: 7"),
    ({"inputs": [TENSOR | {"datatype": "FP8"}]}, "`inputs.0.datatype`: .*FP8"),
    ({"inputs": [TENSOR | {"datatype": "BYTES", "data": ["a"] * 8}]}, "must hold float32"),
    ({"inputs": [TENSOR | {"datatype": "INT32", "data": [0.5] * 8}]}, "whole numbers"),
    ({"inputs": [TENSOR | {"shape": [2, 4]}]}, "must have 4 numbers"),
    ({"inputs": [TENSOR | {"shape": [2, 2, 2, 2]}]}, "must have 16 values"),
    ({"inputs": [TENSOR | {"shape": [2**31 - 1] * 4}]}, "values"),
    ({"inputs": [TENSOR | {"shape": [10**30, 2, 2, 1]}]}, "`inputs.0.shape.0`: "),
    ({"inputs": [TENSOR | {"data": [1, [2]] * 4}]}, "a list of 1"),
    ({"inputs": [TENSOR | {"data": [1e39] * 8}]}, "fit float32"),
    ({"inputs": [TENSOR | {"parameters": {"binary_data_size": 32}}]}, "either `data` or"),
    ({"inputs": [{key: TENSOR[key] for key in ("name", "datatype", "shape")}]}, "either `data` or"),
    ({"inputs": [TENSOR | {"shape": [0, 2, 2, 1], "data": []}]}, "images"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_what_does_not_fit_is_refused_with_its_reason(server, body, message):
    answer = server.ask("POST", INFER, body)
    assert answer.status == 400
    assert re.search(message, answer.json["error"])


@pytest.mark.parametrize(
    ("datatype", "size", "tail", "message"),
    [
        ("FP32", 31, bytes(31), "must have 32 bytes"),
        ("FP32", 32, bytes(31), "32 for 31 bytes"),
        ("FP32", 32, bytes(33), "32 for 33 bytes"),
        ("FP32", -1, bytes(32), "binary_data_size"),
        ("BOOL", 8, b"\2" * 8, "0 and 1"),
        ("BYTES", 8, b"\xff" * 8, "8 elements"),
        ("BYTES", 36, bytes(36), "8 elements"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(server, datatype, size, tail, message):
    parameters = {"binary_data_size": size}
    answer = ask_binary(server, {}, tail, datatype=datatype, parameters=parameters)
    assert answer.status == 400
    assert message in answer.json["error"]


@pytest.mark.parametrize("length", ["-1", "x", "1" * 30, "100000", "\xb2"])
def test_a_length_of_the_json_that_is_none(server, length):
    headers = {"Inference-Header-Content-Length": length}
    assert server.ask("POST", INFER, {"inputs": [TENSOR]}, headers).status == 400


def test_metadata_and_health(server):
    assert server.ask("GET", "/v2").json["extensions"] == ["binary_tensor_data"]
    assert server.ask("GET", "/v2/health/live").json == {"live": True}
    assert server.ask("GET", "/v2/health/ready").json == {"ready": True}
    about = server.ask("GET", "/v2/models/toy").json
    assert about == server.ask("GET", "/v2/models/toy/versions/7").json
    assert about["versions"] == ["7"]
    assert about["inputs"] == [{"name": "images", "datatype": "FP32", "shape": [-1, 2, 2, 1]}]
    assert [tensor["name"] for tensor in about["outputs"]] == ["logits", "probabilities"]
    assert about["signatures"].keys() == fakes.SIGNATURES.keys()
    assert about["signatures"]["predict_bytes"]["inputs"] == [
        {"name": "image_bytes", "datatype": "BYTES", "shape": [-1]}
    ]
    assert server.ask("GET", "/v2/models/toy/ready").json == {"name": "toy", "ready": True}
    for path, status in [("slow", 503), ("nope", 404), ("toy/versions/8", 404)]:
        answer = server.ask("GET", f"/v2/models/{path}/ready")
        assert (answer.status, answer.json["ready"]) == (status, False)
        assert server.ask("GET", f"/v2/models/{path}").status == status
        assert server.ask("POST", f"/v2/models/{path}/infer", {"inputs": [TENSOR]}).status == status


def test_health_when_nothing_is_ready_or_a_batch_does_not_end():
    with fakes.in_process() as server:
        server.repository.is_ready = False
        assert server.ask("GET", "/v2/health/ready").status == 503
        assert server.ask("GET", "/v2/health/live").status == 200
        server.servable.busy_seconds = 119.0
        assert server.ask("GET", "/v2/health/live").status == 200
        server.servable.busy_seconds = 121.0
        answer = server.ask("GET", "/v2/health/live")
        assert answer.status == 503
        assert answer.json["error"].startswith("Version 7 of toy has computed one batch for more")
