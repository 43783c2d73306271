"""The check of a configuration before anything is opened or written: each number by itself
(`limits`), then options that have no effect, and options that do not fit together, in the
order of the fields.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import START, Config, Model, options
from ..errors import UserError, checking
from ..functions import is_own
from . import limits

#: Options of --model that can change in a trained network without a change of its weights.
CHANGEABLE = ("dropout", "stochastic_depth", "remat", "dtype")

#: Options that only some values of another option use: that option and these values.
USED_WITH: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "data.padding": ("data.augmentation", ("pad_crop_flip",)),
    "data.test": ("data.name", ("folder",)),
    "data.watch-test": ("data.holdout", (0,)),
    "data.skip-broken": ("data.name", ("folder",)),
    "optimizer.nesterov": ("optimizer.name", ("sgd", "muon")),
    "optimizer.adam-ratio": ("optimizer.name", ("muon",)),
    "optimizer.reference-batch-size": ("optimizer.scaling", ("linear", "sqrt")),
    "schedule.drops": ("schedule.kind", ("steps",)),
    "schedule.factor": ("schedule.kind", ("steps",)),
    "schedule.stable": ("schedule.kind", ("linear",)),
    "schedule.cycles": ("schedule.kind", ("cosine",)),
    "schedule.warmup-learning-rate": ("schedule.kind", ("steps",)),
}


def check_given(config: Config, recipe: Config) -> None:
    """Check that every option that differs from those of a recipe has an effect. Options that
    the recipe itself has set need none: those of a step schedule stay when a person
    chooses another one.

    Raises:
        UserError: for a number out of its limits, and for the first option without an effect.
    """
    limits.check(config)
    values, before = options(config), options(recipe)
    for name, (other, users) in USED_WITH.items():
        if values[name] != before[name] and values[other] not in users:
            raise UserError(
                f"--{name} is for --{other} {' and '.join(map(str, users))}. Received: --{other} "
                f"{values[other]}"
            )


def check(config: Config) -> None:
    """Check the whole configuration of a run.

    Raises:
        UserError: for the first option that is wrong or does not fit another one.
    """
    limits.check(config)
    _check_model(config.model)
    _check_data(config)
    _check_batches(config)
    _check_run(config)


def _check_model(model: Model) -> None:
    import keras_preact as kp

    _check_precision(model.dtype)
    if model.weights is not None:
        _check_finetuning(model)
        return
    if not model.name:
        raise UserError(
            "Fine-tuning starts from a trained network: add --model.weights with a run "
            "directory, a file of weights or ResNet50V2:imagenet."
        )
    for option in ("freeze", "mean", "std"):
        if getattr(model, option):
            raise UserError(
                f"--model.{option} needs a trained network: add --model.weights, or remove "
                "the option."
            )
    from . import parts

    if is_own(model.name):
        parts.builder(model.name)
    else:
        with checking():
            kp.model_entry(model.name)
    parts.arguments(model)


def _check_precision(name: str | None) -> None:
    """Check that the layers of a network can compute in a precision."""
    import keras

    if name in (None, "auto"):
        return
    try:
        policy = keras.dtype_policies.get(name)
        computes = keras.backend.is_float_dtype(policy.compute_dtype)
    except ValueError:
        computes = False
    if not computes or isinstance(policy, keras.dtype_policies.QuantizedDTypePolicy):
        raise UserError(
            "--model.precision must be auto, float32, mixed_bfloat16, mixed_float16 or another "
            f"floating-point policy of Keras. Received: {name}"
        )


def _check_finetuning(model: Model) -> None:
    default = Model()
    for field in dataclasses.fields(model):
        changed = getattr(model, field.name) != getattr(default, field.name)
        if changed and field.name not in (*START, *CHANGEABLE):
            option = field.name.replace("_", "-")
            raise UserError(
                f"--model.{option} cannot change the trained network of --model.weights. Remove "
                "the option."
            )
    if bool(model.mean) != bool(model.std):
        raise UserError("--model.mean and --model.std belong together: give both, or neither.")


def _check_data(config: Config) -> None:
    from ..data import folders, pipelines

    data = config.data
    folders.check_share(data)
    pipelines.check_options(data.augmentation, data.border, data.flip)
    if data.class_weights != "none" and (data.mixup or data.cutmix):
        raise UserError(
            "--data.class-weights needs images of one class: remove --data.mixup and --data.cutmix."
        )
    if data.on_device and config.distribution != "none":
        raise UserError(
            "--data.on-device needs --distribution none. Received: --distribution "
            f"{config.distribution}"
        )


def _check_batches(config: Config) -> None:
    import keras

    at_once = config.iterations_at_once
    if config.steps_per_epoch % at_once:
        raise UserError(
            f"--steps-per-epoch must be a multiple of {at_once} iterations, which the backend runs "
            f"at a time, or 0. Received: {config.steps_per_epoch}"
        )
    if config.batch_size % config.accumulate:
        raise UserError(
            "--accumulate must divide --batch-size. "
            f"Received: --accumulate {config.accumulate} --batch-size {config.batch_size}"
        )
    if config.steps_per_execution > 1 and keras.backend.backend() == "torch":
        raise UserError(
            "--steps-per-execution must be 1 on torch: Keras supports no other. Received: "
            f"{config.steps_per_execution}"
        )


def _check_run(config: Config) -> None:
    from ..directory import runs
    from . import callbacks

    for name in config.callbacks:
        callbacks.find(name)
    if config.output is None and (config.resume or config.distribution == "multi_worker"):
        option = "--resume" if config.resume else "--distribution multi_worker"
        raise UserError(f"{option} needs --output, the directory of the run.")
    if not (config.resume or config.dry_run or config.distribution == "multi_worker"):
        runs.new_directory(config.output, "")
