"""Dropout is random in training and absent at inference: what it does to each value,
and where it stands.
"""

import dataclasses

import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

RATE = 0.3


def bare(arrangement):
    """The arrangement without what hides the addition."""
    return dataclasses.replace(kp.ARRANGEMENTS[arrangement], after_addition=())


def check_dropped(got, full, rate, times=1):
    """Each value is 0 or `full / (1 - rate)`; `times` dropouts behind one another."""
    share = (1 - rate) ** times
    live = np.abs(full) > 1e-3  # zeros of a ReLU say nothing
    kept = np.isclose(got, full / share, 1e-3, 1e-3)
    dropped = np.isclose(got, 0, atol=1e-4)
    assert (kept | dropped).all()
    assert abs(dropped[live].mean() - (1 - share)) < 0.05
    assert live.sum() > 1000


@pytest.mark.parametrize("strides", [1, 2], ids=["kept", "changed"])
@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_dropout_shortcut(arrangement, strides):
    """output - F is dropout(x), where the unit changes the shape dropout(projection of
    x).
    """
    x = harness.images(4, 18 * strides, 18 * strides, 4)
    unit = harness.unit_on(
        x, 4, arrangement=bare(arrangement), shortcut=kp.shortcuts.Dropout(RATE), strides=strides
    )
    end_of_x, residual = harness.reference_of(
        unit, arrangement=arrangement, strides=strides, training=True
    ).paths(x)
    got = harness.numpy(unit(x, training=True)) - residual
    check_dropped(got, end_of_x, RATE)
    first, second = (harness.numpy(unit(x, training=True)) for _ in range(2))
    assert not np.array_equal(first, second)


def test_rate_of_the_paper():
    assert kp.shortcuts.Dropout().rate == 0.5


@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_before_addition(arrangement):
    """At the end of F, behind whatever the arrangement has there."""
    x = harness.images(4, 18, 18, 4)
    options = {"dropout": RATE, "dropout_at": "before_addition"}
    unit = harness.unit_on(x, 4, arrangement=bare(arrangement), **options)
    _, residual = harness.reference_of(unit, arrangement=arrangement, training=True).paths(x)
    check_dropped(harness.numpy(unit(x, training=True)) - x, residual, RATE)


@pytest.mark.parametrize("block", ["basic", "bottleneck", "dense"])
@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_between_weights(arrangement, block):
    """In front of every weight but the first: weights that change nothing let the
    dropouts through to the output.
    """
    x = harness.images(2000, 4) if block == "dense" else harness.images(4, 18, 18, 4)
    unit = kp.ResidualUnit(
        4 if block != "bottleneck" else 1,
        block=block,
        arrangement=bare(arrangement),
        shortcut="none",
        normalization="none",
        dropout=RATE,
        dropout_at="between_weights",
    )
    unit.build(x.shape)
    harness.randomize(unit)
    values = harness.weights(unit)
    for path, value in values.items():
        if path != next(iter(values)):
            centre = (0,) * value.ndim if value.shape[0] == 1 else (value.shape[0] // 2,) * 2
            value[...] = 0
            if block == "dense":
                value[...] = np.eye(4)
            else:
                value[centre[:2]] = (
                    np.eye(*value.shape[2:]) if value.shape[2] == value.shape[3] else 1
                )
    unit.set_weights(list(values.values()))
    full = harness.numpy(unit(x, training=False))
    got = harness.numpy(unit(x, training=True))
    assert unit.options.dropout == RATE
    check_dropped(got, full, RATE, times=len(unit.options.block.channels(4)) - 1)


@pytest.mark.parametrize(
    "options", [{"dropout": 0.9}, {"dropout": 0.9, "dropout_at": "before_addition"}], ids=str
)
def test_inference_is_that_of_a_unit_without_dropout(options):
    x = harness.images(2, 5, 6, 4)
    unit, plain = harness.unit_on(x, 4, **options), harness.unit_on(x, 4)
    np.testing.assert_array_equal(
        *(harness.numpy(each(x, training=False)) for each in (unit, plain))
    )
    assert harness.paths(unit) == harness.paths(plain)
