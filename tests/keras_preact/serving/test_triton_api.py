"""What Triton's clients ask for: configuration, statistics and index, of a model computed by
hand.
"""

import time

import pytest

from tests.keras_preact.serving import fakes

PREDICT, INFER = "/v1/models/toy:predict", "/v2/models/toy/infer"
ROW = [[[1.0], [2.0]], [[3.0], [4.0]]]


def test_the_configuration_of_a_model(server):
    config = server.ask("GET", "/v2/models/toy/config").json
    assert config == server.ask("GET", "/v2/models/toy/versions/7/config").json
    assert config == {
        "name": "toy",
        "platform": "tensorflow_savedmodel",
        "max_batch_size": 8,
        "input": [{"name": "images", "data_type": "TYPE_FP32", "dims": [2, 2, 1]}],
        "output": [
            {"name": "logits", "data_type": "TYPE_FP32", "dims": [3]},
            {"name": "probabilities", "data_type": "TYPE_FP32", "dims": [3]},
        ],
    }


TOY = {"name": "toy", "version": "7", "state": "READY", "reason": ""}
BAD = {"name": "bad", "version": "1", "state": "UNAVAILABLE", "reason": "It is broken."}


@pytest.mark.parametrize(
    ("body", "index"),
    [
        (None, [BAD, TOY]),
        ({}, [BAD, TOY]),
        ({"ready": None}, [BAD, TOY]),
        ({"ready": False}, [BAD, TOY]),
        ({"ready": True}, [TOY]),
    ],
)
def test_the_index_of_all_models(server, body, index):
    answer = server.ask("POST", "/v2/repository/index", body)
    assert answer.json == index


@pytest.mark.parametrize("body", [{"ready": 1}, {"steady": True}, [], b"{"])
def test_a_wrong_question_for_the_index(server, body):
    answer = server.ask("POST", "/v2/repository/index", body)
    assert answer.status == 400
    assert "Received: " in answer.json["error"] or "not JSON" in answer.json["error"]


def test_statistics():
    began = 1000 * time.time()
    with fakes.serving() as server:
        [before] = server.ask("GET", "/v2/models/toy/stats").json["model_stats"]
        assert before.pop("last_inference") == before["inference_count"] == 0
        assert server.ask("POST", PREDICT, {"instances": [ROW] * 3}).status == 200
        tensor = {"name": "images", "datatype": "FP32", "shape": [2, 2, 2, 1], "data": [1] * 8}
        assert server.ask("POST", INFER, {"inputs": [tensor]}).status == 200
        failing = [[[666.0], [1.0]], [[1.0], [1.0]]]
        assert server.ask("POST", PREDICT, {"instances": [failing]}).status == 500
        [after] = server.ask("GET", "/v2/models/toy/versions/7/stats").json["model_stats"]
        everything = server.ask("GET", "/v2/models/stats").json["model_stats"]
    assert everything == [after]
    assert (after["name"], after["version"]) == ("toy", "7")
    assert (after["inference_count"], after["execution_count"]) == (5, 2)
    assert began - 1 <= after["last_inference"] <= 1000 * time.time() + 1
    counts = {name: one["count"] for name, one in after["inference_stats"].items()}
    assert counts == {"success": 2, "fail": 1, "compute_infer": 2}
    assert all(one["ns"] > 0 for one in after["inference_stats"].values())
    success, compute = (
        after["inference_stats"][name]["ns"] for name in ("success", "compute_infer")
    )
    assert success > compute
