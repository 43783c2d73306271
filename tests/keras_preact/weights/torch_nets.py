"""Torch's networks that ours are compared with, drawn anew: replicas of the networks for
CIFAR with the released code's nesting and with the ports' attributes.
"""

import numpy as np
import pytest

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


def theirs_on(net, images):
    with torch.no_grad():
        return net(torch.tensor(np.moveaxis(images, -1, 1))).numpy()


class ConcatTable(nn.Sequential):
    def forward(self, x):
        return [module(x) for module in self]


class CAddTable(nn.Module):
    def forward(self, tensors):
        return sum(tensors)


class Concat(nn.Sequential):
    def forward(self, x):
        return torch.cat([module(x) for module in self], 1)


class Zero(nn.Module):
    def forward(self, x):
        return x * 0


def conv(channels, filters, size, stride=1):
    return nn.Conv2d(channels, filters, size, stride, size // 2, bias=False)


def norm(channels, activation):
    return [nn.BatchNorm2d(channels), activation()]


def containers(
    units,
    block="bottleneck",
    shortcut="projection",
    widths=(4, 8, 12),
    linear=nn.Linear,
    activation=nn.ReLU,
):
    """The released network as a tree of containers."""
    expansion = 4 if block == "bottleneck" else 1
    channels = widths[0]
    stages = []
    for filters, first_stride in zip(widths, (1, 2, 2), strict=True):
        stage = []
        for u in range(units):
            out, stride = filters * expansion, first_stride if u == 0 else 1
            first = norm(channels, activation)
            between = norm(filters, activation)
            if block == "basic":
                branch = [conv(channels, filters, 3, stride), *between, conv(filters, filters, 3)]
            else:
                branch = [conv(channels, filters, 1, stride), *between, conv(filters, filters, 3)]
                branch += [*norm(filters, activation), conv(filters, out, 1)]
            if u:
                unit = [ConcatTable(nn.Sequential(*first, *branch), nn.Identity()), CAddTable()]
            else:
                if out == channels:
                    path = nn.Identity()
                elif shortcut == "projection":
                    path = nn.Sequential(conv(channels, out, 1, stride))
                else:
                    path = nn.Sequential(nn.AvgPool2d(1, stride), Concat(nn.Identity(), Zero()))
                unit = [*first, ConcatTable(nn.Sequential(*branch), path), CAddTable()]
            stage.append(nn.Sequential(*unit))
            channels = out
        stages.append(nn.Sequential(*stage))
    head = [*norm(channels, activation), nn.AvgPool2d(8), nn.Flatten(), linear(channels, 10)]
    return nn.Sequential(conv(3, widths[0], 3), *stages, *head)


def linear_in_a_container(*sizes):
    return nn.Sequential(nn.Identity(), nn.Linear(*sizes))


class Leaky(nn.Module):
    def forward(self, x):
        return nn.functional.leaky_relu(x, 0.2)


class AttributesUnit(nn.Module):
    """Its projection reads the raw input, or as in the paper the activated one."""

    def __init__(self, channels, filters, block, stride, stride_on, activated):
        super().__init__()
        self.activated = activated
        basic = block == "basic"
        sizes = (3, 3) if basic else (1, 3, 1)
        widths = (filters, filters) if basic else (filters, filters, 4 * filters)
        strided = 0 if basic or stride_on == "first" else 1
        changes = stride > 1 or channels != widths[-1]
        self.downsample = (
            nn.Sequential(conv(channels, widths[-1], 1, stride)) if changes else nn.Identity()
        )
        self.length = len(sizes)
        for i, (size, width) in enumerate(zip(sizes, widths, strict=True)):
            setattr(self, f"bn{i + 1}", nn.BatchNorm2d(channels))
            stride_of_it = stride if i == strided else 1
            setattr(self, f"conv{i + 1}", conv(channels, width, size, stride_of_it))
            channels = width

    def forward(self, x):
        projects = isinstance(self.downsample, nn.Sequential)
        activated = torch.relu(self.bn1(x))
        shortcut = self.downsample(activated if self.activated and projects else x)
        x = self.conv1(activated)
        for i in range(2, self.length + 1):
            x = getattr(self, f"conv{i}")(torch.relu(getattr(self, f"bn{i}")(x)))
        return x + shortcut


class Attributes(nn.Module):
    """The network of the PyTorch ports."""

    def __init__(self, units, block="bottleneck", stride_on="3x3", activated=False):
        super().__init__()
        channels, expansion = 4, 4 if block == "bottleneck" else 1
        self.conv1 = conv(3, channels, 3)
        for s, filters in enumerate((4, 8, 12), 1):
            stage = []
            for u in range(units):
                stride = 2 if s > 1 and u == 0 else 1
                stage.append(AttributesUnit(channels, filters, block, stride, stride_on, activated))
                channels = filters * expansion
            setattr(self, f"layer{s}", nn.Sequential(*stage))
        self.bn = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        return self.fc(torch.relu(self.bn(x)).mean((2, 3)))


#: A replica of every kind, small.
CIFAR = {
    "bottleneck": lambda: containers(2),
    "basic": lambda: containers(3, "basic", "zero_pad", (8, 16, 32)),
    "basic with projections": lambda: containers(2, "basic"),
    "linear in a container": lambda: containers(1, "basic", linear=linear_in_a_container),
    "attributes, bottleneck": lambda: Attributes(2),
    "attributes, basic": lambda: Attributes(2, "basic"),
}
