"""The networks in the files of a run: opened, loaded, saved."""

import collections
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import keras

import keras_preact as kp

from ..disk import replacing
from ..errors import UserError, reading
from ..functions import find_object, trust
from . import runs
from .checkpoints import Checkpoints

#: File in checkpoints/ with the network, without its weights.
ARCHITECTURE = "network.json"


def open_run(run: Path, checkpoint: str = "final", again: str = "") -> tuple[keras.Model, Path]:
    """Return a run's model, not compiled, and the file with its weights. Parts of a person
    in it are imported.

    Args:
        run: A run directory.
        checkpoint: `"final"` (model.keras, written at the end), `"best"`
            (checkpoints/best.keras) or `"last"`, the newest complete checkpoint. This has
            the trained weights, also in a run that averages them.
        again: Command line that trusts the parts, for the error; empty: they are trusted.

    Raises:
        UserError: if it does not exist; the message names the ones that do. Or if a
            person has to trust its parts.
    """
    own = runs.parts_of(run)
    trust(own, run / "config.json", again, not again)
    for name in own:
        find_object(name, f"A part in {run / 'config.json'}", "my_parts:my_shortcut")
    saved = Checkpoints(run / "checkpoints").newest(_warn) if checkpoint == "last" else None
    if saved is None:
        path = _model_path(run, checkpoint)
        return load(path), path
    model = architecture(run)
    saved.restore(model)
    return model, saved.path


def _model_path(run: Path, checkpoint: str) -> Path:
    files = {"final": run / "model.keras", "best": run / "checkpoints" / "best.keras"}
    if checkpoint in files and files[checkpoint].is_file():
        return files[checkpoint]
    available = [name for name, path in files.items() if path.is_file()]
    if any((run / "checkpoints").glob("state-*.npz")) and checkpoint != "last":
        available.append("last")
    hint = (
        f"It has: {', '.join(f'--checkpoint {name}' for name in available)}."
        if available
        else "It has no model at all."
    )
    missing = files.get(checkpoint, run / "checkpoints" / "state-*.npz")
    raise UserError(f"The run {run} was not finished: there is no {missing}. {hint}")


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def load(path: Path) -> keras.Model:
    """Return the model in a .keras file, not compiled.

    Raises:
        UserError: for a file that Keras cannot load.
    """
    with reading(
        f"{path} is damaged, or no model of this package or of Keras' own layers. Keras says"
    ):
        return keras.saving.load_model(path, compile=False)


def load_classifier(path: Path) -> keras.Model:
    """Return the model in a .keras file, as `load` does. It has one input and one output.

    Raises:
        UserError: for a file that Keras cannot load, or with another model.
    """
    model = load(path)
    # a model that has not been called on an input yet has none
    inputs, outputs = (len(getattr(model, name, ())) for name in ("inputs", "outputs"))
    if (inputs, outputs) != (1, 1):
        raise UserError(
            f"{path} must have one input and one output, each of a known shape. Received: "
            f"{inputs} and {outputs}"
        )
    return model


def shipped(name: str) -> keras.Model:
    """Return a network with trained weights by MODEL:WEIGHTS: one that the package has, or
    one of `kp.applications`, which returns logits here.

    Raises:
        ValueError: for an unknown model or unknown weights.
        UserError: if the weights cannot be downloaded.
    """
    model, _, weights = name.partition(":")
    if model not in kp.applications.__all__ or not model.startswith("ResNet"):
        return kp.create_model(model, weights=weights, include_preprocessing=True)
    options = {"mean": 127.5, "std": 127.5, "classifier_activation": None}  # as preprocess_input
    try:
        return getattr(kp.applications, model)(weights=weights, **options)
    except (ConnectionError, FileNotFoundError) as error:
        raise UserError(f"{name}: {error}") from error


def architecture(run: Path) -> keras.Model:
    """Return the network of a run that has started, without its weights."""
    path = run / "checkpoints" / ARCHITECTURE
    with reading(f"{path} is damaged or missing"):
        return keras.models.model_from_json(path.read_text())


def save(model: keras.Model, path: Path, write: bool = True) -> None:
    """Write the model to `path`, completely or not at all. Every process of a
    distribution calls this, and one of them writes.
    """
    if write:
        with replacing(path) as temporary:
            model.save(temporary)
    else:  # every process must take part, because writing gathers weights
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / path.name)


def precision(model: keras.Model) -> str:
    """Return the dtype policy of a network: the one of most of its layers with weights."""
    policies = collections.Counter(_policies(model))
    return policies.most_common(1)[0][0] if policies else model.dtype_policy.name


def _policies(model: keras.Model) -> Iterator[str]:
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _policies(layer)
        elif layer.weights:
            yield layer.dtype_policy.name
