"""Eq. 3 to 6 hold on a clean path, forward and backward, and on no other path."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

#: Nothing follows the addition.
CLEAN = ("relu_before_addition", "relu_only_preactivation", "full_preactivation")
BLOCKS = {
    "basic": (4, (2, 5, 6, 4)),
    "bottleneck": (1, (2, 5, 6, 4)),
    "dense": (4, (3, 4)),
    "single": (4, (2, 5, 6, 4)),
}


def silence(unit):
    """Make F = 0: set the last weight, and gamma and beta of a norm after it, to 0."""
    last = len(unit.block.channels(4))
    places = [f"branch/conv_{last}/", f"branch/dense_{last}/", f"branch/norm_{last}/"]
    values = {
        path: np.zeros_like(value)
        if any(path.startswith(place) for place in places) and "moving" not in path
        else value
        for path, value in harness.weights(unit).items()
    }
    unit.set_weights(list(values.values()))


def silenced(block, **options):
    filters, shape = BLOCKS[block]
    x = harness.images(*harness.with_streams(shape, options.get("shortcut", "identity")))
    unit = harness.unit_on(x, filters, block=block, **options)
    silence(unit)
    return x, harness.numpy(unit(x, training=False))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_unit_without_residual_is_the_identity_only_where_the_path_is_clean(arrangement, block):
    x, y = silenced(block, arrangement=arrangement)
    assert (x < 0).any()  # on positive values a ReLU is an identity as well
    assert np.array_equal(y, x) == (arrangement in CLEAN)


@pytest.mark.parametrize("shortcut", [name for name in kp.SHORTCUTS if name != "dropout"])
def test_which_shortcuts_are_identities(shortcut):
    x, y = silenced("basic", shortcut=shortcut)
    equal = np.isclose(y, x)
    assert equal.all() if shortcut in harness.IDENTITIES else not equal.any()


@pytest.mark.parametrize(
    ("shortcut", "factor"), [("identity", 1), (kp.shortcuts.ConstantScaling(0.5, 1), 0.5)]
)
def test_shallow_term_forward_and_backward(shortcut, factor):
    """Eq. 4 to 6: with F = 0 the input arrives times the product of the lambdas, and so
    does the gradient.
    """
    x, cotangent = harness.images(2, 5, 6, 4), harness.images(2, 5, 6, 4, seed=2)
    chain = keras.Sequential([kp.ResidualUnit(4, shortcut=shortcut) for _ in range(4)])
    chain.build(x.shape)
    for unit in chain.layers:
        silence(unit)
    np.testing.assert_array_equal(harness.numpy(chain(x)), factor**4 * x)
    _, on_x, _ = harness.value_and_grad(chain, x, cotangent)
    np.testing.assert_array_equal(on_x, factor**4 * cotangent)
