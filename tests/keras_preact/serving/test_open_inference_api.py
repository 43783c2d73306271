"""The Open Inference Protocol: JSON and binary tensors, against a model computed by
hand.
"""

import dataclasses
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from keras_preact.serving import open_inference_api
from keras_preact.serving.settings import Settings
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
LOGITS = [[image[0, 0, 0], image.sum(), 0] for image in IMAGES]


def ask_binary(server, document, *parts, **tensor):
    """Send JSON with one input, and bytes after it."""
    if tensor:
        document = document | {"inputs": [TENSOR | tensor]}
        del document["inputs"][0]["data"]
    head = json.dumps(document).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return server.ask("POST", INFER, b"".join([head, *parts]), headers)


def outputs_of(answer):
    """Return the tensors of an answer by name, wherever they are."""
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
    # An output's own word counts more than the request's.
    logits = {"name": "logits", "parameters": {"binary_data": False}}
    chosen = document | {"outputs": [logits, {"name": "probabilities"}]}
    for request, in_json in ((document, [False, False]), (chosen, [True, False])):
        answer = server.ask("POST", INFER, request)
        assert answer.headers["Content-Type"] == "application/octet-stream"
        length = int(answer.headers["Inference-Header-Content-Length"])
        assert ["data" in one for one in json.loads(answer.body[:length])["outputs"]] == in_json
        for name, array in outputs_of(answer).items():
            np.testing.assert_array_equal(array, plain[name])


@pytest.mark.parametrize(
    ("tensor", "tail"),
    [
        ({"data": ["12", "0"]}, []),
        ({"data": [{"b64": "MTI="}, {"b64": "MA"}]}, []),
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


@pytest.mark.parametrize(
    ("name", "most", "expected"),
    [
        ("logits", 1, [["1.5:1:dog"], ["5.5:1:dog"]]),
        (
            "logits",
            9,
            [
                ["1.5:1:dog", "0.0:0:cat", "0.0:2:émeu"],
                ["5.5:1:dog", "1.0:0:cat", "0.0:2:émeu"],
            ],
        ),
        ("features", 2, [["0.75:3", "0.5:2"], ["1.75:3", "1.5:2"]]),  # are of no classes
    ],
)
@pytest.mark.parametrize("binary", [False, True])
def test_the_largest_values_with_their_classes(server, name, most, expected, binary):
    parameters = {"classification": most, "binary_data": binary}
    document = {"inputs": [TENSOR], "outputs": [{"name": name, "parameters": parameters}]}
    [tensor] = outputs_of(server.ask("POST", INFER, document)).values()
    assert tensor.tolist() == expected


@pytest.mark.parametrize(
    ("classes", "name", "expected"),
    [
        (
            ["cat", "dog"],
            "probabilities",
            [["0.75:0:cat", "0.25:1:dog"], ["0.5:0:cat", "0.5:1:dog"]],
        ),
        (["dog"], "probabilities", [["0.25:0:dog"], ["0.5:0:dog"]]),
        (["cat", "dog"], "logits", [["0.25:0"], ["0.5:0"]]),
    ],
)
def test_the_classes_of_a_binary_classifier(classes, name, expected):
    servable = fakes.load(Path("toy/7"), Settings("models"))
    servable = dataclasses.replace(servable, classes=classes)
    found = open_inference_api._largest(servable, name, np.array([[0.25], [0.5]]), 2)
    assert found.tolist() == expected


def test_metadata_and_health(server):
    extensions = server.ask("GET", "/v2").json["extensions"]
    assert {"binary_tensor_data", "classification"} <= {*extensions}
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
    for path, status in [("bad", 503), ("nope", 404), ("toy/versions/8", 404)]:
        assert server.ask("GET", f"/v2/models/{path}/ready").status == status
