"""Make a servable from the folder of a version, and run its warm-up requests."""

import asyncio
import dataclasses
import gc
from pathlib import Path
from typing import Any

import numpy as np

from keras_preact.export.version import GRAPH, Frozen, Version, VersionError
from keras_preact.preprocessing import InputRange
from keras_preact.serving import engines
from keras_preact.serving.batching import Batcher, ComputationError
from keras_preact.serving.decoding import ImageDecoder
from keras_preact.serving.errors import RequestError, TooLarge
from keras_preact.serving.metrics import Metrics
from keras_preact.serving.servable import Servable
from keras_preact.serving.settings import Settings
from keras_preact.serving.tensors import Signature, TensorSpec


def load(path: Path, settings: Settings, metrics: Metrics) -> Servable:
    """Load a version of a model and run its warm-up requests. Call it in a thread
    without an event loop.

    Args:
        path: `.../NAME/VERSION`.
        settings: The server's settings.
        metrics: Metrics that count every batch that is computed after the warm-up.

    Raises:
        VersionError: if its files are wrong, or a warm-up request fails.
        Exception: of another class, if a library cannot load or compute the model.
    """
    version = Version(path)
    assert version.number is not None
    labels = path.parent.name, str(version.number)
    with version.reading_card() as card:
        signatures = {name: _signature(name, one) for name, one in card["signatures"].items()}
        classes, precision = version.class_names(card), card["precision"]
        top_k = _positive(card["top_k"])
        max_batch_size = settings.max_batch_size or max(map(_positive, card["batch_sizes"]))
    version.check_files()
    engines.use_threads(settings.threads)
    frozen, decode = version.functions()
    signatures = _with_smallest(signatures, frozen)
    # The variables of a loaded SavedModel hold every weight a second time, in reference cycles.
    gc.collect()
    engine = engines.ENGINES[settings.engine](frozen, settings, precision)
    servable = Servable(
        name=path.parent.name,
        version=version.number,
        classes=classes,
        top_k=top_k,
        signatures=signatures,
        signature_defs=read_signature_defs(path),
        batcher=Batcher(engine, max_batch_size, together=settings.batching),
        decoder=decode and ImageDecoder(decode, settings.threads),
        max_queue=settings.max_queue,
    )
    asyncio.run(_warm_up(servable, version))
    servable.forget()
    rows = metrics.batch_rows.labels(*labels)
    seconds = metrics.batch_seconds.labels(*labels)

    def observe(n: int, time: float) -> None:
        rows.observe(n)
        seconds.observe(time)

    servable.batcher.observe = observe
    return servable


def _numbers(value: Any) -> np.ndarray:
    return np.array(value, "float64")


def _positive(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"a positive whole number was expected, not {value!r}")
    return value


def _signature(name: str, function: dict[str, Any]) -> Signature:
    [input_spec] = _specs(function["inputs"]).values()
    return Signature(name, input_spec, _specs(function["outputs"]))


def _with_smallest(signatures: dict[str, Signature], frozen: Frozen) -> dict[str, Signature]:
    """Add the smallest images to signatures for images of any size."""
    shapes = {one.input.shape for one in signatures.values()}
    smallest = {shape: frozen.smallest(shape) for shape in shapes if None in shape[1:]}
    limited = {}
    for name, one in signatures.items():
        spec = dataclasses.replace(one.input, smallest=smallest.get(one.input.shape, ()))
        limited[name] = dataclasses.replace(one, input=spec)
    return limited


def _specs(tensors: dict[str, Any]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(
            name,
            tensor["dtype"],
            tuple(tensor["shape"]),
            None
            if tensor.get("mean") is None
            else InputRange(_numbers(tensor["mean"]), _numbers(tensor["std"])),
            vocabulary=tensor.get("vocabulary") and _positive(tensor["vocabulary"]),
        )
        for name, tensor in tensors.items()
    }


def read_signature_defs(version: Path) -> dict[str, Any]:
    """Return the SignatureDefs of a SavedModel by name, as JSON with the names that
    TensorFlow Serving gives the fields.
    """
    from google.protobuf import json_format
    from tensorflow.core.protobuf import saved_model_pb2

    model = saved_model_pb2.SavedModel.FromString((version / GRAPH).read_bytes())
    return {
        name: json_format.MessageToDict(
            definition, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for name, definition in model.meta_graphs[0].signature_def.items()
    }


async def _warm_up(servable: Servable, version: Version) -> None:
    """Run the version's warm-up requests, so that no client waits for slow first
    computations.
    """
    done: set[object] = set()
    for name, inputs in version.warm_up_requests():
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
            problem = f"One of its warm-up requests fails: {error}"
            raise VersionError(version.path, problem) from error
