"""Load a version of a model from its folder: read its card, check its files, load the
functions of its SavedModel, run its warm-up requests.
"""

import asyncio
import dataclasses
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from keras_preact.export import _directory, versions
from keras_preact.preprocessing import InputRange
from keras_preact.serving import engines
from keras_preact.serving.batching import Batcher, ComputationError
from keras_preact.serving.errors import RequestError, TooLarge
from keras_preact.serving.metrics import Metrics
from keras_preact.serving.servable import ImageDecoder, Servable
from keras_preact.serving.settings import Settings
from keras_preact.serving.tensors import Signature, TensorSpec


class LoadError(Exception):
    """A version cannot be served; the message is a sentence without a path."""


def load(path: Path, settings: Settings, metrics: Metrics) -> Servable:
    """Load a version of a model and run its warm-up requests. Call it in a thread
    without an event loop.

    Args:
        path: `.../NAME/VERSION`.
        settings: The server's settings.
        metrics: Metrics that count every computed batch.

    Raises:
        LoadError: if its files are wrong; the message is a sentence without a path.
        Exception: of another class, if a library cannot load or compute the model.
    """
    version = versions.number_of(path.name)
    assert version is not None
    labels = path.parent.name, str(version)
    name, card_file = _directory.OWN_CARD.as_posix(), path / _directory.OWN_CARD
    if not card_file.is_file():  # a read of a pipe or a device may never end
        raise LoadError(
            f"It has no {name}: only exports of keras_preact.export.save can be served."
        )
    try:
        card = json.loads(card_file.read_bytes())
        hashes = dict(card["files"])
        signatures = {name: _signature(name, one) for name, one in card["signatures"].items()}
        classes, top_k, precision = card["classes"], int(card["top_k"]), card["precision"]
        max_batch_size = settings.max_batch_size or max(card["batch_sizes"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LoadError(
            f"Its {name} cannot be read: {error!r}. Export it again with this release of "
            "keras-preact."
        ) from error
    check_files(path, hashes)
    engines.use_threads(settings.threads)
    frozen, decode = read_functions(path)
    # The variables of a loaded SavedModel hold every weight a second time, in reference cycles.
    gc.collect()
    engine = engines.ENGINES[settings.engine](frozen, settings, precision)

    def observe(rows: int, seconds: float) -> None:
        metrics.batch_rows.labels(*labels).observe(rows)
        metrics.batch_seconds.labels(*labels).observe(seconds)

    servable = Servable(
        name=path.parent.name,
        version=version,
        classes=classes,
        top_k=top_k,
        signatures=signatures,
        signature_defs=read_signature_defs(path),
        batcher=Batcher(engine, max_batch_size, together=settings.batching, observe=observe),
        decoder=decode and ImageDecoder(decode, settings.threads),
        max_queue=settings.max_queue,
    )
    asyncio.run(_warm_up(servable, path))
    return servable


def _signature(name: str, function: dict[str, Any]) -> Signature:
    [input_spec] = _specs(function["inputs"]).values()
    return Signature(name, input_spec, _specs(function["outputs"]))


def _specs(tensors: dict[str, Any]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(
            name,
            tensor["dtype"],
            tuple(tensor["shape"]),
            None
            if tensor.get("mean") is None
            else InputRange(np.array(tensor["mean"]), np.array(tensor["std"])),
        )
        for name, tensor in tensors.items()
    }


def check_files(version: Path, hashes: dict[str, str]) -> None:
    """Compare the files of a version with the hashes in its card.

    Raises:
        LoadError: if a file is missing, damaged, or not in the card. Hidden files are
            ignored.
    """
    present = {path.relative_to(version).as_posix() for path in versions.files(version)}
    for name in sorted(present - {_directory.OWN_CARD.as_posix(), *hashes}):
        raise LoadError(
            f"It holds {name}, which its model card does not list. Remove this file, or export "
            "the version again."
        )
    for name, expected in hashes.items():
        # a name that leads out of the folder is not in `present`, and a pipe is not a file
        if name not in present or not (version / name).is_file():
            raise LoadError(f"Its {name} is missing, or not a regular file. Copy it again.")
        if _directory.sha256(version / name) != expected:
            raise LoadError(
                f"Its {name} is damaged: the SHA-256 hash is not the one in the model card. Copy "
                "it again."
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
    """Return the network of a SavedModel with its weights in the graph, and the decoder
    of images that the SavedModel holds, if any.
    """
    import tensorflow as tf

    loaded = tf.saved_model.load(str(version))
    frozen = engines.freeze(loaded.core)
    int8 = version / _directory.INT8
    if int8.is_file():
        frozen = dataclasses.replace(frozen, int8=int8)
    return frozen, getattr(loaded, "decode", None)


async def _warm_up(servable: Servable, path: Path) -> None:
    """Run the version's warm-up requests, so that no client waits for slow first
    computations.
    """
    from keras_preact.export import _warmup

    done: set[object] = set()
    for name, inputs in _warmup.read(path):
        [array] = inputs.values()
        if {name, len(array)} <= done:
            continue  # one network computes all signatures
        done |= {name, len(array)}
        try:
            array = servable.signatures[name].input.check(array)
            await servable.predict(name, array)
        except TooLarge:
            pass  # this server computes smaller batches than the model was exported for
        except (RequestError, ComputationError, KeyError) as error:
            await servable.close()
            raise LoadError(f"One of its warm-up requests fails: {error}") from error
