"""Networks for CIFAR of Torch: replicas with the released code's nesting and with the
ports' attributes agree with ours.
"""

import numpy as np
import pytest

from keras_preact import weights
from tests.keras_preact import harness

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tests.keras_preact.weights.torch_nets import randomized, theirs_on  # noqa: E402


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
TINY = {
    "bottleneck": lambda: containers(2),
    "basic": lambda: containers(3, "basic", "zero_pad", (8, 16, 32)),
    "basic with projections": lambda: containers(2, "basic"),
    "linear in a container": lambda: containers(1, "basic", linear=linear_in_a_container),
    "attributes, bottleneck": lambda: Attributes(2),
    "attributes, basic": lambda: Attributes(2, "basic"),
}

IMAGES = harness.images(2, 32, 32, 3)


def check_same(model, net):
    ours, theirs = harness.numpy(model(IMAGES, training=False)), theirs_on(net, IMAGES)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


ON_ALL = "basic with projections"  # of the released code, and the fewest shapes


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.backend if kind == ON_ALL else []) for kind in TINY],
)
def test_outputs_and_the_way_back(kind):
    net = randomized(TINY[kind]())
    model = weights.from_torch_cifar(net.state_dict())
    check_same(model, net)
    state, given = weights.to_torch_cifar(model), net.state_dict()
    if kind == "linear in a container":
        given = {name.replace("8.1.", "8."): tensor for name, tensor in given.items()}
    assert state.keys() == given.keys()
    for name, tensor in given.items():
        np.testing.assert_array_equal(state[name], tensor.numpy())


@pytest.mark.parametrize(
    ("make", "same"),
    [
        (lambda: Attributes(2, activated=True), {"activate_shape_shortcut": True}),
        (lambda: Attributes(1, stride_on="first"), {"stride_on": "first"}),
        (lambda: containers(2, activation=Leaky), {"activation": "leaky_relu"}),
    ],
    ids=["projection", "stride", "activation"],
)
def test_a_sample_shows_what_the_weights_do_not(make, same):
    net = randomized(make())
    check = (IMAGES, theirs_on(net, IMAGES))
    with pytest.raises(ValueError, match=r"does not compute.* largest difference"):
        weights.from_torch_cifar(net.state_dict(), check=check)
    check_same(weights.from_torch_cifar(net.state_dict(), check=check, **same), net)


@pytest.mark.parametrize(
    ("kind", "start", "told"),
    [
        ("bottleneck", "3.1.", r"\(2, 2, 1\) units.*ResNet-20, has \(2, 2, 2\)"),
        ("attributes, basic", "layer1.1.", r"\(1, 2, 2\) units.*ResNet-14, has \(2, 2, 2\)"),
    ],
)
def test_a_stage_cut_short_is_told(kind, start, told):
    state = TINY[kind]().state_dict()
    with pytest.warns(UserWarning, match=told) as caught:
        weights.from_torch_cifar({n: t for n, t in state.items() if not n.startswith(start)})
    assert caught[0].filename == __file__


def test_other_weights():
    ports, released = TINY["attributes, basic"]().state_dict(), TINY["bottleneck"]().state_dict()
    for state, message in (
        # torchvision's have bn1 there
        ({name: t for name, t in ports.items() if not name.startswith("bn.")}, "are: conv1.weight"),
        (ports | {"layer4.0.conv1.weight": torch.zeros(4, 4, 3, 3)}, "3 stages.*weights of 4"),
        # an early preresnet.lua had projections with a normalisation: another function
        (released | {"2.0.2.1.1.weight": torch.ones(32)}, "1 left over: 2.0.2.1.1.weight"),
    ):
        with pytest.raises(ValueError, match=message):
            weights.from_torch_cifar(state)
