"""Dropout is random in training and absent at inference: its effect on each value, and
its place.
"""

import dataclasses

import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

RATE = 0.3


def bare(arrangement):
    """The arrangement without the layers after the addition."""
    return dataclasses.replace(kp.ARRANGEMENTS[arrangement], after_addition=())


def check_dropped(got, full, rate):
    """Each value is 0 or `full / (1 - rate)`."""
    live = np.abs(full) > 1e-3  # zeros of a ReLU say nothing
    kept = np.isclose(got, full / (1 - rate), 1e-3, 1e-3)
    dropped = np.isclose(got, 0, atol=1e-4)
    assert (kept | dropped).all()
    assert abs(dropped[live].mean() - rate) < 0.05
    assert live.sum() > 1000


@pytest.mark.parametrize(
    ("arrangement", "strides"),
    [("full_preactivation", 1), ("full_preactivation", 2), ("original", 2)],
)
def test_dropout_shortcut(arrangement, strides):
    """output - F is dropout(x); if the unit changes the shape, dropout(projection of x)."""
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


@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_before_addition(arrangement):
    """This dropout is at the end of F, after all layers that the arrangement has there."""
    x = harness.images(4, 18, 18, 4)
    options = {"dropout": RATE, "dropout_at": "before_addition"}
    unit = harness.unit_on(x, 4, arrangement=bare(arrangement), **options)
    _, residual = harness.reference_of(unit, arrangement=arrangement, training=True).paths(x)
    check_dropped(harness.numpy(unit(x, training=True)) - x, residual, RATE)


@pytest.mark.parametrize("block", ["basic", "dense"])
@pytest.mark.parametrize("arrangement", ["full_preactivation", "original"])
def test_between_weights(arrangement, block):
    """This dropout is before every weight except the first. The second weight is an
    identity here, so that the output shows the dropout.
    """
    x = harness.images(2000, 4) if block == "dense" else harness.images(4, 18, 18, 4)
    unit = kp.ResidualUnit(
        4,
        block=block,
        arrangement=bare(arrangement),
        shortcut="none",
        normalization="none",
        dropout=RATE,
        dropout_at="between_weights",
    )
    unit.build(x.shape)
    harness.randomize(unit)
    first, second = unit.get_weights()
    second = 0 * second
    second[() if block == "dense" else (1, 1)] = np.eye(4)
    unit.set_weights([first, second])
    full, got = (harness.numpy(unit(x, training=training)) for training in (False, True))
    check_dropped(got, full, RATE)


def test_stochastic_depth_drops_all_of_f_or_nothing():
    """In this unit, F is 1 for every image, at every position (arXiv 1603.09382)."""
    ones = {"use_bias": True, "kernel_initializer": "zeros", "bias_initializer": "ones"}
    unit = kp.ResidualUnit(3, stochastic_depth=0.25, **ones)
    x = np.zeros((2000, 4, 5, 3), "float32")
    first, second = (harness.numpy(unit(x, training=True)) for _ in range(2))
    kept = first[:, 0, 0, 0] > 0
    expected = np.where(kept, 1 / 0.75, 0)[:, None, None, None]
    np.testing.assert_allclose(first, np.broadcast_to(expected, x.shape), rtol=1e-6)
    assert abs((~kept).mean() - 0.25) < 0.05  # more than five deviations
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(harness.numpy(unit(x, training=False)), 1)
    np.testing.assert_array_equal(harness.numpy(kp.ResidualUnit(3, **ones)(x, training=True)), 1)
