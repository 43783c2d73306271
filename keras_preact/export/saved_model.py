"""`kp.export.save`: a trained classifier as a SavedModel that TensorFlow alone loads."""

import datetime
import errno
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_preact import _checks
from keras_preact.export import _accuracy, _check, _children, _directory, _graph, _scores, _warmup
from keras_preact.export._children import ExportError
from keras_preact.export._images import MAX_PIXELS
from keras_preact.preprocessing import Preprocessing

PRECISIONS = ("float32", "bfloat16")


def save(
    model: keras.Model,
    directory: str | Path,
    *,
    classes: Sequence[str],
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    version: int | None = None,
    top_k: int = 5,
    batch_sizes: Sequence[int] = _warmup.BATCH_SIZES,
    max_image_pixels: int = MAX_PIXELS,
    fold_batch_norm: bool = True,
    precision: str = "float32",
    validation_data: tuple | None = None,
    max_accuracy_loss: float = 0.005,
) -> Path:
    """Write a new version of a served model: `DIRECTORY/VERSION/`, a SavedModel, and
    `DIRECTORY/model_card.json`.

    The SavedModel holds every weight once, changes none, gives float32 whatever the
    network computes in, takes any number of images, and loads with TensorFlow alone.
    Its signatures:

    - `serving_default`: from `images`, float32 `(batch, height, width, channels)` with
      the sizes of the model's input (free where that has None), or `(batch, features)`,
      to `logits` and `probabilities`, both `(batch, classes)`. The channels stand last
      in a model with `data_format="channels_first"` too. The images are pixels from 0
      to 255 if the model has its `preprocessing` layer.
    - `features`: from `images` to `features`, `(batch, width)`, what the classifier
      reads.
    - `predict_bytes`: from `image_bytes`, PNG, JPEG or GIF files, a string each, to
      `classes` (names), `scores` and `indices` of the most probable, `(batch, top_k)`.
      The files are decoded, brought to the model's size as `preprocessing` says, and
      normalised. It is left out for models of other things than images of 1, 3 or 4
      channels, and where nothing says what size they want or how pixels are normalised
      (a model without its own layer for it, exported without `preprocessing`).

    Images of another size, no image, values that are not finite, damaged files and
    files of more than `max_image_pixels` end in an error. Requests in
    `assets.extra/tf_serving_warmup_requests` warm up a server for every signature and
    batch size.

    Before the new version can be seen, a process in which Keras cannot be imported runs
    it, and its outputs are compared with the model's. It then appears complete, in one
    step; after any failure everything is as it was before.

    Args:
        model: A `ResidualNetwork` with its classifier, or a functional or sequential
            model that ends in a Dense layer (with a softmax or sigmoid, or without).
            Its backend may be any; nothing in it is changed.
        directory: Such as `saved_models/NAME`; versions that it has already stay.
        classes: A name for each output.
        preprocessing: What files of images go through; kept in the card.
        run: What is known of the training; kept in the card.
        metrics: Kept in the card.
        version: A number that is not taken. None: one more than the highest.
        top_k: Classes that `predict_bytes` answers with; all, where there are fewer.
        batch_sizes: Of the warm-up requests, and what servers put batches together to.
        max_image_pixels: Larger image files are not decoded.
        fold_batch_norm: Whether batch normalisations are folded into the convolutions
            and dense layers in front of them. The SavedModel's variables are then not
            those of the model.
        precision: `"float32"`: as the model computes. `"bfloat16"`: convolutions in 16
            bits, which CPUs with AMX do several times faster; needs `validation_data`.
        validation_data: Images, as `model` takes them, and labels `(n,)`: on these the
            SavedModel in bfloat16 must be about as accurate as the model. Both
            accuracies are kept in the card.
        max_accuracy_loss: What it may lose, as a share of the images.

    Returns:
        The path of the version.

    Raises:
        ValueError: for a model without logits or with outputs that are not finite,
            class names that do not fit, a version that is taken (the message names the
            next free one).
        OSError: if there is no room for it, or no permission.
        ExportError: if the SavedModel cannot be written, gives other outputs than the
            model, or loses accuracy.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.create_model("digits_resnet8_preact", include_preprocessing=True)
    >>> path = kp.export.save(model, "saved_models/digits", classes=list("0123456789"))  # doctest: +SKIP
    >>> import tensorflow as tf  # doctest: +SKIP
    >>> served = tf.saved_model.load(path)  # doctest: +SKIP
    >>> served.signatures["serving_default"](images=tf.zeros((5, 8, 8, 1)))["probabilities"].shape  # doctest: +SKIP
    TensorShape([5, 10])
    >>> file = tf.io.read_file("five.png")  # doctest: +SKIP
    >>> served.signatures["predict_bytes"](image_bytes=[file])["classes"][0, 0].numpy()  # doctest: +SKIP
    b'5'
    """
    directory = Path(directory)
    _checks.one_of(precision, PRECISIONS, "precision")
    _checks.positive_int(top_k, "top_k")
    _checks.positive_int(max_image_pixels, "max_image_pixels")
    sizes = _check_batch_sizes(batch_sizes)
    scores, reference = _scores.take_apart(model), None
    if precision == "bfloat16":
        reference = _accuracy.Reference.of(scores, validation_data, max_accuracy_loss)
        scores = _scores.take_apart(_scores.in_bfloat16(model))
    names = check_classes(classes, scores.classes)
    _directory.check_version(directory, version)
    plan = _plan(scores, names, preprocessing, top_k, max_image_pixels, fold_batch_norm)
    card = _card(model, scores, plan, run, metrics)
    card = (
        {"name": directory.resolve().name, "version": version}
        | card
        | {"batch_sizes": sizes, "precision": precision}
    )
    with _children.naming(directory), _directory.workshop(directory) as temporary:
        path = temporary / "version"
        _write(scores, plan, path)
        card["check"] = _check.compare(scores, path, temporary)
        if reference is not None:
            card["check"]["accuracy"] = reference.compare(path, temporary)
        _warmup.write(path, _requests(scores, plan, sizes))
        return _directory.publish(temporary, directory, version, card)


def _check_batch_sizes(sizes: Sequence[int]) -> list[int]:
    for size in sizes:
        _checks.positive_int(size, "batch_sizes")
    if not sizes or sorted(set(sizes)) != list(sizes):
        raise ValueError(
            "`batch_sizes` must hold at least one number, in rising order. Received: "
            f"batch_sizes={sizes}"
        )
    return list(sizes)


def _plan(
    scores: _scores.Scores, classes, preprocessing, top_k: int, max_pixels: int, fold: bool
) -> _graph.Plan:
    if isinstance(preprocessing, Mapping):
        preprocessing = Preprocessing(**preprocessing)
    shape = scores.model.input_shape
    size = None
    if (
        len(shape) == 4
        and shape[3] in (1, 3, 4)
        and (scores.takes_pixels or preprocessing is not None)
    ):
        if preprocessing is not None and len(preprocessing.mean) not in (1, shape[3]):
            raise ValueError(
                f"`preprocessing` must hold a mean and a std for each of the model's {shape[3]} "
                f"channels. Received: {preprocessing}"
            )
        if None not in shape[1:3]:
            size = shape[1:3]
        elif preprocessing is not None:
            size = (preprocessing.size, preprocessing.size)
    return _graph.Plan(
        activation=scores.activation,
        classes=classes,
        size=size,
        preprocessing=preprocessing,
        takes_pixels=scores.takes_pixels,
        max_pixels=max_pixels,
        top_k=min(top_k, len(classes)),
        fold=fold,
    )


def _requests(
    scores: _scores.Scores, plan: _graph.Plan, batch_sizes: list[int]
) -> Iterator[tuple[str, dict]]:
    """Return a request of every signature for every batch size, of black images."""
    import tensorflow as tf

    *size, channels = scores.model.input_shape[1:]
    shape = (*(plan.size or [scores.smallest_size if n is None else n for n in size]), channels)
    for n in batch_sizes:
        for signature in (_graph.SERVING_DEFAULT, _graph.FEATURES):
            yield signature, {"images": np.zeros((n, *shape), "float32")}
        if plan.size is not None:
            file = tf.io.encode_png(np.zeros(shape, "uint8")).numpy()
            yield _graph.PREDICT_BYTES, {"image_bytes": np.array([file] * n, object)}


def _write(scores: _scores.Scores, plan: _graph.Plan, path: Path) -> None:
    """Write the SavedModel to `path`."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        try:
            _graph.write(scores.core, plan, path)
        except tf.errors.OpError as error:
            words = _children.no_room(error)
            if words:
                raise OSError(errno.ENOSPC, words) from error
            raise ExportError(
                f"TensorFlow could not write the SavedModel: {error.message}"
            ) from error
    else:
        doing = "Writing the SavedModel with Keras on TensorFlow"
        _children.hand_over(
            scores.core, _graph.__name__, [plan.to_json(), str(path)], path.parent, doing
        )
    for name in ("assets", "assets.extra"):
        (path / name).mkdir(exist_ok=True)
    path.chmod(0o755)


def check_classes(classes: Sequence[str], outputs: int) -> list[str]:
    """Return the names of the classes as a list.

    Raises:
        ValueError: if they are not one name of its own for each of so many outputs.
    """
    names = list(classes)
    if isinstance(classes, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"`classes` must be a list of names, each a string. Received: classes={classes!r}"
        )
    if len(names) != outputs:
        raise ValueError(
            f"`classes` must name each of the model's {outputs} outputs, in order. Received: "
            f"{len(names)} names"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"Every class must have a name of its own. Received: {', '.join(map(repr, twice))} "
            "more than once"
        )
    return names


def _card(model, scores: _scores.Scores, plan: _graph.Plan, run, metrics) -> dict[str, Any]:
    """Return what the card holds of model and training, as JSON can hold it."""
    trainable = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    total = model.count_params()
    card = {
        "exported_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "classes": plan.classes,
        "preprocessing": plan.preprocessing and plan.preprocessing.to_dict(),
        "pixels": plan.takes_pixels,
        "max_image_pixels": plan.max_pixels,
        "top_k": plan.top_k,
        "activation": plan.activation,
        "fold_batch_norm": plan.fold,
        "signatures": _signatures(scores, plan),
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
            raise ValueError(
                f"The model card cannot hold {key!r}: {error}. Received: {value!r}"
            ) from error
    return card


def _signatures(scores: _scores.Scores, plan: _graph.Plan) -> dict[str, dict]:
    images = {"images": _tensor("float32", *scores.model.input_shape[1:])}
    classes, features = (
        _tensor("float32", scores.classes),
        _tensor("float32", scores.core.output_shape[1][-1]),
    )
    signatures = {
        _graph.SERVING_DEFAULT: {
            "inputs": images,
            "outputs": {"logits": classes, "probabilities": classes},
        },
        _graph.FEATURES: {"inputs": images, "outputs": {"features": features}},
    }
    if plan.size is not None:
        outputs = {"classes": "string", "scores": "float32", "indices": "int32"}
        signatures[_graph.PREDICT_BYTES] = {
            "inputs": {"image_bytes": _tensor("string")},
            "outputs": {name: _tensor(dtype, plan.top_k) for name, dtype in outputs.items()},
        }
    return signatures


def _tensor(dtype: str, *shape) -> dict:
    return {"dtype": dtype, "shape": [None, *shape]}


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
    packages = {
        "keras_preact": "keras-preact",
        "keras": "keras",
        "tensorflow": "tensorflow",
        "numpy": "numpy",
    }
    return (
        {"backend": backend}
        | {name: of(package) for name, package in packages.items()}
        | {backend: of(backend)}
    )
