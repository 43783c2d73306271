"""timm's whole networks, its own adaptation of weights, and its variants without a
counterpart here.
"""

import numpy as np
import pytest

import keras_preact as kp
from keras_preact import weights
from tests.keras_preact.weights import timm_nets
from tests.keras_preact.weights.torch_nets import check_same, randomized, torch

timm = pytest.importorskip("timm")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["resnetv2_50x1_bit", "resnetv2_34d", "resnetv2_50d_gn"])
def test_a_whole_network(name):
    net = randomized(timm.create_model(name, num_classes=10))
    model = weights.from_timm(net.state_dict(), input_shape=(64, 64, 3))
    assert model.name == name
    check_same(net, model, (64, 64))
    assert weights.to_timm(model).keys() == net.state_dict().keys()


#: timm's names of networks, and options of the builder.
NAMES = {
    "resnetv2_18": {},
    "resnetv2_18d": {"stem": "deep", "downsampling": "average"},
    "resnetv2_34d": {"stem": "deep", "downsampling": "average"},
    "resnetv2_50d": {"stem": "deep", "downsampling": "average"},
    "resnetv2_50d_gn": {"stem": "deep", "downsampling": "average", "normalization": "group"},
    "resnetv2_50t": {"stem": "tiered", "downsampling": "average"},
}


@pytest.mark.parametrize("name", NAMES)
def test_builders_make_timms_networks(name):
    """The names and shapes of all weights, and so their number, are timm's."""
    with torch.device("meta"):
        wanted = {
            key: tuple(value.shape) for key, value in timm.create_model(name).state_dict().items()
        }
    model = kp.models.resnet_imagenet(
        int(name[9:11]),
        arrangement="full_preactivation_raw_stem",
        kernel_initializer="zeros",
        **NAMES[name],
    )
    state = weights.to_timm(model)
    assert {key: array.shape for key, array in state.items()} == wanted


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("kind", ["resnetv2_18", "resnetv2_18d"])
def test_other_channels_and_classes_as_timm_adapts_them(tmp_path, channels, kind):
    """`create_model(pretrained=True)` from a file is timm's own way of it."""
    small = {"layers": (1, 1, 1, 1), "channels": (32, 32, 32, 32), "stem_chs": 32}
    net = randomized(timm.create_model(kind, num_classes=7, **small))
    path = tmp_path / "net.safetensors"
    weights.write_state(path, {name: tensor.numpy() for name, tensor in net.state_dict().items()})
    adapted = timm.create_model(
        kind,
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
        ("resnetv2_50d_evos", {}, "with EvoNorm"),
        ("resnetv2_50d_frn", {}, "with filter response"),
        ("resnetv2_50", {"preact": False}, "original order"),
        ("resnetv2_50d", {"preact": False}, "original order"),
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
        (
            lambda state: state | {"stages.1.blocks.0.conv2.weight": WIDE},
            r"here and \(65, 64, 3, 3\)",
        ),
    ],
)
def test_other_weights(change, message):
    with pytest.raises(ValueError, match=message):
        weights.from_timm(change(timm_nets.basic().state_dict()))
