"""A model computed by hand, a repository that lends it, an app of them in this process,
and a server of it in a thread.
"""

import asyncio
import contextlib
import dataclasses
import email.message
import http.client
import json
import queue
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from keras_preact.preprocessing import InputRange
from keras_preact.serving import server
from keras_preact.serving.app import create_app
from keras_preact.serving.errors import NotFound, RequestError, Unavailable
from keras_preact.serving.repository import VersionStatus
from keras_preact.serving.settings import Settings
from keras_preact.serving.tensors import Signature, TensorSpec

CLASSES = ["cat", "dog", "émeu"]
SHAPE = (2, 2, 1)
IMAGES = TensorSpec("images", "float32", (None, *SHAPE))
BYTES = TensorSpec("image_bytes", "string", (None,))
PIXELS = dataclasses.replace(
    IMAGES, name="pixels", expected=InputRange(np.array([125.0]), np.array([64.0]))
)
OUTPUTS = {
    "serving_default": (IMAGES, {"logits": ("float32", 3), "probabilities": ("float32", 3)}),
    "features": (IMAGES, {"features": ("float32", 4)}),
    "of_pixels": (PIXELS, {"features": ("float32", 4)}),
    "predict_bytes": (
        BYTES,
        {"classes": ("string", 2), "scores": ("float32", 2), "indices": ("int32", 2)},
    ),
}
SIGNATURES = {
    name: Signature(
        name,
        spec,
        {key: TensorSpec(key, dtype, (None, *rest)) for key, (dtype, *rest) in outputs.items()},
    )
    for name, (spec, outputs) in OUTPUTS.items()
}


class FakeServable:
    """Logits: the first value of an image, the sum of all, zero. Bytes: as many as the
    digits they are.
    """

    name, version = "toy", 7
    classes = CLASSES
    signatures = SIGNATURES
    signature_defs = {"serving_default": {"method_name": "tensorflow/serving/predict"}}  # noqa: RUF012
    top_k = 2
    waiting = 0
    busy_seconds = 0.0

    def __init__(self):
        self.hold: threading.Event | None = None
        self.started = threading.Event()
        self.cancelled = threading.Event()

    async def predict(self, signature, images, deadline):
        self.started.set()
        try:
            while self.hold is not None and not self.hold.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if signature == "predict_bytes":
            if not all(data.isdigit() for data in images):
                raise RequestError("Not an image.")
            images = np.array([np.full(SHAPE, int(data[:3]), np.float32) for data in images])
        assert images.dtype == np.float32
        assert images.shape[1:] == SHAPE
        if (images == 666).any():
            raise KeyError("/secret/path of TensorFlow")
        logits = np.stack(
            [images[:, 0, 0, 0], images.sum((1, 2, 3)), np.zeros(len(images))], 1
        ).astype(np.float32)
        exponents = np.exp(logits - logits.max(1, keepdims=True))
        probabilities = exponents / exponents.sum(1, keepdims=True)
        order = np.argsort(-probabilities, axis=1, kind="stable")[:, :2]
        outputs = {
            "logits": logits,
            "probabilities": probabilities,
            "features": images.reshape(len(images), 4),
            "classes": np.array(CLASSES, dtype=object)[order],
            "scores": np.take_along_axis(probabilities, order, 1),
            "indices": order.astype(np.int32),
        }
        return {spec.name: outputs[spec.name] for spec in SIGNATURES[signature].outputs.values()}


class FakeRepository:
    """Lends one model, `toy`; there are also `slow`, which is being loaded, and `bad`,
    which failed.
    """

    def __init__(self):
        self.servable = FakeServable()
        self.running = False
        self.leases = 0
        self.is_ready = True

    async def start(self):
        self.running = True

    async def stop(self):
        while self.leases:
            await asyncio.sleep(0.005)
        self.running = False

    @contextlib.contextmanager
    def lease(self, name, version=None):
        if name in ("slow", "bad"):
            raise Unavailable(f"The model {name} is not available.")
        if name != "toy" or version not in (None, self.servable.version):
            raise NotFound("There is no such model.")
        self.leases += 1
        try:
            yield self.servable
        finally:
            self.leases -= 1

    def labelled(self, name, label):
        if (name, label) != ("toy", "stable"):
            raise NotFound("There is no such label.")
        return self.servable.version

    def names(self):
        return ["bad", "slow", "toy"]

    def status(self, name):
        states = {
            "bad": VersionStatus(1, "END", "INTERNAL", "It is broken."),
            "slow": VersionStatus(1, "LOADING"),
            "toy": VersionStatus(self.servable.version, "AVAILABLE"),
        }
        if name not in states:
            raise NotFound("There is no such model.")
        return [states[name]]

    def available(self, name):
        return [one.version for one in self.status(name) if one.state == "AVAILABLE"]

    def ready(self):
        return self.is_ready


class InProcess:
    """An app without a socket. `ask` sends one request to it, and returns its answer."""

    def __init__(self, app, loop):
        self.app, self._loop = app, loop
        self.repository = app.state.repository
        self.servable = getattr(self.repository, "servable", None)

    def ask(self, method, path, body=None, headers=()):
        answer = self._loop.run_until_complete(self._ask(method, path, body, dict(headers)))
        # The bytes of a header are Latin-1, as http.client reads them.
        start, *parts = answer
        fields = email.message.Message()
        for name, value in start["headers"]:
            fields[name.decode("latin-1")] = value.decode("latin-1")
        return Answer(start["status"], fields, b"".join(part.get("body", b"") for part in parts))

    async def _ask(self, method, path, body, headers):
        body = encoded(body)
        fields = {"content-length": str(len(body))} | headers
        scope = {
            "type": "http",
            "method": method,
            "path": urllib.parse.unquote(path),
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in fields.items()],
        }
        messages = [{"type": "http.request", "body": body}]
        answer = []

        async def receive():
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message):
            answer.append(message)

        await self.app(scope, receive, send)
        return answer


@contextlib.contextmanager
def in_process(
    directory: Path | None = None, replica: str | None = None, **options
) -> Iterator[InProcess]:
    """Give an app of a fake repository, or of a real one of `directory`."""
    with asyncio.Runner() as runner:
        settings = Settings(directory or Path("nowhere"), **options)
        app = create_app(settings, None if directory else FakeRepository(), replica)
        lifespan = app.router.lifespan_context(app)
        runner.run(lifespan.__aenter__())
        try:
            yield InProcess(app, runner.get_loop())
        finally:
            runner.run(lifespan.__aexit__(None, None, None))


class Running:
    """A server on a port of its own. `ask` sends one request over a new connection."""

    def __init__(self, port, app, loop, stop):
        self.port, self.app, self._loop, self._stop = port, app, loop, stop
        self.repository = app.state.repository
        self.servable = getattr(self.repository, "servable", None)

    def stop(self):
        self._loop.call_soon_threadsafe(self._stop.set)

    def ask(self, method, path, body=None, headers=()):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else encoded(body), dict(headers))
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())


def encoded(body):
    """Return bytes as they are, a text as UTF-8, nothing as no bytes, the rest as JSON."""
    if body is None or isinstance(body, bytes):
        return body or b""
    return (body if isinstance(body, str) else json.dumps(body)).encode()


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self):
        return json.loads(self.body)


@contextlib.contextmanager
def serving(directory: Path | None = None, **options) -> Iterator[Running]:
    """Run a server in a thread until the context ends: of a fake repository, or of a real
    one of `directory`. Its limits on time are generous.
    """
    options = dict.fromkeys(("header_seconds", "body_seconds", "deadline_seconds"), 60) | options
    settings = Settings(directory or Path("nowhere"), **options)
    app = create_app(settings, None if directory else FakeRepository())
    address = server.free_address("127.0.0.1", 0)
    started: queue.Queue[Running] = queue.Queue()

    async def run() -> None:
        stop = asyncio.Event()
        running = Running(address[1], app, asyncio.get_running_loop(), stop)
        await server.serve(app, settings, address, stop, lambda: started.put(running))

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    running = started.get(timeout=60)
    try:
        yield running
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended
            running.stop()
        thread.join(60)
    assert not thread.is_alive()
