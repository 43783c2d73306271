"""One version of a model, loaded: images are decoded each by itself, so that a damaged
one spoils no other, and computed in batches.
"""

import asyncio
import dataclasses
import functools
import os
import re
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from keras_preact.export._images import FILE_TYPES
from keras_preact.serving.batching import Batcher
from keras_preact.serving.errors import DeadlineExceeded, RequestError, TooBusy
from keras_preact.serving.tensors import Signature, highest


@dataclasses.dataclass(frozen=True, eq=False)
class Servable:
    """A loaded version of a model; `loading.load` makes it.

    Args:
        name: The model's name.
        version: The version's number.
        classes: Their names, in the order of the outputs.
        top_k: Number of the most probable classes in an answer.
        signatures: Its functions by name.
        signature_defs: TensorFlow's description of them, as JSON.
        batcher: Computes the network.
        decoder: Makes the network's input from image files. `None` if no signature
            takes them.
    """

    name: str
    version: int
    classes: list[str]
    top_k: int
    signatures: Mapping[str, Signature]
    signature_defs: dict[str, Any]
    batcher: Batcher
    decoder: "ImageDecoder | None"

    @functools.cached_property
    def _names(self) -> np.ndarray:
        return np.array(self.classes, dtype=object)

    @property
    def waiting(self) -> int:
        """Images that wait for the network, or to be decoded."""
        return self.batcher.waiting + (self.decoder.pending if self.decoder else 0)

    @property
    def busy_seconds(self) -> float:
        """Seconds that the longest batch now has been computed."""
        return self.batcher.busy_seconds

    async def predict(
        self, signature: str, inputs: Mapping[str, np.ndarray], deadline: float | None
    ) -> dict[str, np.ndarray]:
        """Return a signature's outputs by name.

        Args:
            signature: Its name.
            inputs: Its input, as `Signature.check` returns it.
            deadline: Time of the running event loop at which the request ends. `None`:
                never.

        Returns:
            Arrays with an entry for each example; strings are `str` in arrays of
            objects.

        Raises:
            RequestError: if it cannot be answered; the message is for the client.
            ComputationError: if the network failed.
        """
        [images] = inputs.values()
        self.batcher.check_rows(len(images))
        if images.dtype == object:
            assert self.decoder is not None  # `load` made sure
            images = await self.decoder(images.tolist(), deadline)
        outputs = await self.batcher.submit(images, deadline)
        wanted = self.signatures[signature].outputs
        if "classes" in wanted:
            indices, scores = highest(outputs["probabilities"], self.top_k)
            outputs = outputs | {
                "classes": self._names[indices],
                "scores": scores,
                "indices": indices,
            }
        return {name: outputs[name] for name in wanted}

    async def close(self) -> None:
        """Answer the waiting requests and end all threads. No request may follow."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Do the same without an event loop."""
        if self.decoder:
            self.decoder.close()
        self.batcher.close()


#: Smaller files of small images are decoded in the event loop: that takes less time than the way to
#: a thread and back, and at most 5 ms whatever is in them.
INLINE_BYTES, INLINE_PIXELS = 4 * 1024, 64 * 64


class ImageDecoder:
    """Turns image files into the network's input, in threads.

    Args:
        decode: The TensorFlow function of an exported model for it: strings `(n,)` to
            images `(n, ...)`.
        max_queue: Largest number of images that are being decoded or wait for it. (One
            request of any size may in any case.)
        threads: Threads. None: one per core.
        direct: Decodes some files faster, with the same result. None: `decode` decodes
            all.
    """

    def __init__(
        self,
        decode: Callable,
        max_queue: int,
        threads: int | None = None,
        direct: "DirectDecoder | None" = None,
    ):
        self._decode = decode
        self._direct = direct
        self._max_queue = max_queue
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads or os.cpu_count(), thread_name_prefix="decoder")
        #: Images that are being decoded or wait for it.
        self.pending = 0

    async def __call__(self, files: Sequence[bytes], deadline: float | None) -> np.ndarray:
        """Return the images `(n, ...)` in `files`.

        Args:
            files: Their contents.
            deadline: Time of the running event loop at which the request ends. `None`:
                never.

        Raises:
            RequestError: for a file that is not a whole image, or is not accepted; the
                message says which.
            TooBusy: if too many images wait.
            DeadlineExceeded: if they could not be decoded in time; those that still
                wait are dropped.
        """
        if self._direct is not None and sum(map(len, files)) <= INLINE_BYTES:
            images = [self._direct(file, INLINE_PIXELS) for file in files]
            if all(image is not None for image in images):
                return np.stack(images)  # type: ignore[arg-type]
        with self._lock:
            if self.pending and self.pending + len(files) > self._max_queue:
                raise TooBusy(
                    f"{self.pending} images wait to be decoded already; at most "
                    f"{self._max_queue} may."
                )
            self.pending += len(files)
        waiting = dict(enumerate(files))  # empty at the end, whatever is in the threads' queue
        jobs = [self._threads.submit(self._decode_one, waiting, i) for i in range(len(files))]
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
        finally:
            waiting.clear()
        for number, result in enumerate(results):
            if isinstance(result, BaseException):
                raise _translated(result, f"image {number}") from result
        return np.concatenate(results)  # type: ignore[arg-type]

    def close(self) -> None:
        """Decode the waiting images, and return when the threads have ended."""
        self._threads.shutdown()

    def _decode_one(self, waiting: dict[int, bytes], number: int) -> np.ndarray:
        import tensorflow as tf

        file = waiting.pop(number)
        if self._direct is not None and (image := self._direct(file)) is not None:
            return image[np.newaxis]
        return self._decode(tf.constant([file])).numpy()

    def _count_down(self, job) -> None:
        with self._lock:
            self.pending -= 1


@dataclasses.dataclass(frozen=True)
class DirectDecoder:
    """Decodes files of the network's size by calls of the very operations that
    `keras_preact.export` writes into a graph. Everything else is left to the graph.

    A call of an exported `decode` takes 380 us for a file of 32 x 32 pixels, this 45
    us (PNG) or 75 us (JPEG). Pillow's PNGs are equal and take 40 us; its JPEGs differ
    by up to 4 of 255.

    Args:
        height, width, channels: The network's, with 1 or 3 channels. Larger files are
            left to the graph: resizing takes most of their time.
    """

    height: int
    width: int
    channels: int

    def __call__(self, file: bytes, max_pixels: int | None = None) -> np.ndarray | None:
        """Return the pixels, float32 `(height, width, channels)`; None for a file that is
        not whole, of another size or another kind, or of more than `max_pixels`.
        """
        import tensorflow as tf

        if max_pixels is not None and self.height * self.width > max_pixels:
            return None
        kind = next((row for row in FILE_TYPES if file.startswith(row.magic)), None)
        if kind is None or b"TXt" in file:  # compressed texts take time
            return None
        if any(sum(map(file.count, marks)) > most for marks, most in kind.limits.items()):
            return None
        size = (self.height, self.width)
        contents = tf.constant(file)  # of bytes, each operation would make one, slowly
        try:
            if kind.name == "PNG":
                if struct.unpack(">II", file[16:24]) != size[::-1]:
                    return None
                pixels = tf.raw_ops.DecodePng(contents=contents, channels=self.channels)
            else:
                *found, channels = tf.raw_ops.ExtractJpegShape(contents=contents).numpy().tolist()
                if tuple(found) != size or (channels == 4 and self.channels == 1):
                    return None
                pixels = tf.raw_ops.DecodeJpeg(contents=contents, channels=self.channels)
        except (tf.errors.InvalidArgumentError, struct.error):
            return None
        return pixels.numpy().astype("float32")


def _translated(error: BaseException, image: str) -> BaseException:
    """Return the error for the client; one that is not the image's fault stays as it is."""
    import tensorflow as tf

    if not isinstance(error, tf.errors.InvalidArgumentError):
        return error
    own_words = re.search("<<(.*?)>>", error.message, re.DOTALL)
    # For the function it is the first image of one.
    return RequestError(
        own_words[1].replace("image 0", image, 1) if own_words else f"{image} is damaged or cut off"
    )
