"""`kp.export.save`: a trained classifier as a SavedModel that TensorFlow alone loads."""

import datetime
import errno
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_preact.export import _check, _children, _directory, _graph, _scores
from keras_preact.export._children import ExportError
from keras_preact.preprocessing import Preprocessing


def save(
    model: keras.Model,
    directory: str | Path,
    *,
    classes: Sequence[str],
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    version: int | None = None,
) -> Path:
    """Write a new version of a served model: `DIRECTORY/VERSION/`, a SavedModel, and `DIRECTORY/model_card.json`.

    The SavedModel has one signature, `serving_default`: from `images`, float32 `(batch, height, width, channels)` with the
    sizes of the model's input (free where that has None), or `(batch, features)`, to `logits` and `probabilities`, both
    float32 `(batch, classes)`. The channels stand last in a model with `data_format="channels_first"` too. The images are
    pixels from 0 to 255 if the model has its `preprocessing` layer. Images of another size, no image, and values that are not
    finite end in an error. It holds every weight once, changes none, and loads with TensorFlow alone.

    Before the new version can be seen, a process in which Keras cannot be imported runs it, and its outputs are compared
    with the model's. It then appears complete, in one step; after any failure everything is as it was before.

    Args:
        model: A `ResidualNetwork` with its classifier, or a functional or sequential model that ends in a Dense layer (with a
            softmax or sigmoid, or without). Its backend may be any; nothing in it is changed.
        directory: Such as `saved_models/NAME`; versions that it has already stay.
        classes: A name for each output.
        preprocessing: Kept in the card.
        run: What is known of the training; kept in the card.
        metrics: Kept in the card.
        version: A number that is not taken. None: one more than the highest.

    Returns:
        The path of the version.

    Raises:
        ValueError: for a model without logits or with outputs that are not finite, class names that do not fit, a version
            that is taken (the message names the next free one).
        OSError: if there is no room for it, or no permission.
        ExportError: if the SavedModel cannot be written, or gives other outputs than the model.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.create_model("digits_resnet8_preact", include_preprocessing=True)
    >>> path = kp.export.save(model, "saved_models/digits", classes=list("0123456789"))  # doctest: +SKIP
    >>> import tensorflow as tf  # doctest: +SKIP
    >>> serve = tf.saved_model.load(path).signatures["serving_default"]  # doctest: +SKIP
    >>> serve(images=tf.zeros((5, 8, 8, 1)))["probabilities"].shape  # doctest: +SKIP
    TensorShape([5, 10])
    """
    directory = Path(directory)
    scores = _scores.take_apart(model)
    names = _check_classes(classes, scores.classes)
    _directory.check_version(directory, version)
    card = _card(model, scores, names, preprocessing, run, metrics)
    card = {"name": directory.resolve().name, "version": version} | card
    try:
        with _directory.workshop(directory) as temporary:
            _write(scores, temporary)
            card["check"] = _check.compare(scores, temporary / "version", temporary)
            return _directory.publish(temporary, directory, version, card)
    except OSError as error:
        if _children.no_room(error) is None:
            raise
        message = f"There is no room for the export in {directory} ({_children.no_room(error)}); nothing of it was left behind"
        raise OSError(error.errno or errno.ENOSPC, message) from error


def _write(scores: _scores.Scores, temporary: Path) -> None:
    """Write the SavedModel to `temporary / "version"`."""
    path = temporary / "version"
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        try:
            _graph.write(scores.model, scores.activation, path)
        except tf.errors.OpError as error:
            words = _children.no_room(error)
            if words:
                raise OSError(errno.ENOSPC, words) from error
            raise ExportError(f"TensorFlow could not write the SavedModel: {error.message}") from error
    else:
        file = temporary / "scores.keras"
        scores.model.save(file)
        modules = {type(layer).__module__ for layer in scores.model._flatten_layers()} - {"__main__"}
        known = sorted(module for module in modules if module.split(".")[0] != "keras")
        _children.run(
            ["-m", _graph.__name__, str(file), scores.activation, str(path), *known],
            "Writing the SavedModel with Keras on TensorFlow",
            " Layers of your own must be registered (keras.saving.register_keras_serializable) by a module that can be "
            "imported, and run on TensorFlow.",
        )
        file.unlink()
    for name in ("assets", "assets.extra"):
        (path / name).mkdir(exist_ok=True)
    path.chmod(0o755)


def _check_classes(classes: Sequence[str], outputs: int) -> list[str]:
    names = list(classes)
    if isinstance(classes, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"`classes` must be a list of names, each a string. Received: classes={classes!r}")
    if len(names) != outputs:
        raise ValueError(f"`classes` must name each of the model's {outputs} outputs, in order. Received: {len(names)} names")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Every class must have a name of its own. Received: {', '.join(map(repr, twice))} more than once")
    return names


def _card(model, scores: _scores.Scores, classes, preprocessing, run, metrics) -> dict[str, Any]:
    """Return what the card holds apart from name, version and check, as JSON can hold it."""
    preprocessing = preprocessing.to_dict() if isinstance(preprocessing, Preprocessing) else preprocessing
    trainable = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    total = model.count_params()
    shape = [None, *scores.model.input_shape[1:]]
    outputs = {"dtype": "float32", "shape": [None, scores.classes]}
    card = {
        "exported_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "classes": classes,
        "preprocessing": preprocessing,
        "signature": {
            "name": _graph.SIGNATURE,
            "inputs": {"images": {"dtype": "float32", "shape": shape, "normalized_in_graph": scores.takes_pixels}},
            "outputs": {"logits": outputs, "probabilities": outputs | {"activation": scores.activation}},
        },
        "parameters": {"total": total, "trainable": trainable},
        "model": {"class": type(model).__name__, "name": model.name, "config": model.get_config()},
        "run": run,
        "metrics": metrics,
        "versions": _versions(),
    }
    for key, value in card.items():
        try:
            card[key] = json.loads(json.dumps(value, default=_plain, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"The model card cannot hold {key!r}: {error}. Received: {value!r}") from error
    return card


def _plain(value):
    """Turn what JSON does not know into what it does."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    return keras.saving.serialize_keras_object(value)  # part of the config of a functional model


def _versions() -> dict[str, str | None]:
    def of(distribution: str) -> str | None:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None  # such as keras-preact itself, run from its source tree

    backend = keras.backend.backend()
    packages = {"keras_preact": "keras-preact", "keras": "keras", "tensorflow": "tensorflow", "numpy": "numpy"}
    return {"backend": backend} | {name: of(package) for name, package in packages.items()} | {backend: of(backend)}
