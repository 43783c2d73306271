"""The gate around the APIs: errors that tell nothing of the inside, ids, tokens, logs,
metrics, bad JSON of every kind.
"""

import contextlib
import gzip
import json
import logging
import os
import re
import socket
import time
from pathlib import Path

import pytest
from prometheus_client import parser

from keras_preact.serving import logs, tensors
from tests.keras_preact.serving import fakes

PREDICT, CLASSIFY, INFER = (
    "/v1/models/toy:predict",
    "/v1/models/toy:classify",
    "/v2/models/toy/infer",
)
ROW = [[[1.0], [2.0]], [[3.0], [4.0]]]
EVIL = [[[666.0], [2.0]], [[3.0], [4.0]]]  # on which the model raises
INSTANCES = {"instances": [ROW]}
TENSOR = {"name": "images", "shape": [1, 2, 2, 1], "datatype": "FP32", "data": [666, 1, 1, 1]}
TOKEN = "a-secret-token"
PROBES = ["/v2/health/live", "/v2/health/ready", "/metrics"]


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
    "900 pairs of brackets": b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}",
    "deep objects": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "many lists": b'{"instances": [' + b"[]," * tensors.MAX_CONTAINERS + b"[]]}",
    "lone surrogate": b'{"instances": ["\\ud800"]}',
    "no UTF-8": b'{"instances": ["\xff\xfe"]}',
    "UTF-16": '{"instances": []}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "a number of 10,000 digits": b'{"instances": [' + b"9" * 10_000 + b"]}",
    "NUL": b"\0" * 100,
}
ERRORS = [
    *(("POST", path, body) for path in (PREDICT, CLASSIFY, INFER) for body in BAD_JSON.values()),
    ("POST", PREDICT, {"instances": [EVIL]}),
    ("POST", CLASSIFY, {"examples": [{"images": EVIL}]}),
    ("POST", INFER, {"inputs": [TENSOR]}),
    ("POST", "/v1/models/toy:regress", {}),
    ("POST", "/v1/models/..%2F..%2Fetc:predict", {}),
    *(("GET", path, None) for path in ("/nope", "/v1/models/nope", "/v2/models/slow")),
    ("GET", "/static/../app.py", None),
    *(("PATCH", path, None) for path in ("/", "/metrics", "/v2", "/v1/models", PREDICT, INFER)),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_no_error_tells_of_the_inside(server, number, caplog):
    method, path, body = ERRORS[number]
    answer = server.ask(method, path, body)
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json.keys() == {"error"}
    text = answer.json["error"]
    assert len(text) < 1000
    # The paths of the API are the only ones that a client hears of.
    assert "/" not in text.replace("GET /v1/models lists", "")
    assert not re.search(r"[Tt]ensor[Ff]low|[Kk]eras|Traceback|\.py|[a-z]Error\b", text)
    if answer.status == 500:
        [record] = [record for record in caplog.records if record.exc_info]
        assert record.id in text
        assert record.id == answer.headers["X-Request-ID"]
        assert "secret" in logs.JsonFormatter().format(record)
    evil = "666" in json.dumps(body) if isinstance(body, dict) else False
    assert answer.status == 500 if evil else answer.status in (400, 404, 405, 503)
    if body in BAD_JSON.values():
        assert answer.status == 400


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_compressed_bodies_are_refused(server, encoding):
    body = gzip.compress(json.dumps(INSTANCES).encode())
    answer = server.ask("POST", PREDICT, body, {"Content-Encoding": encoding})
    assert (answer.status, "Content-Encoding" in answer.json["error"]) == (415, True)
    assert server.ask("POST", PREDICT, INSTANCES, {"Content-Encoding": "identity"}).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/models/{}:predict"),
        ("GET", "/v1/models/{}"),
        ("GET", "/v2/models/{}/ready"),
        ("POST", "/v1/models/toy:{}"),
        ("GET", "/v1/models/toy/versions/{}"),
    ],
)
def test_long_names_are_not_repeated_whole(tmp_path, method, path):
    """By the real repository, whose words they are."""
    with fakes.in_process(directory=tmp_path) as server:
        answer = server.ask(method, path.format("x" * 20_000), b"{}" if method == "POST" else None)
    assert answer.status in (400, 404)
    assert len(answer.body) < 400


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
    text = [logs.JsonFormatter().format(record) for record in caplog.records]
    assert "\n" not in "".join(text)
    one, two = map(json.loads, text)
    about = {"id": "one", "method": "POST", "path": PREDICT, "model": "toy", "version": "7"}
    assert one.items() >= (about | {"status": 200}).items()
    assert one["ms"] > 0
    assert one["bytes"] > 0
    assert one["time"].endswith("+00:00")
    about = {"id": "two", "path": '/v1/models/no "such', "model": "", "version": "", "status": 404}
    assert two.items() >= about.items()


@pytest.mark.parametrize(
    ("choice", "logged"),
    [("requests", ["/v2"]), ("all", ["/v2", *PROBES]), ("none", [])],
)
def test_probes_are_logged_if_told_so(caplog, choice, logged):
    caplog.set_level(logging.INFO, "keras_preact.serving")
    with fakes.in_process(access_log=choice) as server:
        for path in ("/v2", *PROBES):
            assert server.ask("GET", path).status == 200
    assert [record.path for record in caplog.records] == logged


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8501", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8501", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
        ("127.0.0.1.evil.example:8501", 400),
        ("", 400),
        ("evil" * 10_000, 400),
    ],
)
def test_a_local_server_is_reached_under_no_other_name(server, host, status):
    """A page could read it under a name of its own, which leads to 127.0.0.1."""
    answer = server.ask("GET", "/v2/health/live", headers={"Host": host})
    assert answer.status == status
    if status == 400:
        assert "--allowed-hosts" in answer.json["error"]
        assert len(answer.body) < 300


def test_names_that_are_allowed():
    with fakes.in_process(allowed_hosts="models.example") as server:
        for host, status in (("models.example:80", 200), ("localhost", 400)):
            assert server.ask("GET", "/v2", headers={"Host": host}).status == status
    with fakes.in_process(host="0.0.0.0") as server:
        assert server.ask("GET", "/v2", headers={"Host": "any.example"}).status == 200


def test_a_log_that_nobody_reads_holds_nobody_up():
    """A pipe takes 64 KiB; the rest waits, and what is beyond that is dropped and counted."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:  # what is in the pipe already
            os.write(writing, b"{}\n")
    os.set_blocking(writing, True)
    log = logs.Log(writing, capacity=50)
    try:
        for i in range(5000):
            log.handle(logging.makeLogRecord({"levelname": "INFO", "msg": f"line {i} " + "." * 90}))
        dropped = log.dropped
        assert dropped in (4949, 4950)  # the writer hangs with one, at most, and 50 wait
        log.stop(0.1)  # it does not wait for ever either
        assert log._writer.is_alive()
        texts = []
        with open(reading, closefd=False) as pipe:
            while len(texts) < 5000 - dropped:
                line = json.loads(next(pipe))
                if "dropped" in line:
                    assert 0 < line["dropped"] <= dropped
                elif line:
                    texts.append(line["message"])
    finally:
        os.close(reading)
        log.stop(60)
        os.close(writing)
    assert texts[0].startswith("line 0 ")
    assert len(set(texts)) == len(texts)


def test_lines_that_come_soon_after_another_are_written_together(monkeypatch):
    monkeypatch.setattr(logs, "PAUSE_SECONDS", 0.3)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        log = logs.Log(theirs.fileno())
        for i in range(20):
            log.handle(logging.makeLogRecord({"levelname": "INFO", "msg": f"line {i}"}))
            time.sleep(0.001)  # the thread would write each by itself
        log.stop(60)
        theirs.close()
        parts = list(iter(lambda: ours.recv(1_000_000), b""))
    lines = b"".join(parts).splitlines()
    assert [json.loads(line)["message"] for line in lines] == [f"line {i}" for i in range(20)]
    assert len(parts) < 10


def test_values_of_every_kind_are_logged():
    values = {"file": "\udcff", "large": 2**80, "where": Path("there")}
    record = logging.makeLogRecord({"levelname": "INFO", "msg": "see", **values})
    found = json.loads(logs.JsonFormatter().format(record))
    assert {name: found[name] for name in values} == values | {"where": "there"}


def metrics(server):
    """Return the samples that the server shows: {(name, labels): value}."""
    answer = server.ask("GET", "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in parser.text_string_to_metric_families(answer.body.decode())
        for one in family.samples
    }


def test_metrics_count_requests():
    with fakes.in_process() as server, fakes.in_process() as other:
        for _ in range(3):
            server.ask("POST", PREDICT, INSTANCES)
        server.ask("POST", PREDICT, {})
        server.servable.waiting = 5
        found = metrics(server)
        toy = {"model": "toy", "version": "7"}
        labels = toy | {"api": "predict"}
        count = {
            one: found["keras_preact_requests_total", frozenset((labels | {"status": one}).items())]
            for one in ("200", "400")
        }
        assert count == {"200": 3, "400": 1}
        assert found["keras_preact_request_seconds_count", frozenset(labels.items())] == 4
        assert found["keras_preact_requests_in_progress", frozenset()] == 0
        assert found["keras_preact_queue_images", frozenset(toy.items())] == 5
        assert any(name == "process_resident_memory_bytes" for name, _ in found)
        assert not any(("api", "predict") in labels for _, labels in metrics(other))
        for model, versions in (("toy", 1), ("bad", 0), ("slow", 0)):
            labels = frozenset({"model": model}.items())
            assert found["keras_preact_model_available_versions", labels] == versions


def test_replicas_behind_one_address_have_series_of_their_own():
    with fakes.in_process(replica="r1") as one, fakes.in_process() as alone:
        for server in (one, alone):
            server.ask("GET", "/v2")
        found, without = metrics(one), metrics(alone)
    label = frozenset({"replica": "r1"}.items())
    # the memory of the process and the like are there once more in each
    assert {(name, labels | label) for name, labels in without} <= found.keys()
    assert all(label <= labels for _, labels in found)


def test_invented_names_are_no_new_series():
    def ask(server, i):
        server.ask("GET", f"/v1/models/made-up-{i}")
        server.ask("GET", f"/made-up-{i}")
        server.ask("POST", f"/v1/models/toy/versions/{i + 100}:predict", INSTANCES)
        server.ask("POST", f"/v2/models/made-up-{i}/infer", b"{}")
        server.ask("POST", f"/v1/models/toy:made-up-{i}", b"{}")

    with fakes.in_process() as server:
        ask(server, 0)
        metrics(server)
        before = metrics(server).keys()
        for i in range(1, 6):
            ask(server, i)
        assert metrics(server).keys() == before


@pytest.fixture(scope="module")
def guarded():
    with fakes.in_process(token=TOKEN) as running:
        yield running


@pytest.mark.parametrize(
    "path", ["/", "/v2/health/live", "/v2/health/ready", "/static%2F..%2Fv2", "/static/page.js"]
)
def test_probes_and_the_page_need_no_token(guarded, path):
    assert guarded.ask("GET", path).status == (404 if "%2F" in path else 200)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer é",
        f"Bearer {TOKEN} x",
    ],
)
def test_without_the_token_everything_else_is_closed(guarded, header):
    headers = {} if header is None else {"Authorization": header}
    for method, path in [
        *(("GET", path) for path in ("/v1/models", "/metrics", "/v2", "/v2/models/toy/ready")),
        *(("GET", path) for path in ("/nope", "/v2/health/other", "//")),
        ("POST", PREDICT),
        ("POST", INFER),
    ]:
        answer = guarded.ask(method, path, b"x" if method == "POST" else None, headers)
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert TOKEN not in answer.body.decode()


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_with_the_token_everything_is_open(guarded, scheme):
    headers = {"Authorization": f"{scheme} {TOKEN}"}
    assert guarded.ask("POST", PREDICT, INSTANCES, headers).status == 200
    assert guarded.ask("GET", "/metrics", headers=headers).status == 200


def test_metrics_may_be_open_alone():
    with fakes.in_process(token=TOKEN, open_metrics=True) as server:
        assert server.ask("GET", "/metrics").status == 200
        assert server.ask("GET", "/v1/models").status == 401
