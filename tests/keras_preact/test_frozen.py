"""Batch normalisation that is frozen, or at inference, keeps its moving statistics bit
by bit.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


@pytest.mark.parametrize("when", ["made", "built"])  # frozen
@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_frozen_unit_in_training(arrangement, when):
    x = harness.images(2, 5, 6, 3)
    options = {
        "arrangement": arrangement,
        "strides": 2,
        "shortcut": kp.shortcuts.ShortcutOnlyGating(normalization="batch"),
    }
    unit = harness.unit_on(x, 4, **options, trainable=when == "built")
    if when == "built":
        unit.trainable = False
    before = unit.get_weights()
    inference = harness.numpy(unit(x, training=False))
    # Inference has kernels of its own, which may round differently.
    harness.close(unit(x, training=True), inference, tolerance=1e-6)
    for value, old in zip(unit.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)
    assert not unit.trainable_weights


def test_a_frozen_pattern_freezes_the_norms_alone():
    unit = kp.ResidualUnit(4, normalization=keras.layers.BatchNormalization(trainable=False))
    unit.build((2, 5, 6, 4))
    assert [weight.path.rsplit("/", 2)[1] for weight in unit.trainable_weights] == [
        "conv_1",
        "conv_2",
    ]


def test_fit_leaves_frozen_layers_alone():
    model = kp.models.resnet_cifar(8, width_factor=0.125, input_shape=(8, 8, 3))
    for layer in [
        *model.units,
        model.get_layer("stem_conv"),
        model.get_layer("stem_norm"),
        model.get_layer("head_norm"),
    ]:
        layer.trainable = False
    before = harness.weights(model)
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
    )
    model.fit(harness.images(4, 8, 8, 3), np.array([0, 1, 2, 3]), batch_size=2, verbose=0)
    changed = {
        path
        for path, value in harness.weights(model).items()
        if not np.array_equal(value, before[path])
    }
    assert changed == {"head_classifier/kernel", "head_classifier/bias"}
    model.predict(harness.images(4, 8, 8, 3), verbose=0)
    assert all(
        np.array_equal(before[path], value)
        for path, value in harness.weights(model).items()
        if path not in changed
    )
