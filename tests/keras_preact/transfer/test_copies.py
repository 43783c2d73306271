"""Copies of a network with other options."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness


def network(**options):
    options = {"classes": 10, "input_shape": (16, 16, 3), "block": "basic"} | options
    model = kp.models.ResidualNetwork([(4, 4, 1)], stem="3x3", stem_filters=4, **options)
    harness.randomize(model)
    return model


@pytest.mark.parametrize("stacked", [False, True])
def test_computes_with_the_same_weights(stacked):
    model = network(stacked=stacked, mean=(1.0, 2.0, 3.0), std=2.0)
    before = harness.weights(model)
    copy = kp.transfer.changed_copy(model, input_shape=(24, 20, 3), dropout=0.3)
    assert type(copy) is type(model)
    assert copy.input_shape == (None, 24, 20, 3)
    assert copy.get_config()["dropout"] == 0.3
    images = harness.images(2, 16, 16, 3)
    same_size = kp.transfer.changed_copy(copy, input_shape=(16, 16, 3))
    np.testing.assert_array_equal(*(harness.numpy(each(images)) for each in (same_size, model)))
    copy.set_weights([0 * weight for weight in copy.get_weights()])
    np.testing.assert_equal(harness.weights(model), before)


def test_bad_changes():
    model, copy = network(), kp.transfer.changed_copy
    assert "give head_classifier other weights" in harness.error_of(lambda: copy(model, classes=3))
    assert "drop_out" in harness.error_of(lambda: copy(model, drop_out=0.1))
    assert "Received: 'head'" in harness.error_of(lambda: copy(model, ["stem_conv", "head"]))
    assert "residual" in harness.error_of(lambda: copy(keras.Sequential()))


def test_new_weights_of_one_layer():
    """A name is no list of names, of which it holds several."""
    model = kp.models.ResidualNetwork(
        [(4, 11, 1)],
        stem="3x3",
        stem_filters=4,
        block="single",
        input_shape=(4, 4, 1),
        classes=2,
        stacked=False,
    )
    harness.randomize(model)
    before = harness.weights(model)
    changed = harness.changed(kp.transfer.changed_copy(model, "stage1_unit10"), before)
    assert {path.partition("/")[0] for path in changed} == {"stage1_unit10"}
