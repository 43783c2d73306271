"""Decode the image files of waiting requests in threads, several files per call."""

import asyncio
import os
import re
from collections.abc import Callable, Sequence

import numpy as np

from keras_preact.serving.errors import RequestError
from keras_preact.serving.pool import Pool

#: Most files of a call, and most bytes of several. A call costs more than a small file in it: eight
#: PNGs of 32 x 32 pixels take 0.3 of the time of eight calls. A large file needs its time anyway.
MAX_FILES, MAX_BYTES = 8, 64 * 1024

#: How PNG, JPEG and WebP files begin in base64, and a data URL.
_AS_TEXT = (b"iVBORw0KGgo", b"/9j/", b"UklGR", b"data:image/")


class ImageDecoder(Pool):
    """Turns image files into the network's input, in threads.

    Args:
        decode: TensorFlow function of an exported model from strings `(n,)` to images
            `(n, ...)`.
        threads: Number of threads. None: one per core.
    """

    def __init__(self, decode: Callable, threads: int | None = None):
        super().__init__(threads or os.cpu_count() or 1, "decoder")
        self._decode = decode

    async def __call__(self, files: Sequence[bytes]) -> np.ndarray:
        """Return the images `(n, ...)` in files with these contents.

        Raises:
            RequestError: if a file is not a complete image, or is not accepted; the
                message says which one.
        """
        images = await self.results(files)
        for number, image in enumerate(images):
            if isinstance(image, Exception):
                raise _translated(image, f"image {number}", files[number])
        return images[0] if len(images) == 1 else np.concatenate(images)

    def _next(self) -> list[tuple[bytes, asyncio.Future]]:
        """Return a share of the files that wait, so that each thread that is free has some."""
        share = min(MAX_FILES, -(-len(self._waiting) // (self._count - self.busy)))
        entries: list[tuple[bytes, asyncio.Future]] = []
        size = 0
        while self._waiting and len(entries) < share:
            size += len(self._waiting[0][0])
            if entries and size > MAX_BYTES:
                break
            entries.append(self._waiting.popleft())
        return entries

    def _compute(self, items: list[bytes]) -> list[np.ndarray]:
        """Return the image `(1, ...)` in each file."""
        import tensorflow as tf

        images = self._decode(tf.constant(items)).numpy()
        return [images[i : i + 1] for i in range(len(items))]


def _translated(error: Exception, image: str, file: bytes) -> Exception:
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
