"""Networks for CIFAR of Torch: replicas with the released code's nesting and with the
ports' attributes agree with ours.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import weights

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


def branch(channels, filters, block, stride):
    """The weights and what stands between them, behind the first BN and ReLU."""
    between = [nn.BatchNorm2d(filters), nn.ReLU()]
    if block == "basic":
        return [conv(channels, filters, 3, stride), *between, conv(filters, filters, 3)]
    behind = [nn.BatchNorm2d(filters), nn.ReLU(), conv(filters, 4 * filters, 1)]
    return [conv(channels, filters, 1, stride), *between, conv(filters, filters, 3), *behind]


def containers(
    units, block="bottleneck", shortcut="projection", widths=(16, 32, 64), linear=nn.Linear
):
    """The released network as a tree of containers."""
    expansion = 4 if block == "bottleneck" else 1
    channels = widths[0]
    stages = []
    for filters, first_stride in zip(widths, (1, 2, 2), strict=True):
        stage = []
        for u in range(units):
            out, stride = filters * expansion, first_stride if u == 0 else 1
            weights = branch(channels, filters, block, stride)
            norm = [nn.BatchNorm2d(channels), nn.ReLU()]
            if u:
                unit = [ConcatTable(nn.Sequential(*norm, *weights), nn.Identity()), CAddTable()]
            else:
                if out == channels:
                    path = nn.Identity()
                elif shortcut == "projection":
                    path = nn.Sequential(conv(channels, out, 1, stride))
                else:
                    path = nn.Sequential(nn.AvgPool2d(1, stride), Concat(nn.Identity(), Zero()))
                unit = [*norm, ConcatTable(nn.Sequential(*weights), path), CAddTable()]
            stage.append(nn.Sequential(*unit))
            channels = out
        stages.append(nn.Sequential(*stage))
    head = [
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.AvgPool2d(8),
        nn.Flatten(),
        linear(channels, 10),
    ]
    return nn.Sequential(conv(3, widths[0], 3), *stages, *head)


def linear_in_a_container(*sizes):
    return nn.Sequential(nn.Identity(), nn.Linear(*sizes))


class AttributesUnit(nn.Module):
    def __init__(self, channels, filters, block, stride, downsample, stride_on):
        super().__init__()
        sizes, widths = (
            ((3, 3), (filters,) * 2)
            if block == "basic"
            else ((1, 3, 1), (filters, filters, 4 * filters))
        )
        strided = 0 if block == "basic" or stride_on == "first" else 1
        self.length = len(sizes)
        for i, (size, width) in enumerate(zip(sizes, widths, strict=True)):
            setattr(self, f"bn{i + 1}", nn.BatchNorm2d(channels))
            setattr(
                self, f"conv{i + 1}", conv(channels, width, size, stride if i == strided else 1)
            )
            channels = width
        self.downsample = downsample

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        for i in range(1, self.length + 1):
            x = getattr(self, f"conv{i}")(torch.relu(getattr(self, f"bn{i}")(x)))
        return x + shortcut


class Projecting(AttributesUnit):
    """Its projection reads the activated input, as in the paper."""

    def forward(self, x):
        activated = torch.relu(self.bn1(x))
        shortcut = x if self.downsample is None else self.downsample(activated)
        x = self.conv1(activated)
        for i in range(2, self.length + 1):
            x = getattr(self, f"conv{i}")(torch.relu(getattr(self, f"bn{i}")(x)))
        return x + shortcut


class Attributes(nn.Module):
    """The network of the PyTorch ports."""

    def __init__(
        self,
        units,
        block="bottleneck",
        widths=(16, 32, 64),
        stride_on="3x3",
        unit=AttributesUnit,
    ):
        super().__init__()
        channels = widths[0]
        self.conv1 = conv(3, channels, 3)
        for s, (filters, first_stride) in enumerate(zip(widths, (1, 2, 2), strict=True), 1):
            stage = []
            for u in range(units):
                out, stride = (
                    filters * (4 if block == "bottleneck" else 1),
                    first_stride if u == 0 else 1,
                )
                changes = stride > 1 or out != channels
                downsample = nn.Sequential(conv(channels, out, 1, stride)) if changes else None
                stage.append(unit(channels, filters, block, stride, downsample, stride_on))
                channels = out
            setattr(self, f"layer{s}", nn.Sequential(*stage))
        self.bn = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        return self.fc(torch.relu(self.bn(x)).mean((2, 3)))


#: A replica of every kind, small.
TINY = {
    "bottleneck": lambda: containers(2, widths=(4, 8, 12)),
    "basic": lambda: containers(3, "basic", "zero_pad", (8, 16, 32)),
    "basic with projections": lambda: containers(2, "basic", widths=(4, 8, 12)),
    "linear in a container": lambda: containers(
        1, "basic", widths=(4, 8, 12), linear=linear_in_a_container
    ),
    "attributes, bottleneck": lambda: Attributes(2, widths=(4, 8, 12)),
    "attributes, basic": lambda: Attributes(2, "basic", (4, 8, 12)),
}


def images(channels=3):
    return np.random.default_rng(5).normal(size=(2, 32, 32, channels)).astype("float32")


def assert_equal_outputs(model, net):
    ours, theirs = (
        keras.ops.convert_to_numpy(model(images(), training=False)),
        theirs_on(net, images()),
    )
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.backend
@pytest.mark.parametrize("kind", TINY)
def test_outputs_and_the_way_back(kind):
    net = randomized(TINY[kind]())
    model = weights.from_torch_cifar(net.state_dict())
    assert_equal_outputs(model, net)
    state, given = weights.to_torch_cifar(model), net.state_dict()
    if kind == "linear in a container":
        given = {name.replace("8.1.", "8."): tensor for name, tensor in given.items()}
    assert state.keys() == given.keys()
    for name, tensor in given.items():
        np.testing.assert_array_equal(state[name], tensor.numpy())


@pytest.mark.backend
@pytest.mark.soak
@pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="it compiles for minutes; the small ones run there"
)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("cifar_resnet164", lambda: containers(18)),
        ("cifar_resnet110", lambda: containers(18, "basic", "zero_pad")),
    ],
)
def test_the_papers_networks(name, make, tmp_path):
    net = randomized(make())
    torch.save(net.state_dict(), tmp_path / "net.pth")
    model = weights.from_torch_cifar(tmp_path / "net.pth")
    assert model.name == name
    assert_equal_outputs(model, net)
    own = kp.create_model(f"{name}_preact")
    same = {"name": "", "shortcut": ""}  # the pattern of the shortcut has a counted name
    assert model.get_config() | same == own.get_config() | same
    net.load_state_dict(
        {key: torch.tensor(array) for key, array in weights.to_torch_cifar(own).items()},
        strict=True,
    )
    assert_equal_outputs(own, net.eval())


@pytest.mark.backend
def test_stride_on_the_first_convolution_of_a_port():
    net = randomized(Attributes(1, widths=(4, 8, 12), stride_on="first"))
    assert_equal_outputs(weights.from_torch_cifar(net.state_dict(), stride_on="first"), net)


class Leaky(nn.Module):
    def forward(self, x):
        return nn.functional.leaky_relu(x, 0.2)


def leaky():
    """The released network with another activation, which has no weights."""
    net = TINY["bottleneck"]()
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, Leaky())
    return net


@pytest.mark.parametrize(
    ("make", "same"),
    [
        (
            lambda: Attributes(2, widths=(4, 8, 12), unit=Projecting),
            {"activate_shape_shortcut": True},
        ),
        (lambda: Attributes(1, widths=(4, 8, 12), stride_on="first"), {"stride_on": "first"}),
        (leaky, {"activation": "leaky_relu"}),
    ],
    ids=["projection", "stride", "activation"],
)
def test_a_sample_shows_what_the_weights_do_not(make, same):
    net = randomized(make())
    check = (images(), theirs_on(net, images()))
    with pytest.raises(ValueError, match=r"does not compute.* largest difference") as error:
        weights.from_torch_cifar(net.state_dict(), check=check)
    assert weights.ASSUMPTIONS["torch_cifar"] in str(error.value)
    weights.from_torch_cifar(net.state_dict(), check=check, **same)


@pytest.mark.backend
def test_other_channels_and_classes():
    net = randomized(TINY["basic"]())
    model = weights.from_torch_cifar(net.state_dict(), input_shape=(32, 32, 1), classes=100)
    assert (model.input_shape, model.output_shape) == ((None, 32, 32, 1), (None, 100))
    own, given = weights.to_torch_cifar(model), net.state_dict()
    np.testing.assert_allclose(
        own["0.weight"], given["0.weight"].sum(1, keepdim=True).numpy(), rtol=1e-6, atol=1e-7
    )
    np.testing.assert_array_equal(own["3.0.2.0.0.weight"], given["3.0.2.0.0.weight"].numpy())


@pytest.mark.parametrize(
    ("kind", "stage", "units", "depth"),
    [("bottleneck", 3, (2, 2, 1), 20), ("attributes, basic", 1, (1, 2, 2), 14)],
)
def test_a_stage_cut_short_is_told(kind, stage, units, depth):
    start = f"layer{stage}.1." if kind.startswith("attributes") else f"{stage}.1."
    state = {n: t for n, t in TINY[kind]().state_dict().items() if not n.startswith(start)}
    with pytest.warns(UserWarning, match=r"nearest known network, ResNet-") as caught:
        model = weights.from_torch_cifar(state)
    assert caught[0].filename == __file__
    assert f"stages of {units} units" in str(caught[0].message)
    assert f"ResNet-{depth}, has (2, 2, 2)" in str(caught[0].message)
    assert len(model.units) == 5


@pytest.mark.backend
class TestRefusal:
    def test_other_weights(self):
        state = TINY["attributes, basic"]().state_dict()
        torchvision = {
            name: tensor for name, tensor in state.items() if not name.startswith("bn.")
        }  # has bn1 there
        with pytest.raises(
            ValueError,
            match=r"no weights of a pre-activation network for CIFAR.*They are: conv1\.weight",
        ):
            weights.from_torch_cifar(torchvision)
        with pytest.raises(ValueError, match=r"3 stages\. Received: weights of 4"):
            weights.from_torch_cifar(state | {"layer4.0.conv1.weight": torch.zeros(4, 4, 3, 3)})

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_weights_that_are_no_numbers(self, value):
        state = TINY["basic"]().state_dict()
        state["4.running_var"][1] = value
        with pytest.raises(ValueError, match=r"must be finite.*infinity in 4\.running_var\."):
            weights.from_torch_cifar(state)

    def test_projections_with_a_normalisation(self):
        """As an early preresnet.lua had them: another function."""
        state = TINY["bottleneck"]().state_dict()
        with pytest.raises(weights.WeightsMismatch) as error:
            weights.from_torch_cifar(state | {"2.0.2.1.1.weight": torch.ones(32)})
        assert error.value.left_over == ["2.0.2.1.1.weight"]

    def test_networks_that_neither_has(self):
        options = {"input_shape": (8, 8, 3), "width_factor": 0.25}
        for model, message in (
            (
                kp.models.resnet_cifar(20, arrangement="original", **options),
                r"the released code for CIFAR does: arrangement=",
            ),
            (
                kp.models.resnet_cifar(29, block=kp.blocks.Bottleneck(stride_on="3x3"), **options),
                r"stride_on='3x3' where",
            ),
            (
                kp.models.resnet_cifar(20, arrangement="full_preactivation_raw_stem", **options),
                r"PyTorch ports.* does: activate_shape_shortcut=True where it has False",
            ),
            (
                kp.models.resnet_imagenet(
                    (1, 1, 1), block="basic", input_shape=(32, 32, 3), width_factor=0.25
                ),
                r"stem='7x7'",
            ),
            (None, r"must be a ResidualNetwork"),
        ):
            with pytest.raises(ValueError, match=message):
                weights.to_torch_cifar(model)
