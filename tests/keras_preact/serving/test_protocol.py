"""Connections: headers that do not end, what is not HTTP, requests in a row, over raw
sockets.
"""

import contextlib
import json
import socket
import threading

import keras
import pytest

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend"
)

pytest.importorskip("uvicorn")
from keras_preact.serving.protocol import MAX_HEAD_BYTES  # noqa: E402
from tests.keras_preact.serving import fakes  # noqa: E402
from tests.keras_preact.serving.fakes import wait_for  # noqa: E402
from tests.keras_preact.serving.raw_http import (
    BODY,
    POST,
    connected,
    exchange,
    received,
    still_serves,
)


@pytest.mark.parametrize("sent", [b"", b"\r\n", POST, POST + b"X-", b"GET"])
def test_headers_that_do_not_come_end(sent):
    with fakes.serving(header_seconds=0.2) as server, connected(server) as connection:
        connection.sendall(sent)
        assert received(connection) == b""
        still_serves(server)


@pytest.mark.parametrize("first", [b"", b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"])
@pytest.mark.parametrize("drop", [b"a", b"\r\n"])
def test_headers_that_come_in_drops_end(first, drop):
    """Each drop comes well within the time; all of them together do not."""
    with fakes.serving(header_seconds=0.5) as server, connected(server) as connection:
        connection.sendall(first + (b"GET / HTTP/1.1\r\nX: " if drop == b"a" else b""))
        stop = threading.Event()

        def drip():
            with contextlib.suppress(OSError):
                while not stop.wait(0.02):
                    connection.sendall(drop)

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert received(connection).count(b"HTTP/1.1") == (1 if first else 0)
        finally:
            stop.set()
            thread.join(60)
        still_serves(server)


@pytest.mark.parametrize("lines", [[b"X: " + b"a" * 10**6], [b"X%d: a" % i for i in range(20_000)]])
def test_headers_without_end(lines):
    with fakes.serving() as server:
        status, answer = exchange(
            server, b"GET /v2 HTTP/1.1\r\nHost: a\r\n", *(line + b"\r\n" for line in lines)
        )
        assert (status, str(MAX_HEAD_BYTES) in answer["error"]) == (431, True)
        assert server.ask("GET", "/v2", headers={"X": "a" * (MAX_HEAD_BYTES // 2)}).status == 200
        still_serves(server)


@pytest.mark.parametrize("flood", [b"X: a\r\n", b"1;" + b"x" * 1000 + b"\r\na\r\n"])
def test_what_frames_a_body_is_bounded(flood):
    """Trailers, and extensions of chunks: neither is body."""
    end = b"0\r\n" if flood.startswith(b"X") else b""
    with fakes.serving() as server:
        status, _ = exchange(
            server, POST + b"Transfer-Encoding: chunked\r\n\r\n" + end, *[flood] * 50_000
        )
        assert status in (400, 431)
        still_serves(server)


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"hello\r\n\r\n",
        b"GET /v2 HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n",
    ],
)
def test_what_is_not_http(request_):
    with fakes.serving() as server:
        status, answer = exchange(server, request_)
        assert (status, answer) == (400, {"error": "This is not HTTP."})
        still_serves(server)


def test_pipelined_requests_are_answered_in_order():
    with fakes.serving() as server:
        with connected(server) as connection:
            one = POST + b"X-Request-ID: %d\r\nContent-Length: %d\r\n"
            requests = [
                one % (i, len(BODY))
                + (b"Connection: close\r\n" if i == 4 else b"")
                + b"\r\n"
                + BODY
                for i in range(5)
            ]
            connection.sendall(b"".join(requests))
            answers = received(connection)
        assert [answers.index(b"x-request-id: %d" % i) for i in range(5)] == sorted(
            answers.index(b"x-request-id: %d" % i) for i in range(5)
        )
        assert answers.count(b"200 OK") == 5


def test_a_client_that_does_not_take_its_answer_is_cut_off():
    rows = 400_000
    tensor = {
        "name": "images",
        "datatype": "FP32",
        "shape": [rows, 2, 2, 1],
        "parameters": {"binary_data_size": 16 * rows},
    }
    head = json.dumps(
        {"inputs": [tensor], "outputs": [{"name": "features", "parameters": {"binary_data": True}}]}
    ).encode()
    lengths = f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + 16 * rows}\r\n"
    request = f"POST /v2/models/toy/infer HTTP/1.1\r\n{lengths}\r\n"
    with fakes.serving(header_seconds=0.3) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request.encode() + head)
        connection.sendall(bytes(16 * rows))
        open_ones = server.server.server_state.connections
        wait_for(lambda: server.repository.leases == 0 and server.servable.started.is_set())
        [one] = open_ones
        wait_for(lambda: not open_ones)
        assert one.transport.get_write_buffer_size() == 0
        still_serves(server)
        assert len(received(connection)) < 16 * rows
