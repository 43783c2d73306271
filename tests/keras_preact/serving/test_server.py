"""Connections and limits, over sockets: what is too slow, too much or not HTTP ends, and
the server continues. A server that stops finishes its requests.

No good request is under a short limit: a busy machine may pause for a second.
"""

import concurrent.futures
import contextlib
import json
import signal
import socket
import threading

import pytest

from keras_preact.serving import gate
from keras_preact.serving.server import MAX_HEAD_BYTES
from tests.keras_preact.serving import fakes
from tests.keras_preact.serving.server_process import wait_for

PREDICT = "/v1/models/toy:predict"
BODY = json.dumps({"instances": [[[[1.0], [2.0]], [[3.0], [4.0]]]]}).encode()
POST = f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\n".encode()
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Do not wait long for the rest of a refused request."""
    monkeypatch.setattr(gate, "LINGER_SECONDS", 0.4)


@pytest.fixture(scope="module")
def usual():
    """A server with generous limits on time, which no test may hurt."""
    with fakes.serving() as server:
        yield server


@contextlib.contextmanager
def connected(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        yield connection


def received(connection):
    """Return all that comes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            data += chunk
    return data


def exchange(server, request):
    """Send bytes, and return the status and the JSON of the answer, after which the
    server closes the connection.
    """
    with connected(server) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request)
        head, _, body = received(connection).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower(), head
    return int(head.split()[1]), json.loads(body)


def wait_until_idle(server):
    wait_for(lambda: not server.repository.leases)
    wait_for(lambda: server.app.state.admission.requests == server.app.state.admission.bytes == 0)


def still_serves(server):
    assert server.ask("POST", PREDICT, BODY).status == 200
    wait_until_idle(server)


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


@pytest.mark.parametrize(
    ("start", "drop"),
    [(b"", b""), (POST + b"X-", b""), (b"GET / HTTP/1.1\r\nX: ", b"a"), (b"", b"\r\n")],
)
def test_headers_that_do_not_come_end_the_connection(start, drop):
    """Nor do drops help, of which each comes well within the time."""
    with fakes.serving(header_seconds=0.3) as server, connected(server) as connection:
        connection.sendall(start)
        stop = threading.Event()

        def drip():
            with contextlib.suppress(OSError):
                while drop and not stop.wait(0.02):
                    connection.sendall(drop)

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert received(connection) == b""
        finally:
            stop.set()
            thread.join(60)


@pytest.mark.parametrize("framing", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
def test_a_body_that_does_not_come_ends(framing):
    with fakes.serving(body_seconds=0.2) as server:
        part = b'{"instances": [' if framing.startswith(b"Content") else b'3\r\n{"i\r\n'
        status, answer = exchange(server, POST + framing + b"\r\n\r\n" + part)
        assert (status, "0.2 seconds" in answer["error"]) == (408, True)
        wait_until_idle(server)


def test_an_answer_that_takes_too_long():
    with fakes.serving(deadline_seconds=0.2) as server:
        server.servable.hold = threading.Event()
        late = server.ask("POST", PREDICT, BODY)
        assert (late.status, "0.2 seconds" in late.json["error"]) == (503, True)
        assert int(late.headers["Retry-After"]) >= 1
        assert server.servable.cancelled.wait(60)
        wait_until_idle(server)


@pytest.mark.parametrize(
    "flood",
    [
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 10**6,
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 50_000,
        CHUNKED + b"0\r\n" + b"X: a\r\n" * 50_000,  # trailers
        CHUNKED + (b"1;" + b"x" * 1000 + b"\r\na\r\n") * 5000,  # extensions of chunks
    ],
)
def test_headers_without_end(usual, flood):
    status, answer = exchange(usual, flood)
    assert (status, str(MAX_HEAD_BYTES) in answer["error"]) == (431, True)
    assert usual.ask("GET", "/v2", headers={"X": "a" * (MAX_HEAD_BYTES // 2)}).status == 200
    still_serves(usual)


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"hello\r\n\r\n",
        b"GET /v2 HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"no number\r\n",
        b"GET /v2/health/live HTTP/1.1\r\nConnection: close\r\n\r\n",  # without a host
        GET[:-2] + b"Host: localhost\r\nConnection: close\r\n\r\n",  # with two
    ],
)
def test_what_is_not_http(usual, request_):
    status, answer = exchange(usual, request_)
    assert (status, answer.keys()) == (400, {"error"})
    still_serves(usual)


def test_pipelined_requests_are_answered_in_order(usual):
    one = POST + b"X-Request-ID: %d\r\nContent-Length: %d\r\n%s\r\n"
    ends = [b"", b"", b"", b"", b"Connection: close\r\n"]
    requests = [one % (i, len(BODY), end) + BODY for i, end in enumerate(ends)]
    with connected(usual) as connection:
        connection.sendall(b"".join(requests))
        answers = received(connection)
    places = [answers.index(b"x-request-id: %d" % i) for i in range(5)]
    assert places == sorted(places)
    assert answers.count(b"200 OK") == 5


def test_few_pipelined_requests_are_read_while_one_is_answered():
    """Not even if they come together with the end of a large body."""
    body = BODY.ljust(20_000)
    with fakes.serving() as server, held(server):
        before = set(server.server.server_state.connections)
        with connected(server) as connection:
            request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
            connection.sendall(request[:-1])
            wait_for(lambda: server.app.state.admission.bytes >= len(body) - 1)
            [other] = set(server.server.server_state.connections) - before
            connection.sendall(request[-1:] + GET * 500)
            wait_for(lambda: other.pipeline)
            assert len(other.pipeline) <= 4096 // len(GET)


def test_a_client_that_does_not_take_its_answer_is_cut_off():
    rows = 400_000
    tensor = {
        "name": "images",
        "datatype": "FP32",
        "shape": [rows, 2, 2, 1],
        "parameters": {"binary_data_size": 16 * rows},
    }
    wanted = {"name": "features", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
    request = (
        "POST /v2/models/toy/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\n"
        f"Content-Length: {len(head) + 16 * rows}\r\n\r\n"
    )
    with fakes.serving() as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request.encode() + head + bytes(16 * rows))
        open_ones = server.server.server_state.connections
        wait_for(lambda: server.repository.leases == 0 and server.servable.started.is_set())
        [one] = open_ones
        one.timeout_keep_alive = 0.1  # from here on: the request itself was not in a hurry
        server.loop.call_soon_threadsafe(one._check_progress)
        wait_for(lambda: not open_ones)
        assert one.transport.get_write_buffer_size() == 0
        assert len(received(connection)) < 16 * rows


def test_bodies_that_are_too_large():
    """They are refused before they are read, and the client gets its answer."""
    with fakes.serving(max_body_bytes=1000) as server:
        status, answer = exchange(server, POST + b"Content-Length: 1001\r\n\r\n")
        assert (status, "1000 bytes. Received: one of 1001" in answer["error"]) == (413, True)
        status, _ = exchange(server, POST + b"Content-Length: 99999999999999999999999\r\n\r\n")
        assert status in (400, 413)
        status, answer = exchange(server, CHUNKED + (b"64\r\n" + bytes(100) + b"\r\n") * 11)
        assert (status, "Received: a longer one" in answer["error"]) == (413, True)
        assert server.ask("POST", PREDICT, BODY.ljust(1000)).status == 200
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
        start = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        assert exchange(server, start + chunks)[0] == 200
        still_serves(server)


def test_a_client_that_sends_everything_before_it_looks_gets_its_refusal(monkeypatch):
    monkeypatch.setattr(gate, "LINGER_SECONDS", 60)
    with fakes.serving(max_body_bytes=1000) as server:
        assert server.ask("POST", PREDICT, bytes(5_000_000)).status == 413


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


def test_the_bodies_of_all_requests_are_limited_together():
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


def test_a_client_that_goes_takes_its_work_with_it(caplog):
    caplog.set_level("INFO", "keras_preact.serving")
    with fakes.serving(deadline_seconds=1000) as server:
        server.servable.hold = threading.Event()
        with connected(server) as connection:
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            assert server.servable.started.wait(60)
        assert server.servable.cancelled.wait(60)
        wait_for(lambda: any(getattr(one, "status", None) == 499 for one in caplog.records))
        server.servable.hold = None
        with connected(server) as connection:
            connection.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        still_serves(server)
        records = [one for one in caplog.records if one.name == "keras_preact.serving"]
        assert not [record for record in records if record.exc_info]


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
    with fakes.in_process() as server:
        server.app.state.stopping = True
        assert server.ask("GET", "/v2/health/ready").status == 503
        assert server.ask("GET", "/v2/health/live").status == 200
        assert server.ask("POST", PREDICT, BODY).status == 200


def test_what_does_not_finish_in_time_is_told_so():
    with fakes.serving(drain_seconds=0.2) as server, held(server) as [answer]:
        server.server.handle_exit(signal.SIGTERM, None)
        late = answer.result(60)
        assert (late.status, late.json) == (503, {"error": "The server is stopping."})
        wait_for(lambda: not server.repository.running)
