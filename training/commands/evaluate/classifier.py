"""What is evaluated: a run, a .keras file, an exported model or shipped weights."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...config import Data, from_json
from ...directory import runs
from ...errors import UserError, reading

if TYPE_CHECKING:
    from keras_preact.preprocessing import InputRange, Preprocessing


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A network to evaluate, as a function from pixels to logits.

    Args:
        path: File or directory of the model.
        output: Folder for the results.
        outputs: Number of classes.
        shape: Height, width and channels of its images, None for any.
        logits: Function from float32 pixels to logits.
        precision: Dtype policy in which the network computes, or precision of an export.
        data: Data set that it was trained on, if known.
        classes: Names of its classes, if known.
        described: Content of the config.json of its run; None without a run.
        preprocessing: How image files are resized for it. None: as the data set says.
    """

    path: Path
    output: Path
    outputs: int
    shape: Sequence[int | None]
    logits: Callable[[np.ndarray], np.ndarray]
    precision: str
    data: Data | None
    classes: Sequence[str] | None = None
    described: Mapping[str, Any] | None = None
    preprocessing: "Preprocessing | None" = None

    @property
    def size(self) -> int | None:
        """Height and width of its images, None for any."""
        return self.shape[1]


def open_classifier(path: Path, checkpoint: str, again: str = "") -> Classifier:
    """Open what a person named.

    Args:
        path: A run directory, a .keras file, an exported model, or MODEL:WEIGHTS.
        checkpoint: Network of a run: final, best or last.
        again: Command line that trusts the parts of a run's network, for the error;
            empty: they are trusted.

    Raises:
        UserError: for anything else.
    """
    from ...directory import models

    if (path / "config.json").is_file():
        described = runs.read_config(path)
        data = from_json(Data, described["config"]["data"])
        opened = _of_keras(*models.open_run(path, checkpoint, again), path, data)
        return dataclasses.replace(opened, classes=described.get("classes"), described=described)
    runs.check_no_checkpoint(path, checkpoint)
    if path.suffix == ".keras" and path.is_file():
        return _of_keras(models.load_classifier(path), path, Path(f"evaluation-{path.stem}"), None)
    if path.is_dir():
        return _open_saved_model(path)
    name, _, weights = str(path).partition(":")
    if weights:
        from ...data import SOURCES

        network = models.shipped(str(path))
        known = Data(weights) if weights in SOURCES else None
        return _of_keras(network, path, Path(f"evaluation-{name}-{weights}"), known)
    raise UserError(
        f"{path} is not a run directory, a .keras file, an exported model (saved_models/NAME) or "
        "MODEL:WEIGHTS."
    )


def _of_keras(model, path: Path, output: Path, data: Data | None) -> Classifier:
    import keras

    import keras_preact as kp
    from keras_preact.compiled import outputs_of

    from ...directory import models

    _check_images(path, model.input_shape[1:])
    expected = kp.models.expected_input(model)
    activation = outputs_of(model, model.inputs[0])[0].activation
    _check_one_class(path, activation, model.output_shape[-1])
    logits = getattr(model, "logits", None)
    if logits is not None:
        model, activation = keras.Model(model.input, logits), "linear"

    def logits_of(images: np.ndarray) -> np.ndarray:
        return _as_logits(np.asarray(model.predict_on_batch(images)), activation)

    watched = _watched(logits_of, expected, path)
    return Classifier(
        path=path,
        output=output,
        outputs=max(2, model.output_shape[-1]),
        shape=model.input_shape[1:],
        logits=lambda pixels: watched(expected.of_pixels(pixels)),
        precision=models.precision(model),
        data=data,
    )


def _open_saved_model(path: Path) -> Classifier:
    import tensorflow as tf

    from keras_preact.export.version import find
    from keras_preact.preprocessing import InputRange, Preprocessing

    version = find(path)
    with version.reading_card() as card:
        classes, precision = version.class_names(card), card["precision"]
        described = card["run"] or {}
        function = card["signatures"]["serving_default"]
        images = function["inputs"]["images"]
        mean, std = (images.get(key, default) for key, default in (("mean", 0.0), ("std", 1.0)))
        shape = tuple(images["shape"][1:])
        outputs = function["outputs"]["logits"]["shape"][-1]
        activation = card["activation"]
        preprocessing = Preprocessing(**card["preprocessing"]) if card["preprocessing"] else None
        takes_pixels = card["pixels"]
    _check_images(version.path, shape)
    _check_one_class(version.path, activation, outputs)
    with reading(f"{version.path} is damaged"):
        loaded = tf.saved_model.load(str(version.path))

    def in_tensorflow(pixels: np.ndarray) -> np.ndarray:
        # the function keeps `loaded` alive: a signature alone does not hold its weights
        serve = loaded.signatures["serving_default"]
        return serve(images=tf.constant(pixels, tf.float32))["logits"].numpy()

    compute = _in_8_bits(version.path) if precision == "int8" else in_tensorflow
    expected = InputRange(np.array(mean), np.array(std))
    watched = _watched(compute, expected, version.path)

    def logits(pixels: np.ndarray) -> np.ndarray:
        if preprocessing is not None and not takes_pixels:
            images = preprocessing.normalize(pixels)
        else:
            images = expected.of_pixels(pixels)
        return _as_logits(watched(images), "linear")

    options = described.get("config")
    return Classifier(
        path=version.path,
        output=Path(f"evaluation-{path.name}"),
        outputs=max(2, outputs),
        shape=shape,
        logits=logits,
        precision=precision,
        data=from_json(Data, options["data"]) if options else None,
        classes=classes if len(classes) > 1 else None,
        described=described if options else None,
        preprocessing=None if options else preprocessing,
    )


def _check_one_class(path: Path, activation: str, outputs: int) -> None:
    if activation == "sigmoid" and outputs > 1:
        raise UserError(
            f"{path} finds several classes in one image. Only classifiers with one class per image "
            "can be evaluated."
        )


def _in_8_bits(version: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from images to the logits of a version's network in 8 bits, as the
    server's engine openvino computes it.
    """
    from keras_preact.export.version import INT8

    try:
        import openvino as ov
    except ImportError as error:
        raise UserError(
            f"To measure {version} in 8 bits, install OpenVINO: pip install "
            "'keras-preact[openvino]'"
        ) from error
    options = {"INFERENCE_PRECISION_HINT": "bf16"}
    with reading(f"{version} is damaged"):
        compiled = ov.Core().compile_model(version / INT8, "CPU", options)
    return lambda images: compiled([images.astype("float32")])["logits"]


def _as_logits(outputs: np.ndarray, activation: str) -> np.ndarray:
    """Return logits for each class: of probabilities, and of the single output of a binary
    classifier.
    """
    if activation in ("softmax", "sigmoid"):
        outputs = np.clip(outputs.astype("float64"), 1e-30, 1)
        below = np.log1p(-np.minimum(outputs, 1 - 1e-15)) if activation == "sigmoid" else 0
        outputs = np.log(outputs) - below
    if outputs.shape[-1] == 1:
        return np.concatenate([np.zeros_like(outputs), outputs], axis=-1)
    return outputs


def _watched(
    logits: Callable[[np.ndarray], np.ndarray], expected: "InputRange", path: Path
) -> Callable[[np.ndarray], np.ndarray]:
    """Return `logits`, with a warning if the first images do not have the expected range."""
    is_first = True

    def watched(images: np.ndarray) -> np.ndarray:
        nonlocal is_first
        if is_first and (problem := expected.problem(images)):
            print(f"Warning: {path}: {problem}", file=sys.stderr)
        is_first = False
        return logits(images)

    return watched


def _check_images(path: Path, shape: Sequence[int | None]) -> None:
    """Check that a network with an input of this shape takes images."""
    if len(shape) != 3:
        raise UserError(f"{path} does not take images: its input has shape {shape}.")
