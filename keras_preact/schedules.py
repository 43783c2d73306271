"""Learning-rate schedules, counted in iterations from 0."""

import itertools
from collections.abc import Sequence

import keras


def step_schedule(
    learning_rate: float = 0.1,
    drops: Sequence[int] = (32_000, 48_000),
    *,
    factor: float = 0.1,
    warmup_steps: int = 400,
    warmup_learning_rate: float = 0.01,
) -> keras.optimizers.schedules.LearningRateSchedule:
    """Return a rate that is multiplied by `factor` at every one of `drops`; by default
    the paper's for CIFAR.

    Args:
        learning_rate: Behind the warm-up.
        drops: Iterations, rising, from which on the rate is lower.
        factor: What a drop multiplies the rate by.
        warmup_steps: How many iterations run at `warmup_learning_rate` first; 0 for
            none.
        warmup_learning_rate: Their rate.

    Example:

    >>> rate = step_schedule()
    >>> [round(float(rate(step)), 4) for step in (0, 399, 400, 31_999, 32_000, 48_000)]
    [0.01, 0.01, 0.1, 0.1, 0.01, 0.001]

    Source: appendix of arXiv 1603.05027: 0.01 for 400 iterations, then 0.1, divided by
        10 at 32k and 48k, 64k in all.
    """
    boundaries = ([warmup_steps] if warmup_steps else []) + list(drops)
    if any(late <= early for early, late in itertools.pairwise(boundaries)):
        raise ValueError(
            f"`drops` must rise, behind the warm-up. Received: warmup_steps={warmup_steps}, "
            f"drops={list(drops)}"
        )
    rates = [learning_rate * factor**i for i in range(len(drops) + 1)]
    if warmup_steps:
        rates.insert(0, warmup_learning_rate)
    if not boundaries:
        raise ValueError(
            "A rate without drops and warm-up is no schedule: give the optimiser the number itself."
        )
    # Keras' schedule takes a boundary as the last iteration of the value in front of it
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        [step - 1 for step in boundaries], rates
    )


def cosine_schedule(
    learning_rate: float, steps: int, *, warmup_steps: int = 0, final_learning_rate: float = 0.0
) -> keras.optimizers.schedules.LearningRateSchedule:
    """Return a rate that rises from 0 in a line over `warmup_steps`, then falls as half
    a cosine until iteration `steps`.

    Args:
        learning_rate: The highest rate.
        steps: Iterations in all, the warm-up included.
        warmup_steps: Iterations of the rise.
        final_learning_rate: The rate at the end and from there on.

    Example:

    >>> rate = cosine_schedule(0.1, 100, warmup_steps=10)
    >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 55, 100)]
    [0.0, 0.05, 0.1, 0.05, 0.0]

    Source: arXiv 1608.03983 (cosine), arXiv 1706.02677 (warm-up). Not the paper's.
    """
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            f"`warmup_steps` must be less than `steps`. Received: warmup_steps={warmup_steps}, "
            f"steps={steps}"
        )
    alpha = final_learning_rate / learning_rate
    if not warmup_steps:
        return keras.optimizers.schedules.CosineDecay(learning_rate, steps, alpha=alpha)
    return keras.optimizers.schedules.CosineDecay(
        0.0,
        steps - warmup_steps,
        alpha=alpha,
        warmup_target=learning_rate,
        warmup_steps=warmup_steps,
    )
