"""Gradients on the running backend against differences of the NumPy unit, so that all
backends agree with one reference.
"""

import dataclasses

import numpy as np
import pytest

import keras_preact as kp
from tests import reference
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

STEP = 1e-6

KEPT, CHANGED = (2, 5, 4, 4), (2, 5, 4, 3)


def directional_derivative(unit: reference.Unit, x, cotangent, path, direction):
    """Central difference of `sum(unit(x) * cotangent)`; `path` None moves x, another
    one that weight.
    """

    def loss(step):
        moved = x + step * direction if path is None else x
        weights = (
            unit.weights
            if path is None
            else unit.weights | {path: unit.weights[path] + step * direction}
        )
        return (dataclasses.replace(unit, weights=weights)(moved) * cotangent).sum()

    return (loss(STEP) - loss(-STEP)) / (2 * STEP)


def check(shape, filters=4, training=True, **options):
    x = harness.images(*shape)
    unit = harness.unit_on(x, filters, **options)
    expected = harness.reference_of(unit, training=training, **options)
    rng = np.random.default_rng(2)
    cotangent = rng.normal(size=unit.compute_output_shape(shape)).astype("float32")
    value, on_x, on_weights = harness.value_and_grad(unit, x, cotangent, training)
    np.testing.assert_allclose(value, (expected(x) * cotangent).sum(), 1e-4, 1e-3)
    assert set(on_weights) == {path for path in expected.weights if "moving_" not in path}
    for path, gradient in [(None, on_x), *on_weights.items()]:
        direction = rng.normal(size=gradient.shape)
        difference = directional_derivative(
            expected, x.astype("float64"), cotangent, path, direction
        )
        np.testing.assert_allclose(
            (gradient * direction).sum(), difference, 1e-3, 1e-3, err_msg=str(path)
        )


@pytest.mark.parametrize("shape", [KEPT, CHANGED], ids=["kept", "changed"])
@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_arrangements(arrangement, shape):
    check(shape, arrangement=arrangement, strides=1 if shape is KEPT else 2)


@pytest.mark.parametrize("shape", [KEPT, CHANGED], ids=["kept", "changed"])
@pytest.mark.parametrize(
    "shortcut", [name for name in kp.SHORTCUTS if name not in ("identity", "dropout")]
)
def test_shortcuts(shortcut, shape):
    check(shape, shortcut=shortcut, strides=1 if shape is KEPT else 2)


@pytest.mark.parametrize("block", ["bottleneck", "dense"])
def test_blocks(block):
    check((6, 3) if block == "dense" else CHANGED, block=block)


@pytest.mark.parametrize("normalization", ["layer", "group", "rms", "none"])
def test_normalizations(normalization):
    check(CHANGED, normalization=normalization, arrangement="original")


@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh"])
def test_activations(activation):
    check(KEPT, activation=activation)


def test_zero_padding():
    check(CHANGED, strides=2, shape_shortcut="zero_pad")


def test_inference():
    """Behind fixed moving statistics the gradient does not pass through a batch's mean
    and variance.
    """
    check(CHANGED, training=False, strides=2)
