"""keras-hub's pre-activation ResNetBackbone, and classifiers around it, compute what
ours do, here and back.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

keras_hub = pytest.importorskip("keras_hub")

BLOCKS = ["basic_block", "bottleneck_block"]


def backbone(block_type, **options):
    """Of 2 and 2 units with random weights."""
    options = {"use_pre_activation": True, "image_shape": (40, 40, 3)} | options
    model = keras_hub.models.ResNetBackbone(
        [64], [7], [64, 72], [2, 2], [1, 2], block_type, **options
    )
    harness.randomize(model)
    return model


def classifier(block_type, **options):
    model = keras_hub.models.ImageClassifier(
        backbone=backbone(block_type), num_classes=5, **options
    )
    harness.randomize(model, seed=2)
    return model


def check_same(one, other, shape=(40, 40, 3)):
    images = harness.images(2, *shape)
    expected = keras.ops.convert_to_numpy(one(images))
    assert expected.std() > 0.01
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(other(images)), expected, atol=1e-4, rtol=1e-4
    )


def check_equal_weights(one, other):
    for weight, its in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, its)


@pytest.mark.backend
@pytest.mark.parametrize("block_type", BLOCKS)
def test_backbones_and_back(block_type):
    theirs = backbone(block_type)
    ours = kp.weights.from_keras_hub(theirs)
    check_same(theirs, ours)
    back = kp.weights.to_keras_hub(ours)
    assert type(back) is keras_hub.models.ResNetBackbone
    check_equal_weights(theirs, back)
    own = {key: value for key, value in back.get_config().items() if key != "dtype"}
    assert own == {key: value for key, value in theirs.get_config().items() if key != "dtype"}


@pytest.mark.backend
@pytest.mark.parametrize("options", [{}, {"pooling": "max", "activation": "softmax"}], ids=str)
def test_classifiers_and_back(options):
    theirs = classifier("bottleneck_block", **options)
    ours = kp.weights.from_keras_hub(theirs, stacked=True)
    check_same(theirs, ours)
    back = kp.weights.to_keras_hub(ours)
    assert isinstance(back, keras_hub.models.ImageClassifier)
    check_same(theirs, back)
    check_equal_weights(theirs, back)


def test_a_sample_shows_other_outputs():
    theirs = classifier("basic_block")
    images = harness.images(2, 40, 40, 3)
    outputs = keras.ops.convert_to_numpy(theirs(images))
    kp.weights.from_keras_hub(theirs, check=(images, outputs))
    outputs[1, 2] += 0.5
    message = harness.error_of(lambda: kp.weights.from_keras_hub(theirs, check=(images, outputs)))
    assert "largest difference from the outputs in `check` is 0.5" in message
    assert kp.weights.ASSUMPTIONS["keras_hub"] in message


def test_other_channels_classes_and_heads():
    theirs = classifier("basic_block")
    assert kp.weights.from_keras_hub(theirs, classes=3, input_shape=(40, 40, 1)).output_shape == (
        None,
        3,
    )
    check_same(theirs.backbone, kp.weights.from_keras_hub(theirs, include_top=False, pooling=None))
    assert kp.weights.from_keras_hub(theirs.backbone, classes=7).output_shape == (None, 7)


def test_any_size_and_channels_first():
    theirs = backbone("basic_block", image_shape=(3, None, None), data_format="channels_first")
    ours = kp.weights.from_keras_hub(theirs)
    assert ours.input_shape == (None, 3, None, None)
    last = kp.weights.from_keras_hub(theirs, data_format="channels_last")
    assert last.input_shape == (None, None, None, 3)
    check_same(kp.weights.from_keras_hub(backbone("basic_block")), last)


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"use_pre_activation": False}, "use_pre_activation=False"),
        (
            {"block_type": "basic_block_vd", "use_pre_activation": False},
            "block_type='basic_block_vd'",
        ),
        (
            {"input_conv_filters": [32, 64], "input_conv_kernel_sizes": [7, 3]},
            r"input_conv_kernel_sizes=\[7, 3\]",
        ),
    ],
    ids=str,
)
def test_other_backbones_are_refused(options, received):
    arguments = {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [7],
        "stackwise_num_filters": [64, 128],
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2],
        "block_type": "basic_block",
        "use_pre_activation": True,
    }
    with pytest.raises(ValueError, match=f"must have use_pre_activation=True.*{received}"):
        kp.weights.from_keras_hub(keras_hub.models.ResNetBackbone(**arguments | options))


def test_other_models_are_refused():
    with pytest.raises(ValueError, match=r"must be a keras_hub.models.ResNetBackbone"):
        kp.weights.from_keras_hub(kp.models.resnet_imagenet((1, 1), input_shape=(32, 32, 3)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"arrangement": "full_preactivation"}, "arrangement='full_preactivation'"),
        ({"stem": "7x7_zero_padded"}, "stem='7x7_zero_padded' where it has '7x7'"),
        ({"strided_unit": "last"}, "strides in the first unit of a stage"),
        ({"normalization": keras.layers.BatchNormalization(epsilon=1e-3)}, "normalization="),
        ({"std": 255.0}, "std=255.0 where it has None"),
        ({"width_factor": 0.5}, "64 filters in its first stage"),
        ({"include_top": False, "pooling": "avg"}, "pooling='avg'"),
    ],
    ids=harness.label,
)
def test_to_keras_hub_refuses_what_computes_otherwise(options, named):
    options = {"arrangement": "full_preactivation_raw_stem"} | options
    model = kp.models.resnet_imagenet((2, 2), input_shape=(32, 32, 3), **options)
    assert named in harness.error_of(lambda: kp.weights.to_keras_hub(model))


@pytest.mark.parametrize(
    ("block", "stages", "stage"),
    [("basic", [(64, 1, 2)], 1), ("bottleneck", [(64, 1, 1), (64, 1, 1)], 2)],
)
def test_to_keras_hub_refuses_projections_where_it_has_none(block, stages, stage):
    options = {
        "stem": "7x7",
        "stem_filters": 64,
        "input_shape": (32, 32, 3),
        "classes": 3,
    }
    made = kp.blocks.Bottleneck(stride_on="3x3") if block == "bottleneck" else block
    model = kp.models.ResidualNetwork(
        stages, block=made, arrangement="full_preactivation_raw_stem", **options
    )
    assert f"differs in stage {stage}" in harness.error_of(lambda: kp.weights.to_keras_hub(model))
