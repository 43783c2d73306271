"""The networks of runs: built as configured, compiled, read from a run's files and
written to them.
"""

from typing import Any

import keras

import keras_preact as kp

from ..cli.terminal import some
from ..config import Config, Optimizer
from ..data import ImageData
from ..errors import UserError
from ..functions import is_own
from . import parts


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
    arguments = {
        "classes": len(data.classes),
        "input_shape": (size, size, data.channels),
        "data_format": "channels_last",  # as tf.data delivers them, whatever Keras is set to
        "mean": data.preprocessing.mean,
        "std": data.preprocessing.std,
        **parts.arguments(config.model),
    }
    if is_own(config.model.name):
        return parts.build(config.model.name, arguments)
    network = kp.create_model(config.model.name, **arguments)
    if own := config.model.functions:
        parts.through_file(network, own)
    return network


#: Words of `exclude_from_decay` for weights that some networks do not have, or do not train.
OFTEN_MISSING = ("norm", "bias")


def rate_factors(options: Optimizer, model: Any) -> dict[str, float]:
    """Return the factors on the learning rate of layers: those of `layer_decay`, times
    those of branches if the network's shortcut scales them with the depth.
    """
    of_branches = kp.optimizers.depth_rates(model, options.name)
    if options.layer_decay is None:
        return of_branches
    of_parts = kp.transfer.rate_factors(model, options.layer_decay)
    stages = [part for part in of_parts if part not in ("stem", "head")]
    return of_parts | {
        f"{stage}/{name}": of_parts[stage] * factor
        for stage in stages
        for name, factor in of_branches.items()
    }


def _not_decayed(options: Optimizer, model: Any) -> list[str]:
    """Return the words of `exclude_from_decay` that fit weights of the network; all without
    one.
    """
    words = list(options.exclude_from_decay)
    if model is None:
        return words
    paths = [weight.path for weight in model.trainable_weights]
    found = [word for word in words if any(word in path for path in paths)]
    if missing := [word for word in words if word not in (*found, *OFTEN_MISSING)]:
        raise UserError(
            f"--optimizer.exclude-from-decay: no trained weight has {missing[0]} in its path. The "
            f"paths: {some(paths)}."
        )
    return found


def optimizer(config: Config, rate: Any, model: Any = None) -> keras.optimizers.Optimizer:
    """Make the configured optimizer.

    Args:
        config: Configuration of the run.
        rate: The learning rate, a number or a schedule.
        model: The network that it trains; needed if the configuration has a rate per
            layer, or excludes from the decay what a network may not have, and if the
            network's shortcut sets the rate of its branches.
    """
    options = config.optimizer
    arguments: dict[str, Any] = {
        "exclude_from_decay": _not_decayed(options, model),
        "rate_factors": {} if model is None else rate_factors(options, model),
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
        made = kp.optimizers.CoupledSGD(
            rate, coupled_weight_decay=options.weight_decay, **arguments
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
    classes if `config.has_soft_labels`.
    """
    if config.has_soft_labels:
        return keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=config.optimizer.label_smoothing
        )
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
