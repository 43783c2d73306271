"""The question `server`: what does a request over HTTP cost, beside a plain loop over the
same network?

Real servers run in processes of their own, and so does the client.
"""

import contextlib
import functools
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import children
from ...cli import UserError
from . import client, exports
from .cells import PLAIN, Cell, Round, in_turn, label
from .direct import Loop

if TYPE_CHECKING:
    from .workload import Options

#: No server takes longer to load a model, no client to get its last answers.
PATIENCE = 180.0
#: Width and height of the image in the JPEG file.
JPEG_SIZE = (500, 375)
_TICKS = os.sysconf("SC_CLK_TCK")


def measure(options: "Options", folder: Path) -> Iterator[Round]:
    """Ask real servers, one image per request, beside a plain loop over the same network
    and one over its peer's.
    """
    for model in options.models:
        kinds = [(model, PLAIN, options.precision), *exports.plain_peer(model)]
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            loops = {kind: Loop(folder, *kind) for kind in kinds}
            servers = {
                (engine, batching): stack.enter_context(
                    Server(model, options.precision, engine, batching, folder, scratch)
                )
                for engine, batching in itertools.product(options.engines, options.batching)
            }
            for process in servers.values():
                process.wait()
            requests = Requests(model, exports.path_of(folder, model, options.precision), scratch)
            trivial = stack.enter_context(TrivialServer(requests.answer_bytes))
            over = label("server", model, PLAIN, precision=options.precision)
            cells = [
                Cell(
                    label("server", name, PLAIN, precision=bits),
                    over,
                    functools.partial(_as_requests, loop, options.seconds),
                )
                for (name, _, bits), loop in loops.items()
            ]

            def add(name: str, over: str, process, *job, cells=cells) -> None:
                cells.append(Cell(name, over, functools.partial(process.ask, *job)))

            for n in options.concurrency:
                name = label("client", model, "trivial", concurrency=n)
                add(name, name, trivial, requests.tensor, n, min(1.0, options.seconds))
            usual = options.usual_concurrency
            for (engine, batching), process in servers.items():
                named = functools.partial(label, "server", model, engine, batching=batching)
                for n in options.concurrency:
                    add(named(concurrency=n), over, process, requests.tensor, n, options.seconds)
                if requests.jpeg is not None and batching == options.batching[0]:
                    name = named(concurrency=usual, input="jpeg")
                    add(name, over, process, requests.jpeg, usual, options.seconds)
            for figures in in_turn(cells, options.rounds):
                yield compare_batching(figures)


def compare_batching(figures: Round) -> Round:
    """Add `over_no_batching` to the candidates with batching: the ratio of requests per
    second.
    """
    found = {}
    for name, one in figures.items():
        without = figures.get(name.replace("batching=on", "batching=off"))
        if "batching=on" in name and without is not None:
            ratio = one["requests_per_second"] / without["requests_per_second"]
            one = one | {"over_no_batching": ratio}
        found[name] = one
    return found


def _as_requests(loop: Loop, seconds: float) -> dict:
    figures = loop.measure(1, seconds)
    return {"requests_per_second": figures.pop("images_per_second")} | figures


class Requests:
    """The requests for a model, as files in `folder`. `jpeg` is None if it takes no image
    files.
    """

    def __init__(self, model: str, path: Path, folder: Path):
        card = json.loads((path / "assets.extra" / "model_card.json").read_text())
        default = card["signatures"]["serving_default"]
        name = exports.name_of(model)
        shape = tuple(default["inputs"]["images"]["shape"][1:])
        self.tensor = folder / "tensor"
        self.tensor.write_bytes(tensor_request(name, shape))
        self.answer_bytes = 4 * default["outputs"]["probabilities"]["shape"][1]
        self.jpeg: Path | None = None
        if "predict_bytes" in card["signatures"]:
            self.jpeg = folder / "jpeg"
            self.jpeg.write_bytes(jpeg_request(name))


class Server:
    """`python -m keras_preact.serving` on a free port. It is killed when the context
    ends.
    """

    def __init__(
        self, model: str, precision: str, engine: str, batching: str, folder: Path, scratch: Path
    ):
        self._log = scratch / f"{engine}-{batching}.log"
        command = [sys.executable, "-m", "keras_preact.serving", "--port", "0"]
        command += ["--engine", engine, "--batching" if batching == "on" else "--no-batching"]
        command += [str(exports.path_of(folder, model, precision).parents[1])]
        with open(self._log, "wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=Path(__file__).parents[3],
                env=os.environ | {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> None:
        """Return when the models are loaded.

        Raises:
            UserError: if the server ends, cannot load them or takes too long; the
                message has the end of its log.
        """
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self._process.poll() is None:
            printed = re.search(
                r"^Serving at http://[\d.]+:(\d+): (.*)$",
                self._log.read_text(errors="replace"),
                re.M,
            )
            if printed is not None and "(not available)" not in printed[2]:
                self.port = int(printed[1])
                return
            if printed is not None:
                break
            time.sleep(0.05)
        lines = self._log.read_text(errors="replace").splitlines() or ["nothing"]
        raise UserError(f"The server does not serve. It wrote: {lines[-1][:500]}")

    def ask(self, request: Path, concurrency: int, seconds: float, requests: int | None = None):
        """Return the figures of `ask`, and the CPU time of this process per request."""
        before = self._cpu_seconds()
        figures = ask(self.port, request, concurrency, seconds, requests)
        answered = figures["requests"] + figures["refused"] + concurrency  # the first ones too
        return figures | {"server_cpu_ms": 1e3 * (self._cpu_seconds() - before) / answered}

    def resident(self) -> int:
        """Return the bytes of memory that the process has."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(r"^VmRSS:\s+(\d+) kB", status, re.M)[1]) * 1024  # type: ignore[index]

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


class TrivialServer:
    """Answers every request with `size` bytes, at once. It is killed when the context
    ends.
    """

    def __init__(self, size: int):
        self._process = subprocess.Popen(
            _client({"answer": size}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.ask = functools.partial(ask, int(self._process.stdout.readline()))

    def __enter__(self) -> "TrivialServer":
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()


def ask(
    port: int, request: Path, concurrency: int, seconds: float, requests: int | None = None
) -> dict[str, float]:
    """Let a client process send the request in a file, and return the figures of
    `client.measure`.

    Raises:
        UserError: if it failed.
    """
    job = {"port": port, "request": str(request), "concurrency": concurrency, "seconds": seconds}
    if requests is not None:
        job["requests"] = requests
    done = subprocess.run(
        _client(job),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds + PATIENCE,
        check=False,
    )
    if done.returncode:
        raise UserError(f"The client failed: {children.last_line(done.stderr)}")
    return json.loads(done.stdout)


def _client(job: dict) -> list[str]:
    # by its path: the package around it imports TensorFlow
    return [sys.executable, "-I", str(Path(client.__file__)), json.dumps(job)]


def tensor_request(model: str, shape: tuple[int, ...]) -> bytes:
    """Return a request of the Open Inference Protocol with one random image as a binary
    tensor, probabilities back.
    """
    image = np.random.default_rng(0).integers(0, 256, (1, *shape)).astype("float32")
    given = {"name": "images", "datatype": "FP32", "shape": image.shape}
    return _request(
        model,
        given,
        image.tobytes(),
        [{"name": "probabilities", "parameters": {"binary_data": True}}],
    )


def jpeg_request(model: str) -> bytes:
    """Return a request with one JPEG file, classes and scores back."""
    file = jpeg()
    given = {"name": "image_bytes", "datatype": "BYTES", "shape": [1]}
    return _request(
        model,
        given,
        len(file).to_bytes(4, "little") + file,
        [{"name": "classes"}, {"name": "scores"}],
    )


def jpeg() -> bytes:
    """Return a JPEG file of smooth shapes with some noise, about as large as one of a
    photograph.
    """
    from PIL import Image

    rng = np.random.default_rng(0)
    shapes = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype="uint8")).resize(
        JPEG_SIZE, Image.Resampling.BICUBIC
    )
    noisy = np.clip(np.asarray(shapes) + rng.normal(0, 6, (*JPEG_SIZE[::-1], 3)), 0, 255).astype(
        "uint8"
    )
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=85)
    return file.getvalue()


def _request(model: str, given: dict, data: bytes, wanted: list[dict]) -> bytes:
    given = given | {"parameters": {"binary_data_size": len(data)}}
    described = json.dumps({"inputs": [given], "outputs": wanted}).encode()
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\n"
        f"Host: {client.HOST}\r\n"
        "Content-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {len(described)}\r\n"
        f"Content-Length: {len(described) + len(data)}\r\n\r\n"
    )
    return head.encode() + described + data
