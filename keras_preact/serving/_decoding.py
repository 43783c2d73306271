"""Decodes the images of requests in threads, each image by itself: a damaged one spoils
no other.
"""

import asyncio
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from keras_preact.serving.errors import DeadlineExceeded, RequestError, TooBusy


class ImageDecoder:
    """Files of images to what the network takes.

    Args:
        decode: The TensorFlow function that an exported model has for it: strings
            `(n,)` to images `(n, ...)`.
        max_queue: Most images that are being decoded or wait for it. (One request of
            any size may in any case.)
    """

    def __init__(self, decode: Callable, max_queue: int):
        self._decode = decode
        self._max_queue = max_queue
        self._pending = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="decoder")

    @property
    def pending(self) -> int:
        """Images that are being decoded or wait for it."""
        return self._pending

    async def __call__(self, files: Sequence[bytes], deadline: float | None) -> np.ndarray:
        """Return the images `(n, ...)` of `files`.

        Args:
            files: Their contents.
            deadline: The running event loop's time until which they are wanted. None:
                for ever.

        Raises:
            RequestError: for a file that is no whole image, or one that is not taken;
                it says which.
            TooBusy: if there is no more room to wait.
            DeadlineExceeded: if they could not be decoded in time; those that still
                wait are dropped.
        """
        with self._lock:
            if self._pending and self._pending + len(files) > self._max_queue:
                raise TooBusy(
                    f"{self._pending} images wait to be decoded already; at most "
                    f"{self._max_queue} may."
                )
            self._pending += len(files)
        jobs = [self._threads.submit(self._decode_one, file) for file in files]
        for job in jobs:
            job.add_done_callback(self._count_down)
        try:
            async with asyncio.timeout_at(deadline):
                results = await asyncio.gather(
                    *map(asyncio.wrap_future, jobs), return_exceptions=True
                )
        except TimeoutError:
            raise DeadlineExceeded(
                "The request's time was over before its images were decoded."
            ) from None
        images = []
        for number, result in enumerate(results):
            if isinstance(result, BaseException):
                raise _translate(result, f"image {number}") from result
            images.append(result)
        return np.concatenate(images)

    def close(self) -> None:
        """Decode what waits, and return when the threads have ended."""
        self._threads.shutdown()

    def _decode_one(self, file: bytes) -> np.ndarray:
        import tensorflow as tf

        return self._decode(tf.constant([file])).numpy()

    def _count_down(self, job) -> None:
        with self._lock:
            self._pending -= 1


def _translate(error: BaseException, image: str) -> BaseException:
    """Return the error that the client is told of; one that is not the image's fault
    stays as it is.
    """
    import tensorflow as tf

    if not isinstance(error, tf.errors.InvalidArgumentError):
        return error
    own_words = re.search("<<(.*?)>>", error.message, re.DOTALL)
    # To the function it is the first of one.
    return RequestError(
        own_words[1].replace("image 0", image, 1) if own_words else f"{image} is damaged or cut off"
    )
