"""The length of a run in updates, epochs and steps of `fit`, and its learning rate."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras_preact as kp

from ..config import Config
from ..errors import UserError

#: Factor on the learning rate for a ratio of batch sizes, by `Optimizer.scaling`.
SCALINGS: dict[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "linear": float,
    "sqrt": math.sqrt,
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The length of a run.

    Args:
        iterations: Updates in total.
        steps_per_epoch: Updates in an epoch.
        micro_batches: Steps of `fit` in an update, with gradient accumulation.
    """

    iterations: int
    steps_per_epoch: int
    micro_batches: int = 1

    @property
    def epochs(self) -> int:
        """Epochs, the last one perhaps cut short."""
        return math.ceil(self.iterations / self.steps_per_epoch)

    @property
    def per_epoch(self) -> int:
        """Steps of `fit` in an epoch."""
        return self.steps_per_epoch * self.micro_batches

    @property
    def steps(self) -> int:
        """Steps of `fit` in total."""
        return self.iterations * self.micro_batches


def plan(config: Config, images: int) -> Plan:
    """Return the length of the configured run over this number of training images.

    Without `steps_per_epoch`, an epoch has as many updates as use every image once,
    rounded.

    Raises:
        UserError: for a configuration without an update, or with an epoch or a run that
            is not a whole number of executions.
    """
    unit = config.iterations_at_once
    steps_per_epoch = config.steps_per_epoch or (
        max(1, round(images / config.batch_size / unit)) * unit
    )
    iterations = config.iterations(config.schedule.length, steps_per_epoch)
    if iterations < 1:
        raise UserError(
            f"--schedule.length leaves no iteration. Received: {config.schedule.length}"
        )
    if iterations % unit:
        raise UserError(
            f"--schedule.length must be a multiple of {unit} iterations, which the backend runs "
            f"at a time (--steps-per-execution {config.steps_per_execution}). Received: "
            f"{iterations}"
        )
    return Plan(iterations, steps_per_epoch, config.accumulate)


def learning_rate(config: Config, plan: Plan) -> Any:
    """Return the configured learning rate, a number or a schedule.

    Raises:
        ValueError: for drops and a warm-up that do not fit into the run.
    """
    schedule, options = config.schedule, config.optimizer
    factor = SCALINGS[options.scaling](config.batch_size / options.reference_batch_size)
    rate = factor * options.learning_rate
    warmup = config.iterations(schedule.warmup, plan.steps_per_epoch)
    if schedule.kind == "cosine":
        return kp.schedules.cosine_schedule(
            rate, plan.iterations, warmup_steps=warmup, cycles=schedule.cycles
        )
    if schedule.kind == "linear":
        stable = config.iterations(schedule.stable, plan.steps_per_epoch)
        return kp.schedules.linear_schedule(
            rate, plan.iterations, warmup_steps=warmup, stable_steps=stable
        )
    if not schedule.drops and not warmup:
        return rate
    return kp.schedules.step_schedule(
        rate,
        [config.iterations(drop, plan.steps_per_epoch) for drop in schedule.drops],
        factor=schedule.factor,
        warmup_steps=warmup,
        warmup_learning_rate=factor * schedule.warmup_learning_rate,
    )


def check_warmup(config: Config, plan: Plan) -> str | None:
    """Return a warning if the warm-up is as long as the run or longer, else None.

    Raises:
        UserError: in the same case, for a cosine or linear schedule.
    """
    schedule = config.schedule
    if config.iterations(schedule.warmup, plan.steps_per_epoch) < plan.iterations:
        return None
    message = (
        f"The warm-up ({schedule.warmup:g} {schedule.unit}) is not shorter than the run "
        f"({schedule.length:g} {schedule.unit}): the learning rate never reaches "
        f"{config.optimizer.learning_rate:g}. Shorten it, as with --schedule.warmup "
        f"{schedule.length / 10:g}, or train longer."
    )
    if schedule.kind != "steps":
        raise UserError(message)
    return message


def rate_at(rate: Any) -> Callable[[int], float]:
    """Return the learning rate as a function of the updates done."""
    return (lambda step: float(rate(step))) if callable(rate) else lambda step: float(rate)
