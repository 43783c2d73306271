"""Memory stays flat under hostile load: nothing waits for Python's collector, and no
client can make the server hold more than its limits.
"""

import concurrent.futures
import contextlib
import gc
import json
import socket
import threading
import time
import tracemalloc

import pytest

from tests.keras_preact.serving import fakes
from tests.keras_preact.serving.server_process import (
    CLASSIFY,
    PREDICT,
    Server,
    check_answers,
    classify_body,
    encoded,
    post,
    predict_body,
    random_images,
    wait_for,
)

TOY = "/v1/models/toy:predict"
MIB = 2**20
GOOD = {"instances": [[[[1.0], [2.0]], [[3.0], [4.0]]]]}


@contextlib.contextmanager
def without_collector():
    """Give a function that returns the bytes held since, while cycles stay."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        yield lambda: tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
        gc.enable()
        gc.collect()


LARGE = b" " * MIB
REFUSED = {
    "no JSON": (400, LARGE + b"{"),
    "wrong values": (400, json.dumps({"instances": [["a" * MIB]]}).encode()),
    "an error inside": (500, json.dumps(GOOD).replace("1.0", "666").encode() + LARGE),
    "too large": (413, LARGE * 3),
    "good": (200, json.dumps(GOOD).encode() + LARGE),
}


@pytest.mark.parametrize("case", REFUSED)
def test_no_cycle_keeps_a_body(case):
    status, body = REFUSED[case]
    with fakes.in_process(max_body_bytes=2 * MIB) as server:
        server.ask("POST", TOY, body)  # what is made the first time stays
        with without_collector() as held:
            for _ in range(5):
                assert server.ask("POST", TOY, body).status == status
            wait_for(lambda: held() < MIB / 2)


@pytest.mark.parametrize("end", ["deadline", "gone", "stopped"])
def test_no_cycle_keeps_the_body_of_a_request_that_ends_early(end):
    body = json.dumps(GOOD).encode() + LARGE
    with fakes.serving(deadline_seconds=0.1 if end == "deadline" else 60) as server:
        server.servable.hold = threading.Event()

        def begin():
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            head = f"POST {TOY} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            return connection

        def ask():
            server.servable.started.clear()
            with contextlib.closing(begin()) as connection:
                assert server.servable.started.wait(60)
                if end == "stopped":
                    for task in list(server.server.server_state.tasks):
                        server.loop.call_soon_threadsafe(task.cancel)
                if end != "gone":
                    assert b" 503 " in connection.recv(1000)
            wait_for(lambda: server.app.state.admission.requests == 0)
            wait_for(lambda: not server.server.server_state.connections)

        ask()
        with without_collector() as held:
            for _ in range(5):
                ask()
            wait_for(lambda: held() < MIB / 2)


def test_work_that_nobody_waits_for_holds_no_body():
    """The threads are busy; what was to follow is cancelled."""
    from keras_preact.serving.gate import Workers

    class Body:
        alive = 0

        def __init__(self):
            Body.alive += 1

        def __del__(self):
            Body.alive -= 1

    import asyncio

    async def main():
        workers, busy = Workers(threads=2), threading.Event()
        try:
            tasks = [
                asyncio.create_task(workers.run(MIB, lambda body: busy.wait(60), Body()))
                for _ in range(20)
            ]
            await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            del tasks, task
            assert Body.alive == 2
        finally:
            busy.set()
            workers.close()

    asyncio.run(main())


GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_few_pipelined_requests_are_held_at_once():
    """They are answered in their order nevertheless, all of them."""
    number, most = 5000, 0
    first = json.dumps(GOOD).encode()
    head = f"POST {TOY} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(first)}\r\n\r\n"
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with fakes.serving() as server:
        server.servable.hold = threading.Event()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            sender = threading.Thread(
                target=connection.sendall, args=(head.encode() + first + GET * number + last,)
            )
            sender.start()
            assert server.servable.started.wait(60)
            [one] = server.server.server_state.connections
            wait_for(lambda: one.pipeline)
            time.sleep(0.1)  # time in which it could read more
            most = len(one.pipeline)
            server.servable.hold.set()
            answers = b""
            while chunk := connection.recv(MIB):
                answers += chunk
            sender.join(60)
    assert most <= 4096 / len(GET) + 1
    assert answers.count(b"HTTP/1.1 200") == number + 2
    assert answers.index(b"predictions") < answers.index(b'{"live":true}')


def hostile(server, stop):
    """Return what bad clients do again and again, each in a thread of its own."""
    large = b'{"instances": [' + b"[" * 100 + b"1.5," * (5 * MIB)

    def refused():
        server.post(PREDICT, large)

    def too_large():
        with contextlib.suppress(ConnectionError):
            server.post(PREDICT, large * 2)

    def cancelled():
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            head = f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(large)}"
            client.sendall(head.encode() + b"\r\n\r\n" + large)

    def pipelined():
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", server.port), timeout=1) as client,
        ):
            client.setblocking(False)
            while not stop.is_set():
                with contextlib.suppress(BlockingIOError):
                    client.send(GET * 5000)
                with contextlib.suppress(BlockingIOError):
                    client.recv(MIB)
                time.sleep(0.001)

    def silent():
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", server.port), timeout=1) as client,
        ):
            while not stop.is_set():
                client.sendall(GET * 5000)

    return [refused, refused, too_large, cancelled, pipelined, silent, silent, silent]


@pytest.mark.soak
def test_memory_stays_flat_while_good_requests_are_answered(directory, saved_model, tmp_path):
    stop = threading.Event()
    small = ("--max-pending-bytes", 64 * MIB)
    with Server(directory, tmp_path / "log", *small) as server:

        def again(deed):
            while not stop.is_set():
                deed()

        check_answers(server, saved_model)
        server.post(PREDICT, b'{"instances": [' + b"1.5," * (5 * MIB))
        before, curve, served = server.memory(), [], 0
        images, file = random_images(1), encoded(1)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            bad = [pool.submit(again, deed) for deed in hostile(server, stop)]
            try:
                end = time.monotonic() + 20
                while time.monotonic() < end:
                    with contextlib.closing(server.connect()) as connection:
                        for path, body in (
                            (PREDICT, predict_body(images)),
                            (CLASSIFY, classify_body(file)),
                        ):
                            status, answer, _ = post(connection, path, body)
                            assert status in (200, 429), answer
                            served += status == 200
                    curve.append((server.memory() - before) // MIB)
            finally:
                stop.set()
            for one in bad:
                one.result(60)
        check_answers(server, saved_model)
        print(served, curve[:: len(curve) // 20 + 1])
        assert served > 20
        assert max(curve) < 600, curve[:: len(curve) // 20 + 1]
