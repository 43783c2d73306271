"""Decode the image files of waiting requests in threads, several files per call."""

import asyncio
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from keras_preact.serving.errors import RequestError

#: Most files of a call, and most bytes of several. A call costs more than a small file in it: eight
#: PNGs of 32 x 32 pixels take 0.3 of the time of eight calls. A large file needs its time anyway.
MAX_FILES, MAX_BYTES = 8, 64 * 1024

#: How PNG, JPEG and WebP files begin in base64, and a data URL.
_AS_TEXT = (b"iVBORw0KGgo", b"/9j/", b"UklGR", b"data:image/")


class ImageDecoder:
    """Turns image files into the network's input, in threads.

    The more files wait, the more a thread decodes in one call. If a call fails, its files
    are decoded one by one, so that a damaged file spoils no other. A decoder belongs to
    one event loop at a time.

    Args:
        decode: TensorFlow function of an exported model from strings `(n,)` to images
            `(n, ...)`.
        threads: Number of threads. None: one per core.
    """

    def __init__(self, decode: Callable, threads: int | None = None):
        self._decode = decode
        self._count = threads or os.cpu_count() or 1
        self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="decoder")
        self._waiting: deque[tuple[bytes, asyncio.Future]] = deque()
        self._workers: set[asyncio.Task | None] = set()
        self._busy = 0  # workers whose thread decodes

    async def __call__(self, files: Sequence[bytes]) -> np.ndarray:
        """Return the images `(n, ...)` in files with these contents. If the call is
        cancelled, files that still wait are dropped.

        Raises:
            RequestError: if a file is not a complete image, or is not accepted; the
                message says which one.
        """
        loop = asyncio.get_running_loop()
        entries = [(file, loop.create_future()) for file in files]
        self._waiting.extend(entries)
        for _ in range(min(len(files), self._count - len(self._workers))):
            self._workers.add(loop.create_task(self._work()))
        images = []
        results = await asyncio.gather(*(one for _, one in entries), return_exceptions=True)
        for number, result in enumerate(results):
            if isinstance(result, BaseException):
                raise _translated(result, f"image {number}", files[number])
            images.append(result)
        return images[0] if len(images) == 1 else np.concatenate(images)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)

    async def _work(self) -> None:
        try:
            await asyncio.sleep(0)  # for files that arrive in the same step of the loop
            while entries := self._next_entries():
                await self._decode_entries(entries)
        finally:
            # at once, because a file that comes now needs another worker
            self._workers.discard(asyncio.current_task())

    async def _decode_entries(self, entries: Sequence[tuple[bytes, asyncio.Future]]) -> None:
        files = [file for file, _ in entries]
        loop = asyncio.get_running_loop()
        results: list[np.ndarray | Exception]
        self._busy += 1
        try:
            results = await loop.run_in_executor(self._threads, self._decode_all, files)
        except Exception as error:  # no thread can be started
            results = [error] * len(files)
        finally:
            self._busy -= 1
        for (_, image), result in zip(entries, results, strict=True):
            if image.done():  # the request was cancelled
                continue
            if isinstance(result, Exception):
                image.set_exception(result)
            else:
                image.set_result(result)

    def _next_entries(self) -> list[tuple[bytes, asyncio.Future]]:
        """Return the files of the next call: a share of those that wait, so that each thread
        that is free has some.
        """
        share = min(MAX_FILES, -(-len(self._waiting) // (self._count - self._busy)))
        entries: list[tuple[bytes, asyncio.Future]] = []
        size = 0
        while self._waiting and len(entries) < share:
            file, image = self._waiting[0]
            if image.done():  # the request was cancelled
                self._waiting.popleft()
                continue
            size += len(file)
            if entries and size > MAX_BYTES:
                break
            entries.append(self._waiting.popleft())
        return entries

    def _decode_all(self, files: Sequence[bytes]) -> list[np.ndarray | Exception]:
        """Return an image `(1, ...)` or an error for each file."""
        import tensorflow as tf

        try:
            images = self._decode(tf.constant(files)).numpy()
        except Exception as error:
            if len(files) == 1:
                return [error]
            return [result for file in files for result in self._decode_all([file])]
        return [images[i : i + 1] for i in range(len(files))]


def _translated(error: BaseException, image: str, file: bytes) -> BaseException:
    """Return the error for the client. An error that the image did not cause is
    returned unchanged.
    """
    import tensorflow as tf

    if not isinstance(error, tf.errors.InvalidArgumentError):
        return error
    sentence = re.search("<<(.*?)>>", error.message, re.DOTALL)
    if sentence is None:
        return RequestError(f"{image} is damaged or cut off. Send a whole PNG, JPEG or WebP file.")
    # A file that is refused was decoded alone, as image 0.
    text = sentence[1].replace("image 0", image, 1)
    if file.startswith(_AS_TEXT):
        text += '. It looks like base64 in a plain text: send it as {"b64": "BASE64"}, encoded once'
    return RequestError(text)
