"""Stochastic depth of one unit (arXiv 1603.09382): in training the whole branch of an
image is there or not.
"""

import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


def unit(**options) -> kp.ResidualUnit:
    """Return a unit whose F is 1 for every image, at every place."""
    made = kp.ResidualUnit(
        3, use_bias=True, kernel_initializer="zeros", bias_initializer="ones", **options
    )
    made.build((None, 4, 5, 3))
    return made


def branch(layer, training: bool) -> np.ndarray:
    x = np.zeros((2000, 4, 5, 3), "float32")
    return harness.numpy(layer(x, training=training))


@pytest.mark.parametrize("rate", [0.25, 0.6])
def test_an_image_loses_all_of_f_or_nothing(rate):
    layer = unit(stochastic_depth=rate)
    first, second = branch(layer, True), branch(layer, True)
    for added in (first, second):
        assert np.ptp(added, axis=(1, 2, 3)).max() == 0
        kept = added[:, 0, 0, 0] > 0
        np.testing.assert_array_equal(added[~kept], 0)
        np.testing.assert_allclose(added[kept], 1 / (1 - rate), rtol=1e-6)
        assert abs((~kept).mean() - rate) < 0.05  # more than four deviations
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(branch(layer, False), 1)


def test_off_by_default():
    np.testing.assert_array_equal(branch(unit(), True), 1)
