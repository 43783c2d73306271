"""A network in a process of its own, called in a loop.

JOB is JSON: the SavedModel, and how it is run. For every line on stdin, `{"batch": ...,
"seconds": ...}`, it calls the network for so long and writes a line of figures to
stdout. Between two lines it does nothing.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ... import children
from ...cli import UserError
from .client import summarize

#: How a user without this package's server runs a SavedModel; every other name is one of the
#: server's engines.
PLAIN = "loop"
_WARMUP_CALLS = 2
_LEAST_CALLS = 2


class Loop:
    """The process, and what is asked of it. It is killed when the context ends."""

    def __init__(self, path: Path, engine: str, precision: str):
        job = json.dumps({"path": str(path), "engine": engine, "precision": precision})
        self._process = subprocess.Popen(
            children.command(f"{__package__}.loop", job),
            env=children.environment("tensorflow"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Loop":
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()

    def wait(self) -> None:
        """Return when the network is loaded."""
        self._read()

    def measure(self, batch: int, seconds: float) -> dict[str, float]:
        """Return images in a second, and how long a call takes.

        Raises:
            UserError: if the process ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"batch": batch, "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError(
                f"A measuring process ended with status {self._process.wait()}; its message "
                "stands above."
            )
        return json.loads(line)


def _plain(path: Path) -> tuple[Callable[[np.ndarray], object], tuple[int, ...]]:
    """Return a call of the default signature, and the shape of an image."""
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    function = loaded.signatures["serving_default"]
    [(name, spec)] = function.structured_input_signature[1].items()

    def run(images: np.ndarray) -> list[np.ndarray]:
        held = loaded  # the functions of a SavedModel do not keep its variables
        assert held is not None
        return [tensor.numpy() for tensor in function(**{name: tf.constant(images)}).values()]

    return run, tuple(spec.shape[1:])


def _engine(
    path: Path, engine: str, precision: str
) -> tuple[Callable[[np.ndarray], object], tuple[int, ...]]:
    """Return what the server's engine makes of the network, and the shape of an image."""
    import tensorflow as tf

    from keras_preact.serving import engines
    from keras_preact.serving.settings import Settings

    loaded = tf.saved_model.load(str(path))  # its functions alone do not keep its variables
    frozen = engines.freeze(loaded.core)
    shape = tuple(frozen.function.inputs[0].shape[1:])
    return engines.ENGINES[engine](frozen, Settings(path.parents[1]), precision), shape


def _measure(
    run: Callable[[np.ndarray], object], images: np.ndarray, seconds: float
) -> dict[str, float]:
    calls: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(calls) < _LEAST_CALLS:
        before = time.perf_counter()
        run(images)
        calls.append(time.perf_counter() - before)
    return {
        "images_per_second": len(images) * len(calls) / sum(calls),
        **summarize(calls),
        "calls": len(calls),
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    path, engine = Path(job["path"]), job["engine"]
    run, shape = _plain(path) if engine == PLAIN else _engine(path, engine, job["precision"])
    print(json.dumps({"ready": True}), flush=True)
    warm: set[int] = set()
    for line in sys.stdin:
        told = json.loads(line)
        images = (
            np.random.default_rng(0).integers(0, 256, (told["batch"], *shape)).astype("float32")
        )
        for _ in range(0 if told["batch"] in warm else _WARMUP_CALLS):
            run(images)
        warm.add(told["batch"])
        print(json.dumps(_measure(run, images, told["seconds"])), flush=True)


if __name__ == "__main__":
    main()
