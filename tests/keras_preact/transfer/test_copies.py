"""Copies of a network with other options."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


def network(**options):
    options = {"classes": 10, "input_shape": (16, 16, 3), "block": "basic"} | options
    return kp.models.ResidualNetwork(
        [(4, 4, 1)], stem="3x3", stem_filters=4, mean=(1.0, 2.0, 3.0), std=2.0, **options
    )


def randomised(model):
    """Give every weight, moving statistics too, a value that no initialiser has."""
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.uniform(0.5, 1.5, weight.shape))
    return model


@pytest.mark.parametrize("stacked", [False, True])
def test_computes_with_the_same_weights(stacked):
    model = randomised(network(stacked=stacked))
    assert harness.longest_stack(model) == (3 if stacked else 0)
    before = model.get_weights()
    copy = kp.transfer.changed_copy(model, input_shape=(24, 20, 3), dropout=0.3)
    assert type(copy) is type(model)
    assert copy.input_shape == (None, 24, 20, 3)
    assert copy.get_config()["dropout"] == 0.3
    assert [weight.path for weight in copy.weights] == [weight.path for weight in model.weights]
    images = np.random.default_rng(1).uniform(0, 9, (2, 16, 16, 3)).astype("float32")
    same_size = kp.transfer.changed_copy(copy, input_shape=(16, 16, 3))
    np.testing.assert_array_equal(
        ops.convert_to_numpy(same_size(images)), ops.convert_to_numpy(model(images))
    )

    for weight in copy.weights:
        weight.assign(np.zeros(weight.shape))
    for old, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(now, old)


def test_layers_stay_frozen_and_new_ones_are_drawn():
    model = randomised(network(classes=4))
    kp.transfer.freeze(model, up_to="head")
    copy = kp.transfer.changed_copy(model, ("head_classifier",), classes=7)
    assert [weight.path for weight in copy.trainable_weights] == [
        "head_classifier/kernel",
        "head_classifier/bias",
    ]
    assert copy.output_shape == (None, 7)
    np.testing.assert_array_equal(copy.get_layer("head_classifier").bias, 0.0)
    assert not model.get_layer("stem_conv").trainable


def test_bad_changes():
    model = network()
    with pytest.raises(ValueError, match="other weights in head_classifier: bias, kernel"):
        kp.transfer.changed_copy(model, classes=3)
    with pytest.raises(
        ValueError, match=r"can be changed in .*dropout, .*Received: drop_out, size"
    ):
        kp.transfer.changed_copy(model, size=3, drop_out=0.1)
    with pytest.raises(ValueError, match="network of residual units"):
        kp.transfer.changed_copy(keras.Sequential(), dropout=0.1)
