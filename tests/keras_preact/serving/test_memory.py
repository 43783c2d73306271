"""Memory: bodies are freed with their requests, and do not wait for Python's collector."""

import contextlib
import gc
import json
import tracemalloc

from keras_preact.serving import gate
from tests.keras_preact.serving import fakes
from tests.keras_preact.serving.server_process import wait_for

TOY = "/v1/models/toy:predict"
MIB = 2**20
GOOD = json.dumps({"instances": [[[[1.0], [2.0]], [[3.0], [4.0]]]]}).encode()


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


LARGE = b" " * 4 * MIB
REQUESTS = [
    (200, GOOD + LARGE),
    (400, LARGE + b"{"),
    (400, json.dumps({"instances": [["a" * 4 * MIB]]}).encode()),
    (500, GOOD.replace(b"1.0", b"666") + LARGE),  # an error inside
]


def test_no_cycle_keeps_a_body(monkeypatch):
    monkeypatch.setattr(gate.log, "propagate", False)  # pytest keeps records, and their frames
    with fakes.serving() as server:
        for status, body in REQUESTS:
            assert server.ask("POST", TOY, body).status == status
        # What is made the first time stays.
        with without_collector() as held:
            for _, body in REQUESTS:
                for _ in range(5):
                    server.ask("POST", TOY, body)
                wait_for(lambda: held() < 4 * MIB)  # less than one body
