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
#: Width and height of the image in the large file.
PHOTOGRAPH = (500, 375)
#: Images in a call of an engine alone, beside which a server's CPU time stands.
ENGINE_BATCH = 32
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
            alone = {
                engine: Loop(folder, model, engine, options.precision) for engine in options.engines
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
            cells += [
                Cell(
                    label("server", model, engine, batch=ENGINE_BATCH),
                    over,
                    functools.partial(_as_requests, loop, options.seconds, ENGINE_BATCH),
                )
                for engine, loop in alone.items()
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
                for kind, file in requests.files.items() if batching == options.batching[0] else ():
                    name = named(concurrency=usual, input=kind)
                    add(name, over, process, file, usual, options.seconds)
            for figures in in_turn(cells, options.rounds):
                yield compare(figures)


def compare(figures: Round) -> Round:
    """Add `over_no_batching` to the candidates with batching, the ratio of requests per
    second, and `over_engine` to those of a server: the CPU time of an answer over that
    of an image in its engine alone.
    """
    found = {}
    for name, one in figures.items():
        without = figures.get(name.replace("batching=on", "batching=off"))
        if "batching=on" in name and without is not None:
            ratio = one["requests_per_second"] / without["requests_per_second"]
            one = one | {"over_no_batching": ratio}
        alone = figures.get(f"{name.rpartition(':')[0]}:batch={ENGINE_BATCH}")
        if "concurrency=" in name and alone is not None:
            one = one | {"over_engine": one["cpu_ms"] / alone["cpu_ms"]}
        found[name] = one
    return found


def _as_requests(loop: Loop, seconds: float, batch: int = 1) -> dict:
    figures = loop.measure(batch, seconds)
    return {"requests_per_second": figures.pop("images_per_second")} | figures


class Requests:
    """The requests for a model, as files in `folder`.

    Attributes:
        tensor: With one image as numbers.
        files: Kind of image file to a request with one; nothing for a model that takes
            none.
        answer_bytes: Of the answer to `tensor`.
    """

    def __init__(self, model: str, path: Path, folder: Path):
        card = json.loads((path / "assets.extra" / "model_card.json").read_text())
        default = card["signatures"]["serving_default"]
        name = exports.name_of(model)
        shape = tuple(default["inputs"]["images"]["shape"][1:])
        self.tensor = folder / "tensor"
        self.tensor.write_bytes(tensor_request(name, shape))
        self.answer_bytes = 4 * default["outputs"]["probabilities"]["shape"][1]
        self.files: dict[str, Path] = {}
        if "predict_bytes" in card["signatures"]:
            for kind, file in image_files(shape[:2]).items():
                self.files[kind] = folder / kind
                self.files[kind].write_bytes(file_request(name, file))


class Server:
    """`keras-preact serve` on a free port. It is killed when the context
    ends.
    """

    def __init__(
        self, model: str, precision: str, engine: str, batching: str, folder: Path, scratch: Path
    ):
        self._log = scratch / f"{engine}-{batching}.log"
        command = [sys.executable, "-m", "training", "serve", "--port", "0"]
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
        return figures | {"cpu_ms": 1e3 * (self._cpu_seconds() - before) / answered}

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


def file_request(model: str, file: bytes) -> bytes:
    """Return a request with one image file, classes and scores back."""
    given = {"name": "image_bytes", "datatype": "BYTES", "shape": [1]}
    return _request(
        model,
        given,
        len(file).to_bytes(4, "little") + file,
        [{"name": "classes"}, {"name": "scores"}],
    )


def image_files(size: tuple[int, int]) -> dict[str, bytes]:
    """Return an image of smooth shapes with some noise, as large as a photograph's file
    of `PHOTOGRAPH`, and as a PNG and a JPEG file of the network's height and width.
    """
    from PIL import Image

    rng = np.random.default_rng(0)
    shapes = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype="uint8")).resize(
        PHOTOGRAPH, Image.Resampling.BICUBIC
    )
    noisy = np.clip(np.asarray(shapes) + rng.normal(0, 6, (*PHOTOGRAPH[::-1], 3)), 0, 255)
    photograph = Image.fromarray(noisy.astype("uint8"))
    small = photograph.resize(size[::-1])
    return {
        "jpeg": _encoded(photograph, "JPEG", quality=85),
        "small_jpeg": _encoded(small, "JPEG", quality=85),
        "small_png": _encoded(small, "PNG"),
    }


def _encoded(image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
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
