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
PLACES = ("stage1", "stage2", "stage3", "head")


def network(output_stride, units=(2, 2, 2), **options):
    options = {"width_factor": 0.0625, "input_shape": (SIZE, SIZE, 3), "classes": 3} | options
    return kp.models.resnet_imagenet(units, output_stride=output_stride, **options)


def maps(model, x, places=PLACES) -> dict[str, np.ndarray]:
    found = transfer.feature_extractor(model, places)(x, training=False)
    return {name: harness.numpy(tensor) for name, tensor in found.items()}


def check(output_stride, **options) -> None:
    strided, dilated = network(None, **options), network(output_stride, **options)
    harness.randomize(strided)
    dilated.set_weights(strided.get_weights())
    x = harness.images(1, *strided.input_shape[1:])
    expected, found = maps(strided, x), maps(dilated, x)
    strides = STRIDES[options.get("strided_unit", "first")]
    side = 2 if options.get("data_format") == "channels_first" else 1
    for name, stride in zip(PLACES, (*strides, strides[-1]), strict=True):
        step = max(1, stride // output_stride)
        index = (*[slice(None)] * side, slice(None, None, step), slice(None, None, step))
        assert found[name].shape[side] == -(-x.shape[side] // min(stride, output_stride))
        np.testing.assert_allclose(
            found[name][index], expected[name], rtol=1e-4, atol=1e-5, err_msg=name
        )
        if step > 1:  # the places between are no copies
            shifted = np.roll(found[name], -1, axis=(side, side + 1))[index]
            assert np.abs(shifted - expected[name]).max() > 1e-3


GROUPS = {"groups": 2, "base_width": 64}


@pytest.mark.parametrize(
    ("output_stride", "options"),
    [  # every pair of block, stride and unit; and the options that change the arithmetic
        (4, {"block": "single"}),
        (8, {"block": "single", "strided_unit": "last"}),
        (8, {"block": "basic"}),
        (4, {"block": "basic", "strided_unit": "last"}),
        (4, {"block": "bottleneck"}),
        (8, {"block": "bottleneck", "strided_unit": "last"}),
        (4, {"block": "bottleneck", "stride_on": "first", "strided_unit": "last"} | GROUPS),
        (4, {"stacked": True, "units": (1, 3, 3), "arrangement": "original"}),
        (4, {"shape_shortcut": "zero_pad", "width_factor": 0.25}),
        (4, {"stem": "7x7_zero_padded", "stacked": True, "units": (3, 3, 2)}),
        # the maps of the strided network have odd sizes, so that an average has fewer pixels
        (4, {"stem": "deep", "downsampling": "average", "input_shape": (76, 84, 3)}),
        (8, {"strided_unit": "last", "downsampling": "average"}),
    ],
    ids=str,
)
def test_sampled_it_is_the_strided_network(output_stride, options):
    check(output_stride, **options)


@pytest.mark.backend
def test_channels_first():
    if keras.backend.backend() == "tensorflow":
        pytest.skip("TensorFlow has no dilated convolution with the channels first on a CPU")
    options = {"data_format": "channels_first", "input_shape": (3, SIZE, SIZE)}
    check(4, **options, stem="deep", downsampling="average")


def test_files_keep_the_stride(tmp_path):
    network(8).save(tmp_path / "dilated.keras")
    loaded = keras.saving.load_model(tmp_path / "dilated.keras")
    assert loaded.stage_outputs["stage3"].shape[1:3] == (8, 8)


def test_a_cifar_network():
    """Its strides are 1, 2 and 4; its own one changes nothing."""
    options = {"width_factor": 0.25, "input_shape": (16, 16, 3)}
    models = [kp.models.resnet_cifar(14, output_stride=s, **options) for s in (None, 1, 4)]
    harness.randomize(models[0])
    for model in models[1:]:
        model.set_weights(models[0].get_weights())
    x = harness.images(1, 16, 16, 3)
    expected, found, same = (maps(model, x, ["head", "stage1"])["head"] for model in models)
    assert found.shape[1:3] == (16, 16)
    np.testing.assert_allclose(found[:, ::4, ::4], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(same, expected)


@pytest.mark.parametrize("wrong", [12, 0, -8, 2, 32, "8", 8.5])
def test_wrong_values(wrong):
    message = harness.error_of(lambda: network(wrong))
    assert "`output_stride` must be one of 4, 8, 16" in message
