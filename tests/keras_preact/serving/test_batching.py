"""Whatever arrives, and whoever gives up: each answer is that of its own rows, and
nobody waits for ever.
"""

import asyncio
import contextlib
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_preact.serving.batching import Batcher, ComputationError
from keras_preact.serving.errors import DeadlineExceeded, TooBusy, TooLarge, Unavailable

pytestmark = pytest.mark.anyio

GENEROUS = 60  # seconds after which a test that hangs fails


class Network:
    """Adds one to its rows, each batch once `release` lets it; keeps what it was given."""

    def __init__(self, free: bool = True):
        self.batches: list[np.ndarray] = []
        self.entered = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.free = free
        self.together = 0
        self.most_together = 0
        self._lock = threading.Lock()

    def __call__(self, images):
        with self._lock:
            self.batches.append(images.copy())
            self.together += 1
            self.most_together = max(self.most_together, self.together)
        self.entered.release()
        if not self.free:
            assert self.allowed.acquire(timeout=GENEROUS)
        with self._lock:
            self.together -= 1
        if (images < 0).any():
            raise ValueError("a negative row")
        return {"plus_one": images + 1, "itself": images}

    async def is_entered(self):
        assert await asyncio.to_thread(self.entered.acquire, timeout=GENEROUS)

    def release(self):
        self.free = True
        for _ in range(1000):
            self.allowed.release()


def rows(number: int, start: float = 0) -> np.ndarray:
    return np.arange(start, start + number, dtype="float32").reshape(-1, 1)


@contextlib.asynccontextmanager
async def batching(
    network, max_batch_size=8, wait_seconds=0.0, max_queue=100, workers=1, **options
):
    """Give a batcher; it is closed afterwards, and must leave no thread."""
    batcher = Batcher(network, max_batch_size, wait_seconds, max_queue, workers, **options)
    try:
        async with asyncio.timeout(GENEROUS):
            yield batcher
    finally:
        network.release()
        batcher.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("batcher-")]


async def start(*coroutines) -> list[asyncio.Task]:
    """Start tasks in order, each until it waits."""
    tasks = []
    for coroutine in coroutines:
        tasks.append(asyncio.create_task(coroutine))
        await asyncio.sleep(0)
    return tasks


def check_answer(answer, own):
    assert sorted(answer) == ["itself", "plus_one"]
    np.testing.assert_array_equal(answer["itself"], own)
    np.testing.assert_array_equal(answer["plus_one"], own + 1)


@pytest.mark.parametrize("options", [{}, {"wait_seconds": 0.01}, {"max_queue": 2}])
async def test_a_request_alone_is_computed_alone(options):
    """Soon, and whatever the queue may hold."""
    network = Network()
    async with batching(network, **options) as batcher:
        check_answer(await batcher.submit(rows(3), None), rows(3))
    assert [len(batch) for batch in network.batches] == [3]


async def test_how_long_a_batch_is_computed():
    network = Network(free=False)
    async with batching(network, workers=2) as batcher:
        assert batcher.busy_seconds == 0
        first = asyncio.create_task(batcher.submit(rows(1), None))
        await network.is_entered()
        await asyncio.sleep(0.02)
        assert batcher.busy_seconds >= 0.02
        second = asyncio.create_task(batcher.submit(rows(1), None))
        await network.is_entered()
        assert batcher.busy_seconds >= 0.02  # that of the first
        network.release()
        await asyncio.gather(first, second)
        while batcher.busy_seconds:
            await asyncio.sleep(0.001)


async def test_what_waits_is_computed_together_whole_requests_first_come_first_served():
    network = Network(free=False)
    async with batching(network) as batcher:
        first = await start(batcher.submit(rows(1, 1000), None))
        await network.is_entered()
        sizes = [3, 4, 2, 8, 1]
        starts = [100 * i for i in range(len(sizes))]
        tasks = await start(
            *(batcher.submit(rows(n, s), None) for n, s in zip(sizes, starts, strict=True))
        )
        assert batcher.waiting == sum(sizes)
        network.release()
        for task, n, s in zip(tasks, sizes, starts, strict=True):
            check_answer(await task, rows(n, s))
        await first[0]
        assert batcher.waiting == 0
    assert [len(batch) for batch in network.batches] == [1, 3 + 4, 2, 8, 1]
    np.testing.assert_array_equal(network.batches[1], np.concatenate([rows(3), rows(4, 100)]))


async def test_images_of_different_sizes_are_not_put_into_one_batch():
    network = Network(free=False)
    async with batching(network) as batcher:
        tasks = await start(batcher.submit(np.zeros((1, 2)), None))
        await network.is_entered()
        shapes = [(1, 2), (2, 2), (1, 3), (1, 2)]
        tasks += await start(*(batcher.submit(np.zeros(shape), None) for shape in shapes))
        network.release()
        answers = await asyncio.gather(*tasks)
        assert [answer["itself"].shape for answer in answers] == [(1, 2), *shapes]
    assert [batch.shape for batch in network.batches] == [(1, 2), (3, 2), (1, 3), (1, 2)]


async def test_waiting_for_others_ends_when_the_batch_is_full():
    network = Network()
    async with batching(network, wait_seconds=100 * GENEROUS) as batcher:
        tasks = await start(*(batcher.submit(rows(2, i), None) for i in (0, 10, 20, 30)))
        for i, task in enumerate(tasks):
            check_answer(await task, rows(2, 10 * i))
    assert [len(batch) for batch in network.batches] == [8]


@pytest.mark.parametrize("workers", [1, 3])
async def test_without_batching_every_request_runs_by_itself_as_many_at_once_as_there_are_workers(
    workers,
):
    network = Network(free=False)
    async with batching(
        network, workers=workers, together=False, wait_seconds=100 * GENEROUS
    ) as batcher:
        tasks = await start(*(batcher.submit(rows(n), None) for n in (1, 2, 3, 4, 5)))
        for _ in range(workers):
            await network.is_entered()
        network.release()
        for n, task in enumerate(tasks, 1):
            check_answer(await task, rows(n))
    assert sorted(len(batch) for batch in network.batches) == [1, 2, 3, 4, 5]
    assert network.most_together == workers


async def test_a_request_larger_than_a_batch_is_refused():
    network = Network()
    async with batching(network) as batcher:
        with pytest.raises(TooLarge, match=r"at most 8 .* Received: 9"):
            await batcher.submit(rows(9), None)
    assert network.batches == []


async def test_the_queue_does_not_grow():
    network = Network(free=False)
    async with batching(network, max_queue=6) as batcher:
        tasks = await start(batcher.submit(rows(8), None))
        await network.is_entered()
        tasks += await start(batcher.submit(rows(3), None), batcher.submit(rows(2), None))
        with pytest.raises(TooBusy, match=r"5 examples wait .* at most 6") as caught:
            await batcher.submit(rows(2), None)
        assert caught.value.retry_after
        tasks += await start(batcher.submit(rows(1), None))  # there is room for one
        assert batcher.waiting == 6
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        assert batcher.waiting == 3
        tasks[1:2] = await start(batcher.submit(rows(3), None))  # its place is free at once
        network.release()
        await asyncio.gather(*tasks)


async def test_a_request_that_is_late_or_cancelled_leaves_the_queue_and_hurts_nobody():
    network = Network(free=False)
    async with batching(network) as batcher:
        first, late, gone, good = await start(
            batcher.submit(rows(8, 1000), None),
            batcher.submit(rows(2, 100), asyncio.get_running_loop().time() + 0.01),
            batcher.submit(rows(2, 200), None),
            batcher.submit(rows(2, 300), None),
        )
        await network.is_entered()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        with pytest.raises(DeadlineExceeded):
            await late
        assert batcher.waiting == 2
        network.release()
        check_answer(await good, rows(2, 300))
        check_answer(await first, rows(8, 1000))
    np.testing.assert_array_equal(network.batches[-1], rows(2, 300))
    assert len(network.batches) == 2


async def test_a_request_whose_time_is_over_is_not_computed():
    network = Network()
    async with batching(network) as batcher:
        with pytest.raises(DeadlineExceeded):
            await batcher.submit(rows(1), asyncio.get_running_loop().time())
    assert network.batches == []


async def test_a_computation_that_takes_too_long_is_not_waited_for():
    network = Network(free=False)
    async with batching(network) as batcher:
        with pytest.raises(DeadlineExceeded):
            await batcher.submit(rows(1), asyncio.get_running_loop().time() + 0.01)
        network.release()
        check_answer(await batcher.submit(rows(2), None), rows(2))


async def test_a_failure_goes_to_everyone_in_the_batch_and_to_nobody_else():
    network = Network(free=False)
    async with batching(network) as batcher:
        tasks = await start(batcher.submit(rows(1), None))
        await network.is_entered()
        tasks += await start(
            batcher.submit(rows(4), None),
            batcher.submit(rows(4, -1), None),
            batcher.submit(rows(5), None),
        )
        network.release()
        first, good, bad, last = await asyncio.gather(*tasks, return_exceptions=True)
        check_answer(first, rows(1))
        check_answer(last, rows(5))
        assert good is not bad
        for failure in (good, bad):
            assert isinstance(failure, ComputationError)
            assert "negative" not in str(failure)  # what went wrong inside is not for a client
            assert str(failure.__cause__) == "a negative row"
        check_answer(await batcher.submit(rows(2), None), rows(2))


async def test_closing_computes_what_waits_and_takes_nothing_more():
    network = Network(free=False)
    async with batching(network, wait_seconds=100 * GENEROUS) as batcher:
        tasks = await start(*(batcher.submit(rows(n), None) for n in (8, 3, 4)))
        await network.is_entered()
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        while not batcher._closed:
            await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await batcher.submit(rows(1), None)
        network.release()
        for n, task in zip((8, 3, 4), tasks, strict=True):
            check_answer(await task, rows(n))
        await closing


def test_an_event_loop_that_has_gone_does_not_stop_the_threads():
    network = Network(free=False)
    batcher = Batcher(network, 8, 0, 100, 1)

    async def give_up():
        [task] = await start(batcher.submit(rows(1), None))
        await network.is_entered()
        task.cancel()

    async def come():
        check_answer(await asyncio.wait_for(batcher.submit(rows(2), None), GENEROUS), rows(2))

    try:
        asyncio.run(give_up())
        network.release()
        asyncio.run(come())
    finally:
        network.release()
        batcher.close()


async def test_batches_are_reported():
    rows_seen, seconds_seen = [], []
    observers = {"observe_rows": rows_seen.append, "observe_seconds": seconds_seen.append}
    async with batching(Network(), **observers) as batcher:
        await batcher.submit(rows(3), None)
        await batcher.submit(rows(5), None)
    assert rows_seen == [3, 5]
    assert all(0 <= seconds < GENEROUS for seconds in seconds_seen)


STEPS = st.one_of(
    st.tuples(
        st.just("submit"), st.integers(1, 8), st.sampled_from([None, None, 0.0, 0.002, 30.0])
    ),
    st.tuples(st.just("cancel"), st.integers(0, 1000), st.none()),
    st.tuples(st.just("compute"), st.integers(1, 3), st.none()),
)


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(STEPS, max_size=40),
    max_queue=st.integers(1, 30),
    workers=st.integers(1, 3),
    together=st.booleans(),
    wait=st.sampled_from([0, 0.001]),
)
def test_any_schedule(steps, max_queue, workers, together, wait):
    """No two rows are equal, so an answer that holds another's rows, or its own in
    another order, shows.
    """
    network = Network(free=False)
    requests: list[tuple[np.ndarray, asyncio.Task, float | None]] = []

    async def scenario():
        options = {"max_queue": max_queue, "workers": workers, "together": together}
        async with batching(network, wait_seconds=wait, **options) as batcher:
            loop = asyncio.get_running_loop()
            for number, (step, value, seconds) in enumerate(steps):
                if step == "submit":
                    own = rows(value, 10 * number)
                    deadline = None if seconds is None else loop.time() + seconds
                    requests.append((own, (await start(batcher.submit(own, deadline)))[0], seconds))
                    assert batcher.waiting <= max(max_queue, 8)
                elif step == "cancel" and requests:
                    requests[value % len(requests)][1].cancel()
                elif step == "compute":
                    for _ in range(value):
                        network.allowed.release()
                    await asyncio.sleep(0.0005 * value)
            network.release()
            tasks = [task for _, task, _ in requests]
            return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(scenario())
    answered = []
    for (own, _, seconds), result in zip(requests, results, strict=True):
        if isinstance(result, dict):
            check_answer(result, own)
            answered += own.ravel().tolist()
        elif isinstance(result, DeadlineExceeded):
            assert seconds in (0.0, 0.002)
        else:
            assert isinstance(result, TooBusy | asyncio.CancelledError), result
    computed = [row for batch in network.batches for row in batch.ravel().tolist()]
    assert len(set(computed)) == len(computed)
    assert set(answered) <= set(computed)
    submitted = {tuple(own.ravel().tolist()) for own, _, _ in requests}
    for batch in network.batches:
        assert len(batch) <= 8
        assert together or tuple(batch.ravel().tolist()) in submitted
    if workers == 1:
        assert computed == sorted(computed)  # first come, first served
