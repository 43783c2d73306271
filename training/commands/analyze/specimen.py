"""What is analysed: a run, a .keras file or a registered model, with the images that it is
measured on.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_preact as kp
from keras_preact.analysis.audit import audit

from ... import data as datasets
from ...config import Data, from_json
from ...directory import measurements, models, runs
from ...directory.histories import read_table
from ...errors import UserError, command, nearest
from ...functions import trust
from ...run import limits


@dataclasses.dataclass(frozen=True)
class Specimen:
    """A network and a batch.

    Args:
        name: Name for headings.
        model: The network.
        weights: Source of its weights, in words.
        trained: Whether the weights were trained.
        x, labels: The batch.
        data: Source of the batch, in words.
        more: Images and labels to count errors on, if possible others than those of the
            batch; None if the labels mean nothing.
        entry: Name of the registered model, if the weights are new.
        history, health: Columns of a run's history.csv and health.csv, perhaps empty.
        measured_on: Images that the run's `val_accuracy` is measured on.
    """

    name: str
    model: Any
    weights: str
    trained: bool
    x: np.ndarray
    labels: np.ndarray
    data: str
    more: tuple[np.ndarray, np.ndarray] | None = None
    entry: str | None = None
    history: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    health: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    measured_on: str = "test"

    @property
    def training(self) -> bool:
        """Whether signals are measured with the batch's statistics. Before training, the
        moving statistics say nothing.
        """
        return not self.trained

    @property
    def is_foreign(self) -> bool:
        """Whether the network was not built with this package."""
        return not getattr(self.model, "units", None)

    def audit(self):
        """Return the `Audit` of the network on the batch.

        Raises:
            ValueError: as from `kp.analysis.audit`.
        """
        return dataclasses.replace(audit(self.model, self.x, labels=self.labels), model=self.name)


def chosen_data(images: int, seed: int, data: str | None, data_dir: Path | None) -> Data | None:
    """Return the data set that a command's options name, or None. Check the other options of
    the batch.

    Raises:
        UserError: for options that do not fit together.
    """
    if images < 2:
        raise UserError(f"--images must be at least 2, for batch statistics. Received: {images}")
    if data_dir is not None and data is None:
        raise UserError("--data-dir needs --data.")
    limits.check_one("seed", seed)
    return None if data is None else Data(name=data, dir=data_dir)


def open_specimen(
    target: str, checkpoint: str, data: Data | None, images: int, seed: int, again: str = ""
) -> Specimen:
    """Open the network that a user named, with its images.

    Args:
        target: A run directory, a .keras file, or a name of `kp.list_models()`.
        checkpoint: Model of a run: final, best or last.
        data: Data set that replaces the run's data set, or the digits.
        images: Images in the batch.
        seed: Seed of a registered model's weights, and of random images.
        again: Command line that trusts the functions which a run names, for the error;
            empty: they are trusted.

    Raises:
        UserError: for a target that is none of the three, or does not fit the data.
    """
    path = Path(target)
    if (path / "config.json").is_file():
        _check_unseeded(target, seed)
        return _open_run(path, checkpoint, data, images, again)
    runs.check_no_checkpoint(target, checkpoint)
    if path.suffix == ".keras" and path.is_file():
        model = models.load_classifier(path)
        batch = _batch(model, data, images, seed)
        if batch["more"] is not None:
            _check_unseeded(target, seed)
        trained = not _is_untrained(model)
        weights = f"from {path.name}"
        if not trained:
            weights += ", untrained: every moving mean is 0 and every moving variance is 1"
        return Specimen(path.name, model, weights, trained, **batch)
    if target in kp.list_models():
        keras.utils.set_random_seed(seed)
        model = kp.create_model(target)
        batch = _batch(model, data, images, seed) | {"more": None}
        return Specimen(target, model, f"new, seed {seed}", False, entry=target, **batch)
    if path.is_dir():
        runs.read_config(path)  # its error says what is missing
    if not path.exists() and (path.suffix or len(path.parts) > 1):
        raise UserError(
            f"{target} does not exist. Name a run directory, a .keras file or a registered model."
        )
    raise UserError(
        f"{target} is not a run directory, a .keras file or a registered model. "
        f"{nearest(target, kp.list_models())} `{command('train', '--help')}` lists all models."
    )


def _check_unseeded(target: str, seed: int) -> None:
    if seed:
        raise UserError(
            f"--seed is for new weights and random images, and {target} is measured with neither. "
            f"Received: {seed}"
        )


def _open_run(run: Path, checkpoint: str, data: Data | None, images: int, again: str) -> Specimen:
    described = runs.read_config(run)
    trained_on = from_json(Data, described["config"]["data"])
    if data is None and trained_on.is_function:
        trust([trained_on.name], run / "config.json", again, not again)
    model, path = models.open_run(run, checkpoint, again)
    return Specimen(
        run.resolve().name,
        model,
        f"from the run's {path.relative_to(run)}",
        True,
        history=read_table(run / "history.csv"),
        health=read_table(run / "health.csv"),
        measured_on="held-out" if trained_on.holdout else "test",
        **_from_data(
            model,
            data or dataclasses.replace(trained_on, holdout=0),
            images,
            pixels=True,
            classes=described.get("classes"),
        ),
    )


def _is_untrained(model) -> bool:
    """Whether the network has moving statistics and all of them have their initial
    values.
    """
    initial = {"moving_mean": 0, "moving_variance": 1}
    as_new = [
        (keras.ops.convert_to_numpy(variable) == initial[name]).all()
        for variable in model.non_trainable_variables
        if (name := variable.path.rsplit("/", 1)[-1]) in initial
    ]
    return bool(as_new) and all(as_new)


def _batch(model, data: Data | None, images: int, seed: int) -> dict[str, Any]:
    """Return the fields of a `Specimen` that hold images in the range that the network
    expects: images of `data` if given, else digits if they fit, else random images.
    """
    if data is not None:
        return _from_data(model, data, images)
    shape = model.input_shape[1:]
    if shape in ((8, 8, 1), (64,)) and model.output_shape[-1] == 10:
        return _from_data(model, Data("digits"), images)
    if None in shape:
        raise UserError(
            f"The input of {model.name} has no fixed shape; name a data set with --data. "
            f"Received: {model.input_shape}"
        )
    rng = np.random.default_rng(seed)
    size = (images, *shape)
    expected = kp.models.expected_input(model)
    if expected.is_plain:
        x, entries = rng.normal(size=size), "random numbers (normal, mean 0, variance 1)"
    else:
        x = rng.uniform(*expected.bounds, size)
        entries = "random numbers from {:.4g} to {:.4g}".format(*expected.bounds)
    labels = rng.integers(0, model.output_shape[-1], images)
    description = (
        f"{images} images of {' x '.join(map(str, shape))} {entries}. Images and labels are "
        "random: losses and accuracies mean nothing here"
    )
    return {"x": x.astype("float32"), "labels": labels, "data": description, "more": None}


def _from_data(
    model,
    data: Data,
    images: int,
    pixels: bool = False,
    classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the fields of a `Specimen` that hold images: test images of a data set, in the
    range that the network expects, or as `pixels`. `classes` has the names of the network's
    classes, if they are known.
    """
    source = datasets.load(data)
    shape = model.input_shape[1:]
    measurements.fitting_classes(model.name, classes, model.output_shape[-1], source)
    size = shape[0] if len(shape) == 3 else source.size
    x, labels = datasets.sample(source, source.test, 5 * images, size)
    if not pixels:
        x = _in_range(x, source, kp.models.expected_input(model))
    if len(shape) == 1:
        x = x.reshape(len(x), -1)
    if x.shape[1:] != shape and None not in shape:
        raise UserError(
            f"{model.name} takes {shape}, the images of {source.name} are {x.shape[1:]}. Use "
            "--data to choose another data set."
        )
    rest = slice(images if len(x) > images else 0, None)  # a small test set has no others
    return {
        "x": x[:images].astype("float32"),
        "labels": labels[:images],
        "data": f"{min(images, len(x))} test images of {source.name}",
        "more": (x[rest].astype("float32"), labels[rest]),
    }


def _in_range(pixels: np.ndarray, source, expected: kp.preprocessing.InputRange) -> np.ndarray:
    """Return pixels in the range that a network expects."""
    if expected.bounds in ((0, 255), (0, 1)):
        return expected.of_pixels(pixels)
    normalised = source.preprocessing.normalize(pixels)
    return normalised * np.mean(expected.std) + np.mean(expected.mean)
