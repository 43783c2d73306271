"""Channels first is channels last with transposed data, on every backend."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


def first(x):
    return x.transpose(0, 3, 1, 2)


def check(make, x):
    """`make(data_format)` returns a built layer."""
    last, transposed = make("channels_last"), make("channels_first")
    harness.randomize(last)
    assert [weight.shape for weight in last.weights] == [
        weight.shape for weight in transposed.weights
    ]
    transposed.set_weights(last.get_weights())
    for training in (False, True):
        want = harness.numpy(last(x, training=training))
        got = harness.numpy(transposed(first(x), training=training))
        np.testing.assert_allclose(got, first(want) if want.ndim == 4 else want, 1e-4, 1e-4)


@pytest.mark.parametrize(
    "options",
    [
        *({"arrangement": name} for name in kp.ARRANGEMENTS),
        *({"shortcut": name} for name in kp.SHORTCUTS if name != "dropout"),
        *({"normalization": name, "arrangement": "original"} for name in ("layer", "group", "rms")),
        {"normalization": keras.layers.LayerNormalization(epsilon=0.1)},
        {"shape_shortcut": "zero_pad"},
        {"block": "bottleneck", "groups": 2, "stride_on": "3x3", "use_bias": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("changed", [False, True], ids=["kept", "changed"])
def test_units(options, changed):
    filters, channels, strides = 4, 4 * (4 if "block" in options else 1), 1
    if changed:
        channels, strides = 3, 2
    x = harness.images(2, 5, 6, channels)

    def make(data_format):
        unit = harness.unit_of(filters, strides=strides, data_format=data_format, **options)
        shape = first(x).shape if data_format == "channels_first" else x.shape
        unit.build(shape)
        assert unit.compute_output_shape(shape) == tuple(unit(np.zeros(shape, "float32")).shape)
        return unit

    check(make, x)


def test_dense_units_have_their_features_last_in_either_format():
    """Vectors, and vectors in a grid, whatever Keras' setting for images is."""
    x = harness.images(2, 3, 5, 4)
    for options in ({}, {"shortcut": "conv1x1"}, {"shape_shortcut": "zero_pad"}):
        units = [
            harness.unit_of(6, block="dense", data_format=name, **options)
            for name in ("channels_last", "channels_first")
        ]
        for unit in units:
            assert unit.compute_output_shape(x.shape) == (2, 3, 5, 6)
            unit.build(x.shape)
        units[1].set_weights(units[0].get_weights())
        want, got = (harness.numpy(unit(x)) for unit in units)
        assert want.shape == (2, 3, 5, 6)
        np.testing.assert_allclose(got, want, 1e-5, 1e-6)


@pytest.mark.parametrize(
    "build", [kp.models.resnet_cifar, kp.models.wide_resnet, kp.models.resnet_imagenet]
)
def test_default_input_shape_follows_the_format(build):
    size = 224 if build is kp.models.resnet_imagenet else 32
    arguments = {
        kp.models.resnet_cifar: (8,),
        kp.models.wide_resnet: (10, 0.125),
        kp.models.resnet_imagenet: ((1, 1),),
    }[build]
    assert build(*arguments).input_shape == (None, size, size, 3)
    assert build(*arguments, data_format="channels_first").input_shape == (None, 3, size, size)


@pytest.mark.parametrize("size", [4, 5])
def test_bias_is_added_to_the_channels_of_a_map_as_wide_as_they_are_many(size):
    """Keras 3.15 on TensorFlow takes the last axis for the channels if its width is
    their number.
    """

    def make(data_format):
        unit = harness.unit_of(
            4, data_format=data_format, use_bias=True, shortcut="exclusive_gating"
        )
        unit.build((2, 4, size, size) if data_format == "channels_first" else (2, size, size, 4))
        return unit

    check(make, harness.images(2, size, size, 4))
