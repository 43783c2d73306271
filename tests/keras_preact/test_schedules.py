"""The schedules, value by value."""

import math

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness


def rates(schedule, *steps):
    return [float(schedule(step)) for step in steps]


def test_step_schedule():
    """The default is the paper's schedule for CIFAR."""
    paper = rates(kp.schedules.step_schedule(), 0, 399, 400, 31_999, 32_000, 47_999, 48_000, 63_999)
    assert paper == pytest.approx([0.01] * 2 + [0.1] * 2 + [0.01] * 2 + [0.001] * 2)
    schedule = kp.schedules.step_schedule(1.0, [10, 20], factor=0.5, warmup_steps=0)
    assert rates(schedule, 0, 9, 10, 19, 20, 1000) == [1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.backend
@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_cosine_and_linear_schedule(kind, warmup):
    top, low, steps = 0.2, 0.02, 100
    make = getattr(kp.schedules, f"{kind}_schedule")
    schedule = make(top, steps, warmup_steps=warmup, final_learning_rate=low)
    config = keras.optimizers.schedules.serialize(schedule)
    for made in (schedule, keras.optimizers.schedules.deserialize(config)):
        for step in (0, 3, 10, 11, 40, 99, 100, 150):
            share = min(1, (step - warmup) / (steps - warmup))
            if kind == "cosine":
                share = (1 - math.cos(math.pi * share)) / 2
            expected = top * step / warmup if step < warmup else top + (low - top) * share
            np.testing.assert_allclose(float(made(step)), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.backend
@pytest.mark.parametrize(
    ("make", "option", "expected"),
    [
        (
            kp.schedules.linear_schedule,
            {"stable_steps": 60},
            {0: 0, 5: 0.1, 10: 0.2, 40: 0.2, 70: 0.2, 85: 0.11, 100: 0.02, 200: 0.02},
        ),
        (
            kp.schedules.cosine_schedule,
            {"cycles": 3},
            {0: 0, 5: 0.1, 10: 0.2, 20: 0.155, 25: 0.11, 40: 0.2, 55: 0.11}
            | {70: 0.2, 85: 0.11, 100: 0.02, 200: 0.02},
        ),
    ],
    ids=["stable steps", "restarts"],
)
def test_options_of_one_schedule(make, option, expected):
    schedule = make(0.2, 100, warmup_steps=10, final_learning_rate=0.02, **option)
    config = keras.optimizers.schedules.serialize(schedule)
    for made in (schedule, keras.optimizers.schedules.deserialize(config)):
        np.testing.assert_allclose(rates(made, *expected), [*expected.values()], rtol=1e-5)


def test_errors():
    steps = kp.schedules.step_schedule
    for call, word in (
        (lambda: steps(drops=(20, 10)), "must rise after the warm-up"),
        (lambda: steps(drops=(400, 500)), "warmup_steps=400"),
        (lambda: steps(drops=(), warmup_steps=0), "the number itself"),
        (lambda: kp.schedules.cosine_schedule(0.1, 10, warmup_steps=10), "must be shorter"),
        (lambda: kp.schedules.linear_schedule(0.1, 10, warmup_steps=10), "must be shorter"),
        (
            lambda: kp.schedules.linear_schedule(0.1, 10, warmup_steps=4, stable_steps=6),
            "must leave iterations",
        ),
        (lambda: kp.schedules.cosine_schedule(0.1, 10, cycles=0), "cycles=0"),
    ):
        assert word in harness.error_of(call)
