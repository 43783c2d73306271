"""The networks of runs: built as configured, compiled, read from a run's files and
written to them.
"""

import collections
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras

import keras_preact as kp

from . import runs
from .checkpoints import Checkpoints
from .cli import UserError, reading
from .config import Config
from .data import ImageData

#: File in checkpoints/ with the network, without its weights.
ARCHITECTURE = "network.json"


def image_size(config: Config, data: ImageData, default: int | None = None) -> int:
    """Return height and width of the images for a network.

    Args:
        config: Configuration of the run.
        data: The data set.
        default: Size if neither of them has one.

    Raises:
        UserError: if there is none.
    """
    size = config.data.size or data.size or default
    if size is None:
        raise UserError(
            f"The images of {data.name} differ in size. Choose one for the network, such as "
            "--data.size 64."
        )
    return size


def build(config: Config, data: ImageData, size: int) -> keras.Model:
    """Make the configured network for the data set's classes and images of `size` x
    `size` pixels, uint8 or float.
    """
    return kp.create_model(
        config.model.name,
        classes=len(data.classes),
        input_shape=(size, size, data.channels),
        data_format="channels_last",  # as tf.data delivers them, whatever Keras is set to
        mean=data.preprocessing.mean,
        std=data.preprocessing.std,
        **config.model.overrides(),
    )


def precision(model: keras.Model) -> str:
    """Return the dtype policy of a network: the one of most of its layers with weights."""
    policies = collections.Counter(
        layer.dtype_policy.name for layer in model.layers if layer.weights
    )
    return policies.most_common(1)[0][0] if policies else model.dtype_policy.name


#: Words of `exclude_from_decay` for weights that some networks do not have, or do not train.
OFTEN_MISSING = ("norm", "bias")


def optimizer(config: Config, rate: Any, model: Any = None) -> keras.optimizers.Optimizer:
    """Make the configured optimizer.

    Args:
        config: Configuration of the run.
        rate: The learning rate, a number or a schedule.
        model: The network that it trains; needed if the configuration has a rate per
            layer, or excludes from the decay what a network may not have.
    """
    options = config.optimizer
    trained = [] if model is None else [weight.path for weight in model.trainable_weights]
    arguments: dict[str, Any] = {
        "exclude_from_decay": [
            word
            for word in options.exclude_from_decay
            if word not in OFTEN_MISSING or model is None or any(word in path for path in trained)
        ],
        "global_clipnorm": options.clip_norm,
        "gradient_accumulation_steps": config.accumulate if config.accumulate > 1 else None,
    }
    if options.ema is not None:
        arguments |= {"use_ema": True, "ema_momentum": options.ema}
    if options.name in ("sgd", "muon"):
        arguments |= {"momentum": options.momentum, "nesterov": options.nesterov}
    else:
        arguments |= {"beta_1": options.momentum}
    made: keras.optimizers.Optimizer
    if options.name == "sgd":
        decay = options.layer_decay
        made = kp.optimizers.CoupledSGD(
            rate,
            coupled_weight_decay=options.weight_decay,
            rate_factors=None if decay is None else kp.transfer.rate_factors(model, decay),
            **arguments,
        )
    elif options.name == "muon":
        made = kp.optimizers.Muon(
            rate,
            weight_decay=options.weight_decay,
            adam_weight_decay=options.weight_decay,
            adam_lr_ratio=options.adam_ratio,
            **arguments,
        )
    else:
        optimizer_class = {"adamw": kp.optimizers.AdamW, "lion": kp.optimizers.Lion}[options.name]
        made = optimizer_class(rate, weight_decay=options.weight_decay, **arguments)
    # Keras does this by itself only if the policy is the global one
    return (
        keras.optimizers.LossScaleOptimizer(made) if config.model.dtype == "mixed_float16" else made
    )


def loss(config: Config) -> keras.losses.Loss:
    """Make the configured loss, of logits and labels: class numbers, or shares of the
    classes if `config.has_shares`.
    """
    if config.has_shares:
        return keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=config.optimizer.label_smoothing
        )
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


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


def load(path: Path) -> keras.Model:
    """Return the model in a .keras file, not compiled.

    Raises:
        UserError: for a file that Keras cannot load.
    """
    with reading(
        f"{path} is damaged, or no model of this package or of Keras' own layers. Keras says"
    ):
        return keras.saving.load_model(path, compile=False)


def open_run(run: Path, checkpoint: str = "final") -> tuple[keras.Model, Path]:
    """Return a run's model, not compiled, and the file with its weights.

    Args:
        run: A run directory.
        checkpoint: `"final"` (model.keras, written at the end), `"best"`
            (checkpoints/best.keras) or `"last"`, the newest complete checkpoint. This has
            the trained weights, also in a run that averages them.

    Raises:
        UserError: if it does not exist; the message names the ones that do.
    """
    saved = Checkpoints(run / "checkpoints").newest(_warn) if checkpoint == "last" else None
    if saved is None:
        path = _model_path(run, checkpoint)
        return load(path), path
    model = architecture(run)
    saved.restore(model)
    return model, saved.path


def shipped(name: str) -> keras.Model:
    """Return a network with trained weights that the package has, by MODEL:WEIGHTS.

    Raises:
        ValueError: for an unknown model or unknown weights.
    """
    model, _, weights = name.partition(":")
    return kp.create_model(model, weights=weights, include_preprocessing=True)


def architecture(run: Path) -> keras.Model:
    """Return the network of a run that has started, without its weights."""
    path = run / "checkpoints" / ARCHITECTURE
    with reading(f"{path} is damaged or missing"):
        return keras.models.model_from_json(path.read_text())


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def save(model: keras.Model, path: Path, write: bool = True) -> None:
    """Write the model to `path`, completely or not at all. Every process of a
    distribution calls this, and one of them writes.
    """
    if write:
        with runs.replacing(path) as temporary:
            model.save(temporary)
    else:  # every process must take part, because writing gathers weights
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / path.name)
