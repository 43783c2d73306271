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

    def __call__(self, images):
        self.batches.append(images.copy())
        self.entered.release()
        if not self.free:
            assert self.allowed.acquire(timeout=GENEROUS)
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
async def batching(network, max_batch_size=8, max_queue=100, **options):
    """Give a batcher; it is closed afterwards, and must leave no thread."""
    before = set(threading.enumerate())
    batcher = Batcher(network, max_batch_size, max_queue, **options)
    try:
        async with asyncio.timeout(GENEROUS):
            yield batcher
    finally:
        network.release()
        await batcher.close()
        batcher._thread.shutdown()
    after = set(threading.enumerate()) - before
    assert not [one for one in after if one.name.startswith("batcher-")]


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


async def test_what_waits_is_computed_together_whole_requests_first_come_first_served():
    network = Network(free=False)
    sent = [rows(n, 100 * i) for i, n in enumerate([1, 3, 4, 2, 8, 1])]
    async with batching(network) as batcher:
        tasks = await start(batcher.submit(sent[0], None))
        await network.is_entered()
        tasks += await start(*(batcher.submit(own, None) for own in sent[1:]))
        assert batcher.waiting == 3 + 4 + 2 + 8 + 1
        network.release()
        for task, own in zip(tasks, sent, strict=True):
            check_answer(await task, own)
        assert batcher.waiting == 0
    assert [len(batch) for batch in network.batches] == [1, 3 + 4, 2, 8, 1]
    np.testing.assert_array_equal(network.batches[1], np.concatenate(sent[1:3]))


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


async def test_without_batching_every_request_runs_by_itself():
    network = Network(free=False)
    async with batching(network, together=False) as batcher:
        tasks = await start(*(batcher.submit(rows(n), None) for n in (1, 2, 3)))
        await network.is_entered()
        assert batcher.busy_seconds > 0
        network.release()
        for n, task in enumerate(tasks, 1):
            check_answer(await task, rows(n))
        assert batcher.busy_seconds == 0
    assert [len(batch) for batch in network.batches] == [1, 2, 3]


async def test_the_queue_does_not_grow():
    network = Network(free=False)
    async with batching(network, max_queue=6) as batcher:
        tasks = await start(batcher.submit(rows(8), None))
        await network.is_entered()
        tasks += await start(batcher.submit(rows(3), None), batcher.submit(rows(2), None))
        with pytest.raises(TooBusy, match=r"5 examples wait .* at most 6"):
            await batcher.submit(rows(2), None)
        with pytest.raises(TooLarge, match=r"at most 8 .* Received: 9"):
            await batcher.submit(rows(9), None)
        tasks += await start(batcher.submit(rows(1), None))  # there is room for one
        assert batcher.waiting == 6
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        assert batcher.waiting == 3
        tasks[1:2] = await start(batcher.submit(rows(3), None))  # its place is free at once
        network.release()
        await asyncio.gather(*tasks)


async def test_a_failure_goes_to_everyone_in_the_batch_and_to_nobody_else():
    network = Network(free=False)
    async with batching(network) as batcher:
        tasks = await start(batcher.submit(rows(1), None))
        await network.is_entered()
        others = [rows(4), rows(4, -1), rows(5)]
        tasks += await start(*(batcher.submit(own, None) for own in others))
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
    async with batching(network) as batcher:
        tasks = await start(*(batcher.submit(rows(n), None) for n in (8, 3, 4)))
        await network.is_entered()
        closing = asyncio.create_task(batcher.close())
        while not batcher._closed:
            await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await batcher.submit(rows(1), None)
        network.release()
        for n, task in zip((8, 3, 4), tasks, strict=True):
            check_answer(await task, rows(n))
        await closing


STEPS = st.one_of(
    st.tuples(
        st.just("submit"), st.integers(1, 8), st.sampled_from([None, None, 0.0, 0.002, 1000.0])
    ),
    st.tuples(st.just("cancel"), st.integers(0, 1000), st.none()),
    st.tuples(st.just("compute"), st.integers(1, 3), st.none()),
)


@settings(max_examples=80)
@given(
    steps=st.lists(STEPS, max_size=40),
    max_queue=st.integers(1, 30),
    together=st.booleans(),
)
def test_any_schedule(steps, max_queue, together):
    """No two rows are equal, so an answer that holds another's rows, or its own in
    another order, shows.
    """
    network = Network(free=False)
    requests: list[tuple[np.ndarray, asyncio.Task, float | None]] = []

    async def scenario():
        async with batching(network, max_queue=max_queue, together=together) as batcher:
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
    assert computed == sorted(computed)  # first come, first served
