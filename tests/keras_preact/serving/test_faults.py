"""Bad requests and bad clients of a server process: each gets a refusal in plain words, and
the others do not notice.
"""

import concurrent.futures
import contextlib
import itertools
import json
import socket
import struct
import threading
import time

import numpy as np
import pytest

from tests.keras_preact.export import image_files
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

HEADER_SECONDS, BODY_SECONDS = 1.5, 2.0


@pytest.fixture(scope="module")
def running(directory, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    limits = ("--header-seconds", HEADER_SECONDS, "--body-seconds", BODY_SECONDS)
    with Server(directory, log, *limits) as server:
        yield server


@pytest.fixture
def server(running, saved_model):
    with unharmed(running, saved_model) as server:
        yield server


def damaged(file):
    """The same file with a byte of its data turned round."""
    middle = len(file) // 2
    return file[:middle] + bytes([file[middle] ^ 0xFF]) + file[middle + 1 :]


JPEG, PNG = encoded(1, "JPEG"), encoded(1)
FILES = {
    "no bytes": b"",
    "junk": np.random.default_rng(0).bytes(5000),
    "truncated jpeg": JPEG[: len(JPEG) // 2],
    "truncated png": PNG[: len(PNG) // 2],
    "another format": encoded(1, "GIF"),
    "jpeg header alone": JPEG[:20],
    "png signature alone": PNG[:8],
    "damaged png": damaged(PNG),
    "huge": image_files.png(2**31 - 1, 2**31 - 1, 8, 2, bytes(1000)),
    "no pixels": image_files.png(0, 5, 8, 2, bytes(1000)),
    "another size than its data": image_files.png(3000, 3000, 8, 2, bytes(1000)),
}


@pytest.mark.parametrize("file", FILES.values(), ids=FILES.keys())
def test_files_that_are_no_images_are_refused(server, file):
    as_rows = {"signature_name": "predict_bytes"} | json.loads(classify_body(file))
    for path, body in (
        (CLASSIFY, classify_body(file)),
        (CLASSIFY, classify_body(PNG, file, JPEG)),
        (PREDICT, json.dumps(as_rows).replace("examples", "instances")),
    ):
        status, answer, _ = server.post(path, body)
        check_refusal(status, answer)
        assert status == 400


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_small_file_of_a_huge_image_takes_no_memory(server, kind):
    """50,000 x 50,000 pixels are 7.5 GB."""
    side = 50_000
    if kind == "PNG":  # of 1 bit a pixel
        bomb = image_files.png(side, side, 1, 0, bytes(1 + side // 8) * 1000)
    else:
        start = JPEG.index(b"\xff\xc0") + 5
        bomb = JPEG[:start] + struct.pack(">HH", side, side) + JPEG[start + 4 :]
    server.post(CLASSIFY, classify_body(PNG))
    before = server.memory()
    body = classify_body(bomb, PNG)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for status, answer, _ in pool.map(lambda _: server.post(CLASSIFY, body), range(16)):
            check_refusal(status, answer)
            assert "50000 x 50000" in answer["error"]
    assert server.memory() - before < 150 * 2**20


def request_bytes(body, path=PREDICT, **headers):
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
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
        b"POST " + PREDICT.encode() + b" HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
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


WELL = [[[0, 0, 0]] * 32] * 32
BODIES = [
    b"",
    predict_body([WELL])[:-5],
    predict_body([[[[0, 0, 0]] * 31] * 32]),
    predict_body([WELL]).replace(b"0", b"NaN", 1),
    predict_body([WELL] * 9),
]


@pytest.mark.soak
def test_no_good_request_fails_among_bad_ones(directory, saved_model, tmp_path):
    """64 clients at once; each eighth request of theirs is bad, in one of many ways. The server
    leaves idle connections open: in one process, each client may wait long for its turn.
    """
    bad = [(CLASSIFY, classify_body(file)) for file in FILES.values()]
    bad += [(PREDICT, body) for body in BODIES]
    limits = ("--header-seconds", PATIENCE, "--body-seconds", PATIENCE)
    clients, each = 64, 16
    refused = itertools.count()
    start = threading.Barrier(clients)

    def client(number):
        images, file = random_images(number, 1 + number % 3), encoded(number)
        probabilities, classes = saved_model.probabilities(images), saved_model.classes(file)
        start.wait()
        with contextlib.closing(server.connect()) as connection:
            for i in range(each):
                if (i + number) % 8 == 0:
                    path, body = bad[next(refused) % len(bad)]
                    check_refusal(*post(connection, path, body)[:2])
                elif i % 2:
                    status, answer, _ = post(connection, CLASSIFY, classify_body(file))
                    assert status == 200, answer
                    check_classes(answer, classes)
                else:
                    status, answer, _ = post(connection, PREDICT, predict_body(images))
                    assert status == 200, answer
                    check_probabilities(answer, probabilities)

    with (
        Server(directory, tmp_path / "log", *limits) as running,
        unharmed(running, saved_model) as server,
        concurrent.futures.ThreadPoolExecutor(clients) as pool,
    ):
        list(pool.map(client, range(clients)))  # raises what failed in a client
    assert next(refused) == clients * each // 8
