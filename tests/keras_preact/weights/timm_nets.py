"""Small networks of timm's class: every kind of unit and stem that the whole ones have."""

import functools

import pytest

from tests import torchvision_stub

pytest.importorskip("torch")
torchvision_stub.import_torchvision_or_stub()
pytest.importorskip("timm")

from timm.layers import BatchNormAct2d, GroupNormAct, StdConv2d, create_conv2d  # noqa: E402
from timm.models.resnetv2 import ResNetV2  # noqa: E402

SMALL = {"layers": (1, 2, 1, 1), "stem_chs": 32, "num_classes": 7}
BATCH = SMALL | {"conv_layer": create_conv2d, "norm_layer": BatchNormAct2d}
#: Options of ResNet-D, `resnetv2_18d` and others, and of ResNet-T.
DEEP = {"stem_type": "deep", "avg_down": True}
TIERED = DEEP | {"stem_type": "tiered"}
GROUP = {"norm_layer": GroupNormAct, "stem_chs": 64}
BIT = SMALL | {"conv_layer": functools.partial(StdConv2d, eps=1e-8), "stem_type": "fixed"}


def basic(**options):
    return ResNetV2(channels=(32, 64, 64, 96), basic=True, bottle_ratio=1.0, **BATCH | options)


def bottleneck(**options):
    return ResNetV2(channels=(128, 256, 256, 384), **BATCH | options)


def bit(**options):
    return ResNetV2(channels=(128, 256, 256, 384), **BIT | options)


def strides_on_the_first_convolution():
    net = bottleneck()
    for stage in net.stages[1:]:
        block = stage.blocks[0]
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    return net
