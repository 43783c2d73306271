"""One loaded version of a model: it decodes images, and computes them in batches."""

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_preact.export.version import class_scores
from keras_preact.serving.batching import Batcher, ComputationError, Duration
from keras_preact.serving.decoding import ImageDecoder
from keras_preact.serving.errors import RequestError, TooBusy, TooLarge
from keras_preact.serving.tensors import Signature, shown

log = logging.getLogger("keras_preact.serving")


@dataclasses.dataclass
class Statistics:
    """What a servable has done for its clients.

    Args:
        success: Requests that were answered.
        fail: Requests that fit the signature and were not answered.
        last: Time of the last request, in seconds since 1970; 0 without one.
    """

    success: Duration = dataclasses.field(default_factory=Duration)
    fail: Duration = dataclasses.field(default_factory=Duration)
    last: float = 0.0


@dataclasses.dataclass(eq=False)
class Servable:
    """A loaded version of a model; `loading.load` makes it.

    Args:
        name: The model's name.
        version: The version's number.
        classes: Names of the classes, in the order of the outputs.
        top_k: Number of the most probable classes in an answer.
        signatures: The model's functions by name.
        signature_defs: TensorFlow's description of these functions, as JSON.
        batcher: Computes the network.
        decoder: Makes the network's input from image files. `None` if no signature
            takes them.
        max_queue: Largest number of images in progress. (If no image is in progress, a
            request of up to a batch is always accepted.)
        in_progress: Images in progress: being decoded or computed, or waiting for it.
        statistics: What it has done since it was loaded.
    """

    name: str
    version: int
    classes: list[str]
    top_k: int
    signatures: Mapping[str, Signature]
    signature_defs: dict[str, Any]
    batcher: Batcher
    decoder: ImageDecoder | None
    max_queue: int
    in_progress: int = 0
    statistics: Statistics = dataclasses.field(default_factory=Statistics)

    def check_rows(self, rows: int) -> None:
        """Check the number of examples in a request. Whoever reads one calls it as soon as
        the number is known, before there is any work.

        Raises:
            TooLarge: if there are more than a batch can hold.
        """
        most = self.batcher.max_batch_size
        if rows > most:
            raise TooLarge(
                f"One request may hold at most {most} examples. Received: {rows}. Send several "
                "requests."
            )

    async def predict(self, signature: str, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return a signature's outputs by name.

        Args:
            signature: Name of the signature.
            array: Its input, as `TensorSpec.check` returns it.

        Returns:
            Arrays with an entry for each example; strings are `str` in arrays of
            objects.

        Raises:
            RequestError: if the request cannot be answered, or the outputs are not
                finite; the message is for the client.
            ComputationError: if the network failed.
        """
        began, self.statistics.last = time.perf_counter(), time.time()
        outcome = self.statistics.fail
        try:
            outputs = await self._predict(signature, array)
            outcome = self.statistics.success
        finally:
            outcome.add(time.perf_counter() - began)
        return outputs

    async def _predict(self, signature: str, array: np.ndarray) -> dict[str, np.ndarray]:
        rows = len(array)
        self.check_rows(rows)
        if self.in_progress and self.in_progress + rows > self.max_queue:
            raise TooBusy(
                f"{self.in_progress} examples are in progress on this model; at most "
                f"{self.max_queue} may be. Received: {rows} more. Send them again later."
            )
        self.in_progress += rows
        try:
            if array.dtype == object:
                assert self.decoder is not None  # its model card promises it
                array = await self.decoder(array.tolist())
            outputs = await self.batcher.submit(array)
        except ComputationError as error:
            if not _is_about_values(error):
                raise
            raise RequestError(
                f"The network cannot compute this input of the shape {shown(array.shape)}: its "
                "size or one of its values is none that the network takes."
            ) from error
        finally:
            self.in_progress -= rows
        wanted = self.signatures[signature].outputs
        names_classes = "classes" in wanted
        used = ["probabilities"] if names_classes else list(wanted)
        self._check_finite(signature, array, {name: outputs[name] for name in used})
        if names_classes:
            outputs = outputs | self.best(outputs["probabilities"])
        return {name: outputs[name] for name in wanted}

    def _check_finite(
        self, signature: str, images: np.ndarray, outputs: dict[str, np.ndarray]
    ) -> None:
        """Check that outputs are finite: JSON has no other numbers, and no order of
        classes follows from them.

        Raises:
            RequestError: with status 400 if the images have values that no network
                takes, else with status 500.
        """
        for name, output in outputs.items():
            finite = np.isfinite(output.reshape(len(output), -1)).all(axis=1)
            if finite.all():
                continue
            row = int(finite.argmin())
            what = f"The network's `{name}` are not finite numbers for example {row}. "
            excess = self.signatures[signature].input.excess(images[row])
            if excess is not None:
                raise RequestError(what + excess)
            about = {"model": self.name, "version": self.version}
            log.error("%s version %d: outputs are not finite", *about.values(), extra=about)
            raise RequestError(
                what + "Its input is in the usual range: the weights are damaged, or the network "
                "overflows. Use another version of the model.",
                500,
            )

    def best(self, probabilities: np.ndarray) -> dict[str, np.ndarray]:
        """Return the most probable classes of each example, `(n, top_k)`: their names,
        scores and int32 indices. The first of equal classes comes first.
        """
        probabilities = class_scores(probabilities, len(self.classes))
        order = (-probabilities).argsort(axis=-1, kind="stable")
        indices = order[:, : self.top_k].astype(np.int32)
        return {
            "classes": np.array(self.classes, dtype=object)[indices],
            "scores": np.take_along_axis(probabilities, indices, axis=1),
            "indices": indices,
        }

    def forget(self) -> None:
        """Count from now on: what was done before was no client's request."""
        self.statistics = Statistics()
        self.batcher.computed, self.batcher.rows = Duration(), 0

    async def close(self) -> None:
        """Answer the waiting requests and end all threads. No request may follow."""
        if self.decoder:
            await self.decoder.close()
        await self.batcher.close()


def _is_about_values(error: ComputationError) -> bool:
    """Whether TensorFlow refused what it was given, such as a token outside the vocabulary
    or an image that is smaller than a window.
    """
    import tensorflow as tf

    return isinstance(error.__cause__, tf.errors.InvalidArgumentError)
