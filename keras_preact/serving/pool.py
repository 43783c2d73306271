"""Compute what waits in threads, several items per call."""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Pool:
    """Computes waiting items in threads, several per call.

    The longer calls take, the more items wait for the next one: calls grow with the load,
    and a single item is computed at once. If a call fails, each of its items is computed
    alone: one must not spoil the others. A pool belongs to one event loop at a time.

    Args:
        threads: Number of threads.
        name: Their name.

    Attributes:
        busy: Number of threads that compute.
    """

    def __init__(self, threads: int, name: str):
        self._count = threads
        self._threads = ThreadPoolExecutor(threads, name)
        self._waiting: deque[tuple[Any, asyncio.Future]] = deque()
        self._workers: set[asyncio.Task] = set()
        self.busy = 0

    def _next(self) -> list[tuple[Any, asyncio.Future]]:
        """Remove the items of the next call from `_waiting` and return them; none if none
        wait.
        """
        raise NotImplementedError

    def _compute(self, items: list) -> Sequence:
        """Return a result for each item, in a thread."""
        raise NotImplementedError

    async def results(self, items: Sequence) -> list:
        """Return the result of each item, or the error that it caused.

        Items of a call that is cancelled leave the queue at once.
        """
        loop = asyncio.get_running_loop()
        entries = [(item, loop.create_future()) for item in items]
        self._waiting.extend(entries)
        for _ in range(min(len(items), self._count - len(self._workers))):
            self._workers.add(loop.create_task(self._work()))
        try:
            return [await answer for _, answer in entries]
        except asyncio.CancelledError:
            for _, answer in entries:
                answer.cancel()
            self._waiting = deque(one for one in self._waiting if not one[1].done())
            raise

    async def close(self) -> None:
        """Compute what waits and end the threads. No item may follow."""
        if self._workers:
            await asyncio.wait(self._workers)
        self._threads.shutdown(wait=False)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        results: list
        try:
            await asyncio.sleep(0)  # for items that arrive in the same step of the loop
            while entries := self._next():
                self.busy += 1
                try:
                    items = [item for item, _ in entries]
                    results = await loop.run_in_executor(self._threads, self._each, items)
                except Exception as error:  # no thread can be started
                    results = [error] * len(entries)
                finally:
                    self.busy -= 1
                for (_, answer), result in zip(entries, results, strict=True):
                    if not answer.done():  # else its call was cancelled
                        answer.set_result(result)
                del entries, items, results, result  # the traceback of an error refers to the error
        finally:
            # at once, because an item that comes now needs another worker
            self._workers.discard(asyncio.current_task())

    def _each(self, items: list) -> list:
        """Return a result or an error for each item."""
        try:
            return list(self._compute(items))
        except Exception as error:
            if len(items) == 1:
                return [error]
            return [result for item in items for result in self._each([item])]
