"""`kp.export.save_onnx` and `save_litert`: a trained classifier as one file for ONNX
Runtime or LiteRT.

Keras' own exporters (`model.export(format="onnx")` and `"litert"`, 3.15) are not used.
Both convert a traced model as this package does. But the ONNX exporter turns the
constants of a Normalization layer into inputs, and keeps function calls for
convolutions with groups. The LiteRT exporter allows operations that LiteRT's
interpreter does not have. Both choose their own names of inputs and outputs.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_preact import atomic
from keras_preact.export import _check, _children, _directory, _graph, _scores
from keras_preact.export.saved_model import at_size, check_classes
from keras_preact.preprocessing import Preprocessing


@dataclasses.dataclass(frozen=True)
class Target:
    """A type of file to convert to.

    Args:
        title: Name of the type in messages.
        suffix: Ending of the file's name.
        modules: Top-level modules of the extra, needed to write and check a file.
    """

    title: str
    suffix: str
    modules: tuple[str, ...]


#: Types of file, each by the name that its extra, its converter and its runtime share.
TARGETS = {
    "onnx": Target("ONNX", ".onnx", ("onnx", "tf2onnx", "onnxruntime")),
    "litert": Target("LiteRT", ".tflite", ("ai_edge_litert",)),
}


def save_onnx(
    model: keras.Model,
    path: str | Path,
    *,
    classes: Sequence[str],
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
) -> Path:
    """Write a classifier as an ONNX file, opset 18, for ONNX Runtime and other engines.

    The input is `images`, float32 `(batch, height, width, channels)` with the sizes of
    the model's input (a size of None is free), or `(batch, features)`. The outputs are
    `logits` and `probabilities`, both float32 `(batch, classes)`. The batch size is
    free. The channels are last even for a model with `data_format="channels_first"`.
    The images are pixels from 0 to 255 if the model has its `preprocessing` layer;
    nothing checks them. Networks in mixed precision are written in float32. Stacks of
    units are unrolled.

    The file's `metadata_props` hold, each as JSON, `classes`, `preprocessing`, `pixels`
    (whether the images are pixels) and `activation` (from logits to probabilities).

    ONNX's checker and ONNX Runtime test the file, and its outputs are compared with the
    model's, before it gets its name. After a failure everything is as before. Needs
    `pip install 'keras-preact[onnx]'`.

    Args:
        model: A network of this package with its classifier, or a functional or
            sequential model in float32 that ends in a Dense layer (with a softmax or
            sigmoid, or without), on any backend. It stays as it is.
        path: Path of a new file, ending in `.onnx`.
        classes: A name for each output.
        preprocessing: How images become the network's input. Kept in the file, at the
            network's size.

    Returns:
        The path.

    Raises:
        ValueError: for a model without logits or with outputs that are not finite,
            wrong class names, a path that exists or has another ending.
        ImportError: if a package is missing; the message names it.
        OSError: if the disk is full, or without permission.
        ExportError: if the network cannot be converted, or the file's outputs differ
            from the model's.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.create_model("digits_resnet8_preact", include_preprocessing=True)
    >>> classes = list("0123456789")
    >>> path = kp.export.save_onnx(model, "digits.onnx", classes=classes)  # doctest: +SKIP
    >>> import numpy as np, onnxruntime  # doctest: +SKIP
    >>> session = onnxruntime.InferenceSession(path)  # doctest: +SKIP
    >>> images = np.zeros((5, 8, 8, 1), "float32")  # doctest: +SKIP
    >>> session.run(["probabilities"], {"images": images})[0].shape  # doctest: +SKIP
    (5, 10)
    """
    return _save("onnx", model, path, classes, preprocessing)


def save_litert(
    model: keras.Model,
    path: str | Path,
    *,
    classes: Sequence[str],
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
) -> Path:
    """Write a classifier as a LiteRT (TensorFlow Lite) file, for phones and small
    computers.

    Inputs, outputs and checks are the same as in `save_onnx`; the signature is called
    `serving_default`. Its runner takes any batch size; an interpreter without a runner
    needs `resize_tensor_input` for sizes other than 1. The file uses only LiteRT's own
    operations. It holds the same metadata as `save_onnx` writes, in `metadata.json` of
    a ZIP archive after the model, as LiteRT's tools write it:
    `unzip -p digits.tflite metadata.json`.

    Needs `pip install 'keras-preact[litert]'`.

    Args:
        model: See `save_onnx`.
        path: Path of a new file, ending in `.tflite`.
        classes: A name for each output.
        preprocessing: How images become the network's input. Kept in the file, at the
            network's size.

    Returns:
        The path.

    Raises:
        ValueError, ImportError, OSError, ExportError: see `save_onnx`.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.create_model("digits_resnet8_preact", include_preprocessing=True)
    >>> classes = list("0123456789")
    >>> path = kp.export.save_litert(model, "digits.tflite", classes=classes)  # doctest: +SKIP
    >>> import numpy as np  # doctest: +SKIP
    >>> from ai_edge_litert.interpreter import Interpreter  # doctest: +SKIP
    >>> serve = Interpreter(str(path)).get_signature_runner("serving_default")  # doctest: +SKIP
    >>> serve(images=np.zeros((5, 8, 8, 1), "float32"))["probabilities"].shape  # doctest: +SKIP
    (5, 10)
    """
    return _save("litert", model, path, classes, preprocessing)


def _save(name: str, model: keras.Model, path: str | Path, classes, preprocessing) -> Path:
    path, target = Path(path), TARGETS[name]
    _check_path(path, target)
    _children.require(target.modules, f"Writing {target.title}", name)
    scores = written = _scores.take_apart(model)
    if not scores.dtypes <= {"float32"}:  # the runtimes lack many operations in fewer bits
        dtypes = ", ".join(sorted(scores.dtypes))
        error = (
            f"{target.title} files compute in float32: build the model with dtype='float32' and "
            f"give it the same weights. Received: layers that compute in {dtypes}"
        )
        written = _scores.take_apart(_scores.in_dtype(model, "float32", error), scores.activation)
    preprocessing = at_size(preprocessing, scores)
    metadata = {
        "classes": check_classes(classes, scores.outputs),
        "preprocessing": preprocessing and preprocessing.to_dict(),
        "pixels": scores.takes_pixels,
        "activation": scores.activation,
    }
    with _children.naming(path.parent), _directory.workshop(path.parent) as temporary:
        graph, file, metadata_file = (
            temporary / entry for entry in ("graph", f"model{target.suffix}", "metadata.json")
        )
        metadata_file.write_text(json.dumps(metadata, allow_nan=False), encoding="utf-8")
        # The converters fold batch normalisations themselves.
        plan = _graph.Plan(scores.activation, fold=False, dtype=scores.input_dtype, plain=True)
        _graph.write(written.core, plan, graph)
        script = str(Path(__file__).with_name("_convert.py"))
        _children.run(
            ["-P", script, name, str(graph), str(file), str(metadata_file)],
            f"Converting the network to {target.title}",
        )
        _check.compare(scores, file, temporary, name)
        _publish(file, path, target)
    return path


def _check_path(path: Path, target: Target) -> None:
    if path.suffix != target.suffix:
        raise ValueError(f"`path` must end in {target.suffix}. Received: {path}")
    if path.exists() or path.is_symlink():
        raise ValueError(
            f"{path} exists, and a file is never overwritten: remove it, or choose another path"
        )


def _publish(file: Path, path: Path, target: Target) -> None:
    """Give a file its name, unless another process has taken it meanwhile."""
    atomic.sync(file)
    try:
        os.link(file, path)
    except OSError:  # the name is taken, or the file system has no hard links
        _check_path(path, target)
        file.rename(path)
    try:
        atomic.sync(path.parent)
    except BaseException:
        path.unlink()
        raise
