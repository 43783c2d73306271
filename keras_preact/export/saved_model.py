"""`kp.export.save`: a trained classifier as a SavedModel that TensorFlow alone loads."""

import collections
import datetime
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_preact import _checks
from keras_preact.classifiers import Outputs
from keras_preact.export import _check, _children, _directory, _graph, _int8, _scores, _warmup
from keras_preact.export._images import MAX_PIXELS
from keras_preact.export.version import is_name
from keras_preact.models.base import UnitNetwork
from keras_preact.preprocessing import Preprocessing

PRECISIONS = ("float32", "bfloat16", "int8")


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
    calibration_images: np.ndarray | None = None,
    max_accuracy_loss: float = 0.005,
) -> Path:
    """Write a new version of a served model: `DIRECTORY/VERSION/`, a SavedModel, and
    `DIRECTORY/model_card.json`.

    The SavedModel holds every weight once, returns float32 whatever the network
    computes in, takes any number of images, and loads with TensorFlow alone. Its
    signatures:

    - `serving_default`: from `images`, float32 `(batch, height, width, channels)` with
      the sizes of the model's input (a size of None is free), or `(batch, features)`,
      or int32 `(batch, tokens)` for a model that takes whole numbers, to `logits` and
      `probabilities`, both `(batch, classes)`. The channels are last even for a model
      with `data_format="channels_first"`. The images are pixels from 0 to 255 if the
      model normalises them itself, with its `preprocessing` layer or the layers that it
      starts with. The card has the `range`, `mean` and `std` that the network expects,
      or its `vocabulary`: tokens are from 0 to one less.
    - `features`: from `images` to `features`, `(batch, width)`, the classifier's input.
    - `predict_bytes`: from `image_bytes`, PNG, JPEG or WebP files as strings, to `classes`
      (names), `scores` and `indices` of the most probable classes, `(batch, top_k)`.
      The files are decoded, resized as `preprocessing` says, and normalised. The
      signature exists only for images of 1 or 3 channels that are no whole numbers, and
      only if the size and the normalisation are known (from the model's own layer or from
      `preprocessing`).

    Images of another size, an empty batch, values that are not finite, damaged files
    and files of more than `max_image_pixels` raise an error. Requests in
    `assets.extra/tf_serving_warmup_requests` warm up a server for every signature and
    batch size; writing them needs `pip install 'keras-preact[tf-serving]'`.

    A process without Keras runs the new version, and its outputs are compared with the
    model's. Then the version appears in one step. After a failure everything is as
    before.

    Args:
        model: A `ResidualNetwork` with its classifier, or a functional or sequential
            model that ends in a Dense layer (with a softmax or sigmoid, or without), on
            any backend. It stays as it is. Logits without an activation are those of a
            binary classifier if there is one, of several classes at once if the model is
            compiled with a binary cross-entropy, else of one class among many.
        directory: Folder of the model, such as `saved_models/NAME`. Its other versions
            stay.
        classes: A name for each output. A binary classifier, with one output, has one
            name, of class 1, or two names, of the classes 0 and 1. Then `predict_bytes`
            and servers name both, with the scores `1 - p` and `p`.
        preprocessing: How image files become the network's input. Kept in the card, at
            the network's size.
        run: Description of the training for the card.
        metrics: Metrics for the card.
        version: Number of the version. None: the highest plus one.
        top_k: Number of classes that `predict_bytes` returns; all if there are fewer.
        batch_sizes: Batch sizes of the warm-up requests, and of servers.
        max_image_pixels: Largest number of pixels of an image file.
        fold_batch_norm: Whether to fold batch normalisations into the convolutions and
            dense layers before them. The SavedModel's variables then differ from the
            model's.
        precision: `"float32"` converts a network of this package that computes in mixed
            precision; a model of another library keeps its dtypes. `"bfloat16"`:
            convolutions in 16 bits, faster on CPUs with AVX512_BF16 or AMX; needs
            `validation_data`, and a model of another library that computes in it.
            `"int8"`: a SavedModel in float32, and beside it the network in 8 bits, which
            the server's engine `openvino` runs; needs `validation_data`,
            `calibration_images` and `pip install 'keras-preact[int8]'`.
        validation_data: Images, as `model` takes them, and labels: classes `(n,)`, or for
            several classes at once 0 or 1 for each output, `(n, classes)`. On these the
            accuracy in bfloat16 or int8 is compared with the model's. The card keeps
            both accuracies.
        calibration_images: Some hundreds of the training images, as `model` takes them.
            They determine the ranges of the activations that 8 bits represent.
        max_accuracy_loss: Largest allowed loss of accuracy, as a share of 1.

    Returns:
        The path of the version.

    Raises:
        ValueError: for a model without logits or with outputs that are not finite,
            wrong class names, a version that exists (the message names the next free
            one).
        ImportError: if tensorflow-serving-api is missing, or for int8 NNCF or OpenVINO.
        OSError: if the disk is full, or without permission.
        ExportError: if the SavedModel cannot be written, its outputs differ from the
            model's, or it loses accuracy.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.create_model("digits_resnet8_preact", include_preprocessing=True)
    >>> classes = list("0123456789")
    >>> path = kp.export.save(model, "saved_models/digits", classes=classes)  # doctest: +SKIP
    >>> import tensorflow as tf  # doctest: +SKIP
    >>> served = tf.saved_model.load(path)  # doctest: +SKIP
    >>> images = tf.zeros((5, 8, 8, 1))  # doctest: +SKIP
    >>> outputs = served.signatures["serving_default"](images=images)  # doctest: +SKIP
    >>> outputs["probabilities"].shape  # doctest: +SKIP
    TensorShape([5, 10])
    >>> file = tf.io.read_file("five.png")  # doctest: +SKIP
    >>> outputs = served.signatures["predict_bytes"](image_bytes=[file])  # doctest: +SKIP
    >>> outputs["classes"][0, 0].numpy()  # doctest: +SKIP
    b'5'
    """
    _checks.path(directory, "directory")
    directory = Path(directory)
    _checks.one_of(precision, PRECISIONS, "precision")
    _checks.positive_int(top_k, "top_k")
    _checks.positive_int(max_image_pixels, "max_image_pixels")
    if not _checks.is_number(max_accuracy_loss) or not 0 <= max_accuracy_loss <= 1:
        raise ValueError(
            "`max_accuracy_loss` must be a share of 1, such as 0.005. Received: "
            f"max_accuracy_loss={max_accuracy_loss!r}"
        )
    sizes = _check_batch_sizes(batch_sizes)
    _warmup.message()  # fails before the work if its package is missing
    scores = original = _scores.take_apart(model)
    if precision == "int8":
        calibration = _check_calibration(calibration_images, scores)
        _children.require(_int8.MODULES, "precision='int8'", "int8")
    labelled = None
    if precision != "float32":
        labelled = _check.labelled(validation_data, precision, scores)
    is_own, is_mixed = isinstance(model, UnitNetwork), scores.dtypes != {"float32"}
    must_change = {
        "float32": is_own and is_mixed,  # a network of another library keeps its dtypes
        "bfloat16": is_own or "bfloat16" not in scores.dtypes,
        "int8": is_mixed,  # NNCF quantises networks in float32
    }
    if must_change[precision]:
        dtype = "mixed_bfloat16" if precision == "bfloat16" else "float32"
        model = _scores.in_dtype(
            model,
            dtype,
            f"precision={precision!r} is for the networks of this package: build another one with "
            f"dtype={dtype!r} and the same weights. Received: model={model!r}",
        )
        # the copy is not compiled, so it does not say what its logits mean
        scores = _scores.take_apart(model, original.activation)
    names = check_classes(classes, scores.outputs)
    _directory.check_version(directory, version)
    preprocessing = at_size(preprocessing, scores)
    plan = _graph.Plan(
        activation=scores.activation,
        fold=fold_batch_norm,
        dtype=scores.input_dtype,
        classes=tuple(names),
        size=_size_of_files(scores, preprocessing),
        preprocessing=preprocessing,
        takes_pixels=scores.takes_pixels,
        max_pixels=max_image_pixels,
        top_k=min(top_k, len(names)),
    )
    card: dict[str, Any] = {"name": directory.resolve().name, "version": version}
    card |= _card(model, scores, plan, run, metrics)
    card |= {"batch_sizes": sizes, "precision": precision}
    with _children.naming(directory), _directory.workshop(directory) as temporary:
        path = temporary / "version"
        _graph.write(scores.core, plan, path)
        for name in ("assets", "assets.extra"):
            (path / name).mkdir(exist_ok=True)
        card["check"] = _check.compare(scores, path, temporary)
        if precision == "int8":
            _int8.write(path, calibration, temporary)
            card["calibration_images"] = len(calibration)
        if labelled is not None:
            card["check"]["accuracy"] = _check.compare_accuracy(
                original, *labelled, path, temporary, precision, max_accuracy_loss
            )
        _warmup.write(path, _requests(scores, plan, sizes))
        return _directory.publish(temporary, directory, version, card)


def _check_calibration(images: np.ndarray | None, scores: _scores.Scores) -> np.ndarray:
    """Return the images as the exported network takes them: with the channels last."""
    taken = None if images is None else _check.as_taken(images, "calibration_images", scores)
    if taken is None or not len(taken):
        raise ValueError(
            "precision='int8' needs calibration_images, some hundreds of the training images as "
            f"the model takes them. Received: calibration_images={images!r}"
        )
    return np.moveaxis(taken, 1, -1) if scores.channels_first else taken


def _check_batch_sizes(sizes: Sequence[int]) -> list[int]:
    for size in sizes:
        _checks.positive_int(size, "batch_sizes")
    if not sizes or sorted(set(sizes)) != list(sizes):
        raise ValueError(
            "`batch_sizes` must hold at least one number, in rising order. Received: "
            f"batch_sizes={sizes}"
        )
    return list(sizes)


def _size_of_files(
    scores: _scores.Scores, preprocessing: Preprocessing | None
) -> tuple[int, int] | None:
    """Return the height and width that image files are resized to. None: the model does
    not take image files.
    """
    shape: Any = scores.input_shape
    if len(shape) != 3 or shape[2] not in (1, 3) or scores.input_dtype != "float32":
        return None
    if preprocessing is None:
        return None if None in shape or not scores.takes_pixels else shape[:2]
    if len(preprocessing.mean) not in (1, shape[2]):
        raise ValueError(
            f"`preprocessing` must hold a mean and a std for each of the model's {shape[2]} "
            f"channels. Received: {preprocessing}"
        )
    height, width = (length or preprocessing.size for length in shape[:2])
    if not scores.takes((height, width, shape[2])):
        raise ValueError(
            f"`preprocessing` resizes image files to {height} x {width} pixels, which is too small "
            f"for this network. Received: {preprocessing}"
        )
    return height, width


def at_size(
    preprocessing: Preprocessing | Mapping[str, Any] | None, scores: _scores.Scores
) -> Preprocessing | None:
    """Return a preprocessing, or one of these options, at the size of the network's square
    images; with its own size if they have no fixed size, or are no images.
    """
    if isinstance(preprocessing, Mapping):
        preprocessing = Preprocessing(**preprocessing)
    shape = scores.input_shape
    if preprocessing is None or len(shape) != 3 or shape[0] is None or shape[0] != shape[1]:
        return preprocessing
    return preprocessing.for_size(shape[0])


def _requests(
    scores: _scores.Scores, plan: _graph.Plan, batch_sizes: list[int]
) -> Iterator[tuple[str, dict]]:
    """Yield a request of black images for every signature and batch size."""
    import tensorflow as tf

    *size, channels = scores.sample_shape
    shape = (*(plan.size or size), channels)
    for n in batch_sizes:
        for signature in (_graph.SERVING_DEFAULT, _graph.FEATURES):
            yield signature, {"images": np.zeros((n, *shape), plan.dtype)}
        if plan.size is not None:
            file = tf.io.encode_png(np.zeros(shape, "uint8")).numpy()
            yield _graph.PREDICT_BYTES, {"image_bytes": np.array([file] * n, object)}


def check_classes(classes: Sequence[str], outputs: Outputs) -> list[str]:
    """Return the names of the classes as a list.

    Raises:
        ValueError: if there is not one unique name for each output; a binary classifier may
            also have two, of the classes 0 and 1.
    """
    names = list(classes)
    if isinstance(classes, str) or not all(map(is_name, names)):
        raise ValueError(
            "`classes` must be a list of names, each a string that UTF-8 can hold. Received: "
            f"classes={classes!r}"
        )
    if len(names) != outputs.count and not (outputs.is_binary and len(names) == 2):
        binary = ", or both classes of a binary classifier" if outputs.is_binary else ""
        raise ValueError(
            f"`classes` must name each of the model's {outputs.count} outputs, in order{binary}. "
            f"Received: {len(names)} names"
        )
    twice = sorted(name for name, count in collections.Counter(names).items() if count > 1)
    if twice:
        raise ValueError(
            f"Every class must have a unique name. Received: {', '.join(map(repr, twice))} "
            "more than once"
        )
    return names


def _card(model, scores: _scores.Scores, plan: _graph.Plan, run, metrics) -> dict[str, Any]:
    """Return the card's description of the model and its training as JSON values."""
    trainable = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    total = model.count_params()
    card = {
        "exported_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "classes": list(plan.classes),
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
    images = {"images": _tensor(plan.dtype, *scores.input_shape)}
    if scores.vocabulary is not None:
        images["images"]["vocabulary"] = scores.vocabulary
    elif plan.dtype == "float32":
        expected = scores.expected
        normalization = {"mean": expected.mean, "std": expected.std}
        images["images"] |= {
            name: np.ravel(value).round(6).tolist() for name, value in normalization.items()
        } | {"range": list(expected.bounds)}
    classes, features = (_tensor("float32", shape[-1]) for shape in scores.core.output_shape)
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
    """Return a value that JSON can hold."""
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
    names = ("keras-preact", "keras", "tensorflow", "numpy", backend)
    return {"backend": backend} | {name.replace("-", "_"): of(name) for name in names}
