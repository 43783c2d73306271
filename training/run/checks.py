"""The check of a configuration before anything is opened or written: each number by itself
(`limits`), then options that do not fit together, in the order of the fields.
"""

import dataclasses

from ..config import START, Config, Model, Optimizer, Schedule
from ..errors import UserError, checking
from ..functions import is_own
from . import limits

#: Options of --model that can change in a trained network without a change of its weights.
CHANGEABLE = ("dropout", "stochastic_depth", "remat", "dtype")


def check(config: Config) -> None:
    """Check the whole configuration of a run.

    Raises:
        UserError: for the first option that is wrong or does not fit another one.
    """
    limits.check(config)
    _check_model(config.model)
    _check_data(config)
    _check_optimizer(config.optimizer)
    _check_schedule(config.schedule)
    _check_batches(config)
    _check_run(config)


def _check_model(model: Model) -> None:
    import keras_preact as kp

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
    if data.test and data.name != "folder":
        raise UserError(f"--data.test is for --data.name folder. Received: --data.name {data.name}")
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


def _check_optimizer(optimizer: Optimizer) -> None:
    if optimizer.nesterov and optimizer.name in ("adamw", "lion"):
        raise UserError(
            "--optimizer.nesterov is for --optimizer.name sgd and muon. Add "
            "--optimizer.no-nesterov: the recipe may have set it. Received: "
            f"--optimizer.name {optimizer.name}"
        )


def _check_schedule(schedule: Schedule) -> None:
    if schedule.stable and schedule.kind != "linear":
        raise UserError(
            "--schedule.stable is for --schedule.kind linear. Add --schedule.stable 0, or another "
            f"kind. Received: --schedule.kind {schedule.kind}"
        )
    if schedule.cycles > 1 and schedule.kind != "cosine":
        raise UserError(
            "--schedule.cycles is for --schedule.kind cosine. Add --schedule.cycles 1, or another "
            f"kind. Received: --schedule.kind {schedule.kind}"
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
