"""keras-hub's pre-activation ResNetBackbone, and classifiers around it, compute what
ours do, here and back.
"""

import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

keras_hub = pytest.importorskip("keras_hub")

SIZES = ([64], [7], [64, 72], [2, 2], [1, 2])


def backbone(block_type, **options):
    """Of 2 and 2 units with random weights."""
    options = {"use_pre_activation": True, "image_shape": (40, 40, 3)} | options
    model = keras_hub.models.ResNetBackbone(*SIZES, block_type, **options)
    harness.randomize(model)
    return model


def classifier(block_type, **options):
    model = keras_hub.models.ImageClassifier(
        backbone=backbone(block_type), num_classes=5, **options
    )
    harness.randomize(model, seed=2)
    return model


def check_same(one, other):
    x = harness.images(2, 40, 40, 3)
    expected = harness.numpy(one(x))
    assert expected.std() > 0.01
    np.testing.assert_allclose(harness.numpy(other(x)), expected, atol=1e-4, rtol=1e-4)


def check_equal_weights(one, other):
    for weight, its in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, its)


@pytest.mark.backend
def test_a_backbone_and_back():
    theirs = backbone("basic_block")
    ours = kp.weights.from_keras_hub(theirs)
    check_same(theirs, ours)
    back = kp.weights.to_keras_hub(ours)
    assert type(back) is keras_hub.models.ResNetBackbone
    check_equal_weights(theirs, back)
    configs = [model.get_config() | {"dtype": ""} for model in (back, theirs)]
    assert configs[0] == configs[1]


def test_a_classifier_and_back():
    theirs = classifier("bottleneck_block", pooling="max", activation="softmax")
    ours = kp.weights.from_keras_hub(theirs, stacked=True)
    check_same(theirs, ours)
    back = kp.weights.to_keras_hub(ours)
    assert isinstance(back, keras_hub.models.ImageClassifier)
    check_same(theirs, back)
    check_equal_weights(theirs, back)


def test_a_head_for_a_backbone_and_none_for_a_classifier():
    theirs = classifier("basic_block")
    check_same(theirs.backbone, kp.weights.from_keras_hub(theirs, include_top=False, pooling=None))
    assert kp.weights.from_keras_hub(theirs.backbone, classes=7).output_shape == (None, 7)


def test_any_size_and_channels_first():
    theirs = backbone("basic_block", image_shape=(3, None, None), data_format="channels_first")
    ours = kp.weights.from_keras_hub(theirs)
    assert ours.input_shape == (None, 3, None, None)
    last = kp.weights.from_keras_hub(theirs, data_format="channels_last")
    assert last.input_shape == (None, None, None, 3)
    check_same(backbone("basic_block"), last)


@pytest.mark.parametrize(
    ("sizes", "block", "options", "received"),
    [
        (SIZES, "basic_block", {"use_pre_activation": False}, "use_pre_activation=False"),
        (SIZES, "basic_block_vd", {"use_pre_activation": False}, "block_type='basic_block_vd'"),
        (([32, 64], [7, 3], *SIZES[2:]), "basic_block", {}, r"kernel_sizes=\[7, 3\]"),
    ],
)
def test_other_backbones_are_refused(sizes, block, options, received):
    theirs = keras_hub.models.ResNetBackbone(
        *sizes, block, **{"use_pre_activation": True} | options
    )
    with pytest.raises(ValueError, match=received):
        kp.weights.from_keras_hub(theirs)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match=r"must be a keras_hub.models.ResNetBackbone"):
        kp.weights.from_keras_hub(kp.models.resnet_cifar(8))
