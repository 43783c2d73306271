"""Small networks of pytorchcv's classes: every kind of unit and stem that the whole ones
have.
"""

import pytest

nn = pytest.importorskip("torch").nn
pytest.importorskip("pytorchcv")

from pytorchcv.models.preresnet import PreResNet  # noqa: E402
from pytorchcv.models.preresnet_cifar import CIFARPreResNet  # noqa: E402


def cifar(widths, bottleneck):
    channels = [[width] * 2 for width in widths]
    return CIFARPreResNet(channels, 4, bottleneck, num_classes=7)


def imagenet(bottleneck, stride_on_first=True):
    net = PreResNet([[16] * 2, [32], [48], [64]], 8, bottleneck, stride_on_first, num_classes=7)
    net.features.final_pool = nn.AdaptiveAvgPool2d(1)  # theirs is for 224 pixels
    return net


PYTORCHCV = {
    "CIFAR": lambda: cifar((4, 8, 12), False),
    "CIFAR, bottleneck": lambda: cifar((16, 32, 48), True),
    "ImageNet": lambda: imagenet(False),
    "ImageNet, bottleneck": lambda: imagenet(True),
    "ImageNet, b": lambda: imagenet(True, False),
}
