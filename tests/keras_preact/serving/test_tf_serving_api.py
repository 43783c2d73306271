"""TensorFlow Serving's REST API, against a model computed by hand."""

import base64
import dataclasses

import numpy as np
import pytest
from google.protobuf import json_format

from tests.keras_preact.serving import fakes
from tests.keras_preact.serving.server_process import wait_for

PREDICT = "/v1/models/toy:predict"
CLASSIFY = "/v1/models/toy:classify"
IMAGES = np.arange(8, dtype="float32").reshape(2, 2, 2, 1) / 4
ROWS = IMAGES.tolist()
LOGITS = [[image[0, 0, 0], image.sum(), 0] for image in IMAGES]


def b64(data: bytes) -> dict:
    return {"b64": base64.b64encode(data).decode()}


def test_rows_are_answered_by_rows(server):
    answer = server.ask("POST", PREDICT, {"instances": ROWS}, {"Content-Type": "text/plain"})
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert answer.json.keys() == {"predictions"}
    rows = answer.json["predictions"]
    assert [row.keys() for row in rows] == [{"logits", "probabilities"}] * 2
    np.testing.assert_allclose([row["logits"] for row in rows], LOGITS)
    np.testing.assert_allclose([sum(row["probabilities"]) for row in rows], 1, rtol=1e-6)
    for name in ("", "serving_default"):  # clients send an empty name for none
        body = {"signature_name": name, "instances": ROWS}
        assert server.ask("POST", PREDICT, body).body == answer.body


@pytest.mark.parametrize("path", ["", "/versions/7", "/labels/stable"])
@pytest.mark.parametrize("instances", [ROWS, [{"images": row} for row in ROWS]])
def test_one_output_is_not_named(server, path, instances):
    body = {"signature_name": "features", "instances": instances}
    answer = server.ask("POST", f"/v1/models/toy{path}:predict", body)
    assert (answer.status, answer.json) == (200, {"predictions": IMAGES.reshape(2, 4).tolist()})


@pytest.mark.parametrize("inputs", [ROWS, {"images": ROWS}])
def test_columns_are_answered_by_columns(server, inputs):
    answer = server.ask("POST", PREDICT, {"inputs": inputs})
    assert answer.json.keys() == {"outputs"}
    assert answer.json["outputs"].keys() == {"logits", "probabilities"}
    np.testing.assert_allclose(answer.json["outputs"]["logits"], LOGITS)
    answer = server.ask("POST", PREDICT, {"signature_name": "features", "inputs": inputs})
    assert answer.json == {"outputs": IMAGES.reshape(2, 4).tolist()}


@pytest.mark.parametrize(
    "instances",
    [
        [b64(b"12"), b64(b"0")],
        [{"image_bytes": b64(b"12")}, {"image_bytes": b64(b"0")}],
        ["12", "0"],  # text is bytes too
        [{"b64": "MT\nI="}, {"b64": "\tM\r\nA =\n"}],  # as many encoders write it
        [{"b64": "MTI\n"}, {"b64": "M A"}],
    ],
)
def test_files(server, instances):
    body = {"instances": instances, "signature_name": "predict_bytes"}
    rows = server.ask("POST", PREDICT, body).json["predictions"]
    assert [row["classes"] for row in rows] == [["dog", "cat"], ["cat", "dog"]]
    assert [row["indices"] for row in rows] == [[1, 0], [0, 1]]
    np.testing.assert_allclose(rows[1]["scores"], [1 / 3, 1 / 3], rtol=1e-6)
    examples = [{"image_bytes": b64(b"12")}, {"image_bytes": b64(b"0")}]
    results = server.ask("POST", CLASSIFY, {"examples": examples}).json["results"]
    for row, result in zip(rows, results, strict=True):
        assert result == [[*pair] for pair in zip(row["classes"], row["scores"], strict=True)]


@pytest.mark.parametrize(
    "body",
    [
        {"examples": [{"images": row} for row in ROWS]},
        {"examples": [{"images": np.ravel(row).tolist()} for row in ROWS]},
        {"examples": [{}], "context": {"images": ROWS[0]}},  # which all examples share
    ],
)
def test_classes_of_pixels_nested_or_flat(server, body):
    results = server.ask("POST", CLASSIFY, body).json["results"]
    probabilities = server.ask("POST", PREDICT, {"inputs": ROWS}).json["outputs"]["probabilities"]
    for result, row in zip(results, probabilities[: len(results)], strict=True):
        best = sorted(range(3), key=lambda index: (-row[index], index))[:2]
        assert result == [[fakes.CLASSES[index], row[index]] for index in best]


def test_status_is_the_message_that_clients_parse(server):
    apis = pytest.importorskip("tensorflow_serving.apis.get_model_status_pb2")
    for path in ("", "/versions/7", "/labels/stable"):
        answer = server.ask("GET", f"/v1/models/toy{path}")
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
        "status": {"error_code": "INVALID_ARGUMENT", "error_message": "It is broken."},
    }


def test_metadata_names_the_version(server):
    for path in ("", "/versions/7", "/labels/stable"):
        assert server.ask("GET", f"/v1/models/toy{path}/metadata").json == {
            "model_spec": {"name": "toy", "signature_name": "", "version": "7"},
            "metadata": {"signature_def": {"signature_def": fakes.DEFS}},
        }


ABOUT = {"classes": 3, "input": {"shape": [None, 2, 2, 1]}, "takes_images": True}
SEVEN = {"version": "7", "state": "AVAILABLE"} | ABOUT
UNKNOWN = {"classes": None, "input": None, "takes_images": False}


def test_the_list_of_models(server):
    bad, toy = server.ask("GET", "/v1/models").json["models"]
    assert toy == {"name": "toy", "versions": [SEVEN]} | ABOUT
    assert (
        bad == {"name": "bad", "versions": [{"version": "1", "state": "END"} | UNKNOWN]} | UNKNOWN
    )


def test_the_list_describes_each_version_by_itself(monkeypatch):
    """An older one may have other classes and other images, and take no image files."""
    load, images = fakes.load, dataclasses.replace(fakes.IMAGES, shape=(None, 5, 5, 1))

    def load_six(path, settings):
        if path.name != "6":
            return load(path, settings)
        one = load(path.with_name("7"), settings)
        default = dataclasses.replace(one.signatures["serving_default"], input=images)
        signatures = {"serving_default": default}
        return dataclasses.replace(one, version=6, classes=["a", "b"], signatures=signatures)

    monkeypatch.setattr(fakes, "load", load_six)
    with fakes.serving(versions="all", poll_seconds=0.01) as server:
        folder = server.app.state.settings.directory / "toy"
        (folder / ".6").mkdir()
        (folder / ".6" / "saved_model.pb").touch()
        (folder / ".6").rename(folder / "6")
        wait_for(lambda: server.app.state.repository.available("toy") == [6, 7])
        _, toy = server.ask("GET", "/v1/models").json["models"]
    six = {"classes": 2, "input": {"shape": [None, 5, 5, 1]}, "takes_images": False}
    assert toy["versions"] == [{"version": "6", "state": "AVAILABLE"} | six, SEVEN]
    assert toy.items() >= ABOUT.items()


PIXELS = np.linspace(0, 255, 8).reshape(2, 2, 2, 1)


@pytest.mark.parametrize(
    ("images", "is_right"),
    [(PIXELS, True), (PIXELS / 255, False), (PIXELS * 0, True), (PIXELS * 256, False)],
    ids=["pixels", "0 to 1", "black", "16 bits"],
)
def test_an_answer_warns_of_the_wrong_range(server, images, is_right):
    """In both forms of `predict`, and in the other protocol."""
    named = {"signature_name": "of_pixels"}
    bodies = [named | {key: images.tolist()} for key in ("instances", "inputs")]
    answers = [server.ask("POST", PREDICT, body).json for body in bodies]
    tensor = {"name": "pixels", "datatype": "FP32", "shape": images.shape, "data": images.tolist()}
    other = server.ask("POST", "/v2/models/toy/infer", {"inputs": [tensor]}).json
    for answer in [*answers, other.get("parameters", {})]:
        assert ("warning" in answer) != is_right
        assert is_right or "This network expects about 0 to 255" in answer["warning"]
