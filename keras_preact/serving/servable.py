"""One version of a model, loaded: images are decoded each by itself, so that a damaged
one spoils no other, and computed in batches.
"""

import asyncio
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

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

    @property
    def waiting(self) -> int:
        """Images that wait for the network, or to be decoded."""
        return self.batcher.waiting + (self.decoder.pending if self.decoder else 0)

    @property
    def busy_seconds(self) -> float:
        """Seconds that the batch now has been computed."""
        return self.batcher.busy_seconds

    async def predict(
        self, signature: str, array: np.ndarray, deadline: float | None
    ) -> dict[str, np.ndarray]:
        """Return a signature's outputs by name.

        Args:
            signature: Its name.
            array: Its input, as `TensorSpec.check` returns it.
            deadline: Time of the running event loop at which the request ends. `None`:
                never.

        Returns:
            Arrays with an entry for each example; strings are `str` in arrays of
            objects.

        Raises:
            RequestError: if it cannot be answered; the message is for the client.
            ComputationError: if the network failed.
        """
        self.batcher.check_rows(len(array))
        if array.dtype == object:
            assert self.decoder is not None  # `load` made sure
            array = await self.decoder(array.tolist(), deadline)
        outputs = await self.batcher.submit(array, deadline)
        wanted = self.signatures[signature].outputs
        if "classes" in wanted:
            indices, scores = highest(outputs["probabilities"], self.top_k)
            classes = np.array(self.classes, dtype=object)[indices]
            outputs = outputs | {"classes": classes, "scores": scores, "indices": indices}
        return {name: outputs[name] for name in wanted}

    async def close(self) -> None:
        """Answer the waiting requests and end all threads. No request may follow."""
        await self.batcher.close()
        if self.decoder:
            self.decoder.close()


class ImageDecoder:
    """Turns image files into the network's input, in threads.

    Args:
        decode: The TensorFlow function of an exported model for it: strings `(n,)` to
            images `(n, ...)`.
        max_queue: Largest number of images that are being decoded or wait for it. (One
            request of any size may in any case.)
        threads: Threads. None: one per core.
    """

    def __init__(self, decode: Callable, max_queue: int, threads: int | None = None):
        self._decode = decode
        self._max_queue = max_queue
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
        if self.pending and self.pending + len(files) > self._max_queue:
            raise TooBusy(
                f"{self.pending} images wait to be decoded already; at most {self._max_queue} may."
            )
        loop = asyncio.get_running_loop()
        self.pending += len(files)
        try:
            jobs = [loop.run_in_executor(self._threads, self._decode_one, one) for one in files]
            async with asyncio.timeout_at(deadline):
                results = await asyncio.gather(*jobs, return_exceptions=True)
        except TimeoutError:
            raise DeadlineExceeded(
                "The request's time was over before its images were decoded."
            ) from None
        finally:
            self.pending -= len(files)
        for number, result in enumerate(results):
            if isinstance(result, BaseException):
                raise _translated(result, f"image {number}") from result
        return np.concatenate(results)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)

    def _decode_one(self, file: bytes) -> np.ndarray:
        import tensorflow as tf

        return self._decode(tf.constant([file])).numpy()


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
