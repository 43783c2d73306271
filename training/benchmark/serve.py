"""The server under load: what a request costs beyond the computation of its network."""

import asyncio
import base64
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from .. import backends, children, disk
from ..errors import UserError, check_positive, reading
from . import report
from .report import Column

Body = Literal["batch", "binary", "json", "png", "jpeg"]

ABOUT = (
    "CPU = CPU time of the server's process per image, of all its threads. batch = one request "
    "holds as many images as the network computes at once, so this is about what the network needs "
    "by itself; all others hold one image. The client runs on the same machine."
)
_ORDER = (
    "Every engine has one server for all rounds. In a round, the kinds of requests take turns, and "
    "a ratio compares figures of the same round."
)
_COLUMNS = (
    Column("cpu_seconds", "CPU us", 1e6, 0),
    Column("images_per_second", "images/s", digits=1),
    Column("latency_99", "99 % ms", 1e3, 1),
)
#: Seconds that a server has to start, and an answer to arrive.
PATIENCE = 120.0


def run(
    model: Annotated[Path, tyro.conf.Positional],
    /,
    engines: tuple[Literal["tensorflow", "openvino"], ...] = ("tensorflow",),
    bodies: tuple[Body, ...] = ("binary", "json", "png", "jpeg"),
    clients: int = 64,
    rounds: int = 3,
    seconds: float = 3.0,
    output: Path | None = None,
) -> None:
    """Measure the server under load, with an exported model.

    Prints the CPU time of the server per image, images per second and the 99th percentile
    of the latency, with ratios to requests of a whole batch.

    Args:
        model: Folder of an exported model, such as saved_models/cifar10_resnet20.
        engines: Engines of the server.
        bodies: Kinds of requests with one image: a binary tensor, numbers in JSON, a PNG
            or a JPEG file.
        clients: Number of requests at the same time.
        rounds: Number of rounds.
        seconds: Seconds of load per round and kind of request.
        output: Write settings, versions and every figure to this JSON file.
    """
    check_positive(clients=clients, rounds=rounds, seconds=seconds)
    requests = _requests(model, ("batch", *bodies))
    disk.make_place(output, "--output")
    started = report.now()
    baselines = {f"{engine}/{body}": f"{engine}/batch" for engine in engines for body in requests}
    figures: list[dict[str, dict[str, float]]] = []
    with contextlib.ExitStack() as stack:
        servers = {engine: stack.enter_context(_serving(model, engine)) for engine in engines}
        for engine, server in servers.items():  # first computations are slow
            for request in requests.values():
                asyncio.run(server.load(request, clients, min(1.0, seconds)))
            print(f"{engine}: ready", file=sys.stderr, flush=True)
        for number in range(1, rounds + 1):
            figures.append({})
            for body, request in requests.items():
                for engine, server in servers.items():
                    figures[-1][f"{engine}/{body}"] = server.measure(request, clients, seconds)
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    content = {
        "command": "serve",
        "settings": {
            "model": model.name,
            "engines": engines,
            "bodies": tuple(requests),
            "clients": clients,
            "rounds": rounds,
            "seconds": seconds,
        },
        "about": ABOUT,
        "order": _ORDER,
        "started": started,
        "versions": backends.versions("tensorflow", "openvino", "granian", "starlette"),
        "rounds": figures,
        "summary": report.summarize(figures, baselines),
    }
    heading = f"{model.name}: {clients} clients, {rounds} round{'s' * (rounds > 1)}"
    report.show(heading, _COLUMNS, baselines, content, output)


class _Request(bytes):
    """A request as it is sent, with the number of its `images`."""

    images = 1


def _requests(model: Path, bodies: tuple[str, ...]) -> dict[str, _Request]:
    """Return a request of each kind for a model, with random pixels.

    Raises:
        UserError: for a folder that is no exported model, or a model that takes no images.
    """
    card_file = model / "model_card.json"
    if not card_file.is_file():
        raise UserError(f"{model} is no exported model: it has no {card_file.name}.")
    with reading(f"{card_file} cannot be read"):
        card = json.loads(card_file.read_text())
        [(name, spec)] = card["signatures"]["serving_default"]["inputs"].items()
        shape, most = spec["shape"][1:], max(card["batch_sizes"])
        if len(shape) != 3 or None in shape:
            raise UserError(f"{model} takes no images of one size. Received: the shape {shape}")
        if {"png", "jpeg"} & {*bodies} and "predict_bytes" not in card["signatures"]:
            raise UserError(f"{model} takes no image files: give --bodies binary json.")
    return {body: _request(model.name, name, shape, body, most) for body in bodies}


def _request(model: str, name: str, shape: list[int], body: str, most: int) -> _Request:
    images = np.random.default_rng(0).integers(0, 256, (most, *shape))
    count = most if body == "batch" else 1
    if body in ("batch", "binary"):
        tensor = images[:count].astype("<f4").tobytes()
        document = {
            "inputs": [
                {
                    "name": name,
                    "shape": [count, *shape],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": len(tensor)},
                }
            ],
            "outputs": [{"name": "probabilities", "parameters": {"binary_data": True}}],
        }
        head = json.dumps(document).encode()
        path = f"/v2/models/{model}/infer"
        lines = [f"Inference-Header-Content-Length: {len(head)}"]
        kind, content = "application/octet-stream", head + tensor
    else:
        document = (
            {"instances": images[:1].tolist()}
            if body == "json"
            else {
                "signature_name": "predict_bytes",
                "instances": [{"b64": base64.b64encode(_file(images[0], body)).decode()}],
            }
        )
        path, lines = f"/v1/models/{model}:predict", []
        kind, content = "application/json", json.dumps(document).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {kind}",
        f"Content-Length: {len(content)}",
        *lines,
    ]
    request = _Request("\r\n".join([*lines, "", ""]).encode() + content)
    request.images = count
    return request


def _file(pixels: np.ndarray, kind: str) -> bytes:
    """Return an image file. Blocks of 4 x 4 pixels are equal: noise would be larger than a
    photograph.
    """
    import tensorflow as tf

    blocks = pixels[::4, ::4].repeat(4, 0).repeat(4, 1)[: pixels.shape[0], : pixels.shape[1]]
    encode = tf.io.encode_png if kind == "png" else tf.io.encode_jpeg
    return encode(tf.constant(blocks, tf.uint8)).numpy()


class _Server:
    """A server in a process, and load for it."""

    def __init__(self, process: subprocess.Popen, port: int):
        self._process, self._port = process, port

    def measure(self, request: _Request, clients: int, seconds: float) -> dict[str, float]:
        """Return the figures of some seconds of load."""
        before, start = self._cpu_seconds(), time.perf_counter()
        latencies = asyncio.run(self.load(request, clients, seconds))
        taken, images = time.perf_counter() - start, len(latencies) * request.images
        return {
            "cpu_seconds": (self._cpu_seconds() - before) / images,
            "images_per_second": images / taken,
            "latency_99": float(np.quantile(latencies, 0.99)),
        }

    async def load(self, request: _Request, clients: int, seconds: float) -> list[float]:
        """Send a request again and again from several clients, each of which waits for its
        answer. Return the latencies in seconds.
        """
        end = time.perf_counter() + seconds
        async with asyncio.timeout(seconds + PATIENCE):
            # as many images at the same time, whatever the request holds, and one request ahead
            number = max(2, clients // request.images)
            jobs = (self._client(request, end) for _ in range(number))
            return [latency for each in await asyncio.gather(*jobs) for latency in each]

    async def _client(self, request: _Request, end: float) -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        latencies: list[float] = []
        try:
            while not latencies or time.perf_counter() < end:
                sent = time.perf_counter()
                writer.write(request)
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = re.search(r"(?i)\r\ncontent-length: *(\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                if not head.startswith("HTTP/1.1 200 "):
                    answer = f"{head.splitlines()[0]} {body[:300].decode(errors='replace')}"
                    raise UserError(f"The server does not answer: {answer}")
                latencies.append(time.perf_counter() - sent)
        finally:
            writer.close()
        return latencies

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _serving(model: Path, engine: str) -> Iterator[_Server]:
    """Start a server of one model in a process, and end it afterwards.

    Raises:
        UserError: if it does not start.
    """
    if not Path("/proc/self/stat").is_file():
        raise UserError("The CPU time of the server is read from /proc, which only Linux has.")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models, log = folder / "models", folder / "log"
        models.mkdir()
        (models / model.name).symlink_to(model.resolve())
        stream = stack.enter_context(log.open("w"))
        arguments = ["serve", str(models), "--port", "0", "--engine", engine]
        process = children.start(
            "training", arguments, "tensorflow", stdout=stream, stderr=subprocess.STDOUT
        )
        stack.callback(children.kill, process)
        yield _Server(process, _port(process, log))


def _port(process: subprocess.Popen, log: Path) -> int:
    """Return the port of a server when it is ready."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"Serving at http://\S+:(\d+):", log.read_text()):
            return int(found[1])
        time.sleep(0.1)
    raise UserError(f"The server does not start: {children.last_line(log.read_text())}")
