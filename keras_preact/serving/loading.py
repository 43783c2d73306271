"""Loads a version of a model from its folder: its card, its files, the functions of the
SavedModel, its warm-up requests.
"""

import asyncio
import contextlib
import dataclasses
import errno
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from keras_preact.export import _directory
from keras_preact.preprocessing import InputRange
from keras_preact.serving import engines
from keras_preact.serving.batching import Batcher, ComputationError
from keras_preact.serving.errors import RequestError, TooLarge
from keras_preact.serving.metrics import Metrics
from keras_preact.serving.servable import DirectDecoder, ImageDecoder, Servable
from keras_preact.serving.settings import Settings
from keras_preact.serving.tensors import DEFAULT_SIGNATURE, Signature, TensorSpec


class _Tensor(pydantic.BaseModel):
    dtype: str
    shape: tuple[int | None, ...]
    mean: list[float] | None = None
    std: list[float] | None = None

    @property
    def expected(self) -> InputRange | None:
        if self.mean is None or self.std is None:
            return None
        return InputRange(np.array(self.mean), np.array(self.std))


class _Function(pydantic.BaseModel):
    inputs: dict[str, _Tensor]
    outputs: dict[str, _Tensor]


class Card(pydantic.BaseModel):
    """The part of a model card that serving needs."""

    classes: list[str]
    signatures: dict[str, _Function]
    batch_sizes: list[int]
    precision: str
    top_k: int
    files: dict[str, str]
    preprocessing: dict[str, Any] | None = None
    pixels: bool = False
    max_image_pixels: int = 0

    @property
    def direct_decoder(self) -> DirectDecoder | None:
        """What decodes files of the network's size without the graph; None if the graph
        does more with them.
        """
        [images] = self.signatures[DEFAULT_SIGNATURE].inputs.values()
        match images.shape:
            case (_, int(height), int(width), 1 | 3 as channels) if (
                self.pixels
                and height * width <= self.max_image_pixels
                and (self.preprocessing is None or self.preprocessing["crop"] is None)
            ):
                return DirectDecoder(height, width, channels)
        return None


class LoadError(Exception):
    """A version cannot be served; the message is a sentence without a path."""


def load(path: Path, settings: Settings, metrics: Metrics) -> Servable:
    """Load a version of a model and run its warm-up requests. Call it in a thread
    without an event loop.

    Args:
        path: `.../NAME/VERSION`.
        settings: The server's settings.
        metrics: Count the attempt, and every batch that is computed.

    Raises:
        LoadError: for whatever is wrong with it, in a sentence without a path.
    """
    name, began = path.parent.name, time.monotonic()
    try:
        servable = _load(path, settings, metrics)
    except BaseException:
        metrics.loads.labels(name, "failure").inc()
        raise
    metrics.loads.labels(name, "success").inc()
    metrics.load_seconds.labels(name).observe(time.monotonic() - began)
    return servable


def _load(path: Path, settings: Settings, metrics: Metrics) -> Servable:
    name, version = path.parent.name, int(path.name)
    card = read_card(path)
    check_files(path, card.files)
    signatures = {
        key: Signature(key, _specs(one.inputs), _specs(one.outputs))
        for key, one in card.signatures.items()
    }
    with _collected_at_the_end():
        engines.use_threads(settings.threads)
        frozen, decode = read_functions(path)
    takes_files = any(
        spec.dtype == "string" for one in signatures.values() for spec in one.inputs.values()
    )
    if takes_files and decode is None:
        raise LoadError(
            "Its SavedModel has no function `decode`, which its model card promises: export it "
            "again."
        )
    batcher = Batcher(
        _start_engine(settings, frozen, card.precision),
        max_batch_size=settings.max_batch_size or max(card.batch_sizes),
        wait_seconds=settings.batch_wait_ms / 1000,
        max_queue=settings.max_queue,
        workers=1 if settings.batching else settings.threads or os.cpu_count() or 1,
        together=settings.batching,
        observe_rows=metrics.batch_rows.labels(name, str(version)).observe,
        observe_seconds=metrics.batch_seconds.labels(name, str(version)).observe,
    )
    decoder = decode and ImageDecoder(
        decode, settings.max_queue, settings.threads, card.direct_decoder
    )
    servable = Servable(
        name,
        version,
        card.classes,
        card.top_k,
        signatures,
        read_signature_defs(path),
        batcher,
        decoder,
    )
    try:
        asyncio.run(_warm_up(servable, path))
    except BaseException:
        servable.close_now()
        raise
    return servable


def read_card(version: Path) -> Card:
    """Return the card of a version.

    Raises:
        LoadError: if there is none, or it is not complete.
    """
    name = _directory.OWN_CARD.as_posix()
    if (version / name).exists() and not (version / name).is_file():
        raise LoadError(f"Its {name} is not a regular file.")
    try:
        return Card.model_validate_json((version / name).read_bytes())
    except FileNotFoundError:
        raise LoadError(
            f"It has no {name}: only exports of keras_preact.export.save can be served."
        ) from None
    except OSError as error:
        raise LoadError(f"Its {name} cannot be read ({error.strerror}).") from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise LoadError(
            f"Its {name} cannot be read: {place}: {first['msg']}. Export it again with this "
            "release of keras-preact."
        ) from error


def _specs(tensors: dict[str, _Tensor]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, one.dtype, one.shape, one.expected) for name, one in tensors.items()
    }


def check_files(version: Path, hashes: dict[str, str]) -> None:
    """Compare the files of a version with the hashes in its card.

    Raises:
        LoadError: if one is missing, damaged, or not in the card. Hidden files do not
            count.
    """
    found = set()
    for path in version.rglob("*"):
        name = path.relative_to(version).as_posix()
        if path.is_dir() or path.name.startswith("."):
            continue
        if not path.is_file():  # a read of a pipe or a device may never end
            raise LoadError(f"Its {name} is not a regular file.")
        found.add(name)
    for name in sorted(found - {_directory.OWN_CARD.as_posix(), *hashes}):
        raise LoadError(f"It holds {name}, which its model card does not know.")
    for name, expected in hashes.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise LoadError("Its model card lists a file outside of its folder.")
        try:
            if not (version / name).is_file():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            actual = _directory.sha256(version / name)
        except OSError as error:
            raise LoadError(f"Its {name} cannot be read ({error.strerror}).") from error
        if actual != expected:
            raise LoadError(
                f"Its {name} is damaged: the SHA-256 hash is not the one in the model card."
            )


def read_signature_defs(version: Path) -> dict[str, Any]:
    """Return the SignatureDefs of a SavedModel by name, as JSON with the names that
    TensorFlow Serving gives the fields.
    """
    from google.protobuf import json_format
    from tensorflow.core.protobuf import saved_model_pb2

    model = saved_model_pb2.SavedModel.FromString((version / "saved_model.pb").read_bytes())
    return {
        name: json_format.MessageToDict(
            definition, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for name, definition in model.meta_graphs[0].signature_def.items()
    }


def read_functions(version: Path) -> tuple[engines.Frozen, Callable | None]:
    """Return the network of a SavedModel with its weights in the graph, and its decoder
    of images, if any.

    Raises:
        LoadError: if TensorFlow cannot load it, or it is another kind of SavedModel.
    """
    import tensorflow as tf

    try:
        loaded = tf.saved_model.load(str(version))
    except Exception as error:  # its errors are of many kinds, and all mean the same
        raise LoadError(
            f"TensorFlow {tf.__version__} cannot load its SavedModel ({type(error).__name__})."
        ) from error
    if not hasattr(loaded, "core"):
        raise LoadError(
            "Its SavedModel has no function `core`: export it again with this release of "
            "keras-preact."
        )
    frozen = engines.freeze(loaded.core)
    int8 = version / _directory.INT8
    if int8.is_file():
        frozen = dataclasses.replace(frozen, int8=int8)
    return frozen, getattr(loaded, "decode", None)


@contextlib.contextmanager
def _collected_at_the_end() -> Iterator[None]:
    """Pause Python's collector, then look through what came meanwhile: the variables of
    a loaded SavedModel hold every weight a second time, and are in reference cycles.

    A collection of everything takes 0.4 s with TensorFlow imported.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if enabled:
            gc.enable()


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
    except ImportError as error:
        raise LoadError(str(error)) from error
    except ValueError as error:
        raise LoadError("Its warm-up requests cannot be read.") from error
    signatures, sizes = set(), set()
    for name, inputs in requests:
        rows = len(next(iter(inputs.values()), ()))
        if name in signatures and rows in sizes:
            continue  # one network computes them all
        signatures.add(name)
        sizes.add(rows)
        signature = servable.signatures.get(name)
        if signature is None:
            raise LoadError("A warm-up request is for a signature that it does not have.")
        try:
            await servable.predict(name, signature.check(inputs), None)
        except TooLarge:
            pass  # this server computes smaller batches than the model was exported for
        except (RequestError, ComputationError) as error:
            raise LoadError(f"A warm-up request of it fails: {error}") from error
