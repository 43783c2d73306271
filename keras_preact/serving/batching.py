"""Compute requests that wait for the network in batches, in a thread."""

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable

import numpy as np

from keras_preact.serving.pool import Pool

Outputs = dict[str, np.ndarray]


@dataclasses.dataclass
class Duration:
    """How often something happened, and the seconds that it took in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


class ComputationError(RuntimeError):
    """The network could not be computed; its `__cause__` says why."""


class Batcher(Pool):
    """Computes the rows of waiting requests together, in a thread of its own.

    A batch holds whole requests in the order of their arrival, at most `max_batch_size`
    rows of the same shape.

    Args:
        run: Function from rows `(n, ...)` to named arrays `(n, ...)`.
        max_batch_size: Largest number of rows in a call of `run`, and in a request.
        together: Whether rows of different requests are computed together.

    Attributes:
        observe: Called with the number of rows of every batch and the seconds that it
            took.
        computed: The batches that were computed.
        rows: The rows in them.
    """

    def __init__(
        self,
        run: Callable[[np.ndarray], Outputs],
        max_batch_size: int,
        *,
        together: bool = True,
    ):
        super().__init__(1, "batcher")
        self._run = run
        self.max_batch_size = max_batch_size
        self._together = together
        self.observe: Callable[[int, float], None] = lambda rows, seconds: None
        self.computed, self.rows = Duration(), 0
        self._began: float | None = None

    @property
    def busy_seconds(self) -> float:
        """Seconds since the current batch began; 0 without a batch."""
        began = self._began  # the thread may end the batch between two looks
        return 0.0 if began is None else time.monotonic() - began

    async def submit(self, images: np.ndarray) -> Outputs:
        """Return the outputs of `run` for these rows.

        Args:
            images: Rows `(n, ...)`.

        Raises:
            ComputationError: if `run` failed.
        """
        [result] = await self.results([images])
        if isinstance(result, Exception):
            raise ComputationError("The network could not be computed.") from result
        return result

    def _next(self) -> list[tuple[np.ndarray, asyncio.Future]]:
        batch = [self._waiting.popleft()] if self._waiting else []
        rows = sum(len(images) for images, _ in batch)
        while self._together and self._waiting:
            following = self._waiting[0][0]
            rows += len(following)
            if rows > self.max_batch_size or following.shape[1:] != batch[0][0].shape[1:]:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _compute(self, items: list[np.ndarray]) -> list[Outputs]:
        """Return the outputs of each request."""
        began = self._began = time.monotonic()
        try:
            outputs = self._run(items[0] if len(items) == 1 else np.concatenate(items))
        finally:
            self._began = None
        stops = list(itertools.accumulate(map(len, items)))
        seconds = time.monotonic() - began
        self.observe(stops[-1], seconds)
        self.computed.add(seconds)
        self.rows += stops[-1]
        return [
            {name: output[stop - len(rows) : stop] for name, output in outputs.items()}
            for rows, stop in zip(items, stops, strict=True)
        ]
