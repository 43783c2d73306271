"""Requests that wait for the network, and the thread that computes them together."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from keras_preact.serving.errors import DeadlineExceeded, TooBusy, TooLarge, Unavailable

Outputs = dict[str, np.ndarray]


class ComputationError(RuntimeError):
    """The network could not be computed; its `__cause__` says why."""


class Batcher:
    """Computes the rows of waiting requests together, in a thread of its own.

    The thread takes waiting requests as a whole, first come first served, at most
    `max_batch_size` rows of the same shape. The longer a batch takes, the more requests
    wait for the next one: batches grow with the load, and a request alone is computed
    at once. It belongs to one event loop at a time.

    Args:
        run: Rows `(n, ...)` to named arrays `(n, ...)`.
        max_batch_size: Largest number of rows in a call of `run`.
        max_queue: Largest number of rows that wait. (One request of up to
            `max_batch_size` rows may wait in any case.)
        together: Whether rows of different requests are computed together.
        observe: Called with the rows of every batch, and the seconds that it took.
    """

    def __init__(
        self,
        run: Callable[[np.ndarray], Outputs],
        max_batch_size: int,
        max_queue: int,
        *,
        together: bool = True,
        observe: Callable[[int, float], None] = lambda rows, seconds: None,
    ):
        self._run = run
        self._max_batch_size = max_batch_size
        self._max_queue = max_queue
        self._together = together
        self._observe = observe
        self._waiting: deque[tuple[np.ndarray, asyncio.Future[Outputs]]] = deque()
        self._worker: asyncio.Task | None = None
        self._began: float | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "batcher")

    @property
    def waiting(self) -> int:
        """Rows that wait to be computed."""
        return sum(len(images) for images, _ in self._waiting)

    @property
    def busy_seconds(self) -> float:
        """Seconds that the present batch has been computed; 0 without any."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def check_rows(self, rows: int) -> None:
        """Raise TooLarge for a request that fits into no batch."""
        if rows > self._max_batch_size:
            raise TooLarge(
                f"One request may hold at most {self._max_batch_size} examples. Received: {rows}. "
                "Send several requests."
            )

    async def submit(self, images: np.ndarray, deadline: float | None) -> Outputs:
        """Return the outputs of `run` for these rows.

        A request that is cancelled, or whose time is over, leaves the queue at once.

        Args:
            images: Rows `(n, ...)`.
            deadline: Time of the running event loop at which the request ends. `None`:
                never.

        Raises:
            TooLarge: for more rows than a batch may have.
            TooBusy: if too many rows wait.
            DeadlineExceeded: if the answer did not come in time.
            Unavailable: after `close`.
            ComputationError: if `run` failed.
        """
        self.check_rows(len(images))
        if self._closed:
            raise Unavailable("This version of the model is being unloaded.")
        if self._waiting and self.waiting + len(images) > self._max_queue:
            raise TooBusy(
                f"{self.waiting} examples wait for this model already; at most {self._max_queue} "
                "may."
            )
        loop = asyncio.get_running_loop()
        entry = images, loop.create_future()
        self._waiting.append(entry)
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        try:
            async with asyncio.timeout_at(deadline):
                return await entry[1]
        except TimeoutError:
            raise DeadlineExceeded(
                "The request's time was over before its answer was computed."
            ) from None
        finally:
            if entry[1].cancelled():
                self._waiting = deque(one for one in self._waiting if one is not entry)

    async def close(self) -> None:
        """Compute the waiting rows, refuse others, and end the thread."""
        self._closed = True
        if self._worker is not None:
            await self._worker
        self._thread.shutdown(wait=False)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # for requests that came in the same step of the loop
        while batch := self._next_batch():
            answers: list[Outputs] = []
            failure: Exception | None = None
            self._began = time.monotonic()
            try:
                answers = await loop.run_in_executor(
                    self._thread, self._compute, [images for images, _ in batch]
                )
            except Exception as error:
                failure = error
            self._began = None
            for number, (_, answer) in enumerate(batch):
                if answer.done():  # nobody waits any more
                    continue
                if failure is None:
                    answer.set_result(answers[number])
                else:
                    answer.set_exception(ComputationError("The network could not be computed."))
                    answer.exception().__cause__ = failure  # type: ignore[union-attr]
            del batch, answers, failure  # the error would hold itself through its traceback
        self._worker = None

    def _next_batch(self) -> list[tuple[np.ndarray, "asyncio.Future[Outputs]"]]:
        batch = [self._waiting.popleft()] if self._waiting else []
        rows = sum(len(images) for images, _ in batch)
        while self._together and self._waiting:
            following = self._waiting[0][0]
            rows += len(following)
            if rows > self._max_batch_size or following.shape[1:] != batch[0][0].shape[1:]:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _compute(self, images: list[np.ndarray]) -> list[Outputs]:
        """Return the outputs of each request."""
        began = time.monotonic()
        outputs = self._run(images[0] if len(images) == 1 else np.concatenate(images))
        stops = list(itertools.accumulate(map(len, images)))
        self._observe(stops[-1], time.monotonic() - began)
        return [
            {name: output[stop - len(rows) : stop] for name, output in outputs.items()}
            for rows, stop in zip(images, stops, strict=True)
        ]
