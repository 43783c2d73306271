"""The question `direct`: what does a network cost in this process, as TensorFlow loads it
and through the server's engines?
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import exports
from .cells import OF_ENGINE, PLAIN, PRECISIONS, Cell, Round, in_turn, label
from .client import summarize

if TYPE_CHECKING:
    from .workload import Options

_WARMUP_CALLS = 2
_LEAST_CALLS = 2


def measure(options: "Options", folder: Path) -> Iterator[Round]:
    """Call each network in a loop."""
    for model in options.models:
        kinds = [
            (model, engine, precision)
            for engine in (PLAIN, *options.engines)
            for precision in OF_ENGINE.get(engine, PRECISIONS)
        ]
        kinds = [*exports.plain_peer(model), *kinds]
        loops = {kind: Loop(folder, *kind) for kind in kinds}
        cells = []
        for batch, (kind, loop) in itertools.product(options.batches, loops.items()):
            name, over = (
                label("direct", model, engine, precision=precision, batch=batch)
                for model, engine, precision in (kind, kinds[0])
            )
            call = functools.partial(loop.measure, batch, options.seconds)
            cells.append(Cell(name, over, call))
        yield from in_turn(cells, options.rounds)


class Loop:
    """A network that is loaded, and called only while it is measured."""

    def __init__(self, folder: Path, model: str, engine: str, precision: str):
        import tensorflow as tf

        from keras_preact.serving import engines, loading
        from keras_preact.serving.settings import Settings

        path = exports.path_of(folder, model, precision)
        self._warm: set[int] = set()
        self._run: Callable[[np.ndarray], object]
        if engine == PLAIN:
            self._loaded = tf.saved_model.load(str(path))  # its functions do not keep its variables
            function = self._loaded.signatures["serving_default"]
            [(name, spec)] = function.structured_input_signature[1].items()
            self._shape = tuple(spec.shape[1:])
            self._run = lambda images: [
                tensor.numpy() for tensor in function(**{name: tf.constant(images)}).values()
            ]
        else:
            frozen, _ = loading.read_functions(path)
            self._shape = tuple(frozen.function.inputs[0].shape[1:])
            self._run = engines.ENGINES[engine](frozen, Settings(path.parents[1]), precision)

    def measure(self, batch: int, seconds: float) -> dict[str, float]:
        """Return images per second, the latency of a call, and the CPU time of an image."""
        shape = (batch, *self._shape)
        images = np.random.default_rng(0).integers(0, 256, shape).astype("float32")
        for _ in range(0 if batch in self._warm else _WARMUP_CALLS):
            self._run(images)
        self._warm.add(batch)
        calls: list[float] = []
        start, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - start < seconds or len(calls) < _LEAST_CALLS:
            before = time.perf_counter()
            self._run(images)
            calls.append(time.perf_counter() - before)
        return {
            "images_per_second": batch * len(calls) / sum(calls),
            **summarize(calls),
            "calls": len(calls),
            "cpu_ms": 1e3 * (time.process_time() - cpu) / (batch * len(calls)),
        }
