"""The gate around the APIs: ids, hosts, tokens, the log, metrics."""

import contextlib
import itertools
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading

import pytest
from prometheus_client import parser

from keras_preact.serving import logs
from keras_preact.serving.tensors import shortened
from tests.keras_preact.serving import fakes
from tests.keras_preact.serving.server_process import wait_for

PREDICT, INFER = "/v1/models/toy:predict", "/v2/models/toy/infer"
INSTANCES = {"instances": [[[[1.0], [2.0]], [[3.0], [4.0]]]]}
TOKEN = "a-secret-token"
LOGGER = "keras_preact.serving"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "version"),
    [
        ("POST", PREDICT, INSTANCES, 200, "7"),
        ("POST", "/v1/models/toy/labels/stable:predict", INSTANCES, 200, "7"),
        ("POST", PREDICT, {}, 400, "7"),
        ("POST", "/v1/models/toy:classify", {"examples": [{"images": [1, 2, 3, 4]}]}, 200, "7"),
        ("POST", "/v1/models/toy/versions/8:predict", INSTANCES, 404, None),
        ("POST", "/v1/models/bad:predict", INSTANCES, 503, None),
        ("GET", "/v1/models", None, 200, None),
    ],
)
def test_an_answer_names_the_version_that_it_comes_from(
    server, method, path, body, status, version
):
    answer = server.ask(method, path, body)
    assert (answer.status, answer.headers["X-Model-Version"]) == (status, version)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("abc-1.2_Z", True), ("a" * 64, True), ("a" * 65, False), ("a b", False), ("é", False)],
)
def test_request_ids(server, sent, kept):
    given = server.ask("GET", "/v2", headers={"X-Request-ID": sent}).headers["X-Request-ID"]
    assert (given == sent) == kept
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", given)


def test_the_log_has_a_line_of_json_for_each_request(server, caplog):
    caplog.set_level(logging.INFO, LOGGER)
    server.ask("GET", "/metrics")  # not at each scrape
    server.ask("POST", PREDICT, INSTANCES, {"X-Request-ID": "one"})
    server.ask("GET", "/v1/models/no%20%22such", headers={"X-Request-ID": "two"})
    records = wait_for(lambda: len(caplog.records) > 1 and caplog.records)
    text = [logs.JsonFormatter().format(record) for record in records]
    assert "\n" not in "".join(text)
    one, two = map(json.loads, text)
    about = {"id": "one", "method": "POST", "path": PREDICT, "model": "toy", "version": "7"}
    assert one.items() >= (about | {"status": 200}).items()
    assert one["ms"] > 0
    assert one["bytes"] > 0
    assert one["time"].endswith("+00:00")
    about = {"id": "two", "path": '/v1/models/no "such', "model": "", "version": "", "status": 404}
    assert two.items() >= about.items()


def test_a_terminal_shows_lines_for_people(server, caplog):
    caplog.set_level(logging.INFO, LOGGER)
    server.ask("POST", PREDICT, INSTANCES)
    [record] = wait_for(lambda: caplog.records)
    line = logs.TextFormatter().format(record)
    assert re.fullmatch(rf"\d\d:\d\d:\d\d POST {PREDICT}: 200, \d+\.\d ms", line)
    caplog.clear()
    server.ask("GET", "/%1b%5b2J%0afine%7f%c2%9b")
    [record] = wait_for(lambda: caplog.records)
    assert r" GET /\x1b[2J\x0afine\x7f\x9b: 404, " in logs.TextFormatter().format(record)
    warning = logging.LogRecord(LOGGER, logging.WARNING, "", 0, "%s is gone", ("toy",), None)
    assert logs.TextFormatter().format(warning).endswith(" warning: toy is gone")


def test_a_name_that_is_no_text_does_not_end_the_log():
    reading, writing = os.pipe()
    log = logs.Log(logs.TextFormatter(), writing)
    for text in ("caf\udce9", "after it"):
        log.handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))
        log.finish(60)
    os.close(writing)
    with open(reading) as pipe:
        first, second = pipe.read().splitlines()
    assert first.endswith(r"caf\udce9")
    assert second.endswith("after it")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_log_is_for_people_only_on_a_terminal(is_terminal):
    reading, writing = os.openpty() if is_terminal else os.pipe()
    code = (
        "import logging; from keras_preact.serving import logs; log = logs.configure(print); "
        "logging.warning('it rains'); log.finish(60)"
    )
    subprocess.run([sys.executable, "-c", code], stderr=writing, check=True)
    line = os.read(reading, 10_000).decode().splitlines()[-1]  # after those of TensorFlow
    for descriptor in (reading, writing):
        os.close(descriptor)
    assert ("warning: it rains" in line) == is_terminal
    assert line.startswith("{") != is_terminal


def test_errors_that_cause_each_other(server, monkeypatch):
    def fail(rows):
        one.__cause__, other.__context__ = other, one
        raise one

    one, other = KeyError("one"), ValueError("other")
    monkeypatch.setattr(server.servable, "check_rows", fail)
    assert (
        server.ask("POST", PREDICT, INSTANCES | {"signature_name": "predict_bytes"}).status == 500
    )
    assert server.ask("GET", "/v2/health/live").status == 200


LOCAL: dict[str, str] = {}
NAMED = {"allowed_hosts": "A.example, b.example"}


@pytest.mark.parametrize(
    ("options", "host", "status"),
    [
        (LOCAL, "LOCALHOST:8501", 200),
        (LOCAL, "[::1]:8501", 200),
        (LOCAL, "evil.example", 400),
        (LOCAL, "127.0.0.1.evil.example:8501", 400),
        (LOCAL, "evil" * 10_000, 400),
        ({"host": "127.0.0.2"}, "127.0.0.2", 200),
        ({"host": "0.0.0.0"}, "any.example", 200),
        ({"allowed_hosts": "*"}, "any.example", 200),
        (NAMED, "a.example:80", 200),
        ({"allowed_hosts": "[fd00::1], fd00::2"}, "[FD00::1]:80", 200),
        ({"allowed_hosts": "[fd00::1], fd00::2"}, "[fd00::2]", 200),
        (NAMED, "localhost", 400),
    ],
)
def test_a_local_server_is_reached_under_no_other_name(options, host, status):
    """A page could read it under a name of its own, which leads to 127.0.0.1."""
    with fakes.serving(**options) as server:
        answer = server.ask("GET", "/v2", headers={"Host": host})
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert server.ask("GET", path, headers={"Host": host}).status == 200
    assert answer.status == status
    if status == 400:
        received = f"Received: {shortened(host.partition(':')[0])!r}. "
        assert f"{received}Start it with --allowed-hosts" in answer.json["error"]
        assert len(answer.body) < 300


SHOP = "https://shop.example"


@pytest.mark.parametrize(
    ("allowed", "origin", "answered"),
    [
        (None, SHOP, None),
        ("https://Shop.example, http://localhost:3000", SHOP, SHOP),
        (SHOP, "https://evil.example", None),
        (SHOP, "https://shop.example.evil", None),
        ("*", SHOP, "*"),
    ],
)
def test_pages_of_allowed_origins_may_use_the_server(allowed, origin, answered):
    """A browser first asks for permission, without the token, and then sends the request."""
    sent = {"Origin": origin, "Authorization": f"Bearer {TOKEN}"}
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with fakes.serving(allowed_origins=allowed, token=TOKEN) as server:
        permission = server.ask("OPTIONS", PREDICT, headers=asked)
        answer = server.ask("POST", PREDICT, INSTANCES, sent)
        refusal = server.ask("POST", PREDICT, {}, sent)
        stranger = server.ask("POST", PREDICT, INSTANCES, {"Origin": origin})
    assert (permission.status == 200) == (answered is not None)
    assert [one.status for one in (answer, refusal, stranger)] == [200, 400, 401]
    for one in (permission, answer, refusal, stranger):  # a page must be able to read errors
        assert one.headers["Access-Control-Allow-Origin"] == answered
    if answered:
        named = permission.headers["Access-Control-Allow-Headers"].lower()
        assert "authorization" in named
        exposed = answer.headers["Access-Control-Expose-Headers"].lower()
        assert {"x-model-version", "retry-after"} <= {*exposed.split(", ")}


ANY = {"allowed_hosts": "*"}
NONE, EMPTY, TWICE = b"", b"Host:\r\n", b"Host: localhost\r\nHost: localhost\r\n"
BLANK = b"Host:  \r\n"


@pytest.mark.parametrize("options", [LOCAL, NAMED, ANY], ids=["local", "named", "any"])
@pytest.mark.parametrize(
    ("path", "version", "hosts", "status"),
    [
        # HAProxy's checks are HTTP/1.0 without a host, unless configured otherwise.
        *[("/v2/health/live", "1.0", hosts, 200) for hosts in (NONE, EMPTY)],
        *[("/v2/health/ready", "1.1", hosts, 200) for hosts in (NONE, EMPTY, BLANK)],
        *[("/v2", "1.0", hosts, 200) for hosts in (NONE, EMPTY, BLANK)],
        *[("/v2", "1.1", hosts, 400) for hosts in (NONE, EMPTY, BLANK)],
        *[(path, "1.1", TWICE, 400) for path in ("/v2", "/v2/health/live")],
        ("/metrics", "1.1", NONE, 400),
    ],
)
def test_requests_without_a_host(options, path, version, hosts, status):
    request = f"GET {path} HTTP/{version}\r\nConnection: close\r\n".encode() + hosts + b"\r\n"
    with (
        fakes.serving(**options) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection,
    ):
        connection.sendall(request)
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    if status == 400:
        received = 2 if hosts == TWICE else 0
        assert f"must have one Host header. Received: {received}" in json.loads(body)["error"]


@pytest.mark.parametrize(("open_metrics", "status"), [(False, 400), (True, 200)])
def test_open_metrics_are_open_to_every_host(open_metrics, status):
    """Prometheus sends the address of the pod."""
    with fakes.serving(open_metrics=open_metrics, token=TOKEN, **NAMED) as server:
        assert server.ask("GET", "/metrics", headers={"Host": "10.0.0.7:8501"}).status == status


def test_a_log_that_nobody_reads_holds_nobody_up(monkeypatch):
    """What a pipe does not take waits; what is beyond that is dropped and counted."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"{}\n")
    os.set_blocking(writing, True)
    write, stuck, dropped = os.write, threading.Event(), []

    def write_and_say_so(descriptor, data):
        if descriptor == writing:
            stuck.set()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_and_say_so)
    log = logs.Log(logs.JsonFormatter(), writing, capacity=50, dropped=lambda: dropped.append(1))
    try:
        for i in range(500):
            log.handle(logging.makeLogRecord({"levelname": "INFO", "msg": f"line {i} " + "." * 90}))
            assert stuck.wait(60)  # with line 0 in hand: 50 more may wait
        assert len(dropped) == 449
        with open(reading, closefd=False) as pipe:
            lines = (json.loads(line) for line in pipe)
            texts = (line["message"] for line in lines if line)
            kept = list(itertools.islice(texts, 51))
        assert [text.split()[1] for text in kept] == [str(i) for i in range(51)]
    finally:
        log.finish(60)
        os.close(reading)
        os.close(writing)


def metrics(server):
    """Return the samples that the server shows: {(name, labels): value}."""
    answer = server.ask("GET", "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in parser.text_string_to_metric_families(answer.body.decode())
        for one in family.samples
    }


@pytest.mark.parametrize("of_process", [{}, {"replica": "a"}])
def test_metrics_count_requests(of_process):
    with fakes.serving(**of_process) as server, fakes.serving() as other:
        for body in [INSTANCES] * 3 + [{}]:
            server.ask("POST", PREDICT, body)
        server.servable.in_progress = 5
        found, others = metrics(server), metrics(other)

    def value(name, **labels):
        return found[f"keras_preact_{name}", frozenset((labels | of_process).items())]

    toy = {"model": "toy", "version": "7"}
    assert value("requests_total", api="predict", status="200", **toy) == 3
    assert value("requests_total", api="predict", status="400", **toy) == 1
    assert value("request_seconds_count", api="predict", **toy) == 4
    assert value("requests_in_progress") == 0
    assert value("queue_images", **toy) == 5
    for model, versions, problems in (("toy", 1, 0), ("bad", 0, 1)):
        assert value("model_available_versions", model=model) == versions
        assert value("model_problems", model=model) == problems
    assert not any(("api", "predict") in labels for _, labels in others)


@pytest.mark.parametrize(("kilobytes", "in_a_thread"), [(100, False), (200, True)])
def test_large_bodies_alone_are_read_in_a_thread(kilobytes, in_a_thread):
    """Two threads wait for Python's lock; but a large body must not hold up the event loop."""
    with fakes.serving() as server:
        used = []
        submit = server.app.state.parser.submit
        server.app.state.parser.submit = lambda *work: used.append(work) or submit(*work)
        body = json.dumps({"instances": [[[[1], [2]], [[3], [4]]]]}) + 1024 * kilobytes * " "
        answer = server.ask("POST", "/v1/models/toy:predict", body.encode())
    assert answer.json["predictions"][0]["logits"] == [1, 10, 0]
    assert bool(used) == in_a_thread


def test_invented_names_are_no_new_series():
    made_up = [
        ("GET", "/v1/models/made-up-{}"),
        ("GET", "/made-up-{}"),
        ("POST", "/v1/models/toy/versions/10{}:predict"),
        ("POST", "/v2/models/made-up-{}/infer"),
        ("POST", "/v1/models/toy:made-up-{}"),
    ]
    series = []
    with fakes.serving() as server:
        for number in range(4):
            for method, path in made_up:
                server.ask(method, path.format(number), INSTANCES)
            series.append(metrics(server).keys())
    assert series[1] == series[-1]  # the first look at the metrics is itself counted later


def test_what_is_open_without_the_token():
    with fakes.serving(token=TOKEN) as server:
        for path in ("/", "/static/page.js", "/v2/health/live", "/v2/health/ready"):
            assert server.ask("GET", path).status == 200
        assert server.ask("GET", "/static%2F..%2Fv2").status == 404
    with fakes.serving(token=TOKEN, open_metrics=True) as server:
        assert server.ask("GET", "/metrics").status == 200
        assert server.ask("GET", "/v1/models").status == 401


def test_everything_else_is_closed_without_the_token():
    wrong = ["", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN]
    wrong += [f"Basic {TOKEN}", "Bearer \xe9", f"Bearer {TOKEN} x"]
    paths = ["/v1/models", "/metrics", "/v2", "/v2/models/toy/ready", "/nope", "/v2/health/other"]
    requests = [("GET", path) for path in [*paths, "//"]] + [("POST", PREDICT), ("POST", INFER)]
    with fakes.serving(token=TOKEN) as server:
        for headers in [{}, *({"Authorization": value} for value in wrong)]:
            for method, path in requests:
                answer = server.ask(method, path, b"x", headers)
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert TOKEN not in answer.body.decode()
                received = "another value" if any(headers.values()) else "no such header"
                assert answer.json["error"].endswith(f"Received: {received}")
        for scheme in ("Bearer", "bearer", "BEARER "):
            headers = {"Authorization": f"{scheme} {TOKEN}"}
            assert server.ask("POST", PREDICT, INSTANCES, headers).status == 200
            assert server.ask("GET", "/metrics", headers=headers).status == 200
