"""What is evaluated: a run, a .keras file, an exported model or shipped weights."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...config import Data, from_json
from ...directory import runs
from ...errors import UserError, reading


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
    if path.suffix == ".keras" and path.is_file():
        return _of_keras(models.load(path), path, Path(f"evaluation-{path.stem}"), None)
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

    from ...directory import models

    _check_images(path, model.input_shape[1:])
    logits = getattr(model, "logits", None)
    if logits is not None:
        model = keras.Model(model.input, logits)
    return Classifier(
        path=path,
        output=output,
        outputs=model.output_shape[-1],
        shape=model.input_shape[1:],
        logits=lambda images: np.asarray(model.predict_on_batch(images)),
        precision=models.precision(model),
        data=data,
    )


def _open_saved_model(path: Path) -> Classifier:
    import tensorflow as tf

    from keras_preact.export.version import find

    version = find(path)
    with version.reading_card() as card:
        classes, precision, described = list(card["classes"]), card["precision"], card["run"] or {}
    with reading(f"{version.path} is damaged"):
        # kept alive by the closure: a signature alone does not hold its weights
        loaded = tf.saved_model.load(str(version.path))

    def logits(images: np.ndarray) -> np.ndarray:
        serve = loaded.signatures["serving_default"]
        return serve(images=tf.constant(images, tf.float32))["logits"].numpy()

    options = described.get("config")
    _, inputs = loaded.signatures["serving_default"].structured_input_signature
    shape = tuple(inputs["images"].shape)[1:]
    _check_images(version.path, shape)
    return Classifier(
        path=version.path,
        output=Path(f"evaluation-{path.name}"),
        outputs=len(classes),
        shape=shape,
        logits=logits,
        precision=precision,
        data=from_json(Data, options["data"]) if options else None,
        classes=classes,
        described=described if options else None,
    )


def _check_images(path: Path, shape: Sequence[int | None]) -> None:
    """Check that a network with an input of this shape takes images."""
    if len(shape) != 3:
        raise UserError(f"{path} does not take images: its input has shape {shape}.")
