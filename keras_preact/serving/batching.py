"""Compute requests that wait for the network in batches, in a thread."""

import asyncio
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

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


class Batcher:
    """Computes the rows of waiting requests together, in a thread of its own.

    A batch holds whole requests in the order of their arrival, at most `max_batch_size`
    rows of the same shape. The longer a batch takes, the more requests wait for the
    next one: batches grow with the load, and a single request is computed at once. A
    batcher belongs to one event loop at a time.

    Args:
        run: Function from rows `(n, ...)` to named arrays `(n, ...)`.
        max_batch_size: Largest number of rows in a call of `run`, and in a request.
        together: Whether rows of different requests are computed together.
        observe: Called with the number of rows of every batch and the seconds that it
            took.

    Attributes:
        computed: The batches that were computed.
        rows: The rows in them.
    """

    def __init__(
        self,
        run: Callable[[np.ndarray], Outputs],
        max_batch_size: int,
        *,
        together: bool = True,
        observe: Callable[[int, float], None] = lambda rows, seconds: None,
    ):
        self._run = run
        self.max_batch_size = max_batch_size
        self._together = together
        self._observe = observe
        self.computed, self.rows = Duration(), 0
        self._waiting: deque[tuple[np.ndarray, asyncio.Future[Outputs]]] = deque()
        self._worker: asyncio.Task | None = None
        self._began: float | None = None
        self._thread = ThreadPoolExecutor(1, "batcher")

    @property
    def busy_seconds(self) -> float:
        """Seconds since the current batch began; 0 without a batch."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    async def submit(self, images: np.ndarray) -> Outputs:
        """Return the outputs of `run` for these rows.

        A request that is cancelled leaves the queue at once.

        Args:
            images: Rows `(n, ...)`.

        Raises:
            ComputationError: if `run` failed.
        """
        loop = asyncio.get_running_loop()
        entry = images, loop.create_future()
        self._waiting.append(entry)
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        try:
            return await entry[1]
        finally:
            if entry[1].cancelled():
                self._waiting = deque(one for one in self._waiting if one is not entry)

    async def close(self) -> None:
        """Compute the waiting rows and end the thread. No request may follow."""
        if self._worker is not None:
            await self._worker
        self._thread.shutdown(wait=False)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # for requests that arrive in the same step of the loop
        while batch := self._next_batch():
            results: list[Outputs | Exception]
            self._began = time.monotonic()
            try:
                results = await loop.run_in_executor(
                    self._thread, self._compute_each, [images for images, _ in batch]
                )
            except Exception as error:  # no thread can be started
                results = [error] * len(batch)
            self._began = None
            for (_, answer), result in zip(batch, results, strict=True):
                if answer.done():  # the request was cancelled
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(ComputationError("The network could not be computed."))
                    answer.exception().__cause__ = result  # type: ignore[union-attr]
                else:
                    answer.set_result(result)
            del batch, results, result  # the traceback of an error refers to the error
        self._worker = None

    def _next_batch(self) -> list[tuple[np.ndarray, "asyncio.Future[Outputs]"]]:
        batch = [self._waiting.popleft()] if self._waiting else []
        rows = sum(len(images) for images, _ in batch)
        while self._together and self._waiting:
            following = self._waiting[0][0]
            rows += len(following)
            if rows > self.max_batch_size or following.shape[1:] != batch[0][0].shape[1:]:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _compute_each(self, images: list[np.ndarray]) -> list[Outputs | Exception]:
        """Return the outputs of each request, or why there are none. If several fail
        together, each is computed alone: one must not spoil the others.
        """
        try:
            return list(self._compute(images))
        except Exception as error:
            if len(images) == 1:
                return [error]
            return [result for one in images for result in self._compute_each([one])]

    def _compute(self, images: list[np.ndarray]) -> list[Outputs]:
        """Return the outputs of each request."""
        began = time.monotonic()
        outputs = self._run(images[0] if len(images) == 1 else np.concatenate(images))
        stops = list(itertools.accumulate(map(len, images)))
        seconds = time.monotonic() - began
        self._observe(stops[-1], seconds)
        self.computed.add(seconds)
        self.rows += stops[-1]
        return [
            {name: output[stop - len(rows) : stop] for name, output in outputs.items()}
            for rows, stop in zip(images, stops, strict=True)
        ]
