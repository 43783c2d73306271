"""Paths of weights below their layers."""

import contextlib

import keras
import pytest

from keras_preact._paths import below


@pytest.mark.parametrize(
    ("scopes", "path"),
    [
        (["conv"], "kernel"),
        (["block", "conv"], "kernel"),
        (["a_conv", "conv"], "kernel"),  # another name that ends in the layer's name
        (["conv", "gate"], "gate/kernel"),
        (["conv", "conv"], "conv/kernel"),
        (["other"], "other/kernel"),  # made outside of the layer
    ],
)
def test_path_below_a_layer(scopes, path):
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        kernel = keras.Variable(0.0, name="kernel")
    assert below(keras.layers.Identity(name="conv"), kernel) == path
