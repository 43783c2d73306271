"""Requests that wait for the network, and the threads that compute them together."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from keras_preact.serving.errors import DeadlineExceeded, TooBusy, TooLarge, Unavailable

Outputs = dict[str, np.ndarray]


class ComputationError(RuntimeError):
    """The network could not be computed; its `__cause__` says why."""


class _Entry:
    """A request that waits, and the future in its event loop that its answer goes to."""

    def __init__(self, images: np.ndarray):
        self.images = images
        self.arrived = time.monotonic()
        self.loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Outputs] = self.loop.create_future()

    def settle(self, answer: "Outputs | ComputationError") -> None:
        """Hand the answer to the future, in its loop."""
        if self.answer.done():  # nobody waits any more
            return
        if isinstance(answer, ComputationError):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)

    def expire(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(
                DeadlineExceeded("The request's time was over before its answer was computed.")
            )


def _settle(answered: "list[tuple[_Entry, Outputs | ComputationError]]") -> None:
    for entry, answer in answered:
        entry.settle(answer)


class Batcher:
    """Computes the rows of waiting requests together, in threads of its own.

    An idle thread takes waiting requests as a whole, first come first served, at most
    `max_batch_size` rows of the same shape. The longer a batch takes, the more requests
    wait for the next one: batches grow with the load, and a request alone is computed
    at once.

    Args:
        run: Rows `(n, ...)` to named arrays `(n, ...)`; called by `workers` threads at
            once.
        max_batch_size: Largest number of rows in a call of `run`.
        wait_seconds: Longest time that a request waits for others to fill its batch.
        max_queue: Largest number of rows that wait. (One request of up to
            `max_batch_size` rows may wait in any case.)
        workers: Threads.
        together: Whether rows of different requests are computed together.
        observe_rows: Called with the rows of every batch.
        observe_seconds: Called with the seconds that `run` took for it.
    """

    def __init__(
        self,
        run: Callable[[np.ndarray], Outputs],
        max_batch_size: int,
        wait_seconds: float,
        max_queue: int,
        workers: int,
        *,
        together: bool = True,
        observe_rows: Callable[[float], None] = lambda rows: None,
        observe_seconds: Callable[[float], None] = lambda seconds: None,
    ):
        self._run = run
        self._max_batch_size = max_batch_size
        self._wait_seconds = wait_seconds if together else 0
        self._max_queue = max_queue
        self._together = together
        self._observe_rows = observe_rows
        self._observe_seconds = observe_seconds
        self._waiting: deque[_Entry] = deque()
        self._rows = 0
        self._closed = False
        self._began: dict[int, float] = {}  # when each thread began with its batch
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"batcher-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Rows that wait to be computed."""
        return self._rows

    @property
    def busy_seconds(self) -> float:
        """Seconds that the longest batch now has been computed; 0 without any."""
        began = list(self._began.values())
        return time.monotonic() - min(began) if began else 0.0

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
        entry = _Entry(images)
        if deadline is not None and deadline <= entry.loop.time():
            raise DeadlineExceeded("The request's time was over before it could be computed.")
        self._enqueue(entry)
        timer = deadline and entry.loop.call_at(deadline, entry.expire)
        try:
            return await entry.answer
        except BaseException:
            self._forget(entry)
            raise
        finally:
            if timer:
                timer.cancel()

    def close(self) -> None:
        """Compute the waiting rows, refuse others, and return when the threads have
        ended.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _enqueue(self, entry: _Entry) -> None:
        with self._changed:
            if self._closed:
                raise Unavailable("This version of the model is being unloaded.")
            if self._waiting and self._rows + len(entry.images) > self._max_queue:
                raise TooBusy(
                    f"{self._rows} examples wait for this model already; at most "
                    f"{self._max_queue} may."
                )
            self._waiting.append(entry)
            self._rows += len(entry.images)
            # A thread that waits for a batch to fill needs no call for every part of it.
            if len(self._waiting) == 1 or self._rows >= self._max_batch_size:
                self._changed.notify()

    def _forget(self, entry: _Entry) -> None:
        with self._changed, contextlib.suppress(ValueError):  # it does not wait any more
            self._waiting.remove(entry)
            self._rows -= len(entry.images)

    def _work(self) -> None:
        thread = threading.get_ident()
        while batch := self._take():
            self._began[thread] = time.monotonic()
            try:
                self._compute(batch)
            finally:
                del self._began[thread]
            del batch  # else an idle thread would hold the last request's images

    def _take(self) -> list[_Entry]:
        """Wait for a batch and return it; it is empty after `close`."""
        with self._changed:
            while True:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return []
                left = self._waiting[0].arrived + self._wait_seconds - time.monotonic()
                if left <= 0 or self._rows >= self._max_batch_size or self._closed:
                    return self._next_batch()
                self._changed.wait(left)

    def _next_batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        rows = 0
        while self._waiting and (not batch or self._fits(self._waiting[0], batch[0], rows)):
            batch.append(self._waiting.popleft())
            rows += len(batch[-1].images)
        self._rows -= rows
        if self._waiting:  # for another thread, while this one computes
            self._changed.notify()
        return batch

    def _fits(self, entry: _Entry, first: _Entry, rows: int) -> bool:
        same_shape = entry.images.shape[1:] == first.images.shape[1:]
        return self._together and same_shape and rows + len(entry.images) <= self._max_batch_size

    def _compute(self, batch: list[_Entry]) -> None:
        answered: list[tuple[_Entry, Outputs | ComputationError]] = []
        images = [entry.images for entry in batch]
        stops = list(itertools.accumulate(map(len, images)))
        try:
            started = time.monotonic()
            outputs = self._run(images[0] if len(images) == 1 else np.concatenate(images))
            self._observe_rows(stops[-1])
            self._observe_seconds(time.monotonic() - started)
            for entry, rows, stop in zip(batch, images, stops, strict=True):
                answer = {name: output[stop - len(rows) : stop] for name, output in outputs.items()}
                answered.append((entry, answer))
        except Exception as error:
            answered.clear()
            for entry in batch:
                failure = ComputationError("The network could not be computed.")
                failure.__cause__ = error
                answered.append((entry, failure))
        # One call per loop, not per request: each wakes the loop, which takes 20 us.
        by_loop: dict[asyncio.AbstractEventLoop, list] = {entry.loop: [] for entry, _ in answered}
        for one in answered:
            by_loop[one[0].loop].append(one)
        for loop, own in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, with whoever waited
                loop.call_soon_threadsafe(_settle, own)
