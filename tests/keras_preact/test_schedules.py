"""The schedules, value by value."""

import math

import keras
import numpy as np
import pytest

import keras_preact as kp

pytestmark = pytest.mark.backend


def rates(schedule, *steps):
    return [float(schedule(step)) for step in steps]


def test_step_schedule_is_the_papers_for_cifar():
    schedule = kp.schedules.step_schedule()
    for first, last, rate in [
        (0, 399, 0.01),
        (400, 31_999, 0.1),
        (32_000, 47_999, 0.01),
        (48_000, 63_999, 0.001),
    ]:
        assert rates(schedule, first, last) == pytest.approx([rate] * 2)


def test_step_schedule_without_warmup():
    schedule = kp.schedules.step_schedule(1.0, [10, 20], factor=0.5, warmup_steps=0)
    assert rates(schedule, 0, 9, 10, 19, 20, 1000) == [1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("step", [0, 3, 10, 11, 40, 99, 100, 150])
def test_cosine_schedule(step):
    top, low, warmup, steps = 0.2, 0.02, 10, 100
    if step < warmup:
        expected = top * step / warmup
    else:
        share = min(1, (step - warmup) / (steps - warmup))
        expected = low + (top - low) * (1 + math.cos(math.pi * share)) / 2
    schedule = kp.schedules.cosine_schedule(
        top, steps, warmup_steps=warmup, final_learning_rate=low
    )
    assert float(schedule(step)) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_cosine_schedule_without_warmup_starts_at_the_top():
    assert float(kp.schedules.cosine_schedule(0.2, 100)(0)) == pytest.approx(0.2)


@pytest.mark.parametrize("warmup", [0, 10])
def test_linear_schedule(warmup):
    top, low, steps = 0.2, 0.02, 100
    schedule = kp.schedules.linear_schedule(
        top, steps, warmup_steps=warmup, final_learning_rate=low
    )
    config = keras.optimizers.schedules.serialize(schedule)
    for made in (schedule, keras.optimizers.schedules.deserialize(config)):
        for step in (0, 3, 10, 11, 40, 99, 100, 150):
            points = [0, warmup, steps], [0, top, low]
            expected = top if not warmup and not step else np.interp(step, *points)
            assert float(made(step)) == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("drops", [(20, 10), (300, 500), (400, 500)])
def test_drops_that_do_not_rise_after_the_warmup(drops):
    with pytest.raises(
        ValueError, match=r"must rise after the warm-up. Received: warmup_steps=400"
    ):
        kp.schedules.step_schedule(drops=drops)


def test_no_schedule():
    with pytest.raises(ValueError, match="give the optimiser the number itself"):
        kp.schedules.step_schedule(drops=(), warmup_steps=0)
    for make in (kp.schedules.cosine_schedule, kp.schedules.linear_schedule):
        with pytest.raises(
            ValueError, match=r"less than `steps`. Received: warmup_steps=10, steps"
        ):
            make(0.1, 10, warmup_steps=10)
