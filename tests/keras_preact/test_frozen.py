"""Batch normalisation keeps its moving statistics bit by bit if it is frozen, and at
inference.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness


@pytest.mark.backend
@pytest.mark.parametrize("arrangement", ["original", "full_preactivation"])
def test_frozen_unit_in_training(arrangement):
    x = harness.images(2, 5, 6, 3)
    gate = kp.shortcuts.ShortcutOnlyGating(normalization="batch")
    unit = harness.unit_on(x, 4, arrangement=arrangement, strides=2, shortcut=gate)
    unit.trainable = False
    before = unit.get_weights()
    inference = harness.numpy(unit(x, training=False))
    # Inference uses other kernels, which may round differently.
    harness.close(unit(x, training=True), inference, tolerance=1e-6)
    for value, old in zip(unit.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)
    assert not unit.trainable_weights
    assert not kp.ResidualUnit.from_config(unit.get_config()).trainable


def test_a_frozen_template_freezes_the_norms_alone():
    unit = kp.ResidualUnit(4, normalization=keras.layers.BatchNormalization(trainable=False))
    unit.build((2, 5, 6, 4))
    trained = [weight.path.rsplit("/", 2)[1] for weight in unit.trainable_weights]
    assert trained == ["conv_1", "conv_2"]


@pytest.mark.backend
def test_fit_leaves_frozen_layers_alone():
    model = kp.models.resnet_cifar(8, width_factor=0.125, input_shape=(8, 8, 3))
    for layer in model.layers:
        layer.trainable = layer.name == "head_classifier"
    before = harness.weights(model)
    harness.compiled(model, jit_compile=False)
    model.fit(harness.images(4, 8, 8, 3), np.arange(4), batch_size=2, verbose=0)
    model.predict(harness.images(4, 8, 8, 3), verbose=0)
    assert harness.changed(model, before) == {"head_classifier/kernel", "head_classifier/bias"}
