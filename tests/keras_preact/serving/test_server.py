"""Limits over a real connection: what is too slow or too much is refused, and the server
continues. A server that stops finishes its requests.

No good request is under a short limit: a busy machine may pause for a second.
"""

import concurrent.futures
import contextlib
import json
import re
import socket
import threading

import pytest

from tests.keras_preact.serving import fakes
from tests.keras_preact.serving.server_process import wait_for

PREDICT = "/v1/models/toy:predict"
BODY = json.dumps({"instances": [[[[1.0], [2.0]], [[3.0], [4.0]]]]}).encode()
POST = f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\n".encode()
CHUNKED = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def exchange(server, request, drip=b""):
    """Send bytes, perhaps one more again and again, and return the status and the JSON of
    the answer.
    """
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request)
        data = b""
        with contextlib.suppress(ConnectionError):
            connection.settimeout(0.05 if drip else 60)
            while not data and drip:
                with contextlib.suppress(TimeoutError):
                    data += connection.recv(65536)
                connection.sendall(drip)
            connection.settimeout(60)
            while chunk := connection.recv(65536):
                data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def still_serves(server):
    assert server.ask("POST", PREDICT, BODY).status == 200
    admission = server.app.state.admission
    wait_for(lambda: admission.requests == admission.bytes == server.servable.in_progress == 0)


@contextlib.contextmanager
def held(server, number=1):
    """Keep requests in progress until the context ends; gives the futures of their
    answers.
    """
    server.network.free.clear()
    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        try:
            answers = [pool.submit(server.ask, "POST", PREDICT, BODY) for _ in range(number)]
            wait_for(lambda: server.servable.in_progress == number)
            yield answers
        finally:
            server.network.free.set()


@pytest.mark.parametrize("framing", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
def test_a_body_that_comes_too_slowly_ends(framing):
    with fakes.serving(body_seconds=0.3) as server:
        drip = b" " if framing.startswith(b"Content") else b"1\r\n \r\n"
        request = POST + b"Connection: close\r\n" + framing + b"\r\n\r\n" + drip
        status, answer = exchange(server, request, drip)
        assert status == 408
        assert re.search(r"0\.3 seconds. Received: [1-9]\d* bytes", answer["error"])
        wait_for(lambda: server.app.state.admission.bytes == 0)


def test_requests_that_are_not_whole(server):
    """A body that ends early, and a damaged chunk."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(POST + b"Content-Length: 1000\r\n\r\n{")
        connection.shutdown(socket.SHUT_WR)
        early = connection.makefile("rb").read()
    assert early.startswith(b"HTTP/1.1 400 ")
    assert b"The body ended before it was complete" in early
    status, answer = exchange(server, CHUNKED + b"no number\r\n")
    assert (status, "its chunks are damaged" in answer["error"]) == (400, True)


def test_an_answer_that_takes_too_long():
    with fakes.serving(deadline_seconds=0.2, hang_seconds=1e-6) as server, held(server) as [answer]:
        late = answer.result(60)
        assert (late.status, "0.2 seconds" in late.json["error"]) == (503, True)
        assert int(late.headers["Retry-After"]) >= 1
        assert server.servable.in_progress == 0
        hung = server.ask("GET", "/v2/health/live")  # the network computes on
        assert (hung.status, "Version 7 of toy" in hung.json["error"]) == (503, True)
        server.network.free.set()
        wait_for(lambda: server.ask("GET", "/v2/health/live").status == 200)


def test_bodies_that_are_too_large():
    """They are refused before they are read, and one of the largest size is not."""
    with fakes.serving(max_body_bytes=1000) as server:
        for length in (1001, 10**15):
            status, answer = exchange(server, POST + b"Content-Length: %d\r\n\r\n" % length)
            assert status == 413
            assert f"1000 bytes. Received: at least {length} bytes" in answer["error"]
        status, _ = exchange(server, CHUNKED + (b"64\r\n" + bytes(100) + b"\r\n") * 11)
        assert status == 413
        assert server.ask("POST", PREDICT, BODY.ljust(1000)).status == 200
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
        assert exchange(server, CHUNKED + chunks)[0] == 200
        still_serves(server)


def test_requests_beyond_the_limit_are_refused_before_their_body_is_read():
    with fakes.serving(max_requests=2) as server, held(server, 2) as answers:
        status, answer = exchange(server, POST + b"Content-Length: 1000\r\n\r\n")
        assert (status, "2 requests are in progress" in answer["error"]) == (429, True)
        assert int(server.ask("POST", PREDICT, BODY).headers["Retry-After"]) >= 1
        for path in ("/v2/health/live", "/v2/health/ready", "/v1/models", "/metrics"):
            assert server.ask("GET", path).status == 200
        assert b"keras_preact_requests_in_progress 2.0" in server.ask("GET", "/metrics").body
        server.network.free.set()
        assert [answer.result(60).status for answer in answers] == [200, 200]
        still_serves(server)


def test_the_bodies_of_all_requests_are_limited_together():
    with fakes.serving(max_body_bytes=1000, max_pending_bytes=1500) as server:
        large = BODY.ljust(1000)
        with held(server):  # a small one
            first = threading.Thread(target=server.ask, args=("POST", PREDICT, large))
            first.start()
            wait_for(lambda: server.servable.in_progress == 2)
            answer = server.ask("POST", PREDICT, large)
            assert answer.status == 429
            assert f"they have {2000 + len(BODY)} bytes" in answer.json["error"]
        first.join(60)
        assert server.ask("POST", PREDICT, large).status == 200
        still_serves(server)


def refuses(server):
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60):
            return False
    except ConnectionRefusedError:
        return True


def test_a_server_that_stops_finishes_what_it_began():
    with fakes.serving() as server:
        state = server.app.state
        with held(server) as [answer]:
            server.stop()
            wait_for(lambda: refuses(server))
            assert state.stopping
            assert not answer.done()
            assert state.repository.names() == ["bad", "toy"]
            server.network.free.set()
            assert answer.result(60).status == 200
        wait_for(lambda: not state.repository.servables())


def test_it_is_not_ready_from_the_moment_that_it_stops():
    with fakes.serving() as server:
        server.app.state.stopping = True
        assert server.ask("GET", "/v2/health/ready").status == 503
        assert server.ask("GET", "/v2/health/live").status == 200
        assert server.ask("POST", PREDICT, BODY).status == 200


def test_what_does_not_finish_in_time_is_told_so():
    with (
        fakes.serving(drain_seconds=0.2, deadline_seconds=1000) as server,
        held(server) as [answer],
    ):
        server.stop()
        late = answer.result(60)
        assert (late.status, "The server is stopping" in late.json["error"]) == (503, True)
