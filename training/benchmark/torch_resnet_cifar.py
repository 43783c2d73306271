"""The paper's network for CIFAR as a PyTorch user writes it, to measure beside
`kp.models.resnet_cifar`. It uses nothing of the library.
"""

from torch import nn
from torch.nn.functional import pad, relu


def _convolution(channels: int, filters: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)


class Unit(nn.Module):
    """BN, ReLU, convolution, twice. `first`: the stem has the first BN and ReLU."""

    def __init__(self, channels: int, filters: int, stride: int, first: bool):
        super().__init__()
        self.norm1 = None if first else nn.BatchNorm2d(channels)
        self.conv1 = _convolution(channels, filters, stride)
        self.norm2 = nn.BatchNorm2d(filters)
        self.conv2 = _convolution(filters, filters)
        self.missing, self.stride = filters - channels, stride

    def forward(self, x):
        activated = x if self.norm1 is None else relu(self.norm1(x))
        if self.missing:  # option A: every second pixel, and zeros for the new channels
            shortcut = activated[:, :, :: self.stride, :: self.stride]
            x = pad(shortcut, (0, 0, 0, 0, 0, self.missing))
        return x + self.conv2(relu(self.norm2(self.conv1(activated))))


class ResNet(nn.Module):
    """The pre-activation network of `depth` 6n + 2 with basic units. It returns logits."""

    def __init__(self, depth: int, classes: int = 10):
        super().__init__()
        self.stem_conv, self.stem_norm = _convolution(3, 16), nn.BatchNorm2d(16)
        widths = [width for width in (16, 32, 64) for _ in range((depth - 2) // 6)]
        self.units = nn.Sequential()
        for before, width in zip([16, *widths], widths, strict=False):
            stride = 1 if before == width else 2
            self.units.append(Unit(before, width, stride, first=not self.units))
        self.head_norm, self.classifier = nn.BatchNorm2d(64), nn.Linear(64, classes)

    def forward(self, x):
        x = self.units(relu(self.stem_norm(self.stem_conv(x))))
        return self.classifier(relu(self.head_norm(x)).mean((2, 3)))
