"""Comparison with networks of Torch, drawn anew: replicas of those for CIFAR with the
released code's nesting and with the ports' attributes.
"""

import keras
import numpy as np
import pytest

from tests.keras_preact import harness

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402


def randomized(net, seed=0):
    """The network with every weight and statistic drawn anew, ready for inference."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if name.endswith("running_var") or (name.endswith("weight") and tensor.ndim == 1):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif tensor.ndim == 1:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
            elif tensor.ndim:
                tensor.copy_(
                    torch.randn(tensor.shape, generator=generator) * (2 / tensor[0].numel()) ** 0.5
                )
    return net.eval()


def outputs(net, images):
    """What a network of Keras or Torch returns for images with the channels last."""
    if isinstance(net, keras.Model):
        return harness.numpy(net(images, training=False))
    with torch.no_grad():
        return net(torch.tensor(np.moveaxis(images, -1, 1))).numpy()


def check_same(one, other, *sizes):
    """Compare the outputs of two networks for images of these heights and widths."""
    for size in sizes:
        x = harness.images(2, *size, 3)
        expected = outputs(one, x)
        assert expected.std() > 0.01
        close = {"rtol": 0, "atol": 1e-4 * np.abs(expected).max()}
        np.testing.assert_allclose(outputs(other, x), expected, **close)


class ConcatTable(nn.Sequential):
    def forward(self, x):
        return [module(x) for module in self]


class CAddTable(nn.Module):
    def forward(self, tensors):
        return sum(tensors)


def conv(channels, filters, size, stride=1):
    return nn.Conv2d(channels, filters, size, stride, size // 2, bias=False)


def norm(channels):
    return [nn.BatchNorm2d(channels), nn.ReLU()]


def containers(
    units, block="bottleneck", shortcut="projection", widths=(4, 8, 12), linear=nn.Linear
):
    """The released network as a tree of containers."""
    basic = block == "basic"
    channels, expansion = widths[0], 1 if basic else 4
    stages = []
    for filters, first_stride in zip(widths, (1, 2, 2), strict=True):
        stage = []
        for u in range(units):
            out, stride = filters * expansion, first_stride if u == 0 else 1
            first = norm(channels)
            branch = [conv(channels, filters, 3 if basic else 1, stride)]
            branch += [*norm(filters), conv(filters, filters, 3)]
            if not basic:
                branch += [*norm(filters), conv(filters, out, 1)]
            if u:
                unit = [ConcatTable(nn.Sequential(*first, *branch), nn.Identity()), CAddTable()]
            else:
                if out == channels:
                    path = nn.Identity()
                elif shortcut == "projection":
                    path = nn.Sequential(conv(channels, out, 1, stride))
                else:
                    padding = (0, 0, 0, 0, 0, out - channels)
                    path = nn.Sequential(nn.AvgPool2d(1, stride), nn.ZeroPad3d(padding))
                unit = [*first, ConcatTable(nn.Sequential(*branch), path), CAddTable()]
            stage.append(nn.Sequential(*unit))
            channels = out
        stages.append(nn.Sequential(*stage))
    head = [*norm(channels), nn.AvgPool2d(8), nn.Flatten(), linear(channels, 10)]
    return nn.Sequential(conv(3, widths[0], 3), *stages, *head)


def linear_in_a_container(*sizes):
    return nn.Sequential(nn.Identity(), nn.Linear(*sizes))


class PortsUnit(nn.Module):
    """A unit of the PyTorch ports, whose projection `downsample` reads the raw input, or of
    pytorch-cifar, whose projection `shortcut` reads the activated one.
    """

    def __init__(self, channels, width, stride, bottleneck, projection):
        super().__init__()
        rows = [(3, width, stride), (3, width, 1)]
        if bottleneck:
            rows = [(1, width, 1), (3, width, stride), (1, 4 * width, 1)]
        self.depth, self.projection, out = len(rows), projection, rows[-1][1]
        if stride > 1 or channels != out:
            self.add_module(projection, nn.Sequential(conv(channels, out, 1, stride)))
        for i, (size, filters, strides) in enumerate(rows, 1):
            self.add_module(f"bn{i}", nn.BatchNorm2d(channels))
            self.add_module(f"conv{i}", conv(channels, filters, size, strides))
            channels = filters

    def forward(self, x):
        activated = torch.relu(self.bn1(x))
        branch = self.conv1(activated)
        for i in range(2, self.depth + 1):
            branch = getattr(self, f"conv{i}")(torch.relu(getattr(self, f"bn{i}")(branch)))
        if not hasattr(self, self.projection):
            return branch + x
        read = x if self.projection == "downsample" else activated
        return branch + getattr(self, self.projection)(read)


class Ports(nn.Module):
    """A network of these units, with a classifier of some name."""

    def __init__(self, widths, units, bottleneck, projection, classifier, last_norm):
        super().__init__()
        self.stages, self.classifier = len(widths), classifier
        channels, self.conv1 = widths[0], conv(3, widths[0], 3)
        for s, (width, count) in enumerate(zip(widths, units, strict=True), 1):
            stage = nn.Sequential()
            for u in range(count):
                stride = 2 if s > 1 and u == 0 else 1
                stage.append(PortsUnit(channels, width, stride, bottleneck, projection))
                channels = width * (4 if bottleneck else 1)
            self.add_module(f"layer{s}", stage)
        if last_norm:
            self.bn = nn.BatchNorm2d(channels)
        self.add_module(classifier, nn.Linear(channels, 10))

    def forward(self, x):
        x = self.conv1(x)
        for s in range(1, self.stages + 1):
            x = getattr(self, f"layer{s}")(x)
        if hasattr(self, "bn"):
            x = torch.relu(self.bn(x))
        return getattr(self, self.classifier)(x.mean((2, 3)))


def attributes(units, bottleneck=True):
    """The network of the PyTorch ports."""
    return Ports((4, 8, 12), 3 * [units], bottleneck, "downsample", "fc", last_norm=True)


def preact_resnet(units, bottleneck=False, last_norm=False, width=8):
    """The network of pytorch-cifar, with four stages; with `last_norm` that of its forks."""
    widths = [width * 2**s for s in range(4)]
    return Ports(widths, units, bottleneck, "shortcut", "linear", last_norm)


#: A replica of every kind, small.
CIFAR = {
    "bottleneck": lambda: containers(2),
    "basic": lambda: containers(3, "basic", "zero_pad", (8, 16, 32)),
    "basic with projections": lambda: containers(2, "basic"),
    "linear in a container": lambda: containers(1, "basic", linear=linear_in_a_container),
    "attributes, bottleneck": lambda: attributes(2),
    "attributes, basic": lambda: attributes(2, bottleneck=False),
    "pytorch-cifar": lambda: preact_resnet((1, 2, 1, 1)),
    "pytorch-cifar, bottleneck": lambda: preact_resnet((2, 1, 1, 1), bottleneck=True),
    "pytorch-cifar, last norm": lambda: preact_resnet((1, 1, 1, 1), last_norm=True),
}
