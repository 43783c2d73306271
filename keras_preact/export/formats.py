"""`kp.export.save_onnx` and `save_litert`: a trained classifier as one file for ONNX
Runtime or LiteRT.
"""

import dataclasses
import errno
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_preact.export import _check, _children, _directory, _plain_graph, _scores
from keras_preact.export._children import ExportError
from keras_preact.export.saved_model import check_classes
from keras_preact.models.base import UnitNetwork
from keras_preact.preprocessing import Preprocessing


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of file.

    Args:
        title: As people call it.
        suffix: Of the file's name.
        modules: Top-level modules that writing and checking need; those of the extra
            named like the format.
    """

    title: str
    suffix: str
    modules: tuple[str, ...]


#: Name, which is also that of the extra, of the converter and of the runtime, to the format.
FORMATS = {
    "onnx": Format("ONNX", ".onnx", ("onnx", "tf2onnx", "onnxruntime")),
    "litert": Format("LiteRT", ".tflite", ("ai_edge_litert",)),
}


def save_onnx(
    model: keras.Model,
    path: str | Path,
    *,
    classes: Sequence[str],
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
) -> Path:
    """Write a classifier as an ONNX file, opset 18, that ONNX Runtime and other engines
    run.

    From `images`, float32 `(batch, height, width, channels)` with the sizes of the
    model's input (free where that has None), or `(batch, features)`, to `logits` and
    `probabilities`, both float32 `(batch, classes)`; the batch size is free. The
    channels stand last in a model with `data_format="channels_first"` too. The images
    are pixels from 0 to 255 if the model has its `preprocessing` layer. Networks in
    mixed precision are written in float32, which their weights are. Stacks of units are
    written out. Nothing checks the images.

    The file's `metadata_props` hold, each as JSON, `classes`, `preprocessing`, `pixels`
    (whether the images are pixels) and `activation` (from logits to probabilities).

    Before the file gets its name, ONNX's checker and ONNX Runtime have been over it,
    and its outputs were compared with the model's. After any failure everything is as
    it was before. Needs `pip install 'keras-preact[onnx]'`.

    Args:
        model: A network of this package with its classifier, or a functional or
            sequential model in float32 that ends in a Dense layer (with a softmax or
            sigmoid, or without). Its backend may be any; nothing in it is changed.
        path: Of a file that is not there yet, ending in `.onnx`.
        classes: A name for each output.
        preprocessing: What images go through before the network; kept in the file.

    Returns:
        The path.

    Raises:
        ValueError: for a model without logits or with outputs that are not finite,
            class names that do not fit, a path that is taken or ends otherwise.
        ImportError: if a package is missing; the message names it.
        OSError: if there is no room for it, or no permission.
        ExportError: if the network cannot be converted, or the file gives other outputs
            than the model.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.create_model("digits_resnet8_preact", include_preprocessing=True)
    >>> path = kp.export.save_onnx(model, "digits.onnx", classes=list("0123456789"))  # doctest: +SKIP
    >>> import numpy as np, onnxruntime  # doctest: +SKIP
    >>> session = onnxruntime.InferenceSession(path)  # doctest: +SKIP
    >>> session.run(["probabilities"], {"images": np.zeros((5, 8, 8, 1), "float32")})[0].shape  # doctest: +SKIP
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
    """Write a classifier as a LiteRT (TensorFlow Lite) file, for telephones and small
    computers.

    Inputs, outputs and promises are those of `save_onnx`; they belong to the signature
    `serving_default`. Its runner takes any batch size; an interpreter without it needs
    `resize_tensor_input` for others than 1. The operations are LiteRT's own, none of
    TensorFlow's. What ONNX files have as metadata stands in `metadata.json` of a ZIP
    archive behind the model, as LiteRT's tools keep such files: `unzip -p digits.tflite
    metadata.json`.

    Needs `pip install 'keras-preact[litert]'`.

    Args:
        model: As in `save_onnx`.
        path: Of a file that is not there yet, ending in `.tflite`.
        classes: A name for each output.
        preprocessing: What images go through before the network; kept in the file.

    Returns:
        The path.

    Raises:
        ValueError: as `save_onnx`.
        ImportError: if a package is missing; the message names it.
        OSError: if there is no room for it, or no permission.
        ExportError: if the network cannot be converted, or the file gives other outputs
            than the model.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.create_model("digits_resnet8_preact", include_preprocessing=True)
    >>> path = kp.export.save_litert(model, "digits.tflite", classes=list("0123456789"))  # doctest: +SKIP
    >>> import numpy as np  # doctest: +SKIP
    >>> from ai_edge_litert.interpreter import Interpreter  # doctest: +SKIP
    >>> serve = Interpreter(str(path)).get_signature_runner("serving_default")  # doctest: +SKIP
    >>> serve(images=np.zeros((5, 8, 8, 1), "float32"))["probabilities"].shape  # doctest: +SKIP
    (5, 10)
    """
    return _save("litert", model, path, classes, preprocessing)


def _save(name: str, model: keras.Model, path: str | Path, classes, preprocessing) -> Path:
    path, kind = Path(path), FORMATS[name]
    _check_path(path, kind)
    missing = [module for module in kind.modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(
            f"Writing {kind.title} needs {', '.join(missing)}: pip install 'keras-preact[{name}]'"
        )
    scores = _scores.take_apart(model)
    written = _in_float32(model, scores, kind)
    if isinstance(preprocessing, Mapping):
        preprocessing = Preprocessing(**preprocessing)
    metadata = {
        "classes": check_classes(classes, scores.classes),
        "preprocessing": preprocessing and preprocessing.to_dict(),
        "pixels": scores.takes_pixels,
        "activation": scores.activation,
    }
    with _children.naming(path.parent), _directory.workshop(path.parent) as temporary:
        graph, file, card = (
            temporary / part for part in ("graph", f"model{kind.suffix}", "metadata.json")
        )
        card.write_text(json.dumps(metadata, allow_nan=False), encoding="utf-8")
        _write_graph(written, graph)
        script = str(Path(__file__).with_name("_convert.py"))
        _children.run(
            ["-P", script, name, str(graph), str(file), str(card)],
            f"Converting the network to {kind.title}",
        )
        _check.compare(scores, file, temporary, name)
        _publish(file, path, kind)
    return path


def _check_path(path: Path, kind: Format) -> None:
    if path.suffix != kind.suffix:
        raise ValueError(f"`path` must end in {kind.suffix}. Received: {path}")
    if path.exists() or path.is_symlink():
        raise ValueError(
            f"{path} is there already, and a file is never overwritten: remove it, or give "
            "another path"
        )


def _in_float32(model: keras.Model, scores: _scores.Scores, kind: Format) -> _scores.Scores:
    """Return the scores of the same network computing in float32: the runtimes lack
    many operations in fewer bits.
    """
    if scores.dtypes <= {"float32"}:
        return scores
    if not isinstance(model, UnitNetwork):
        raise ValueError(
            f"{kind.title} files compute in float32: build the model with dtype='float32' and "
            "give it the same weights. Received: layers that compute in "
            f"{', '.join(sorted(scores.dtypes))}"
        )
    twin = type(model).from_config(model.get_config() | {"dtype": "float32"})
    twin.set_weights(model.get_weights())
    return _scores.take_apart(twin)


def _write_graph(scores: _scores.Scores, path: Path) -> None:
    """Write the SavedModel that is converted."""
    if keras.backend.backend() != "tensorflow":
        arguments = [scores.activation, str(path)]
        _children.hand_over(
            scores.model,
            _plain_graph.__name__,
            arguments,
            path.parent,
            "Writing the network with Keras on TensorFlow",
        )
        return
    import tensorflow as tf

    try:
        _plain_graph.write(scores.model, scores.activation, path)
    except tf.errors.OpError as error:
        words = _children.no_room(error)
        if words:
            raise OSError(errno.ENOSPC, words) from error
        raise ExportError(f"TensorFlow could not write the network: {error.message}") from error


def _publish(file: Path, path: Path, kind: Format) -> None:
    """Give a file its name, which another process may have taken meanwhile."""
    _directory.sync_entry(file)
    try:
        os.link(file, path)
    except OSError:  # the name is taken, or the file system has no hard links
        _check_path(path, kind)
        file.rename(path)
    try:
        _directory.sync_entry(path.parent)
    except BaseException:
        path.unlink()
        raise
