"""The real server in a process of its own, what is asked of it, and the process that
asks.
"""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ... import children
from ...cli import UserError
from . import client

#: No server takes longer to load a model, no client to get its last answers.
PATIENCE = 180.0
#: Width and height of the image in the JPEG file.
JPEG_SIZE = (500, 375)


class Server:
    """`python -m keras_preact.serving` on a free port. It is killed when the context
    ends.

    Args:
        directory: Of the models.
        log: Where it writes its log to.
        options: Of its command.
    """

    def __init__(self, directory: Path, log: Path, *options: str):
        self._log = log
        command = [
            sys.executable,
            "-m",
            "keras_preact.serving",
            str(directory),
            "--port",
            "0",
            *options,
        ]
        with open(log, "wb") as file:
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

    def resident(self) -> int:
        """Return the bytes of memory that the process has."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(r"^VmRSS:\s+(\d+) kB", status, re.M)[1]) * 1024  # type: ignore[index]


class TrivialServer:
    """Answers every request with `size` bytes, at once. It is killed when the context
    ends.
    """

    def __init__(self, size: int):
        self._process = subprocess.Popen(
            _client({"answer": size}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def __enter__(self) -> "TrivialServer":
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()


def ask(
    port: int, request: Path, concurrency: int, seconds: float, requests: int | None = None
) -> dict[str, float]:
    """Have a client process send the request in a file for some seconds, or so often;
    return `client.measure`'s figures.

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
