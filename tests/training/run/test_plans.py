"""The length of a run, and its learning rate."""

import re

import pytest

from training.config import Config, Optimizer, Schedule
from training.run.plans import check_warmup, learning_rate, plan, rate_at


def config(**options) -> Config:
    schedule = Schedule("steps", drops=(3,), length=4)
    return Config(**{"schedule": schedule, "batch_size": 100} | options)


class TestPlan:
    def test_epochs_take_the_images_once(self):
        made = plan(config(), 1040)
        assert (made.steps_per_epoch, made.iterations, made.epochs) == (10, 40, 4)
        assert (made.per_epoch, made.steps) == (10, 40)
        assert plan(config(), 1060).steps_per_epoch == 11
        assert plan(config(), 3).steps_per_epoch == 1

    def test_the_last_epoch_may_be_cut_short(self):
        made = plan(config(schedule=Schedule(length=33, unit="iterations")), 1000)
        assert (made.iterations, made.epochs) == (33, 4)

    def test_each_part_of_an_update_is_a_step(self):
        made = plan(config(accumulate=4), 1000)
        assert (made.steps_per_epoch, made.iterations) == (10, 40)
        assert (made.per_epoch, made.steps) == (40, 160)

    @pytest.mark.parametrize(
        ("together", "parts", "expected"),
        [(4, 1, 12), (4, 2, 10), (4, 4, 10), (6, 4, 9), (16, 1, 16)],
    )
    def test_an_epoch_is_whole_executions(self, together, parts, expected):
        made = plan(config(steps_per_execution=together, accumulate=parts), 1040)
        assert made.per_epoch % together == made.steps % together == 0
        assert made.steps_per_epoch == expected

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"schedule": Schedule(length=0.01)}, "leaves no iteration"),
            (
                {"schedule": Schedule(length=33, unit="iterations"), "steps_per_execution": 4},
                "a multiple of 4 iterations",
            ),
        ],
    )
    def test_errors(self, options, message):
        with pytest.raises(ValueError, match=message):
            plan(config(**options), 1000)


class TestWarmup:
    def test_a_warm_up_that_is_not_shorter_than_the_run(self):
        message = r"The warm-up \(5 iterations\) is not shorter than the run \(5 iterations\)"
        steps, cosine = (
            config(schedule=Schedule(kind, length=5, warmup=5, unit="iterations"))
            for kind in ("steps", "cosine")
        )
        assert re.match(message, check_warmup(steps, plan(steps, 1000)))
        with pytest.raises(ValueError, match=message):  # no step would be left for a cosine
            check_warmup(cosine, plan(cosine, 1000))


class TestLearningRate:
    @pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 0.25), ("sqrt", 0.5)])
    def test_grows_with_the_batch_size(self, scaling, factor):
        options = Optimizer(learning_rate=0.4, scaling=scaling, reference_batch_size=400)
        schedule = Schedule("steps", drops=(3,), length=4, warmup=1, warmup_learning_rate=0.08)
        made = config(optimizer=options, schedule=schedule)
        rate = rate_at(learning_rate(made, plan(made, 1000)))
        expected = {0: 0.08, 9: 0.08, 10: 0.4, 29: 0.4, 30: 0.04, 39: 0.04}
        assert {step: rate(step) for step in expected} == pytest.approx(
            {step: factor * r for step, r in expected.items()}
        )

    def test_constant(self):
        made = config(schedule=Schedule("steps", length=4))
        assert rate_at(learning_rate(made, plan(made, 1000)))(17) == 0.1

    @pytest.mark.parametrize(("kind", "near"), [("cosine", 0.0024472), ("linear", 0.01)])
    def test_ends_with_the_run_in_updates(self, kind, near):
        made = config(schedule=Schedule(kind, length=4, warmup=1), accumulate=2)
        rate = rate_at(learning_rate(made, plan(made, 1000)))
        expected = [0.05, 0.1, 0.05, near, 0]
        found = [rate(step) for step in (5, 10, 25, 37, 40)]
        assert found == pytest.approx(expected, abs=1e-7)

    @pytest.mark.parametrize(
        ("schedule", "expected"),
        [
            (
                Schedule("linear", length=4, warmup=1, stable=2).over(8),
                {10: 0.05, 20: 0.1, 60: 0.1, 70: 0.05, 80: 0},
            ),
            (
                Schedule("cosine", length=4, warmup=1, cycles=2),
                {5: 0.05, 10: 0.1, 25: 0.1, 32.5: 0.05, 40: 0},
            ),
        ],
        ids=["stable", "cycles"],
    )
    def test_options_of_one_kind(self, schedule, expected):
        made = config(schedule=schedule)
        rate = rate_at(learning_rate(made, plan(made, 1000)))
        assert {step: rate(step) for step in expected} == pytest.approx(expected, abs=1e-7)
