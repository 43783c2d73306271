"""Comparison with networks of Torch, drawn anew: replicas of those for CIFAR with the
released code's nesting and with the ports' attributes.
"""

import collections

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


class AttributesUnit(nn.Module):
    """Its projection reads the raw input."""

    def __init__(self, channels, filters, block, stride):
        super().__init__()
        rows = [(3, filters, stride), (3, filters, 1)]
        if block == "bottleneck":
            rows = [(1, filters, 1), (3, filters, stride), (1, 4 * filters, 1)]
        out = rows[-1][1]
        changes = stride > 1 or channels != out
        projection = nn.Sequential(conv(channels, out, 1, stride))
        self.downsample = projection if changes else nn.Identity()
        for i, (size, width, strides) in enumerate(rows, 1):
            self.add_module(f"bn{i}", nn.BatchNorm2d(channels))
            self.add_module(f"conv{i}", conv(channels, width, size, strides))
            channels = width

    def forward(self, x):
        shortcut, *layers = self.children()
        residual = x
        for norm, weight in zip(layers[::2], layers[1::2], strict=True):
            residual = weight(torch.relu(norm(residual)))
        return shortcut(x) + residual


def attributes(units, block="bottleneck"):
    """The network of the PyTorch ports."""
    channels, parts = 4, {"conv1": conv(3, 4, 3)}
    for s, filters in enumerate((4, 8, 12), 1):
        stage = nn.Sequential()
        for u in range(units):
            stage.append(AttributesUnit(channels, filters, block, 2 if s > 1 and u == 0 else 1))
            channels = filters * (4 if block == "bottleneck" else 1)
        parts[f"layer{s}"] = stage
    parts |= {"bn": nn.BatchNorm2d(channels), "relu": nn.ReLU(), "pool": nn.AdaptiveAvgPool2d(1)}
    return nn.Sequential(
        collections.OrderedDict(parts, flat=nn.Flatten(), fc=nn.Linear(channels, 10))
    )


class PreActBlock(nn.Module):
    """A unit of pytorch-cifar: its projection reads the activated input."""

    def __init__(self, channels, width, stride, bottleneck):
        super().__init__()
        rows = [(3, width, stride), (3, width, 1)]
        if bottleneck:
            rows = [(1, width, 1), (3, width, stride), (1, 4 * width, 1)]
        self.depth, out = len(rows), rows[-1][1]
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(conv(channels, out, 1, stride))
        for i, (size, filters, strides) in enumerate(rows, 1):
            setattr(self, f"bn{i}", nn.BatchNorm2d(channels))
            setattr(self, f"conv{i}", conv(channels, filters, size, strides))
            channels = filters

    def forward(self, x):
        activated = torch.relu(self.bn1(x))
        branch = self.conv1(activated)
        for i in range(2, self.depth + 1):
            branch = getattr(self, f"conv{i}")(torch.relu(getattr(self, f"bn{i}")(branch)))
        return branch + (self.shortcut(activated) if hasattr(self, "shortcut") else x)


class PreActResNet(nn.Module):
    """The network of pytorch-cifar, with four stages; with `last_norm` that of its forks."""

    def __init__(self, units, bottleneck=False, last_norm=False, width=8):
        super().__init__()
        channels, self.conv1 = width, conv(3, width, 3)
        for s, count in enumerate(units, 1):
            stage = nn.Sequential()
            for u in range(count):
                stride = 2 if s > 1 and u == 0 else 1
                stage.append(PreActBlock(channels, width * 2 ** (s - 1), stride, bottleneck))
                channels = width * 2 ** (s - 1) * (4 if bottleneck else 1)
            setattr(self, f"layer{s}", stage)
        if last_norm:
            self.bn = nn.BatchNorm2d(channels)
        self.linear = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.conv1(x)
        for s in (1, 2, 3, 4):
            x = getattr(self, f"layer{s}")(x)
        if hasattr(self, "bn"):
            x = torch.relu(self.bn(x))
        return self.linear(nn.functional.avg_pool2d(x, 4).flatten(1))


#: A replica of every kind, small.
CIFAR = {
    "bottleneck": lambda: containers(2),
    "basic": lambda: containers(3, "basic", "zero_pad", (8, 16, 32)),
    "basic with projections": lambda: containers(2, "basic"),
    "linear in a container": lambda: containers(1, "basic", linear=linear_in_a_container),
    "attributes, bottleneck": lambda: attributes(2),
    "attributes, basic": lambda: attributes(2, "basic"),
    "pytorch-cifar": lambda: PreActResNet((1, 2, 1, 1)),
    "pytorch-cifar, bottleneck": lambda: PreActResNet((2, 1, 1, 1), bottleneck=True),
    "pytorch-cifar, last norm": lambda: PreActResNet((1, 1, 1, 1), last_norm=True),
}
