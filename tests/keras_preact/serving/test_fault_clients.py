"""Bad clients of a server process: slow, silent, gone, or no clients at all. The others
do not notice.
"""

import concurrent.futures
import contextlib
import itertools
import socket
import struct
import threading
import time

import pytest

from tests.keras_preact.serving.server_process import (
    CLASSIFY,
    PATIENCE,
    PREDICT,
    Server,
    check_classes,
    check_probabilities,
    check_refusal,
    classify_body,
    encoded,
    post,
    predict_body,
    random_images,
    unharmed,
)
from tests.keras_preact.serving.test_faults import BODIES, FILES

HEADER_SECONDS, BODY_SECONDS = 1.5, 2.0


@pytest.fixture(scope="module")
def running(directory, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    with Server(
        directory, log, "--header-seconds", HEADER_SECONDS, "--body-seconds", BODY_SECONDS
    ) as server:
        yield server


@pytest.fixture
def server(running, saved_model):
    with unharmed(running, saved_model) as server:
        yield server


def request_bytes(body, path=PREDICT, **headers):
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: a",
        f"Content-Length: {len(body)}",
        *(f"{k}: {v}" for k, v in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def plug(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def trickle(server, data, step=0.05):
    """Send `data` a byte at a time until the server has enough of it, and return what
    it says to that.
    """
    with plug(server) as client:
        client.settimeout(step)
        received = b""
        end = time.monotonic() + PATIENCE
        for byte in itertools.chain(data, itertools.repeat(ord("a"))):
            assert time.monotonic() < end, "the server takes it for ever"
            try:
                client.sendall(bytes([byte]))
                while some := client.recv(65536):
                    received += some
                return received
            except TimeoutError:
                continue
            except ConnectionError:
                return received


def test_slow_clients_are_cut_off_while_others_are_served(server, saved_model):
    body = predict_body(random_images(1))
    slow = [
        b"POST " + PREDICT.encode() + b" HTTP/1.1\r\nHost: a\r\nX-Slow: ",
        request_bytes(body)[: -len(body) + 10],
        b"",
        b"POST",
    ]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        trickled = [pool.submit(trickle, server, data) for data in slow * 10]
        served = 0
        while not all(one.done() for one in trickled):
            status, answer, _ = server.post(PREDICT, body)
            assert status == 200, answer
            check_probabilities(answer, saved_model.probabilities(random_images(1)))
            served += 1
    assert served > 0
    for one in trickled:
        assert one.result() == b"" or one.result().split()[1] in (b"400", b"408"), one.result()


@pytest.mark.parametrize(
    "when", ["in its headers", "in its body", "before the answer", "in the answer"]
)
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_clients_that_leave_are_forgotten(server, when, how):
    data = request_bytes(predict_body(random_images(2, 8)))
    count = {"in its headers": 20, "in its body": len(data) // 2}.get(when, len(data))
    for _ in range(30):
        with plug(server) as client:
            client.sendall(data[:count])
            if when == "in the answer":
                client.recv(20)
            if how == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.fixture
def patient(directory, saved_model, tmp_path):
    """A server that leaves idle connections open: each of 64 clients in one process may
    wait long for its turn.
    """
    with (
        Server(
            directory, tmp_path / "log", "--header-seconds", PATIENCE, "--body-seconds", PATIENCE
        ) as running,
        unharmed(running, saved_model) as server,
    ):
        yield server


def test_no_good_request_fails_among_bad_ones(patient, saved_model):
    """64 clients at once; each eighth request of theirs is bad, in one of many ways."""
    bad = [(CLASSIFY, classify_body(file)) for file in FILES.values()]
    bad += [(PREDICT, body) for body in BODIES.values() if len(body) < 100_000]
    clients, each = 64, 16
    refused = itertools.count()
    start = threading.Barrier(clients)

    def client(number):
        start.wait()
        answers = []
        with contextlib.closing(patient.connect()) as connection:
            for i in range(each):
                if (i + number) % 8 == 0:
                    path, body = bad[next(refused) % len(bad)]
                    check_refusal(*post(connection, path, body)[:2])
                elif i % 2:
                    answers.append(
                        ("file", number, post(connection, CLASSIFY, classify_body(encoded(number))))
                    )
                else:
                    rows = 1 + number % 3
                    answers.append(
                        (
                            "rows",
                            number,
                            post(connection, PREDICT, predict_body(random_images(number, rows))),
                        )
                    )
        return answers

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        answers = [answer for some in pool.map(client, range(clients)) for answer in some]
    assert len(answers) == clients * each * 7 // 8
    files = {number: saved_model.classes(encoded(number)) for number in range(clients)}
    rows = {
        number: saved_model.probabilities(random_images(number, 1 + number % 3))
        for number in range(clients)
    }
    for kind, number, (status, answer, _) in answers:
        assert status == 200, answer
        if kind == "file":
            check_classes(answer, files[number])
        else:
            check_probabilities(answer, rows[number])
