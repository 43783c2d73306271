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

pytestmark = pytest.mark.anyio

GENEROUS = 60  # seconds after which a test that hangs fails


class Network:
    """Adds one to its rows, each batch once `release` lets it; keeps what it was given."""

    def __init__(self):
        self.batches: list[np.ndarray] = []
        self.entered = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)

    def __call__(self, images):
        self.batches.append(images.copy())
        self.entered.release()
        assert self.allowed.acquire(timeout=GENEROUS)
        if (images % 1).any():
            raise ValueError("a row that fails")
        return {"plus_one": images + 1, "itself": images}

    async def is_entered(self):
        assert await asyncio.to_thread(self.entered.acquire, timeout=GENEROUS)

    def release(self, batches=1000):
        self.allowed.release(batches)


def rows(number: int, start: float = 0, width: int = 1) -> np.ndarray:
    return np.repeat(np.arange(start, start + number, dtype="float32")[:, None], width, axis=1)


@contextlib.asynccontextmanager
async def batching(network, **options):
    """Give a batcher; it is closed afterwards, and must leave no thread."""
    before = set(threading.enumerate())
    batcher = Batcher(network, 8, **options)
    try:
        async with asyncio.timeout(GENEROUS):
            yield batcher
    finally:
        network.release()
        await batcher.close()
        batcher._threads.shutdown()
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
    network = Network()
    sent = [rows(n, 100 * i) for i, n in enumerate([1, 3, 5, 2, 8, 1])]
    async with batching(network) as batcher:
        tasks = await start(batcher.submit(sent[0]))
        await network.is_entered()
        tasks += await start(*(batcher.submit(own) for own in sent[1:]))
        [left] = await start(batcher.submit(rows(1, 1000)))
        left.cancel()
        await asyncio.wait([left])
        network.release()
        for task, own in zip(tasks, sent, strict=True):
            check_answer(await task, own)
    assert [len(batch) for batch in network.batches] == [1, 3 + 5, 2, 8, 1]
    np.testing.assert_array_equal(network.batches[1], np.concatenate(sent[1:3]))


async def test_a_request_that_fails_spoils_no_other_one():
    network = Network()
    network.release()
    sent = [rows(2), rows(3, 10.5), rows(1, 20)]
    async with batching(network) as batcher:
        tasks = [asyncio.create_task(batcher.submit(own)) for own in sent]
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [len(batch) for batch in network.batches] == [6, 2, 3, 1]
    check_answer(results[0], sent[0])
    check_answer(results[2], sent[2])
    assert str(results[1].__cause__) == "a row that fails"


# Rows, whether their batch fails, and their width: often several requests are in a batch.
SUBMIT = st.tuples(
    st.just("submit"),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([0.0, 0.0, 0.0, 0.5]),
    st.sampled_from([1, 1, 1, 2]),
)
STEPS = st.one_of(
    SUBMIT,
    SUBMIT,
    st.tuples(st.just("cancel"), st.integers(0, 1000)),
    st.tuples(st.just("compute"), st.integers(1, 3)),
)


@settings(max_examples=100)
@given(steps=st.lists(STEPS, min_size=5, max_size=40), together=st.booleans())
def test_any_schedule(steps, together):
    """No two rows are equal, so an answer that holds another's rows, or its own in
    another order, shows.
    """
    network = Network()
    requests: list[tuple[np.ndarray, asyncio.Task]] = []

    async def scenario():
        async with batching(network, together=together) as batcher:
            for number, (step, value, *more) in enumerate(steps):
                if step == "submit":
                    fraction, width = more
                    own = rows(value, 10 * number + fraction, width)
                    requests.append((own, (await start(batcher.submit(own)))[0]))
                elif step == "cancel" and requests:
                    requests[value % len(requests)][1].cancel()
                elif step == "compute":
                    network.release(value)
                    await asyncio.sleep(0.0005 * value)
            network.release()
            await batcher.close()  # computes what waits
            await asyncio.sleep(0)
            tasks = [task for _, task in requests]
            assert all(task.done() for task in tasks)
            return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(scenario())
    answered, failures = [], []
    for (own, _), result in zip(requests, results, strict=True):
        if isinstance(result, dict):
            check_answer(result, own)
            answered += own[:, 0].tolist()
        elif isinstance(result, ComputationError):
            failures.append(result)
            assert (own % 1).any()  # it spoils no other request
            assert str(result.__cause__) == "a row that fails"
        else:
            assert isinstance(result, asyncio.CancelledError), result
    assert len(set(map(id, failures))) == len(failures)  # each has its own, with its own trace
    submitted = {tuple(own[:, 0].tolist()) for own, _ in requests}
    for batch in network.batches:
        assert len(batch) <= 8
        assert together or tuple(batch[:, 0].tolist()) in submitted
    # the requests of a batch that fails are computed again, each alone
    whole = [
        batch
        for batch in network.batches
        if not (batch % 1).any() or tuple(batch[:, 0].tolist()) in submitted
    ]
    computed = [row for batch in whole for row in batch[:, 0].tolist()]
    assert len(set(computed)) == len(computed)
    assert set(answered) <= set(computed)
    assert computed == sorted(computed)  # first come, first served
