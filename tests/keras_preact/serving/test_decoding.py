"""Files of all requests are decoded together, and each request gets its own images. What
batches and decoding share is tested in `test_batching.py`.
"""

import asyncio
import contextlib
import threading

import numpy as np
import pytest
import tensorflow as tf

from keras_preact.serving import decoding
from keras_preact.serving.decoding import ImageDecoder
from keras_preact.serving.errors import RequestError

pytestmark = pytest.mark.anyio

GENEROUS = 60  # seconds after which a test that hangs fails


class Decode:
    """Reads numbers; keeps the files of every call. A call waits until it is released."""

    def __init__(self, released=True):
        self.calls: list[list[bytes]] = []
        self.entered = threading.Semaphore(0)
        self.allowed = threading.Semaphore(10**6 if released else 0)

    def __call__(self, files):
        files = files.numpy().tolist()
        self.calls.append(files)
        self.entered.release()
        assert self.allowed.acquire(timeout=GENEROUS)
        if b"broken" in files:
            raise KeyError("a fault of the server")
        for number, file in enumerate(files):
            if not file.strip().isdigit():
                message = f"<<image {number} is no number>>"
                raise tf.errors.InvalidArgumentError(None, None, message)
        return tf.constant([[float(file)] for file in files])

    async def is_entered(self, calls=1):
        for _ in range(calls):
            assert await asyncio.to_thread(self.entered.acquire, timeout=GENEROUS)


@contextlib.asynccontextmanager
async def decoding_with(decode, threads=1):
    decoder = ImageDecoder(decode, threads)
    try:
        async with asyncio.timeout(GENEROUS):
            yield decoder
    finally:
        decode.allowed.release(10**6)
        await decoder.close()
    assert not decoder._waiting


def files_of(*numbers) -> list[bytes]:
    return [str(number).encode() for number in numbers]


def flat(calls) -> list[bytes]:
    return [file for files in calls for file in files]


async def start(decoder, *requests) -> list[asyncio.Task]:
    """Start requests in order."""
    tasks = []
    for files in requests:
        tasks.append(asyncio.create_task(decoder(files)))
        await asyncio.sleep(0)
    return tasks


async def test_what_waits_is_decoded_together_and_first_come_first_served():
    decode = Decode(released=False)
    async with decoding_with(decode) as decoder:
        requests = [files_of(0), *(files_of(i, i + 100) for i in range(1, 11))]
        tasks = await start(decoder, requests[0])
        await decode.is_entered()
        tasks += await start(decoder, *requests[1:])
        decode.allowed.release(10**6)
        answers = await asyncio.gather(*tasks)
    for files, images in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(images, [[float(file)] for file in files])
    assert [len(call) for call in decode.calls] == [1, 8, 8, 4]
    assert flat(decode.calls) == flat(requests)


async def test_every_thread_gets_a_share():
    decode = Decode(released=False)
    async with decoding_with(decode, threads=3) as decoder:
        [task] = await start(decoder, files_of(*range(6)))
        await decode.is_entered(3)
        decode.allowed.release(10**6)
        assert (await task)[:, 0].tolist() == list(range(6))
    assert [len(call) for call in decode.calls] == [2, 2, 2]


async def test_large_files_are_decoded_alone(monkeypatch):
    monkeypatch.setattr(decoding, "MAX_BYTES", 10)
    decode = Decode()
    async with decoding_with(decode) as decoder:
        files = [b"1", b"2" + b" " * 20, b"3", b"4", b"5" + b" " * 8]
        assert (await decoder(files))[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert [len(call) for call in decode.calls] == [1, 1, 2, 1]


@pytest.mark.parametrize(
    ("file", "error", "message"),
    [(b"junk", RequestError, "image 1 is no number"), (b"broken", KeyError, "of the server")],
)
async def test_a_file_that_fails_spoils_no_other(file, error, message):
    decode = Decode()
    async with decoding_with(decode) as decoder:
        requests = [files_of(1), [b"2", file, b"3"], files_of(4)]
        good, failed, other = await asyncio.gather(*map(decoder, requests), return_exceptions=True)
        assert good.tolist() == [[1]]
        assert other.tolist() == [[4]]
        with pytest.raises(error, match=message):
            raise failed
        # it goes on
        assert (await decoder(files_of(7))).tolist() == [[7]]
    assert [len(call) for call in decode.calls] == [5, 1, 1, 1, 1, 1, 1]


async def test_a_file_that_comes_when_a_thread_has_just_ended_is_decoded(monkeypatch):
    """A worker finds no file, and the next one comes before anybody hears that it ended."""
    ended = asyncio.Event()
    following = ImageDecoder._next

    def noting(decoder):
        entries = following(decoder)
        if not entries:
            ended.set()  # wakes `late` before all callbacks of the worker's task
        return entries

    monkeypatch.setattr(ImageDecoder, "_next", noting)
    async with decoding_with(Decode()) as decoder:

        async def late():
            await ended.wait()
            return await decoder(files_of(2))

        waiting = asyncio.create_task(late())
        await asyncio.sleep(0)
        assert (await decoder(files_of(1))).tolist() == [[1]]
        async with asyncio.timeout(5):
            assert (await waiting).tolist() == [[2]]


async def test_without_threads_every_request_gets_the_error():
    decode = Decode()
    async with decoding_with(decode) as decoder:
        await decoder.close()
        answers = await asyncio.gather(
            *map(decoder, [files_of(1), files_of(2)]), return_exceptions=True
        )
    assert [type(answer) for answer in answers] == [RuntimeError, RuntimeError]
