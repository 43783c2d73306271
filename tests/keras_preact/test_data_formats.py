"""Channels first is channels last with transposed data, on every backend."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness


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


#: Options, and whether the unit changes the shape.
UNITS = [
    ({"arrangement": "original"}, True),
    ({"block": "bottleneck", "groups": 2, "stride_on": "3x3", "use_bias": True}, False),
    ({"arrangement": "bn_after_addition", "shortcut": "exclusive_gating"}, False),
    ({"arrangement": "relu_before_addition", "shortcut": "shortcut_only_gating"}, True),
    ({"arrangement": "relu_only_preactivation", "shortcut": "none"}, True),
    ({"arrangement": "bn_only_preactivation", "shortcut": "constant_scaling"}, False),
    ({"shortcut": "conv1x1", "normalization": "group"}, True),
    ({"normalization": "rms", "arrangement": "original"}, False),
    ({"normalization": keras.layers.LayerNormalization(epsilon=0.1)}, True),
    ({"shape_shortcut": "zero_pad", "normalization": "layer"}, True),
    ({"downsampling": "blur"}, True),
    ({"downsampling": "average", "squeeze_excitation": 2}, True),
    ({"shortcut": "hyper_connections", "arrangement": "original"}, True),
]


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        pytest.param(*case, marks=pytest.mark.backend if i < 2 else ())
        for i, case in enumerate(UNITS)
    ],
    ids=harness.label,
)
def test_units(options, changed):
    channels, strides = (3, 2) if changed else (16 if "block" in options else 4, 1)
    shortcut = options.get("shortcut", "identity")
    x = harness.images(*harness.with_streams((2, 5, 6, channels), shortcut))

    def make(data_format):
        unit = harness.unit_of(4, strides=strides, data_format=data_format, **options)
        shape = first(x).shape if data_format == "channels_first" else x.shape
        unit.build(shape)
        assert unit.compute_output_shape(shape) == tuple(unit(np.zeros(shape, "float32")).shape)
        return unit

    check(make, x)


def test_bias_is_added_to_the_channels_if_the_width_is_their_number():
    """If the last axis is as long as the number of channels, Keras 3.15 on TensorFlow
    takes it for the channels.
    """

    def make(data_format):
        unit = harness.unit_of(
            4, data_format=data_format, use_bias=True, shortcut="exclusive_gating"
        )
        unit.build((2, 4, 4, 4))
        return unit

    check(make, harness.images(2, 4, 4, 4))


@pytest.mark.parametrize(
    "options", [{"shortcut": "conv1x1"}, {"shape_shortcut": "zero_pad"}], ids=str
)
def test_dense_units_have_their_features_last_in_either_format(options):
    """This holds for vectors and for vectors in a grid, whatever Keras' `image_data_format`."""
    x = harness.images(2, 3, 5, 4)
    last, transposed = (
        harness.unit_of(6, block="dense", data_format=f"channels_{place}", **options)
        for place in ("last", "first")
    )
    for unit in (last, transposed):
        assert unit.compute_output_shape(x.shape) == (2, 3, 5, 6)
        unit.build(x.shape)
    transposed.set_weights(last.get_weights())
    harness.close(harness.numpy(transposed(x)), harness.numpy(last(x)))


NETWORKS = {
    "batch": lambda: kp.models.resnet_cifar(8, width_factor=0.25, input_shape=(8, 8, 3)),
    "layer": lambda: kp.models.resnet_cifar(
        8, width_factor=0.25, input_shape=(8, 8, 3), normalization="layer", mean=[1.0, 2.0, 3.0]
    ),
    "rms": lambda: kp.models.resnet_cifar(
        8, width_factor=0.25, input_shape=(8, 8, 3), normalization="rms"
    ),
    "transformer": lambda: kp.models.transformer(1, width=8, num_heads=2, input_shape=(8, 8, 3)),
}


@pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
def test_copies_of_networks_and_files_of_their_features(build, tmp_path):
    model = build()
    harness.randomize(model)
    x = harness.images(2, 8, 8, 3)
    copy = kp.models.changed_copy(model, data_format="channels_first")
    assert copy.input_shape == (None, 3, 8, 8)
    harness.close(harness.numpy(copy(first(x))), harness.numpy(model(x)), 1e-4)
    again = kp.models.changed_copy(copy, data_format="channels_last", input_shape=(8, 8, 3))
    harness.close(harness.numpy(again(x)), harness.numpy(model(x)), 1e-4)
    features = kp.transfer.feature_extractor(copy, ["stem", "head"])
    features.save(tmp_path / "features.keras")
    loaded = keras.saving.load_model(tmp_path / "features.keras")
    for name, want in features(first(x)).items():
        np.testing.assert_array_equal(harness.numpy(loaded(first(x))[name]), harness.numpy(want))


def test_sequences_have_their_channels_last():
    def build(**options):
        return kp.models.resnet_1d(8, input_shape=(16, 3), classes=2, **options)

    assert "transpose other sequences" in harness.error_of(
        lambda: build(data_format="channels_first")
    )
    for options in ({}, {"data_format": None}, {"data_format": "channels_last"}):
        assert build(**options).get_config()["data_format"] == "channels_last"
