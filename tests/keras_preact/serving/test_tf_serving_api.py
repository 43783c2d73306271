"""TensorFlow Serving's REST API, against a model computed by hand."""

import base64
import re

import numpy as np
import orjson
import pytest
from google.protobuf import json_format

from keras_preact.preprocessing import InputRange
from keras_preact.serving import open_inference_api, tensors, tf_serving_api
from keras_preact.serving.errors import RequestError
from tests.keras_preact.serving import fakes

PREDICT = "/v1/models/toy:predict"
CLASSIFY = "/v1/models/toy:classify"
IMAGES = np.arange(8, dtype="float32").reshape(2, 2, 2, 1) / 4
ROWS = IMAGES.tolist()


def b64(data: bytes) -> dict:
    return {"b64": base64.b64encode(data).decode()}


def expected_logits():
    return [[image[0, 0, 0], image.sum(), 0] for image in IMAGES]


def test_rows_are_answered_by_rows(server):
    answer = server.ask("POST", PREDICT, {"instances": ROWS})
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json.keys() == {"predictions"}
    assert [row.keys() for row in answer.json["predictions"]] == [{"logits", "probabilities"}] * 2
    np.testing.assert_allclose(
        [row["logits"] for row in answer.json["predictions"]], expected_logits()
    )
    np.testing.assert_allclose(
        [sum(row["probabilities"]) for row in answer.json["predictions"]], 1, rtol=1e-6
    )


@pytest.mark.parametrize("path", [PREDICT, "/v1/models/toy/versions/7:predict"])
@pytest.mark.parametrize("instances", [ROWS, [{"images": row} for row in ROWS]])
@pytest.mark.parametrize(
    "headers",
    [{}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}],
)
def test_one_output_stands_alone(server, path, instances, headers):
    answer = server.ask(
        "POST", path, {"signature_name": "features", "instances": instances}, headers
    )
    assert (answer.status, answer.json) == (200, {"predictions": IMAGES.reshape(2, 4).tolist()})


@pytest.mark.parametrize("inputs", [ROWS, {"images": ROWS}])
def test_columns_are_answered_by_columns(server, inputs):
    answer = server.ask("POST", PREDICT, {"inputs": inputs})
    assert answer.json.keys() == {"outputs"}
    assert answer.json["outputs"].keys() == {"logits", "probabilities"}
    np.testing.assert_allclose(answer.json["outputs"]["logits"], expected_logits())
    answer = server.ask("POST", PREDICT, {"signature_name": "features", "inputs": inputs})
    assert answer.json == {"outputs": IMAGES.reshape(2, 4).tolist()}


@pytest.mark.parametrize("name", ["", "serving_default"])
def test_the_default_signature_may_be_named_or_left_empty(server, name):
    body = {"signature_name": name, "instances": ROWS}
    assert (
        server.ask("POST", PREDICT, body).json
        == server.ask("POST", PREDICT, {"instances": ROWS}).json
    )


@pytest.mark.parametrize(
    "body",
    [
        {"instances": [b64(b"12"), b64(b"0")]},
        {"instances": [{"image_bytes": b64(b"12")}, {"image_bytes": b64(b"0")}]},
        {"instances": ["12", "0"]},  # text is bytes too
    ],
)
def test_bytes_come_as_base64(server, body):
    rows = server.ask("POST", PREDICT, body | {"signature_name": "predict_bytes"}).json[
        "predictions"
    ]
    assert [row["classes"] for row in rows] == [["dog", "cat"], ["cat", "dog"]]
    assert [row["indices"] for row in rows] == [[1, 0], [0, 1]]
    np.testing.assert_allclose(rows[1]["scores"], [1 / 3, 1 / 3], rtol=1e-6)
    columns = {"signature_name": "predict_bytes", "inputs": [b64(b"12"), b64(b"0")]}
    assert server.ask("POST", PREDICT, columns).json["outputs"]["classes"] == [
        ["dog", "cat"],
        ["cat", "dog"],
    ]


def test_several_inputs_of_other_types_and_bytes_as_output(server):
    body = {
        "signature_name": "pair",
        "instances": [{"number": 5, "flag": True}, {"flag": False, "number": -1}],
    }
    assert server.ask("POST", PREDICT, body).json == {
        "predictions": [
            {"text_bytes": b64(b"5True"), "twice": 10},
            {"text_bytes": b64(b"-1False"), "twice": -2},
        ]
    }
    body = {"signature_name": "pair", "inputs": {"number": [5, -1], "flag": [True, False]}}
    assert server.ask("POST", PREDICT, body).json == {
        "outputs": {"text_bytes": [b64(b"5True"), b64(b"-1False")], "twice": [10, -2]}
    }


REFUSED = [
    ({}, "either `instances`"),
    ({"instances": ROWS, "inputs": ROWS}, "either `instances`"),
    ({"instances": []}, "at least one row"),
    ({"instances": None}, "Received: null"),
    ({"instances": {"images": ROWS}}, "an object with the keys"),
    ({"instances": [{"pictures": ROWS[0]}]}, 'Received: an object with the keys "pictures"'),
    ({"instances": [{"images": ROWS[0]}, ROWS[1]]}, "or its value alone"),
    ({"inputs": {"images": ROWS, "more": 1}}, "an object with the inputs of serving_default"),
    (
        {"instances": ROWS, "signature_name": "nope"},
        "features, pair, predict_bytes, serving_default",
    ),
    ({"instances": ROWS, "signature_name": ["features"]}, "a list of 1"),
    ({"instances": [[[1, 2], [3, 4]]]}, "must have the shape"),
    ({"instances": [[[[1], [2]], [[3]]]]}, "equal length"),
    ({"instances": [[[[1], [2]], [[3], ["4"]]]]}, 'must hold numbers.*the text "4"'),
    ({"instances": [[[[1], [2]], [[3], [None]]]]}, "null"),
    ({"instances": [[[[1], [2]], [[3], [True]]]]}, "true"),
    ({"instances": [[[[1], [2]], [[3], [[4]]]]]}, "not both"),
    ({"instances": [[[[1], [2]], [[3], [1e300]]]]}, "fit float32"),
    ({"instances": [[[[1], [2]], [[3], [10**4000]]]]}, "infinity"),
    ({"instances": [{"b64": "MTI"}]}, "must hold numbers"),
    ({"instances": [{"b64": "M!I"}], "signature_name": "predict_bytes"}, "base64"),
    ({"instances": [{"b64": 7}], "signature_name": "predict_bytes"}, "b64"),
    ({"instances": [7], "signature_name": "predict_bytes"}, "the number 7"),
    (
        {"inputs": {"number": [2**31], "flag": [True]}, "signature_name": "pair"},
        "-2147483648 to 2147483647",
    ),
    ({"inputs": {"number": [2**70], "flag": [True]}, "signature_name": "pair"}, "whole numbers"),
    ({"inputs": {"number": [1.0], "flag": [True]}, "signature_name": "pair"}, "whole numbers"),
    ({"inputs": {"number": [1], "flag": [1]}, "signature_name": "pair"}, "true or false"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_what_does_not_fit_is_refused_with_its_reason(server, body, message):
    answer = server.ask("POST", PREDICT, body)
    assert answer.status == 400
    assert answer.json.keys() == {"error"}
    assert re.search(message, answer.json["error"])


def test_classes_of_encoded_images(server):
    answer = server.ask(
        "POST", CLASSIFY, {"examples": [{"image_bytes": b64(b"12")}, {"image_bytes": b64(b"0")}]}
    )
    [first, second] = answer.json["results"]
    assert [label for label, _ in first] == ["dog", "cat"]
    assert first[0][1] > 0.99
    np.testing.assert_allclose([score for _, score in second], 1 / 3, rtol=1e-6)


@pytest.mark.parametrize(
    "examples",
    [[{"images": row} for row in ROWS], [{"images": np.ravel(row).tolist()} for row in ROWS]],
)
def test_classes_of_pixels_nested_or_flat(server, examples):
    results = server.ask("POST", CLASSIFY, {"examples": examples}).json["results"]
    probabilities = server.ask("POST", PREDICT, {"inputs": ROWS}).json["outputs"]["probabilities"]
    for result, row in zip(results, probabilities, strict=True):
        best = sorted(range(3), key=lambda index: (-row[index], index))[:2]
        assert result == [[fakes.CLASSES[index], row[index]] for index in best]


def test_examples_share_their_context(server):
    alone = server.ask("POST", CLASSIFY, {"examples": [{"images": ROWS[0]}]}).json
    assert (
        server.ask("POST", CLASSIFY, {"context": {"images": ROWS[0]}, "examples": [{}]}).json
        == alone
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"examples": []},
        {"examples": {"image_bytes": b64(b"1")}},
        {"examples": [b64(b"1")]},
        {"examples": [{}]},
        {"examples": [{"image_bytes": b64(b"1")}, {"images": ROWS[0]}]},
        {"examples": [{"images": [1, 2, 3]}]},
        {"examples": [{"images": [1, 2, 3, "4"]}]},
        {"examples": [{"image_bytes": [[b64(b"1")]]}]},
        {"examples": [{"images": ROWS[0]}], "context": []},
        {"examples": [{"images": ROWS[0]}], "signature_name": "nope"},
        {"examples": [{"images": ROWS[0]}], "signature_name": [1]},
    ],
)
def test_examples_that_are_none_are_refused(server, body):
    answer = server.ask("POST", CLASSIFY, body)
    assert answer.status == 400
    assert "Received: " in answer.json["error"]


def test_status_is_the_message_that_clients_parse(server):
    apis = pytest.importorskip("tensorflow_serving.apis.get_model_status_pb2")
    for path in ("/v1/models/toy", "/v1/models/toy/versions/7"):
        answer = server.ask("GET", path)
        parsed = json_format.ParseDict(answer.json, apis.GetModelStatusResponse())
        assert answer.json == json_format.MessageToDict(
            parsed, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        [version] = parsed.model_version_status
        assert (version.version, version.state) == (7, apis.ModelVersionStatus.AVAILABLE)
    [broken] = server.ask("GET", "/v1/models/bad").json["model_version_status"]
    assert broken == {
        "version": "1",
        "state": "END",
        "status": {"error_code": "INTERNAL", "error_message": "It is broken."},
    }


def test_metadata_names_the_version(server):
    answer = server.ask("GET", "/v1/models/toy/metadata").json
    assert answer == server.ask("GET", "/v1/models/toy/versions/7/metadata").json
    assert answer == {
        "model_spec": {"name": "toy", "signature_name": "", "version": "7"},
        "metadata": {"signature_def": {"signature_def": fakes.FakeServable.signature_defs}},
    }


def test_the_list_of_models(server):
    bad, slow, toy = server.ask("GET", "/v1/models").json["models"]
    assert toy == {
        "name": "toy",
        "versions": [{"version": "7", "state": "AVAILABLE"}],
        "classes": 3,
        "input": {"shape": [None, 2, 2, 1]},
        "takes_images": True,
    }
    assert (bad["name"], bad["versions"][0]["state"], bad["takes_images"]) == ("bad", "END", False)
    assert slow["versions"] == [{"version": "1", "state": "LOADING"}]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models/nope", 404),
        ("GET", "/v1/models/toy/versions/8", 404),
        ("GET", "/v1/models/toy/versions/x", 400),
        ("GET", f"/v1/models/toy/versions/{10**30}", 400),
        ("GET", "/v1/models/nope/metadata", 404),
        ("GET", "/v1/models/slow/metadata", 503),
        ("GET", PREDICT, 405),
        ("POST", "/v1/models/nope:predict", 404),
        ("POST", "/v1/models/slow:predict", 503),
        ("POST", "/v1/models/toy/versions/8:predict", 404),
        ("POST", "/v1/models/toy/versions/-1:classify", 400),
        ("POST", "/v1/models/toy:regress", 400),
        ("POST", "/v1/models/toy:embed", 400),
        ("DELETE", "/v1/models/toy", 405),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1", 404),
    ],
)
def test_paths_that_lead_nowhere(server, method, path, status):
    answer = server.ask(method, path, b"{}" if method == "POST" else None)
    assert answer.status == status
    assert answer.json.keys() == {"error"}
    assert (answer.headers["Retry-After"] is not None) == (status == 503)


def test_a_label_is_another_name_of_a_version(server):
    body = {"instances": [[[[1.0], [2.0]], [[3.0], [4.0]]]]}
    for path in ("", ":predict", "/metadata"):
        ask = ("POST", body) if path == ":predict" else ("GET", None)
        by_label, by_number = (
            server.ask(ask[0], f"/v1/models/toy/{one}{path}", ask[1])
            for one in ("labels/stable", "versions/7")
        )
        assert (by_label.status, by_label.body) == (200, by_number.body)
        assert server.ask(ask[0], f"/v1/models/toy/labels/canary{path}", ask[1]).status == 404


@pytest.mark.parametrize("part", [1, 3, 7, 1000])
def test_long_lists_are_read_in_parts(monkeypatch, part):
    """One call on a whole list would hold the event loop up."""
    monkeypatch.setattr(tensors, "_PART", part)
    values = np.arange(5 * 4 * 2).reshape(5, 4, 2)
    np.testing.assert_array_equal(tensors.from_json(values.tolist(), "x", "float32"), values)
    assert tensors.from_json([], "x", "float32").shape == (0,)
    mixed = [1.0] * 10 + ["text"]
    with pytest.raises(RequestError, match=r"must hold numbers\. Received: the text"):
        tensors.from_json(mixed, "x", "float32")
    with pytest.raises(RequestError, match="lists or values at each depth"):
        tensors.from_json([[1.0]] * 10 + [2.0], "x", "float32")


@pytest.mark.parametrize("file", [b"\x89PNG\r\n\x1a\n123", b"\xff\xd8\xff\xe0123"])
@pytest.mark.parametrize("method", ["predict", "classify"])
def test_an_image_file_as_the_body_gets_a_hint(server, method, file):
    answer = server.ask("POST", f"/v1/models/toy:{method}", file)
    assert (answer.status, "image file, not JSON" in answer.json["error"]) == (400, True)


def test_base64_for_the_signature_of_pixels_gets_a_hint(server):
    answer = server.ask("POST", "/v1/models/toy:predict", {"instances": [{"b64": "MTIz"}]})
    assert answer.status == 400
    assert answer.json["error"].endswith('add "signature_name": "predict_bytes"')


PIXELS = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3))
OF_PIXELS = {
    "serving_default": tensors.Signature(
        "serving_default",
        {
            "images": tensors.TensorSpec(
                "images",
                "float32",
                (None, 4, 4, 3),
                InputRange(np.array([125.0]), np.array([64.0])),
            )
        },
        {"scores": tensors.TensorSpec("scores", "float32", (None, 2))},
    )
}


@pytest.mark.parametrize(
    ("images", "is_right"),
    [(PIXELS, True), (PIXELS / 255, False), (PIXELS * 0, True), (PIXELS * 256, False)],
    ids=["pixels", "0 to 1", "black", "16 bits"],
)
def test_an_answer_warns_of_the_wrong_range(images, is_right):
    """In both forms of `predict`, in `classify`, and in the other protocol."""
    outputs = {"probabilities": np.array([[0.25, 0.75]] * 2, "float32")}
    rows = {"instances": images.tolist()}
    call = tf_serving_api.parse_predict(orjson.dumps(rows), OF_PIXELS)
    answers = [orjson.loads(tf_serving_api.dump_predict(outputs, True, call.warning))]
    answers.append(orjson.loads(tf_serving_api.dump_predict(outputs, False, call.warning)))
    examples = {"examples": [{"images": image} for image in images.tolist()]}
    call = tf_serving_api.parse_classify(orjson.dumps(examples), OF_PIXELS)
    answers.append(orjson.loads(tf_serving_api.dump_classify(outputs, ["a", "b"], 1, call.warning)))
    tensor = {"name": "images", "datatype": "FP32", "shape": images.shape, "data": images.ravel()}
    body = orjson.dumps({"inputs": [tensor]}, option=orjson.OPT_SERIALIZE_NUMPY)
    call = open_inference_api.parse(body, len(body), OF_PIXELS)
    content, _ = open_inference_api.dump(call, {"scores": outputs["probabilities"]}, "toy", 1)
    answers.append(orjson.loads(content).get("parameters", {}))
    for answer in answers:
        if is_right:
            assert "warning" not in answer
        else:
            assert re.fullmatch(
                r"`images` has values from 0 to \S+\. This network expects about 0 to 255, so its "
                "answer is probably wrong.",
                answer["warning"],
            )
