"""The sizes of channels at every depth."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness


@pytest.mark.parametrize(
    ("stacked", "training"), [(False, False), pytest.param(True, True, marks=pytest.mark.backend)]
)
def test_the_channel_profile_is_the_mean_size_of_unit_outputs(stacked, training):
    model = kp.models.resnet_cifar(26, input_shape=(8, 8, 1), width_factor=0.25, stacked=stacked)
    harness.randomize(model)
    assert harness.longest_stack(model) == (3 if stacked else 0)
    x = harness.images(3, 8, 8, 1)
    before = harness.weights(model)
    profile = kp.analysis.channel_profile(model, x, training=training)
    for path, weight in harness.weights(model).items():
        np.testing.assert_array_equal(weight, before[path])
    outputs = keras.Model(model.input, model.unit_outputs)(x, training=training)
    assert profile.units == tuple(f"stage{s}_unit{u}" for s in (1, 2, 3) for u in (1, 2, 3, 4))
    assert profile.size.shape == (16, 12)
    for i, output in enumerate(outputs):
        want = np.abs(harness.numpy(output)).mean((0, 1, 2))
        np.testing.assert_allclose(profile.size[: len(want), i], want, rtol=1e-4)
        assert np.isnan(profile.size[len(want) :, i]).all()
