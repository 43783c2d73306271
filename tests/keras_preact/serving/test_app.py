"""What stands around the APIs: errors without a trace of the inside, ids, tokens, logs,
metrics, JSON of every kind of bad.
"""

import gzip
import json
import logging
import re

import keras
import pytest

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend"
)

pytest.importorskip("uvicorn")
from keras_preact.serving import json_body, logs  # noqa: E402
from tests.keras_preact.serving import fakes  # noqa: E402

PREDICT, CLASSIFY, INFER = (
    "/v1/models/toy:predict",
    "/v1/models/toy:classify",
    "/v2/models/toy/infer",
)
ROW = [[[1.0], [2.0]], [[3.0], [4.0]]]
EVIL = [[[666.0], [2.0]], [[3.0], [4.0]]]  # on which the model raises
INSTANCES = {"instances": [ROW]}


@pytest.fixture(scope="module")
def server():
    with fakes.serving() as running:
        yield running


BAD_JSON = {
    "nothing": b"",
    "blanks": b" \n ",
    "no JSON": b"instances=1",
    "half": b'{"instances": [',
    "two": b"{} {}",
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "NaN": b'{"instances": [[[[NaN],[1]],[[1],[1]]]]}',
    "Infinity": b'{"instances": [[[[-Infinity],[1]],[[1],[1]]]]}',
    "100,000 brackets": b'{"instances": ' + b"[" * 100_000,
    "100,000 pairs of brackets": b'{"instances": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "900 pairs of brackets": b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}",
    "deep objects": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "many lists": b'{"instances": [' + b"[]," * json_body.MAX_CONTAINERS + b"[]]}",
    "equal keys": b'{"instances": [1], "instances": [2]}',
    "equal keys, escaped": b'{"instances": [1], "\\u0069nstances": [2]}',
    "equal keys, deep": b'{"instances": [{"images": 1, "images": 2}]}',
    "equal keys, a text with colons": b'{"instances": [{"images": 1, "images": 2}], "signature_name": "::"}',
    "lone surrogate": b'{"instances": ["\\ud800"]}',
    "no UTF-8": b'{"instances": ["\xff\xfe"]}',
    "UTF-16": '{"instances": []}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "a number of 10,000 digits": b'{"instances": [' + b"9" * 10_000 + b"]}",
    "NUL": b"\0" * 100,
}


@pytest.mark.parametrize("path", [PREDICT, CLASSIFY, INFER])
@pytest.mark.parametrize("body", BAD_JSON.values(), ids=BAD_JSON)
def test_bad_json_is_refused(server, path, body):
    answer = server.ask("POST", path, body)
    assert answer.status == 400
    assert len(answer.json["error"]) < 1000
    assert answer.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("more", ["", ', "signature_name": "serving_default", "a": ":"'])
@pytest.mark.parametrize("key", ["instances", "\\u0069nstances"])
def test_a_key_that_is_there_twice_is_refused_though_its_last_value_would_do(server, key, more):
    body = f'{{"instances": [1], "{key}": {json.dumps([ROW])}{more}}}'.encode()
    assert json.loads(body)["instances"] == [ROW]
    answer = server.ask("POST", PREDICT, body)
    assert (answer.status, "each key once" in answer.json["error"]) == (400, True)


def test_a_text_with_colons_is_no_second_key():
    body = b'{"instances": ["a:b", {"c::": ":"}], "d": {"e": {}}}'
    assert json_body.parse(body) == json.loads(body)


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd"])
def test_compressed_bodies_are_refused(server, encoding):
    answer = server.ask(
        "POST",
        PREDICT,
        gzip.compress(json.dumps(INSTANCES).encode()),
        {"Content-Encoding": encoding},
    )
    assert answer.status == 415
    assert "Content-Encoding" in answer.json["error"]
    assert server.ask("POST", PREDICT, INSTANCES, {"Content-Encoding": "identity"}).status == 200


ERRORS = [
    *(("POST", path, body) for path in (PREDICT, CLASSIFY, INFER) for body in BAD_JSON.values()),
    ("POST", PREDICT, {"instances": [EVIL]}),
    ("POST", CLASSIFY, {"examples": [{"images": EVIL}]}),
    (
        "POST",
        INFER,
        {
            "inputs": [
                {
                    "name": "images",
                    "shape": [1, 2, 2, 1],
                    "datatype": "FP32",
                    "data": [666, 1, 1, 1],
                }
            ]
        },
    ),
    ("POST", "/v1/models/toy:regress", {}),
    ("POST", "/v1/models/..%2F..%2Fetc:predict", {}),
    *(
        ("GET", path, None)
        for path in (
            "/nope",
            "/v1/models/nope",
            "/v2/models/nope",
            "/v2/models/slow",
            "/static/../app.py",
        )
    ),
    *(
        ("PATCH", path, None)
        for path in ("/", "/metrics", "/v2", "/v1/models", PREDICT, INFER, "/v2/health/live")
    ),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_no_error_tells_of_the_inside(server, number, caplog):
    answer = server.ask(*ERRORS[number])
    assert answer.status >= 400
    assert answer.json.keys() == {"error"}
    text = answer.json["error"]
    # The paths of the API are the only ones that a client hears of.
    assert "/" not in text.replace("GET /v1/models lists", "")
    assert not re.search(r"[Tt]ensor[Ff]low|[Kk]eras|Traceback|\.py|[a-z]Error\b", text)
    if answer.status == 500:
        [record] = [record for record in caplog.records if record.exc_info]
        assert record.id in text
        assert record.id == answer.headers["X-Request-ID"]
        assert "secret" in logs.JsonFormatter().format(record)
    assert answer.status in (400, 404, 405, 500, 503)


def test_methods_that_would_work_are_named(server):
    answer = server.ask("PUT", PREDICT, b"{}")
    assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    answer = server.ask("POST", "/v2/models/toy", b"{}")
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("abc-1.2_Z", True), ("a" * 64, True), ("a" * 65, False), ("a b", False), ("é", False)],
)
def test_request_ids(server, sent, kept):
    given = server.ask("GET", "/v2", headers={"X-Request-ID": sent}).headers["X-Request-ID"]
    assert (given == sent) == kept
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", given)


def test_the_log_has_a_line_of_json_for_each_request(server, caplog):
    caplog.set_level(logging.INFO, "keras_preact.serving")
    server.ask("POST", PREDICT, INSTANCES, {"X-Request-ID": "one"})
    server.ask("GET", "/v1/models/no%20%22such", headers={"X-Request-ID": "two"})
    records = [
        fakes.wait_for(lambda name=name: [one for one in caplog.records if one.id == name])[0]
        for name in ("one", "two")
    ]
    text = [logs.JsonFormatter().format(record) for record in records]
    assert "\n" not in "".join(text)
    one, two = map(json.loads, text)
    assert (
        one.items()
        >= {
            "method": "POST",
            "path": PREDICT,
            "model": "toy",
            "version": "7",
            "status": 200,
        }.items()
    )
    assert one["ms"] > 0
    assert one["bytes"] > 0
    assert one["time"].endswith("+00:00")
    assert (
        two.items()
        >= {"path": '/v1/models/no "such', "model": "", "version": "", "status": 404}.items()
    )


def metrics(server):
    """Return the samples that the server shows: {(name, labels): value}."""
    parser = pytest.importorskip("prometheus_client.parser")
    answer = server.ask("GET", "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = parser.text_string_to_metric_families(answer.body.decode())
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in families
        for one in family.samples
    }


def test_metrics_count_requests():
    with fakes.serving() as server:
        for _ in range(3):
            server.ask("POST", PREDICT, INSTANCES)
        server.ask("POST", PREDICT, {})
        labels = {"api": "predict", "model": "toy", "version": "7"}
        found = metrics(server)
        count = {
            one: found["keras_preact_requests_total", frozenset((labels | {"status": one}).items())]
            for one in ("200", "400")
        }
        assert count == {"200": 3, "400": 1}
        assert found["keras_preact_request_seconds_count", frozenset(labels.items())] == 4
        assert found["keras_preact_requests_in_progress", frozenset()] == 0
        server.servable.waiting = 5
        server.app.state.metrics.batch("toy", 7, 3, 0.01)
        server.app.state.metrics.load("toy", 7, 1.5, None)
        server.app.state.metrics.load("bad", 1, 0.1, ValueError())
        found = metrics(server)
        toy = {"model": "toy", "version": "7"}
        assert found["keras_preact_queue_images", frozenset(toy.items())] == 5
        assert found["keras_preact_batch_rows_sum", frozenset(toy.items())] == 3
        assert (
            found["keras_preact_model_load_seconds_sum", frozenset({"model": "toy"}.items())] == 1.5
        )
        assert (
            found[
                "keras_preact_model_loads_total",
                frozenset({"model": "bad", "outcome": "failure"}.items()),
            ]
            == 1
        )
        assert any(name == "process_resident_memory_bytes" for name, _ in found)


def test_names_that_clients_make_up_are_no_new_series():
    def ask(server, i):
        server.ask("GET", f"/v1/models/made-up-{i}")
        server.ask("GET", f"/made-up-{i}")
        server.ask("POST", f"/v1/models/toy/versions/{i + 100}:predict", INSTANCES)
        server.ask("POST", f"/v2/models/made-up-{i}/infer", b"{}")
        server.ask("POST", f"/v1/models/toy:made-up-{i}", b"{}")

    with fakes.serving() as server:
        ask(server, 0)
        metrics(server)
        before = metrics(server).keys()
        for i in range(1, 6):
            ask(server, i)
        assert metrics(server).keys() == before


def test_two_apps_count_apart():
    with fakes.serving() as one, fakes.serving() as other:
        one.ask("GET", "/v2")
        names = [key for key in metrics(other) if ("api", "server_metadata") in key[1]]
        assert names == []
