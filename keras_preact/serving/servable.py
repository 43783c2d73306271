"""One version of a model, loaded: requests in, answers out."""

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_preact.serving import _inputs, _load, engines
from keras_preact.serving._decoding import ImageDecoder
from keras_preact.serving._load import LoadError
from keras_preact.serving.batching import Batcher, ComputationError
from keras_preact.serving.errors import RequestError, TooLarge
from keras_preact.serving.settings import Settings
from keras_preact.serving.tensors import INLINE_BYTES, Signature, highest


class Servable:
    """A loaded version of a model; `load` makes it.

    Args:
        name: The model's name.
        version: The version's number.
        card: Its model card.
        signatures: Its functions by name.
        signature_defs: TensorFlow's description of them, as JSON.
        batcher: Computes the network.
        decoder: Makes the network's input from files of images. None where it has no
            such signature.
    """

    def __init__(
        self,
        name: str,
        version: int,
        card: dict[str, Any],
        signatures: Mapping[str, Signature],
        signature_defs: dict[str, Any],
        batcher: Batcher,
        decoder: ImageDecoder | None,
    ):
        self.name = name
        self.version = version
        self.card = card
        self.classes: list[str] = card["classes"]
        self.signatures = signatures
        self.signature_defs = signature_defs
        self._names = np.array(self.classes, dtype=object)
        self._batcher = batcher
        self._decoder = decoder

    @property
    def waiting(self) -> int:
        """Images that wait for the network, or to be decoded."""
        return self._batcher.waiting + (self._decoder.pending if self._decoder else 0)

    async def predict(
        self, signature: str, inputs: Mapping[str, Any], deadline: float | None
    ) -> dict[str, np.ndarray]:
        """Answer a request: a signature's outputs by name.

        Args:
            signature: Its name.
            inputs: Arrays of any type of number by name; files of images as a list of
                bytes, or an array of them.
            deadline: The running event loop's time until which the answer is wanted.
                None: for ever.

        Returns:
            Arrays with an entry for each example; strings are `str` in arrays of
            objects.

        Raises:
            RequestError: for what cannot be answered; the message is for the client.
            ComputationError: if the network could not be computed.
        """
        function = _inputs.find_signature(self.signatures, signature)
        spec, values = _inputs.take(function, inputs)
        self._batcher.check_rows(len(values))
        if spec.dtype != "string":
            small = values.nbytes <= INLINE_BYTES
            images = (
                _inputs.to_float32(spec, values)
                if small
                else await asyncio.to_thread(_inputs.to_float32, spec, values)
            )
        else:
            assert self._decoder is not None  # load made sure
            images = await self._decoder(list(values), deadline)
        outputs = await self._batcher.submit(images, deadline)
        wanted = [spec.name for spec in function.outputs]
        if "classes" in wanted:
            outputs = outputs | self._best(outputs["probabilities"])
        return {name: outputs[name] for name in wanted}

    async def close(self) -> None:
        """Answer what waits and end all threads; for when no request comes any more."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._decoder:
            self._decoder.close()
        self._batcher.close()

    def _best(self, probabilities: np.ndarray) -> dict[str, np.ndarray]:
        indices, scores = highest(probabilities, self.card["top_k"])
        return {"classes": self._names[indices], "scores": scores, "indices": indices}


def load(
    path: Path, settings: Settings, on_batch: Callable[[str, int, int, float], None] | None = None
) -> Servable:
    """Load a version of a model and run its warm-up requests; to be called in a thread
    that has no event loop.

    Args:
        path: `.../NAME/VERSION`.
        settings: What the server was told.
        on_batch: Told of every batch that is computed: the model's name, the version,
            rows, seconds.

    Raises:
        LoadError: whatever is wrong with it, in a sentence without a path.
    """
    name, version = path.parent.name, int(path.name)
    if settings.engine not in engines.ENGINES:
        raise LoadError(
            f"There is no engine {settings.engine!r}. There are: {', '.join(engines.ENGINES)}."
        )
    card = _load.read_card(path)
    _load.check_files(path, card["files"])
    signatures = _load.read_signatures(card)
    engines.use_threads(settings.threads)
    frozen, decode = _load.read_functions(path)
    if decode is None and any(
        spec.dtype == "string" for one in signatures.values() for spec in one.inputs
    ):
        raise LoadError(
            "Its SavedModel has no function `decode`, which its model card promises: export it "
            "again."
        )
    run = _start_engine(settings, frozen, card["precision"])
    batcher = Batcher(
        run,
        max_batch_size=settings.max_batch_size or max(card["batch_sizes"]),
        wait_seconds=settings.batch_wait_ms / 1000,
        max_queue=settings.max_queue,
        workers=1 if settings.batching else os.cpu_count() or 1,
        together=settings.batching,
        on_batch=on_batch and (lambda rows, seconds: on_batch(name, version, rows, seconds)),
    )
    decoder = decode and ImageDecoder(decode, settings.max_queue)
    servable = Servable(
        name, version, card, signatures, _load.read_signature_defs(path), batcher, decoder
    )
    try:
        asyncio.run(_warm_up(servable, path))
    except BaseException:
        servable._close()
        raise
    return servable


def _start_engine(settings: Settings, frozen: engines.Frozen, precision: str) -> engines.Engine:
    try:
        return engines.ENGINES[settings.engine](frozen, settings, precision)
    except ImportError as error:
        raise LoadError(str(error)) from error
    except Exception as error:  # of whatever kind the engine has for it
        raise LoadError(
            f"The engine {settings.engine!r} cannot compute this network ({type(error).__name__})."
        ) from error


async def _warm_up(servable: Servable, path: Path) -> None:
    """Run the version's warm-up requests, so that no client waits for what is slow the
    first time.
    """
    from keras_preact.export import _warmup

    try:
        requests = _warmup.read(path)
    except ValueError as error:
        raise LoadError("Its warm-up requests cannot be read.") from error
    signatures, sizes = set(), set()
    for signature, inputs in requests:
        rows = len(next(iter(inputs.values()), ()))
        if signature in signatures and rows in sizes:
            continue  # one network computes them all
        signatures.add(signature)
        sizes.add(rows)
        try:
            await servable.predict(signature, inputs, None)
        except TooLarge:
            pass  # this server computes smaller batches than the model was exported for
        except (RequestError, ComputationError) as error:
            raise LoadError(f"A warm-up request of it fails: {error}") from error
