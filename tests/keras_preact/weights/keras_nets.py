"""Small networks of keras.applications and keras-hub with random weights."""

import pytest
from keras.src.applications import resnet

from tests.keras_preact import harness


def applications(shape=(40, 40, 3), **options):
    """A ResNetV2 of their parts with 2, 3 and 2 units, 8, 16 and 32 wide."""

    def stack(x):
        x = resnet.stack_residual_blocks_v2(x, 8, 2, name="conv2")
        x = resnet.stack_residual_blocks_v2(x, 16, 3, name="conv3")
        return resnet.stack_residual_blocks_v2(x, 32, 2, stride1=1, name="conv4")

    options = {"classes": 5, "classifier_activation": None, "input_shape": shape} | options
    model = resnet.ResNet(stack, True, True, weights=None, **options)
    harness.randomize(model)
    return model


HUB_SIZES = ([64], [7], [64, 72], [2, 2], [1, 2])


def backbone(block_type, **options):
    """A ResNetBackbone of 2 and 2 units."""
    hub = pytest.importorskip("keras_hub")
    options = {"use_pre_activation": True, "image_shape": (40, 40, 3)} | options
    model = hub.models.ResNetBackbone(*HUB_SIZES, block_type, **options)
    harness.randomize(model)
    return model


def classifier(block_type, **options):
    hub = pytest.importorskip("keras_hub")
    model = hub.models.ImageClassifier(backbone=backbone(block_type), num_classes=5, **options)
    harness.randomize(model, seed=2)
    return model
