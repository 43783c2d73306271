"""HTTP by hand: requests that no well-behaved client sends."""

import contextlib
import json
import socket

from tests.keras_preact.serving.fakes import wait_for

PREDICT = "/v1/models/toy:predict"
BODY = json.dumps({"instances": [[[[1.0], [2.0]], [[3.0], [4.0]]]]}).encode()
POST = f"POST {PREDICT} HTTP/1.1\r\nHost: a\r\n".encode()


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


def exchange(server, *parts):
    """Send bytes, and return the status and the JSON of the answer, behind which the
    server closes the connection.
    """
    with connected(server) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                connection.sendall(part)
        return parsed(received(connection))


def parsed(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower(), answer
    return int(head.split()[1]), json.loads(body)


def still_serves(server):
    assert server.ask("POST", PREDICT, BODY).status == 200
    wait_for(lambda: not server.repository.leases)
    wait_for(lambda: server.app.state.admission.requests == server.app.state.admission.bytes == 0)
