"""Limits on requests and their bodies, and the end of a server: what is too much ends,
and the server goes on.
"""

import concurrent.futures
import contextlib
import signal
import threading

import keras
import pytest

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend"
)

pytest.importorskip("uvicorn")
from tests.keras_preact.serving import fakes  # noqa: E402
from tests.keras_preact.serving.fakes import wait_for  # noqa: E402
from tests.keras_preact.serving.raw_http import (
    BODY,
    POST,
    PREDICT,
    connected,
    exchange,
    still_serves,
)


@contextlib.contextmanager
def held(server, number=1):
    """Keep requests in progress until the context ends; gives the futures of their
    answers.
    """
    server.servable.hold = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        try:
            before = server.repository.leases
            answers = [pool.submit(server.ask, "POST", PREDICT, BODY) for _ in range(number)]
            wait_for(lambda: server.repository.leases == before + number)
            yield answers
        finally:
            server.servable.hold.set()


def test_a_body_announced_too_large_is_not_read():
    with fakes.serving(max_body_bytes=1000) as server:
        status, answer = exchange(server, POST + b"Content-Length: 1001\r\n\r\n", b"")
        assert status == 413
        assert "1000 bytes. Received: one of 1001" in answer["error"]
        assert exchange(server, POST + b"Content-Length: 99999999999999999999999\r\n\r\n")[0] in (
            400,
            413,
        )
        assert server.ask("POST", PREDICT, BODY.ljust(1000)).status == 200
        still_serves(server)


def test_a_large_body_gets_its_answer_although_it_is_not_read():
    with fakes.serving(max_body_bytes=1000) as server:
        assert (
            server.ask("POST", PREDICT, bytes(5_000_000)).status == 413
        )  # the client sends it all before it looks
        still_serves(server)


def test_a_body_of_chunks_is_counted():
    with fakes.serving(max_body_bytes=1000) as server:
        chunk = b"64\r\n" + bytes(100) + b"\r\n"
        status, answer = exchange(
            server, POST + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 11
        )
        assert status == 413
        assert "Received: a longer one" in answer["error"]
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
        request = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        assert exchange(server, request + chunks)[0] == 200
        still_serves(server)


def test_requests_beyond_the_limit_are_refused_before_their_body_is_read():
    with fakes.serving(max_requests=2) as server, held(server, 2) as answers:
        status, answer = exchange(server, POST + b"Content-Length: 1000\r\n\r\n")
        assert (status, "2 requests are in progress" in answer["error"]) == (429, True)
        assert int(server.ask("POST", PREDICT, BODY).headers["Retry-After"]) >= 1
        for path in ("/v2/health/live", "/v2/health/ready", "/v1/models", "/metrics"):
            assert server.ask("GET", path).status == 200
        assert b"keras_preact_requests_in_progress 2.0" in server.ask("GET", "/metrics").body
        server.servable.hold.set()
        assert [answer.result(60).status for answer in answers] == [200, 200]
        still_serves(server)


def test_the_bodies_of_all_requests_are_bounded_together():
    with fakes.serving(max_body_bytes=1000, max_pending_bytes=1500) as server:
        large = BODY.ljust(1000)
        with held(server):  # a small one
            first = threading.Thread(target=server.ask, args=("POST", PREDICT, large))
            first.start()
            wait_for(lambda: server.repository.leases == 2)
            assert server.ask("POST", PREDICT, large).status == 429
        first.join(60)
        assert server.ask("POST", PREDICT, large).status == 200
        still_serves(server)


@pytest.mark.parametrize("framing", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
def test_a_body_that_does_not_come_ends(framing):
    with fakes.serving(body_seconds=0.2) as server:
        part = b'{"instances": [' if framing.startswith(b"Content") else b'3\r\n{"i\r\n'
        status, answer = exchange(server, POST + framing + b"\r\n\r\n", part)
        assert (status, "0.2 seconds" in answer["error"]) == (408, True)
        still_serves(server)


def test_an_answer_that_takes_too_long():
    with fakes.serving(deadline_seconds=0.2) as server:
        with held(server) as [answer]:
            late = answer.result(60)
            assert (late.status, "0.2 seconds" in late.json["error"]) == (503, True)
            assert late.headers["Retry-After"] is not None
            assert server.servable.cancelled.wait(60)
        still_serves(server)


def test_a_client_that_goes_takes_its_work_with_it(caplog):
    caplog.set_level("INFO", "keras_preact.serving")
    with fakes.serving() as server:
        server.servable.hold = threading.Event()
        with connected(server) as connection:
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            assert server.servable.started.wait(60)
        assert server.servable.cancelled.wait(60)
        wait_for(
            lambda: [record for record in caplog.records if getattr(record, "status", None) == 499]
        )
        server.servable.hold = None
        with connected(server) as connection:
            connection.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        still_serves(server)
        assert not [record for record in caplog.records if record.exc_info]


def refuses(server):
    try:
        with connected(server):
            return False
    except ConnectionRefusedError:
        return True


def test_a_server_that_stops_finishes_what_it_began():
    with fakes.serving() as server:
        with held(server) as [answer]:
            server.server.handle_exit(signal.SIGTERM, None)
            assert server.app.state.stopping
            wait_for(lambda: refuses(server))
            assert not answer.done()
            assert server.repository.running
            server.servable.hold.set()
            assert answer.result(60).status == 200
        wait_for(lambda: not server.repository.running)


def test_it_is_not_ready_from_the_moment_that_it_stops():
    with fakes.serving() as server:
        server.app.state.stopping = True
        assert server.ask("GET", "/v2/health/ready").status == 503
        assert server.ask("GET", "/v2/health/live").status == 200
        still_serves(server)


def test_what_does_not_finish_in_time_is_told_so():
    with fakes.serving(drain_seconds=0.2) as server, held(server) as [answer]:
        server.server.handle_exit(signal.SIGTERM, None)
        assert (answer.result(60).status, answer.result().json) == (
            503,
            {"error": "The server is stopping."},
        )
        wait_for(lambda: not server.repository.running)
