"""Output strides: the dilated network computes what the strided one does, and all
places between, with the same weights.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import transfer
from tests.keras_preact import harness

SIZE = 64
#: Strides of the stages of an ImageNet network, at either place of the strided unit.
STRIDES = {"first": (4, 8, 16), "last": (8, 16, 16)}


def network(output_stride, units=(2, 2, 2), **options):
    options = {"width_factor": 0.0625, "input_shape": (SIZE, SIZE, 3), "classes": 3} | options
    return kp.models.resnet_imagenet(units, output_stride=output_stride, **options)


PLACES = ("stage1", "stage2", "stage3", "head")


def maps(model, x) -> dict[str, np.ndarray]:
    extractor = transfer.feature_extractor(model, PLACES)
    return {
        name: keras.ops.convert_to_numpy(tensor)
        for name, tensor in extractor(x, training=False).items()
    }


def check(strided, dilated, output_stride, strides, data_format="channels_last") -> None:
    dilated.set_weights(strided.get_weights())
    shape = (1, SIZE, SIZE, 3) if data_format == "channels_last" else (1, 3, SIZE, SIZE)
    x = harness.images(*shape)
    expected, found = maps(strided, x), maps(dilated, x)
    for name, stride in zip(PLACES, (*strides, strides[-1]), strict=True):
        step = max(1, stride // output_stride)
        places = slice(None, None, step)
        index = (
            (slice(None), places, places)
            if data_format == "channels_last"
            else (slice(None), slice(None), places, places)
        )
        side = 1 if data_format == "channels_last" else 2
        assert found[name].shape[side] == SIZE // min(stride, output_stride)
        np.testing.assert_allclose(
            found[name][index], expected[name], rtol=1e-4, atol=1e-5, err_msg=name
        )
        if step > 1:  # the places between are no copies
            shifted = np.roll(found[name], -1, axis=(side, side + 1))[index]
            assert np.abs(shifted - expected[name]).max() > 1e-3


@pytest.mark.backend
@pytest.mark.parametrize(
    ("output_stride", "block", "strided_unit"),
    [  # every pair
        (4, "single", "first"),
        (8, "single", "last"),
        (8, "basic", "first"),
        (4, "basic", "last"),
        (4, "bottleneck", "first"),
        (8, "bottleneck", "last"),
    ],
)
def test_sampled_it_is_the_strided_network(output_stride, block, strided_unit):
    options = {"block": block, "strided_unit": strided_unit}
    strided = network(None, **options)
    harness.randomize(strided)
    check(strided, network(output_stride, **options), output_stride, STRIDES[strided_unit])


@pytest.mark.parametrize(
    "options",
    [
        {"block": "bottleneck", "stride_on": "first"},
        {
            "block": "bottleneck",
            "stride_on": "first",
            "strided_unit": "last",
            "groups": 2,
            "base_width": 64,
        },
        {"block": "basic", "stacked": True, "units": (1, 3, 3), "arrangement": "original"},
        {
            "arrangement": "relu_only_preactivation",
            "shape_shortcut": "zero_pad",
            "width_factor": 0.25,
        },
        {"stem": "7x7_zero_padded", "strided_unit": "last", "stacked": True, "units": (3, 3, 2)},
    ],
    ids=str,
)
def test_of_every_option(options):
    strided = network(None, **options)
    harness.randomize(strided)
    check(strided, network(4, **options), 4, STRIDES[options.get("strided_unit", "first")])


@pytest.mark.backend
def test_channels_first():
    if keras.backend.backend() == "tensorflow":
        pytest.skip("TensorFlow has no dilated convolution with the channels first on a CPU")
    options = {"data_format": "channels_first", "input_shape": (3, SIZE, SIZE)}
    strided = network(None, **options)
    harness.randomize(strided)
    check(strided, network(8, **options), 8, STRIDES["first"], "channels_first")


@pytest.mark.backend
def test_the_networks_own_stride_changes_nothing():
    strided = network(None)
    harness.randomize(strided)
    same = network(16)
    same.set_weights(strided.get_weights())
    x = harness.images(1, SIZE, SIZE, 3)
    np.testing.assert_array_equal(
        *(keras.ops.convert_to_numpy(model(x)) for model in (same, strided))
    )


@pytest.mark.backend
def test_weights_of_files_fit(tmp_path):
    """Names and shapes are the same, so that a file of one is a file of the other; and
    .keras files keep the stride.
    """
    strided = network(None)
    harness.randomize(strided)
    strided.save_weights(tmp_path / "strided.weights.h5")
    dilated = network(8)
    dilated.load_weights(tmp_path / "strided.weights.h5")
    assert {w.path: tuple(w.shape) for w in dilated.weights} == {
        w.path: tuple(w.shape) for w in strided.weights
    }
    for path, value in harness.weights(strided).items():
        np.testing.assert_array_equal(harness.weights(dilated)[path], value, err_msg=path)
    dilated.save(tmp_path / "dilated.keras")
    loaded = keras.saving.load_model(tmp_path / "dilated.keras")
    x = harness.images(1, SIZE, SIZE, 3)
    np.testing.assert_array_equal(
        *(keras.ops.convert_to_numpy(model(x)) for model in (loaded, dilated))
    )
    assert loaded.stage_outputs["stage3"].shape[1:3] == (8, 8)


@pytest.mark.backend
def test_a_cifar_network():
    """Its strides are 1, 2 and 4."""
    strided, dilated = (
        kp.models.resnet_cifar(14, width_factor=0.25, input_shape=(16, 16, 3), output_stride=stride)
        for stride in (None, 1)
    )
    harness.randomize(strided)
    dilated.set_weights(strided.get_weights())
    x = harness.images(1, 16, 16, 3)
    found, expected = (
        transfer.feature_extractor(model, ["head"])(x)["head"] for model in (dilated, strided)
    )
    found, expected = map(keras.ops.convert_to_numpy, (found, expected))
    assert found.shape[1:3] == (16, 16)
    np.testing.assert_allclose(found[:, ::4, ::4], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.backend
@pytest.mark.parametrize("wrong", [12, 0, -8, 2, 32, "8", 8.5])
def test_wrong_values(wrong):
    message = harness.error_of(lambda: network(wrong))
    assert "`output_stride` must be one of 4, 8, 16" in message
    assert f"Received: output_stride={wrong!r}" in message
