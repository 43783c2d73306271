"""The coordinate check against updates of a model by hand, and what it says about depth."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

X = harness.images(32, 16)
LABELS = np.arange(32) % 3


def builder(**options):
    def build(depth):
        keras.utils.set_random_seed(depth)
        return kp.models.dense_resnet(
            depth, width=16, classes=3, input_shape=(16,), **{"stacked": False} | options
        )

    return build


def check(build, sizes, rate=0.1, **options):
    def optimizer(model):
        rates = options.get("rates", lambda model: {})(model)
        return kp.optimizers.CoupledSGD(rate, momentum=0.5, rate_factors=rates)

    options = {key: value for key, value in options.items() if key != "rates"}
    return kp.analysis.coordinate_check(build, sizes, X, LABELS, optimizer=optimizer, **options)


def by_hand(build, size, steps, rate=0.1):
    """Root mean squares of x_L, and of its changes, from `train_on_batch`."""
    model = build(size)
    last = keras.Model(model.input, model.unit_outputs[-1])

    def output():
        with keras.StatelessScope():
            return harness.numpy(last(X, training=True)).astype("float64")

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kp.optimizers.CoupledSGD(rate, momentum=0.5), loss, jit_compile=False)
    before, changes = output(), []
    for done in range(1, max(steps) + 1):
        model.train_on_batch(X, LABELS)
        if done in steps:
            changes.append(np.sqrt(((output() - before) ** 2).mean()))
    return np.sqrt((before**2).mean()), changes


@pytest.mark.backend
@pytest.mark.parametrize("stacked", [pytest.param(False, marks=pytest.mark.soak), True])
def test_changes_are_those_of_training(stacked):
    build, sizes, steps = builder(stacked=stacked), (6, 10), (1, 3)
    found = check(build, sizes, steps=steps)
    assert (found.sizes, found.steps) == (sizes, steps)
    for i, size in enumerate(sizes):
        start, changes = by_hand(build, size, steps)
        np.testing.assert_allclose(found.start[i], start, 1e-5)
        np.testing.assert_allclose(found.change[i], changes, 1e-3)


def test_exponents():
    change = np.array([[1.0, 5.0], [4.0, 5.0], [16.0, 5.0]])
    found = kp.analysis.CoordinateCheck((10, 20, 40), (1, 2), np.ones(3), change)
    np.testing.assert_allclose(found.exponents, [2, 0], atol=1e-12)


@pytest.mark.soak
def test_one_rate_moves_deep_networks_alike_if_their_branches_are_scaled():
    build, h = builder, kp.shortcuts.DepthScaling(0.5, base=9)
    ordinary, scaled = (
        check(build(stacked=True, shortcut=each), (20, 56), rate=0.02, steps=(1,)).exponents[0]
        for each in ("identity", h)
    )
    assert ordinary > 0.9
    assert scaled < ordinary - 0.3


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_precisions(dtype):
    """Small gradients do not vanish in float16."""
    want = check(builder(), (6, 10), rate=0.1, steps=(2,))
    got = check(builder(dtype=dtype), (6, 10), rate=0.1, steps=(2,))
    np.testing.assert_allclose(got.start, want.start, 0.02)
    np.testing.assert_allclose(got.change, want.change, 0.2)


WRONG = {
    "one size": (lambda: check(builder(), (6, 6)), "two sizes or more"),
    "no steps": (lambda: check(builder(), (6, 10), steps=()), "increasing order"),
    "steps twice": (lambda: check(builder(), (6, 10), steps=(2, 2)), "increasing order"),
    "step 0": (lambda: check(builder(), (6, 10), steps=(0, 2)), "`steps`"),
    "one optimizer": (
        lambda: kp.analysis.coordinate_check(
            builder(), (6, 10), X, LABELS, optimizer=kp.optimizers.CoupledSGD()
        ),
        "a function that returns the optimizer",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes(case):
    call, words = WRONG[case]
    assert words in harness.error_of(call)
