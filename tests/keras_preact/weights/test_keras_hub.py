"""keras-hub's backbones: heads, sizes and formats, and what has no counterpart here."""

import pytest

import keras_preact as kp
from tests.keras_preact.weights.keras_nets import HUB_SIZES, backbone
from tests.keras_preact.weights.torch_nets import check_same

keras_hub = pytest.importorskip("keras_hub")


def test_a_head_for_a_backbone():
    theirs = backbone("basic_block")
    assert kp.weights.from_keras_hub(theirs, classes=7).output_shape == (None, 7)


def test_any_size_and_channels_first():
    theirs = backbone("basic_block", image_shape=(3, None, None), data_format="channels_first")
    ours = kp.weights.from_keras_hub(theirs)
    assert ours.input_shape == (None, 3, None, None)
    last = kp.weights.from_keras_hub(theirs, data_format="channels_last")
    assert last.input_shape == (None, None, None, 3)
    check_same(backbone("basic_block"), last, (40, 40))


@pytest.mark.parametrize(
    ("sizes", "block", "options", "received"),
    [
        (HUB_SIZES, "basic_block", {"use_pre_activation": False}, "use_pre_activation=False"),
        (HUB_SIZES, "basic_block_vd", {"use_pre_activation": False}, "block_type='basic_block_vd'"),
        (([32, 64], [7, 3], *HUB_SIZES[2:]), "basic_block", {}, r"kernel_sizes=\[7, 3\]"),
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
