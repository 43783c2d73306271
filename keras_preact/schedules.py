"""Learning-rate schedules, counted in iterations from 0."""

import itertools
import math
from collections.abc import Sequence

import keras
from keras import ops

from keras_preact import _checks


def step_schedule(
    learning_rate: float = 0.1,
    drops: Sequence[int] = (32_000, 48_000),
    *,
    factor: float = 0.1,
    warmup_steps: int = 400,
    warmup_learning_rate: float = 0.01,
) -> keras.optimizers.schedules.LearningRateSchedule:
    """Return a schedule that multiplies the rate by `factor` at each of `drops`. The
    defaults are the paper's for CIFAR.

    Args:
        learning_rate: Rate after the warm-up.
        drops: Iterations of the drops, in rising order.
        factor: Factor on the rate at a drop.
        warmup_steps: Number of first iterations with `warmup_learning_rate`.
        warmup_learning_rate: Rate of these iterations.

    Example:

    >>> rate = step_schedule()
    >>> [round(float(rate(step)), 4) for step in (0, 399, 400, 31_999, 32_000, 48_000)]
    [0.01, 0.01, 0.1, 0.1, 0.01, 0.001]

    Source: appendix of arXiv 1603.05027: 0.01 for 400 iterations, then 0.1, divided by
        10 at 32k and 48k, 64k in all.
    """
    _checks.positive(learning_rate, "learning_rate")
    _checks.positive(factor, "factor")
    _checks.not_negative(warmup_learning_rate, "warmup_learning_rate")
    _checks.not_negative(warmup_steps, "warmup_steps")
    boundaries = ([warmup_steps] if warmup_steps else []) + list(drops)
    if any(late <= early for early, late in itertools.pairwise(boundaries)):
        raise ValueError(
            f"`drops` must rise after the warm-up. Received: warmup_steps={warmup_steps}, "
            f"drops={list(drops)}"
        )
    rates = [learning_rate * factor**i for i in range(len(drops) + 1)]
    if warmup_steps:
        rates.insert(0, warmup_learning_rate)
    if not boundaries:
        raise ValueError(
            "Without drops and warm-up the rate is constant: give the optimiser the number itself."
        )
    # For Keras, a boundary is the last iteration of the value before it.
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        [step - 1 for step in boundaries], rates
    )


def cosine_schedule(
    learning_rate: float,
    steps: int,
    *,
    warmup_steps: int = 0,
    final_learning_rate: float = 0.0,
    cycles: int = 1,
) -> keras.optimizers.schedules.LearningRateSchedule:
    """Return a schedule that rises linearly from 0 over `warmup_steps`, then falls along
    half a cosine until iteration `steps`.

    Args:
        learning_rate: Highest rate.
        steps: Total number of iterations, including the warm-up.
        warmup_steps: Number of iterations of the warm-up.
        final_learning_rate: Rate at the end and after it.
        cycles: Number of half cosines (warm restarts). They have the same length, and
            each starts at `learning_rate`.

    Raises:
        ValueError: for a warm-up that is not shorter than the run, and for `cycles`
            below 1.

    Example:

    >>> rate = cosine_schedule(0.1, 100, warmup_steps=10)
    >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 55, 100)]
    [0.0, 0.05, 0.1, 0.05, 0.0]
    >>> rate = cosine_schedule(0.1, 100, cycles=2)
    >>> [round(float(rate(step)), 3) for step in (0, 25, 50, 75, 100)]
    [0.1, 0.05, 0.1, 0.05, 0.0]

    Source: arXiv 1608.03983 (cosine, restarts), arXiv 1706.02677 (warm-up). The
        paper does not use it.
    """
    _checks.positive(learning_rate, "learning_rate")  # Keras divides by it
    _check(steps, warmup_steps, final_learning_rate)
    _checks.positive_int(cycles, "cycles")
    if cycles > 1:
        return _Restarts(learning_rate, steps, warmup_steps, final_learning_rate, cycles)
    return keras.optimizers.schedules.CosineDecay(
        0.0 if warmup_steps else learning_rate,
        steps - warmup_steps,
        alpha=final_learning_rate / learning_rate,
        warmup_target=learning_rate if warmup_steps else None,
        warmup_steps=warmup_steps,
    )


def linear_schedule(
    learning_rate: float,
    steps: int,
    *,
    warmup_steps: int = 0,
    stable_steps: int = 0,
    final_learning_rate: float = 0.0,
) -> keras.optimizers.schedules.LearningRateSchedule:
    """Return a schedule that rises linearly from 0 over `warmup_steps`, stays for
    `stable_steps`, then falls linearly until iteration `steps`.

    Without stable steps it is a triangle, for short runs at a high rate; with many, it
    is known as warm-up, stable, decay.

    Args:
        learning_rate: Highest rate.
        steps: Total number of iterations, including the warm-up.
        warmup_steps: Number of iterations of the warm-up.
        stable_steps: Number of iterations at `learning_rate` before it falls.
        final_learning_rate: Rate at the end and after it.

    Raises:
        ValueError: for a warm-up and stable steps that are not shorter than the run.

    Example:

    >>> rate = linear_schedule(0.1, 100, warmup_steps=20)
    >>> [round(float(rate(step)), 3) for step in (0, 10, 20, 60, 100)]
    [0.0, 0.05, 0.1, 0.05, 0.0]
    >>> rate = linear_schedule(0.1, 100, warmup_steps=10, stable_steps=70)
    >>> [round(float(rate(step)), 3) for step in (5, 10, 80, 90)]
    [0.05, 0.1, 0.1, 0.05]

    Source: arXiv 1708.07120 (one cycle), arXiv 2404.06395 (warm-up, stable, decay). The
        paper does not use it.
    """
    _checks.not_negative(learning_rate, "learning_rate")
    _check(steps, warmup_steps, final_learning_rate)
    _checks.not_negative(stable_steps, "stable_steps")
    if stable_steps >= steps - warmup_steps:
        raise ValueError(
            "Warm-up and stable steps must leave iterations in which the rate falls. Received: "
            f"warmup_steps={warmup_steps}, stable_steps={stable_steps}, steps={steps}"
        )
    return _Linear(learning_rate, steps, warmup_steps, final_learning_rate, stable_steps)


class _Falling(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly from 0 over the warm-up, then falls from `top` to `last`."""

    def __init__(self, top: float, steps: int, warmup_steps: int, last: float):
        self.top, self.steps, self.warmup_steps, self.last = top, steps, warmup_steps, last

    def _fallen(self, step):
        """Return how much of the fall is done at a step, from 0 to 1."""
        raise NotImplementedError

    def __call__(self, step):
        step = ops.cast(step, "float32")
        rising = self.top * step / max(1, self.warmup_steps)
        falling = self.top + (self.last - self.top) * self._fallen(step)
        return ops.where(step < self.warmup_steps, rising, falling)

    def get_config(self) -> dict:
        return {name: getattr(self, name) for name in ("top", "steps", "warmup_steps", "last")}


@keras.saving.register_keras_serializable("keras_preact")
class _Restarts(_Falling):
    def __init__(self, top: float, steps: int, warmup_steps: int, last: float, cycles: int):
        super().__init__(top, steps, warmup_steps, last)
        self.cycles = cycles

    def _fallen(self, step):
        length = (self.steps - self.warmup_steps) / self.cycles
        share = ops.mod(step - self.warmup_steps, length) / length
        return ops.where(step < self.steps, (1 - ops.cos(math.pi * share)) / 2, 1.0)

    def get_config(self) -> dict:
        return super().get_config() | {"cycles": self.cycles}


@keras.saving.register_keras_serializable("keras_preact")
class _Linear(_Falling):
    def __init__(
        self, top: float, steps: int, warmup_steps: int, last: float, stable_steps: int = 0
    ):
        super().__init__(top, steps, warmup_steps, last)
        self.stable_steps = stable_steps

    def _fallen(self, step):
        start = self.warmup_steps + self.stable_steps
        return ops.clip((step - start) / (self.steps - start), 0.0, 1.0)

    def get_config(self) -> dict:
        return super().get_config() | {"stable_steps": self.stable_steps}


def _check(steps: int, warmup_steps: int, final: float) -> None:
    """Check the arguments that `cosine_schedule` and `linear_schedule` have in common."""
    _checks.positive(steps, "steps")
    _checks.not_negative(warmup_steps, "warmup_steps")
    _checks.not_negative(final, "final_learning_rate")
    if warmup_steps >= steps:
        raise ValueError(
            f"The warm-up must be shorter than the training: train longer, or warm up for fewer "
            f"steps. Received: warmup_steps={warmup_steps}, steps={steps}"
        )
