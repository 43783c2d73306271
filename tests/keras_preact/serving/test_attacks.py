"""Hostile clients of a server process: each attack ends, costs less than 100 MB, and other
clients are answered meanwhile.
"""

import contextlib
import re
import resource
import selectors
import socket
import time

import pytest

from tests.keras_preact.serving.server_process import (
    PATIENCE,
    PREDICT,
    predict_body,
    random_images,
    run_server,
)

pytestmark = pytest.mark.process

MOST = 100 * 2**20
POST = f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\n".encode()
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = predict_body(random_images(0))


@pytest.fixture(scope="module")
def server(directory, tmp_path_factory):
    """A server that no attack may hurt. The first request costs some memory."""
    options = ("--header-seconds", 4, "--body-seconds", 2)
    with run_server(directory, tmp_path_factory.mktemp("attacks") / "log", *options) as running:
        for _ in range(50):
            assert ask(running) == 200
        yield running


def ask(server):
    with contextlib.closing(server.connect()) as connection:
        connection.request("POST", PREDICT, BODY)
        return connection.getresponse().status


def memory(server):
    """Return the server's memory now and its most so far, in bytes."""
    with open(f"/proc/{server.process.pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))


@contextlib.contextmanager
def attacked(server):
    """Check that a block costs little memory at any time, and that the server is well
    afterwards.
    """
    with open(f"/proc/{server.process.pid}/clear_refs", "w") as file:
        file.write("5")  # forget the most so far
    before, _ = memory(server)
    yield
    assert memory(server)[1] - before < MOST
    assert ask(server) == 200


@contextlib.contextmanager
def connections(server, number):
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
            )
            for _ in range(number)
        ]


def received(connection):
    """Return what comes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while chunk := connection.recv(65536):
            data += chunk
    return data


def send(connection, data):
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)


def statuses(answers):
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+)", answers)]


@pytest.mark.parametrize("start", [b"", POST + b"X-", GET], ids=["silent", "half", "idle"])
def test_connections_that_make_no_progress_are_closed(server, start):
    with attacked(server), connections(server, 100) as some:
        for one in some:
            send(one, start)
        assert server.get("/v2/health/live")[0] == 200
        for one in some:
            assert statuses(received(one)) == ([200] if start == GET else [])


@pytest.mark.parametrize("flood", [b"X: " + b"a" * 10**7, b"X: a\r\n" * 10**6])
def test_a_header_without_end_is_cut(server, flood):
    with attacked(server), connections(server, 4) as some:
        for one in some:
            send(one, b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + flood)
        for one in some:
            assert statuses(received(one)) in ([431], [])


def test_bodies_beyond_the_limit_are_refused_before_they_are_read(server):
    with attacked(server), connections(server, 6) as some:
        for one in some:
            send(one, POST + b"Content-Length: 100000000\r\n\r\n")
            assert one.recv(12) == b"HTTP/1.1 413"
        for one in some:
            send(one, bytes(10**7))  # what nobody waits for is not kept


def test_thirty_megabytes_of_lists_are_refused(server):
    body = b'{"instances": [' + b"[]," * 10**7 + b"[]]}"
    with attacked(server), contextlib.closing(server.connect()) as connection:
        connection.request("POST", PREDICT, body)
        assert connection.getresponse().status == 400


def test_answers_that_nobody_reads_do_not_pile_up(server):
    """Pipelined requests, on connections that read nothing, as fast as the server takes
    them.
    """
    end = time.monotonic() + 5
    with attacked(server), connections(server, 4) as some, selectors.DefaultSelector() as ready:
        for one in some:
            one.setblocking(False)
            ready.register(one, selectors.EVENT_WRITE)
        while time.monotonic() < end:
            for key, _ in ready.select(0.1):
                try:
                    key.fileobj.send(GET * 500)
                except BlockingIOError:
                    pass
                except ConnectionError:
                    ready.unregister(key.fileobj)
        assert server.get("/v2/health/live")[0] == 200


def test_images_of_clients_that_left_hold_nobody_up(server):
    request = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with attacked(server):
        with connections(server, 40) as some:
            for one in some:
                send(one, request)
        assert ask(server) == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_what_is_not_http(server, request_):
    with attacked(server), connections(server, 1) as [one]:
        send(one, request_)
        assert statuses(received(one)) == [400]


@pytest.mark.parametrize(
    "coding", ["gzip, chunked", "GZIP,chunked", "gzip\r\nTransfer-Encoding: chunked"]
)
def test_a_body_in_an_unknown_coding(server, coding):
    """It would be read as it is."""
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    for sent, status in ((coding, 501), ("Chunked", 200)):
        with connections(server, 1) as [one]:
            send(one, POST + f"Transfer-Encoding: {sent}\r\n\r\n".encode() + chunks)
            assert statuses(received(one)) == [status]


def test_six_hundred_clients_at_once(server):
    """Each is answered or told to come again; no connection is cut."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1024:
        pytest.skip("needs 1,024 file descriptors")
    request = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with attacked(server), connections(server, 600) as some:
        for one in some:
            one.sendall(request)
        assert {one.recv(12) for one in some} <= {b"HTTP/1.1 200", b"HTTP/1.1 429"}
