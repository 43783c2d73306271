"""One engine with one exported network, in a process of its own. The argument is JSON; the
first answer has the versions of the packages, and each line of stdin is answered with
figures by batch.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_preact.export.version import Version
from keras_preact.serving.engines import ENGINES
from keras_preact.serving.settings import Settings

from .. import backends, children
from ..errors import UserError


def _plain(loaded: Any) -> Callable[[np.ndarray], Any]:
    """Return the default signature of a SavedModel of any origin."""
    [name] = loaded.signatures["serving_default"].structured_input_signature[1]

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        # the function keeps `loaded` alive: a signature alone does not hold its weights
        outputs = loaded.signatures["serving_default"](**{name: tf.constant(images)})
        return {key: value.numpy() for key, value in outputs.items()}

    return run


def _of_the_server(version: Path, engine: str) -> Callable[[np.ndarray], Any]:
    """Return an engine of the server, as `keras_preact.serving.loading` makes it."""
    with Version(version).reading_card() as card:
        precision = card["precision"]
    frozen, _ = Version(version).functions()
    gc.collect()  # a loaded SavedModel holds the weights a second time, in reference cycles
    return ENGINES[engine](frozen, Settings(version.parents[1]), precision)


def _shape(loaded: Any, size: int | None) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of an input of a SavedModel, without the batch."""
    [spec] = loaded.signatures["serving_default"].structured_input_signature[1].values()
    lengths = spec.shape.as_list()[1:]
    if size is not None and len(lengths) == 3:
        lengths = [size, size, lengths[-1]]
    if None in lengths:
        raise UserError(
            "The network takes inputs of any size. Choose one with --image-size. Received: the "
            f"shape {tuple(lengths)}"
        )
    return tuple(lengths), spec.dtype.name


def measure(
    version: str, engine: str, size: int | None, seconds: float, batches: Sequence[int]
) -> Iterator[dict]:
    """Yield the versions of the packages, then figures by batch for each line of stdin."""
    loaded = tf.saved_model.load(version)
    shape, dtype = _shape(loaded, size)
    run = _plain(loaded) if engine == "plain" else _of_the_server(Path(version), engine)
    del loaded
    random = np.random.default_rng(0)
    inputs = {batch: random.integers(0, 2, (batch, *shape)).astype(dtype) for batch in batches}
    for images in inputs.values():  # first computations are slow
        run(images)
        run(images)
    yield backends.versions("keras-preact", "keras", "tensorflow", "openvino")
    for _ in sys.stdin:
        yield {batch: _figures(run, images, seconds) for batch, images in inputs.items()}


def _figures(run: Callable[[np.ndarray], Any], images: np.ndarray, seconds: float) -> dict:
    calls, start, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds or not calls:
        run(images)
        calls += 1
    taken, computed = time.perf_counter() - start, calls * len(images)
    return {
        "images_per_second": computed / taken,
        "cpu_seconds": (time.process_time() - cpu) / computed,
    }


if __name__ == "__main__":
    children.answer_each(lambda: measure(**json.loads(sys.argv[1])))
