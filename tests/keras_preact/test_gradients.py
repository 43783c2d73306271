"""Gradients on the running backend agree with differences of the NumPy unit, so that all
backends agree with one reference.
"""

import dataclasses

import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

KEPT, CHANGED = (2, 5, 4, 4), (2, 5, 4, 3)


def check(shape, training=True, make=None, **options):
    """Compare gradients along one random direction each, on x (path None) and weights.

    `make` has options of the library's unit that mean the same as some of `options`.
    """
    named = {key: value for key, value in options.items() if key != "hyper"} | (make or {})
    x = harness.images(*harness.with_streams(shape, named.get("shortcut", "identity")))
    unit = harness.unit_on(x, 4, **named)
    expected = harness.reference_of(unit, training=training, **options)
    rng = np.random.default_rng(2)
    cotangent = rng.normal(size=unit.compute_output_shape(x.shape)).astype("float32")
    value, on_x, on_weights = harness.value_and_grad(unit, x, cotangent, training)
    np.testing.assert_allclose(value, (expected(x) * cotangent).sum(), 1e-4, 1e-3)
    assert set(on_weights) == {path for path in expected.weights if "moving_" not in path}

    exact_x = x.astype("float64")

    def loss(path, move):
        if path is None:
            return (expected(exact_x + move) * cotangent).sum()
        weights = expected.weights | {path: expected.weights[path] + move}
        return (dataclasses.replace(expected, weights=weights)(exact_x) * cotangent).sum()

    harness.check_directions(loss, on_x, on_weights, rng)


#: Shortcuts whose factors are computed from x.
COMPUTED = ("exclusive_gating", "shortcut_only_gating", "hyper_connections")
SHORTCUTS = [name for name in kp.SHORTCUTS if name not in ("identity", "dropout")]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        *((CHANGED, {"strides": 2, "arrangement": name}) for name in kp.ARRANGEMENTS),
        *((KEPT, {"shortcut": name}) for name in SHORTCUTS),
        *((CHANGED, {"strides": 2, "shortcut": name}) for name in SHORTCUTS if name in COMPUTED),
        ((6, 3), {"block": "dense"}),
        (CHANGED, {"normalization": "group", "arrangement": "original"}),
        (CHANGED, {"normalization": "rms", "arrangement": "original"}),
        (KEPT, {"activation": "gelu"}),
        (CHANGED, {"strides": 2, "shape_shortcut": "zero_pad"}),
    ],
    ids=str,
)
def test_unit(shape, options):
    check(shape, **options)


@pytest.mark.backend
@pytest.mark.parametrize("training", [True, False])
def test_unit_on_every_backend(training):
    """With fixed moving statistics, the gradient does not pass through a batch's mean
    and variance.
    """
    check(CHANGED, training, block="bottleneck", strides=2, shortcut="exclusive_gating")
