"""timm's networks and ours have equal outputs, and take each other's weights; timm
itself is the reference.
"""

import functools
import itertools
import warnings

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import weights
from training.benchmark import peers

torch = pytest.importorskip("torch")
peers.import_torchvision_or_stub()
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


def ours_on(model, images):
    return keras.ops.convert_to_numpy(model(images, training=False))


def images(size=32, channels=3, width=None):
    return (
        np.random.default_rng(5).normal(size=(2, size, width or size, channels)).astype("float32")
    )


def assert_close(ours, theirs, tolerance=1e-4):
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


@pytest.mark.backend
class TestFromTimm:
    @pytest.mark.parametrize("kind", TINY)
    def test_outputs(self, kind):
        net = randomized(TINY[kind]())
        model = weights.from_timm(net.state_dict(), input_shape=(None, None, 3))
        for x in (
            images(),
            images(33, width=46),
        ):  # the zero padding of the pooling shows at the border
            assert_close(ours_on(model, x), theirs_on(net, x))

    @pytest.mark.soak
    @pytest.mark.skipif(
        keras.backend.backend() == "jax", reason="it compiles for minutes; the small ones run there"
    )
    @pytest.mark.parametrize("name", ["resnetv2_18", "resnetv2_50", "resnetv2_50x1_bit"])
    def test_outputs_of_whole_networks(self, name):
        net = randomized(timm.create_model(name, num_classes=10))
        model = weights.from_timm(net.state_dict(), input_shape=(64, 64, 3))
        assert model.name == name
        assert model.count_params() - sum(
            np.prod(w.shape) for w in model.non_trainable_weights
        ) == sum(p.numel() for p in net.parameters())
        assert_close(ours_on(model, images(64)), theirs_on(net, images(64)))
        assert weights.to_timm(model).keys() == net.state_dict().keys()

    def test_options_go_to_the_network(self):
        net = randomized(TINY["basic"](layers=(1, 4, 1, 1)))
        options = {
            "stacked": True,
            "data_format": "channels_first",
            "classifier_activation": "softmax",
            "name": "mine",
        }
        model = weights.from_timm(net.state_dict(), **options)
        assert (model.name, model.input_shape) == ("mine", (None, 3, 224, 224))
        assert [segment.name for segment in model.segments][1:3] == ["stage2_unit1", "stage2_units"]
        own, given = weights.to_timm(model), net.state_dict()
        assert own.keys() == given.keys()
        for name, tensor in given.items():
            np.testing.assert_array_equal(own[name], tensor.numpy())

    def test_without_classifier(self):
        net = randomized(TINY["basic"]())
        x = images()
        with torch.no_grad():
            features = net.forward_head(
                net.forward_features(torch.tensor(np.moveaxis(x, -1, 1))), pre_logits=True
            ).numpy()
        without = weights.from_timm(
            net.state_dict(), input_shape=(32, 32, 3), include_top=False, pooling="avg"
        )
        assert_close(ours_on(without, x), features)
        net.reset_classifier(0)
        headless = weights.from_timm(net.state_dict(), input_shape=(32, 32, 3))
        assert_close(ours_on(headless, x), features)
        assert weights.from_timm(
            net.state_dict(), input_shape=(32, 32, 3), classes=4
        ).output_shape == (None, 4)

    @pytest.mark.parametrize("channels", [1, 4, 7])
    def test_other_channels_and_classes_as_timm_adapts_them(self, tmp_path, channels):
        """`create_model(pretrained=True)` from a file is timm's own way of it."""
        small = {"layers": (1, 1, 1, 1), "channels": (32, 32, 32, 32), "stem_chs": 32}
        net = randomized(timm.create_model("resnetv2_18", num_classes=7, **small))
        path = tmp_path / "net.safetensors"
        weights.write_state(
            path, {name: tensor.numpy() for name, tensor in net.state_dict().items()}
        )
        adapted = timm.create_model(
            "resnetv2_18",
            pretrained=True,
            pretrained_cfg_overlay={"file": str(path), "num_classes": 7},
            in_chans=channels,
            num_classes=5,
            **small,
        ).state_dict()
        model = weights.from_timm(path, input_shape=(32, 32, channels), classes=5)
        own = weights.to_timm(model)
        assert own.keys() == adapted.keys()
        for name, tensor in adapted.items():
            if not name.startswith("head."):  # new, there and here
                np.testing.assert_allclose(own[name], tensor.numpy(), rtol=1e-6, atol=1e-7)
        assert own["head.fc.weight"].shape == adapted["head.fc.weight"].shape
        assert np.any(own["head.fc.weight"][:5] != net.state_dict()["head.fc.weight"][:5].numpy())

    @pytest.mark.parametrize(
        ("name", "what"),
        [
            ("resnetv2_50t", r"one with [^)]*three 3x3 convolutions [^)]*\)$"),
            ("resnetv2_50d_gn", r"one with [^)]*three 3x3 convolutions [^)]*\)$"),
            ("resnetv2_50d_evos", r"three 3x3 convolutions [^)]*\) and EvoNorm"),
            ("resnetv2_50d_frn", r"three 3x3 convolutions [^)]*\) and filter response"),
        ],
    )
    def test_variants_without_counterpart(self, name, what):
        net = timm.create_model(name, layers=(1, 1, 1, 1), channels=(128, 128, 128, 128))
        with pytest.raises(ValueError, match=what):
            weights.from_timm(net.state_dict())

    def test_original_order(self):
        net = ResNetV2(channels=(128, 128, 128, 128), preact=False, **BATCH, **SMALL)
        with pytest.raises(ValueError, match=r"original order"):
            weights.from_timm(net.state_dict())

    def test_other_weights(self):
        state = TINY["basic"]().state_dict()
        for changed, message in (
            (
                {"conv1.weight": state["stem.conv.weight"]},
                r"no weights of a timm ResNetV2.*conv1\.weight",
            ),
            (
                {name: t for name, t in state.items() if not name.startswith("stages.3")},
                r"4 stages\. Received: weights of 3",
            ),
            (
                {name: t for name, t in state.items() if name != "stages.1.blocks.0.conv1.weight"},
                r"conv1\.weight.*lack",
            ),
            (
                state | {"stages.1.blocks.0.conv2.weight": torch.zeros(65, 64, 3, 3)},
                r"a weight with 65 channels",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                weights.from_timm(changed)
        with pytest.raises(ValueError, match=r"`source` must be"):
            weights.from_timm(None)

    def test_weights_missing_left_over_and_of_another_shape_are_named(self):
        state = TINY["basic"]().state_dict()
        state["stages.1.blocks.1.se.fc1.weight"] = torch.zeros(3)
        state["norm.weight"] = torch.zeros(3)
        del state["stages.0.blocks.0.norm1.bias"]
        with pytest.raises(weights.WeightsMismatch) as error:
            weights.from_timm(state)
        assert error.value.missing == ["stage1_unit1/branch/norm_0/beta"]
        assert error.value.left_over == ["stages.1.blocks.1.se.fc1.weight"]
        assert error.value.shapes == {"head_norm/gamma": ((96,), (3,))}


def strides_on_the_first_convolution(net):
    for stage in net.stages[1:]:
        block = stage.blocks[0]
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    return net


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


class TestCheck:
    @pytest.mark.parametrize("kind", LOOKALIKES)
    def test_a_network_that_computes_something_else_is_found(self, kind):
        like, options, same = LOOKALIKES[kind]
        net = TINY[like](**options)
        if kind.startswith("strides"):
            strides_on_the_first_convolution(net)
        randomized(net)
        shapes = {name: tensor.shape for name, tensor in net.state_dict().items()}
        assert shapes == {name: t.shape for name, t in TINY[like]().state_dict().items()}
        given = {"input_shape": (32, 32, 3), "check": (images(), theirs_on(net, images()))}
        without_check = weights.from_timm(net.state_dict(), input_shape=(32, 32, 3))
        largest = np.abs(ours_on(without_check, images()) - theirs_on(net, images())).max()
        with pytest.raises(ValueError, match=r"does not compute what its source does") as error:
            weights.from_timm(net.state_dict(), **given)
        assert f"{largest:.3g}; rounding" in str(error.value)
        assert weights.ASSUMPTIONS["timm"] in str(error.value)
        if same is not None:
            model = weights.from_timm(net.state_dict(), **given, **same)
            assert_close(ours_on(model, images()), theirs_on(net, images()))

    @pytest.mark.parametrize("kind", TINY)
    def test_a_faithful_conversion_passes(self, kind):
        net = randomized(TINY[kind]())
        logits = torch.tensor(theirs_on(net, images()))
        weights.from_timm(net.state_dict(), input_shape=(32, 32, 3), check=(images(), logits))

    def test_half_precision_has_more_room(self):
        net = randomized(TINY["basic"]())
        given = {"input_shape": (32, 32, 3), "dtype": "mixed_bfloat16"}
        logits = theirs_on(net, images())
        weights.from_timm(net.state_dict(), **given, check=(images(), logits))
        with pytest.raises(ValueError, match=r"does not compute"):
            weights.from_timm(net.state_dict(), **given, check=(images(), 1.2 * logits))

    @pytest.mark.parametrize(
        ("check", "message"),
        [
            (np.zeros((2, 32, 32, 3)), r"`check` must be a pair"),
            ((np.zeros((2, 3, 32, 32)), np.zeros((2, 7))), r"takes images of shape .*\(2, 3, 32"),
            ((np.zeros((0, 32, 32, 3)), np.zeros((0, 7))), r"takes images of shape"),
            ((np.zeros((2, 32, 32, 3)), np.zeros((2, 5))), r"of shape \(2, 7\)\. Received.*\(2, 5"),
            ((np.zeros((2, 32, 32, 3)), np.full((2, 7), np.nan)), r"does not compute"),
        ],
        ids=["no pair", "channels first", "empty", "classes", "nan"],
    )
    def test_samples_that_do_not_fit(self, check, message):
        state = randomized(TINY["basic"]()).state_dict()
        with pytest.raises(ValueError, match=message):
            weights.from_timm(state, input_shape=(32, 32, 3), check=check)


@pytest.mark.parametrize(
    ("units", "depth"), [((2, 2, 2, 1), 18), ((3, 4, 6, 3), None), ((2, 3, 1, 2), None)]
)
def test_a_stage_cut_short_is_told(units, depth):
    state = TINY["basic"](layers=units).state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights.from_timm(state, input_shape=(32, 32, 3))
    own = [str(each.message) for each in caught if "nearest known network" in str(each.message)]
    assert len(own) == (depth is not None)
    assert all(f"ResNet-{depth}, has (2, 2, 2, 2)" in each for each in own)


@pytest.mark.backend
class TestToTimm:
    @pytest.mark.parametrize("kind", TINY)
    def test_timm_loads_it_and_computes_the_same(self, kind):
        model = weights.from_timm(TINY[kind]().state_dict(), input_shape=(32, 32, 3))
        for weight, seed in zip(model.weights, itertools.count(), strict=False):
            weight.assign(
                np.random.default_rng(seed).uniform(0.5, 1, weight.shape)
                * (0.1 if weight.ndim == 4 else 1)
            )
        net = TINY[kind]()
        state = {name: torch.tensor(array) for name, array in weights.to_timm(model).items()}
        assert all(state[name].dtype == tensor.dtype for name, tensor in net.state_dict().items())
        net.load_state_dict(state, strict=True)
        assert_close(theirs_on(net.eval(), images()), ours_on(model, images()))

    def test_networks_that_timm_lacks(self):
        options = {"input_shape": (32, 32, 3), "classes": 2, "width_factor": 0.125}
        raw = {"arrangement": "full_preactivation_raw_stem", **options}
        for model, message in (
            (
                kp.models.resnet_imagenet(18, **options),
                r"arrangement='full_preactivation' where it has",
            ),
            (kp.models.resnet_imagenet((1, 1, 1), block="basic", **raw), r"strides \[1, 2, 2, 2\]"),
            (
                kp.models.resnet_imagenet(
                    18, normalization=keras.layers.BatchNormalization(), **raw
                ),
                r"normalization=",
            ),
            (kp.models.resnet_imagenet(18, activation="gelu", **raw), r"activation='gelu'"),
            (keras.Sequential(), r"must be a ResidualNetwork"),
        ):
            with pytest.raises(ValueError, match=message):
                weights.to_timm(model)
