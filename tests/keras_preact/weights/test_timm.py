"""timm's networks and ours have equal outputs, and take each other's weights; timm
itself is the reference.
"""

import functools

import numpy as np
import pytest

from keras_preact import weights
from tests import torchvision_stub
from tests.keras_preact import harness

torch = pytest.importorskip("torch")
torchvision_stub.import_torchvision_or_stub()
timm = pytest.importorskip("timm")

from timm.layers import BatchNormAct2d, StdConv2d, create_conv2d  # noqa: E402
from timm.models.resnetv2 import ResNetV2  # noqa: E402

from tests.keras_preact.weights.torch_nets import randomized, theirs_on  # noqa: E402

BATCH = {"conv_layer": create_conv2d, "norm_layer": BatchNormAct2d}
BIT = {"conv_layer": functools.partial(StdConv2d, eps=1e-8), "stem_type": "fixed"}
SMALL = {"layers": (1, 2, 1, 1), "stem_chs": 32, "num_classes": 7}

#: Small networks of timm's class: every kind of unit and stem that the whole ones have.
TINY = {
    "basic": lambda **options: ResNetV2(
        channels=(32, 64, 64, 96), basic=True, bottle_ratio=1.0, **BATCH | SMALL | options
    ),
    "bottleneck": lambda **options: ResNetV2(
        channels=(128, 256, 256, 384), **BATCH | SMALL | options
    ),
    "bit": lambda **options: ResNetV2(channels=(128, 256, 256, 384), **BIT | SMALL | options),
}


def images(size=32, width=None):
    return harness.images(2, size, width or size, 3)


def check_same(model, net, x):
    ours, theirs = harness.numpy(model(x, training=False)), theirs_on(net, x)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize(
    "kind", [pytest.param("basic", marks=pytest.mark.backend), "bottleneck", "bit"]
)
def test_outputs_and_the_way_back(kind):
    net = randomized(TINY[kind]())
    model = weights.from_timm(net.state_dict(), input_shape=(None, None, 3), stacked=kind == "bit")
    check_same(model, net, images())
    check_same(model, net, images(33, 46))  # the zero padding of the pooling shows at the border
    state = {name: torch.tensor(array) for name, array in weights.to_timm(model).items()}
    for name, tensor in net.state_dict().items():
        assert state[name].dtype == tensor.dtype
    other = TINY[kind]()
    other.load_state_dict(state, strict=True)
    check_same(model, other.eval(), images())


@pytest.mark.soak
def test_a_whole_network():
    net = randomized(timm.create_model("resnetv2_50x1_bit", num_classes=10))
    model = weights.from_timm(net.state_dict(), input_shape=(64, 64, 3))
    assert model.name == "resnetv2_50x1_bit"
    check_same(model, net, images(64))
    assert weights.to_timm(model).keys() == net.state_dict().keys()


@pytest.mark.parametrize("channels", [1, 4])
def test_other_channels_and_classes_as_timm_adapts_them(tmp_path, channels):
    """`create_model(pretrained=True)` from a file is timm's own way of it."""
    small = {"layers": (1, 1, 1, 1), "channels": (32, 32, 32, 32), "stem_chs": 32}
    net = randomized(timm.create_model("resnetv2_18", num_classes=7, **small))
    path = tmp_path / "net.safetensors"
    weights.write_state(path, {name: tensor.numpy() for name, tensor in net.state_dict().items()})
    adapted = timm.create_model(
        "resnetv2_18",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(path), "num_classes": 7},
        in_chans=channels,
        num_classes=5,
        **small,
    ).state_dict()
    own = weights.to_timm(weights.from_timm(path, input_shape=(32, 32, channels), classes=5))
    assert {name: array.shape for name, array in own.items()} == {
        name: tensor.shape for name, tensor in adapted.items()
    }
    for name, tensor in adapted.items():
        if not name.startswith("head."):  # new, there and here
            np.testing.assert_allclose(own[name], tensor.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("resnetv2_50d_evos", {}, "three 3x3 convolutions .* and EvoNorm"),
        ("resnetv2_50d_frn", {}, "three 3x3 convolutions .* and filter response"),
        ("resnetv2_50", {"preact": False}, "original order"),
    ],
)
def test_variants_without_counterpart(name, options, what):
    small = {"layers": (1, 1, 1, 1), "channels": (128, 128, 128, 128)}
    net = timm.create_model(name, **small, **options)
    with pytest.raises(ValueError, match=what):
        weights.from_timm(net.state_dict())


WIDE = torch.zeros(65, 64, 3, 3)


def without(state, start):
    return {name: tensor for name, tensor in state.items() if not name.startswith(start)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: without(state, "stem"), r"no weights of a timm ResNetV2"),
        (lambda state: without(state, "stages.3"), r"4 stages\. Received: weights of 3"),
        (lambda state: without(state, "stages.1.blocks.0.conv1.weight"), r"conv1\.weight.*lack"),
        (lambda state: state | {"stages.1.blocks.0.conv2.weight": WIDE}, "weight with 65 channels"),
    ],
)
def test_other_weights(change, message):
    with pytest.raises(ValueError, match=message):
        weights.from_timm(change(TINY["basic"]().state_dict()))


def strides_on_the_first_convolution(net):
    for stage in net.stages[1:]:
        block = stage.blocks[0]
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride


#: Networks whose weights have the names and shapes of those of `TINY`, and the option of ours that
#: computes the same, if there is one.
LOOKALIKES = {
    "another activation": ("bottleneck", {"act_layer": torch.nn.GELU}, {"activation": "gelu"}),
    "another stem": ("bottleneck", {"stem_type": "fixed"}, {"stem": "7x7_zero_padded"}),
    "average pooling in projections": ("bottleneck", {"avg_down": True}, None),
    "no standardised weights": (
        "bit",
        {"conv_layer": create_conv2d},
        {"standardize_weights": False},
    ),
    "strides on the first convolution": ("bottleneck", {}, {"stride_on": "first"}),
}


@pytest.mark.parametrize("kind", LOOKALIKES)
def test_a_sample_shows_a_network_that_computes_something_else(kind):
    like, options, same = LOOKALIKES[kind]
    net = TINY[like](**options)
    if kind.startswith("strides"):
        strides_on_the_first_convolution(net)
    randomized(net)
    given = {"input_shape": (32, 32, 3), "check": (images(), theirs_on(net, images()))}
    with pytest.raises(ValueError, match="does not compute what its source does"):
        weights.from_timm(net.state_dict(), **given)
    if same is not None:
        weights.from_timm(net.state_dict(), **given, **same)
