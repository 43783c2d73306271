"""A model computed by hand, and a server of it in a thread."""

import asyncio
import contextlib
import dataclasses
import email.message
import http.client
import json
import queue
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from keras_preact.export.version import VersionError
from keras_preact.preprocessing import InputRange
from keras_preact.serving import server
from keras_preact.serving.app import create_app
from keras_preact.serving.batching import Batcher
from keras_preact.serving.decoding import ImageDecoder
from keras_preact.serving.repository import Repository
from keras_preact.serving.servable import Servable
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
DEFS = {"serving_default": {"method_name": "tensorflow/serving/predict"}}


class Network:
    """Logits: the first value of an image, the sum of all, zero; NaN if the first value is
    99. Fails for 666, and refuses 667. Computes while `free` is set.
    """

    def __init__(self):
        self.free = threading.Event()
        self.free.set()

    def __call__(self, images):
        assert self.free.wait(60)
        assert images.dtype == np.float32
        if (images == 666).any():
            raise KeyError("/secret/path of TensorFlow")
        if (images == 667).any():
            raise tf.errors.InvalidArgumentError(None, None, "/secret/path of a token")
        with np.errstate(over="ignore", invalid="ignore"):
            logits = np.stack(
                [images[:, 0, 0, 0], images.sum((1, 2, 3)), np.zeros(len(images))], 1
            ).astype(np.float32)
            logits[:, 2] /= images[:, 0, 0, 0] != 99  # 0 / 0
            exponents = np.exp(logits - logits.max(1, keepdims=True))
        return {
            "logits": logits,
            "probabilities": exponents / exponents.sum(1, keepdims=True),
            "features": logits[:, 2:] + images.reshape(len(images), 4),
        }


def decode(files):
    """Return images whose values are the numbers that the files are. Fails for 668."""
    if b"668" in files.numpy():
        raise KeyError("/secret/path of TensorFlow")
    for number, file in enumerate(files.numpy()):
        if not file.isdigit():
            message = f"<<image {number} is no number>>"
            raise tf.errors.InvalidArgumentError(None, None, message)
    return tf.stack([tf.fill(SHAPE, float(file[:3])) for file in files.numpy()])


def load(path: Path, settings: Settings) -> Servable:
    """Load the version 7 of `toy`; every other one is broken."""
    if path.parts[-2:] != ("toy", "7"):
        raise VersionError(path, "It is broken.")
    return Servable(
        "toy",
        7,
        CLASSES,
        2,
        SIGNATURES,
        DEFS,
        Batcher(Network(), 8),
        ImageDecoder(decode),
        settings.max_queue,
    )


@contextlib.contextmanager
def app_of(directory: Path | None, replica: str | None = None, **options):
    """Give an app of a directory; without one, of the models `toy` and `bad`."""
    if directory:
        yield create_app(Settings(directory, **options), None, replica)
        return
    with tempfile.TemporaryDirectory() as temporary:
        for version in ("toy/7", "bad/1"):
            (Path(temporary) / version).mkdir(parents=True)
            (Path(temporary) / version / "saved_model.pb").touch()
        policy = {"version_labels": {"stable": 7}}
        (Path(temporary) / "toy" / "version_policy.json").write_text(json.dumps(policy))
        settings = Settings(Path(temporary), **options)
        yield create_app(settings, Repository(settings, load), replica)


class Running:
    """A server on a port of its own. `ask` sends one request over a new connection."""

    def __init__(self, app, port, stop):
        self.app, self.port, self.stop = app, port, stop
        self.servable = app.state.repository.servables()[-1]
        self.network = self.servable.batcher._run

    def ask(self, method, path, body=None, headers=()):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        if not isinstance(body, bytes | None):
            body = json.dumps(body)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())


@dataclasses.dataclass
class Answer:
    status: int
    headers: email.message.Message
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


@contextlib.contextmanager
def serving(directory: Path | None = None, **options) -> Iterator[Running]:
    """Run a server in a thread until the context ends. Its limits on time are generous."""
    options = dict.fromkeys(("header_seconds", "body_seconds", "deadline_seconds"), 60) | options
    address = server.free_address("127.0.0.1", 0)
    started: queue.Queue[Running] = queue.Queue()

    async def run(app) -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with server.running(app, app.state.settings, address):
            started.put(Running(app, address[1], lambda: loop.call_soon_threadsafe(stop.set)))
            await stop.wait()

    with app_of(directory, **options) as app:
        thread = threading.Thread(target=lambda: asyncio.run(run(app)))
        thread.start()
        running = started.get(timeout=60)
        try:
            yield running
        finally:
            with contextlib.suppress(RuntimeError):  # it has ended
                running.stop()
            thread.join(60)
        assert not thread.is_alive()
