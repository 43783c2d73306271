"""What holds for every converter: equal outputs here and the same weights back, heads,
classes, channels, samples, refusals. The other libraries' networks are the reference.
"""

import functools

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.weights import keras_applications
from tests.keras_preact import harness
from tests.keras_preact.weights import timm_nets
from tests.keras_preact.weights.keras_nets import applications, backbone, classifier
from tests.keras_preact.weights.pytorchcv_nets import PYTORCHCV
from tests.keras_preact.weights.torch_nets import CIFAR, check_same, nn, outputs, randomized

#: Networks of the other libraries. A name begins with the converter's.
NETWORKS = {
    "keras_applications": applications,
    "keras_applications, sigmoid": lambda: applications(classifier_activation="sigmoid"),
    "keras_applications, maps": lambda: applications(include_top=False),
    "keras_applications, max": lambda: applications(include_top=False, pooling="max"),
    "keras_hub": lambda: backbone("basic_block"),
    "keras_hub, top": lambda: classifier("bottleneck_block", pooling="max", activation="softmax"),
    "timm, basic": timm_nets.basic,
    "timm, bottleneck": timm_nets.bottleneck,
    "timm, bit": timm_nets.bit,
    "timm, d": lambda: timm_nets.basic(**timm_nets.DEEP),
    "timm, d and bottleneck": lambda: timm_nets.bottleneck(**timm_nets.DEEP),
    "timm, d_gn": lambda: timm_nets.bottleneck(**timm_nets.DEEP, **timm_nets.GROUP),
    "timm, t": lambda: timm_nets.bottleneck(**timm_nets.TIERED),
    **{f"pytorchcv, {kind}": make for kind, make in PYTORCHCV.items()},
    **{f"torch_cifar, {kind}": make for kind, make in CIFAR.items()},
}
#: Options of networks whose weights do not show them.
GIVEN = {"pytorchcv, ImageNet, b": {"stride_on": "3x3"}}
STACKED = ("keras_applications", "keras_hub, top", "timm, bit", "timm, d")
#: Compared on every backend: of each library one, with the fewest shapes.
ON_ALL = (
    *("keras_applications", "keras_hub", "timm, basic", "timm, d"),
    *("torch_cifar, basic with projections", "torch_cifar, pytorch-cifar"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.backend if name in ON_ALL else []) for name in NETWORKS],
)
def test_outputs_and_the_way_back(name):
    library, theirs = name.partition(",")[0], NETWORKS[name]()
    read, write = (getattr(kp.weights, f"{way}_{library}") for way in ("from", "to"))
    if isinstance(theirs, keras.Model):  # on PyTorch, a module as well
        source, weights = theirs, dict(enumerate(theirs.get_weights()))
    else:
        source = randomized(theirs).state_dict()
        weights = {key.replace("8.1.", "8."): tensor.numpy() for key, tensor in source.items()}
    given = GIVEN.get(name, {})
    ours = read(source, input_shape=(None, None, 3), stacked=name in STACKED, **given)
    # at an odd size, the zero padding of timm's pooling shows at the border
    sizes = {"timm": [(32, 32), (33, 46)], "torch_cifar": [(32, 32)], "pytorchcv": [(32, 32)]}.get(
        library, [(40, 40)]
    )
    check_same(theirs, ours, *sizes)
    if library == "keras_applications":
        return  # theirs have 50 layers and more: test_keras_applications
    back = write(ours)
    if isinstance(back, keras.Model):
        assert isinstance(back, type(theirs))
        assert ours.name == back.name == theirs.name
        check_same(theirs, back, *sizes)
        back = dict(enumerate(back.get_weights()))
    np.testing.assert_equal(back, weights)
    assert all(back[key].dtype == array.dtype for key, array in weights.items())


#: Networks of timm whose weights have the names and shapes of those above, and the option of ours
#: that computes the same, if there is one.
LOOKALIKES = {
    "activation": (lambda: timm_nets.bottleneck(act_layer=nn.GELU), {"activation": "gelu"}),
    "stem": (lambda: timm_nets.bottleneck(stem_type="fixed"), {"stem": "7x7_zero_padded"}),
    "average pooling in projections": (
        lambda: timm_nets.bottleneck(avg_down=True),
        {"downsampling": "average"},
    ),
    "no average pooling in projections": (
        lambda: timm_nets.bottleneck(**timm_nets.DEEP | {"avg_down": False}),
        {"downsampling": "strided"},
    ),
    "padding of a deep stem": (
        lambda: timm_nets.bottleneck(**timm_nets.DEEP | {"stem_type": "deep_fixed"}),
        None,
    ),
    "kernels": (
        lambda: timm_nets.bit(conv_layer=timm_nets.create_conv2d),
        {"standardize_weights": False},
    ),
    "stride": (timm_nets.strides_on_the_first_convolution, {"stride_on": "first"}),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_sample_shows_what_the_weights_do_not(name):
    make, same = LOOKALIKES[name]
    net, x = randomized(make()), harness.images(2, 32, 32, 3)
    given = {"input_shape": (32, 32, 3), "check": (x, outputs(net, x))}
    with pytest.raises(ValueError, match="does not compute what its source does"):
        kp.weights.from_timm(net.state_dict(), **given)
    if same is not None:
        kp.weights.from_timm(net.state_dict(), **given, **same)


RAW = {"arrangement": "full_preactivation_raw_stem"}
SHAPE = (40, 40, 3)


def imagenet(stages, **options):
    options = {"block": "basic", "input_shape": SHAPE, "classes": 5} | options
    model = kp.models.resnet_imagenet(stages, **options)
    harness.randomize(model)
    return model


#: Sources of the converters. Each is one of five classes and of images of `SHAPE`, and is made
#: once: converters leave it as it is.
SOURCES = {
    "timm": lambda: kp.weights.to_timm(imagenet((1, 1, 1, 1), width_factor=1 / 8, **RAW)),
    "torch_cifar": lambda: kp.weights.to_torch_cifar(
        kp.models.resnet_cifar(8, width_factor=0.25, classes=5)
    ),
    "pytorchcv": lambda: kp.weights.to_pytorchcv(
        kp.models.resnet_cifar(8, width_factor=0.25, classes=5, shape_shortcut="projection", **RAW)
    ),
    "keras_hub": lambda: kp.weights.to_keras_hub(imagenet((1, 1), **RAW)),
    "keras_applications": applications,
}
SOURCES = {name: functools.cache(make) for name, make in SOURCES.items()}


@pytest.fixture(scope="module", params=SOURCES)
def source(request):
    """A converter's name, its source, and the converter."""
    convert = getattr(kp.weights, f"from_{request.param}")
    return request.param, SOURCES[request.param](), convert


def test_heads_classes_and_channels(source):
    _, theirs, convert = source
    options = {"input_shape": (40, 40, 1), "classes": 3, "stacked": True, "name": "mine"}
    model = convert(theirs, **options)
    assert (model.name, model.input_shape, model.output_shape) == (
        "mine",
        (None, 40, 40, 1),
        (None, 3),
    )
    assert "classes=0" in harness.error_of(lambda: convert(theirs, classes=0))
    whole = convert(theirs, input_shape=SHAPE)
    features = convert(theirs, input_shape=SHAPE, include_top=False, pooling="avg")
    x = harness.images(2, *SHAPE)
    top = whole.get_layer("head_classifier")
    np.testing.assert_allclose(
        harness.numpy(top(features(x))), harness.numpy(whole(x)), rtol=1e-4, atol=1e-4
    )


def test_a_sample_shows_other_outputs(source):
    name, theirs, convert = source
    x = harness.images(2, *SHAPE)
    outputs = harness.numpy(convert(theirs, input_shape=SHAPE)(x))
    convert(theirs, input_shape=SHAPE, check=(x, outputs))
    outputs[1, 2] += 0.5
    message = harness.error_of(lambda: convert(theirs, input_shape=SHAPE, check=(x, outputs)))
    assert "largest difference from the outputs in `check` is 0.5;" in message
    assert kp.weights.ASSUMPTIONS[name] in message


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [("mixed_bfloat16", 1.2), ("mixed_float16", 1.2), ("float32", 1.02), ("float64", 1.02)],
)
def test_only_half_precision_has_more_room(dtype, wrong):
    state = SOURCES["timm"]()
    x = harness.images(2, *SHAPE)
    outputs = harness.numpy(kp.weights.from_timm(state, input_shape=SHAPE)(x))
    options = {"input_shape": SHAPE, "dtype": dtype}
    kp.weights.from_timm(state, **options, check=(x, outputs))
    with pytest.raises(ValueError, match="does not compute"):
        kp.weights.from_timm(state, **options, check=(x, wrong * outputs))


ZEROS = np.zeros((2, *SHAPE))
#: Changes of a good state, a sample, and a word of the message.
REFUSALS = {
    "finite": ({"norm.bias": np.full(64, np.nan)}, None, "finite.*norm.bias"),
    "source": (None, None, "`source` must be"),
    "pair": ({}, ZEROS, "must be a pair"),
    "images": ({}, (np.zeros((2, 3, 40, 40)), 0), r"\(2, 3, 40, 40\)"),
    "empty": ({}, (ZEROS[:0], 0), "takes images of shape"),
    "outputs": ({}, (ZEROS, np.ones((2, 4))), r"\(2, 4\)"),
    "nan": ({}, (ZEROS, np.full((2, 5), np.nan)), "does not compute"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_every_converter_refuses(name):
    changes, check, words = REFUSALS[name]
    state = changes if changes is None else SOURCES["timm"]() | changes
    with pytest.raises(ValueError, match=words):
        kp.weights.from_timm(state, input_shape=SHAPE, check=check)


def cifar(depth=8, **options):
    return kp.models.resnet_cifar(depth, width_factor=0.25, **options)


def like_applications(units=(1, 1, 1, 1), **options):
    """As keras.applications' in all but the options; with 50, in the stages too."""
    like = {
        **keras_applications.FAMILY.options,
        "stride_on": "3x3",
        "strided_unit": "last",
        "include_top": False,
        "kernel_initializer": "zeros",
    }
    return kp.models.resnet_imagenet(
        units, **{"block": "bottleneck", "input_shape": SHAPE} | like | options
    )


def like_hub(stages=(1, 1), **options):
    return imagenet(stages, **RAW | options)


def stages_of_hub(stages, block):
    options = {"stem": "7x7", "stem_filters": 64, "input_shape": SHAPE, **RAW}
    return kp.models.ResidualNetwork(stages, block=block, classes=3, **options)


BOTTLENECK = kp.blocks.Bottleneck(stride_on="3x3")
#: Networks that a library cannot hold, though most would have weights of the same names and shapes:
#: the library, the network, and a part of the message.
OTHERS = [
    ("timm", lambda: cifar(), "arrangement='full_preactivation' where it has"),
    ("timm", lambda: like_hub((1, 1, 1), width_factor=1 / 8), "strides [1, 2, 2, 2]"),
    ("pytorchcv", lambda: cifar(**RAW), "shape_shortcut='zero_pad' where it has 'projection'"),
    ("pytorchcv", lambda: imagenet((1, 1, 1, 1), **RAW), "stem='7x7' where it has"),
    ("torch_cifar", lambda: cifar(11, block=BOTTLENECK), "stride_on='3x3' where"),
    ("torch_cifar", lambda: cifar(**RAW), "ports of the networks for CIFAR does: activate_shape"),
    ("torch_cifar", lambda: None, "must be a ResidualNetwork"),
    (
        "torch_cifar",
        lambda: imagenet(18, width_factor=1 / 8, arrangement="full_preactivation_raw_ends"),
        "stem='7x7' where it has '3x3'",
    ),
    ("timm", lambda: imagenet((1,) * 4, stem="deep", **RAW), "downsampling='strided' where it"),
    ("timm", lambda: imagenet((1,) * 4, downsampling="average", **RAW), "'average' where it"),
    ("keras_hub", lambda: like_hub((2, 2), strided_unit="last"), "strides in the first unit"),
    (
        "keras_hub",
        lambda: like_hub(normalization=keras.layers.BatchNormalization(epsilon=1e-3)),
        "normalization=",
    ),
    ("keras_hub", lambda: like_hub(width_factor=0.5), "64 filters in its first stage"),
    ("keras_hub", lambda: like_hub(include_top=False, pooling="avg"), "pooling='avg'"),
    ("keras_hub", lambda: stages_of_hub([(64, 1, 2)], "basic"), "differs in stage 1"),
    ("keras_hub", lambda: stages_of_hub([(64, 1, 1)] * 2, BOTTLENECK), "differs in stage 2"),
    ("keras_applications", lambda: like_applications(50, strided_unit="first"), "the last units"),
    ("keras_applications", lambda: like_applications(stem="7x7"), "where it has '7x7_zero_padded'"),
    (
        "keras_applications",
        lambda: like_applications(include_top=True, pooling="max"),
        "average pooling before a classifier",
    ),
]


@pytest.mark.parametrize(("library", "make", "words"), OTHERS)
def test_networks_that_a_library_cannot_hold(library, make, words):
    convert = getattr(kp.weights, f"to_{library}")
    assert words in harness.error_of(lambda: convert(make()))


def test_what_acts_in_training_alone_does_not_matter():
    model = like_applications((1, 1), stochastic_depth=0.2, dropout=0.1, zero_init_last=True)
    keras_applications.FAMILY.check(model)


def test_weights_that_are_not_of_pytorchcv():
    message = harness.error_of(lambda: kp.weights.from_pytorchcv(SOURCES["torch_cifar"]()))
    assert "no weights of a PreResNet of pytorchcv" in message
    squeezed = SOURCES["pytorchcv"]() | {"features.stage1.unit1.se.conv1.weight": np.zeros(1)}
    with pytest.raises(kp.weights.WeightsMismatch, match=r"1 left over: .*se\.conv1"):
        kp.weights.from_pytorchcv(squeezed)
