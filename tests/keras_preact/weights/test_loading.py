"""A load is of all weights or of none, the same whether or not units are stacked. What
holds for every converter: heads, classes, channels, samples, refusals.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.weights import keras_applications, layout, loading
from tests.keras_preact import harness
from tests.keras_preact.weights.test_keras_applications import small


def network(**options):
    """Four units in the first stage and two in the second; 34 pixels and more make
    maps of several pixels.
    """
    return kp.models.resnet_imagenet(
        (4, 2),
        block="basic",
        width_factor=1 / 16,
        **{"input_shape": (34, 34, 3), "classes": 4} | options,
    )


def values(model) -> dict[str, np.ndarray]:
    return {path: place.value() for path, place in loading.named(model).items()}


def same_names(model) -> list[layout.Entry]:
    return [layout.Entry(path, f"their/{path}") for path in loading.named(model)]


def random_state(model, seed=3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f"their/{path}": rng.uniform(0.5, 1, value.shape).astype("float32")
        for path, value in values(model).items()
    }


def check_equal(one, other):
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(value, other[path], path)


@pytest.mark.backend
@pytest.mark.parametrize("stacked", [False, True])
def test_load_and_extract(stacked):
    model = network(stacked=stacked)
    state = random_state(model)
    assert loading.load(model, state, same_names(model)) == loading.Adapted()
    single = harness.weights(kp.models.unstack(model))
    check_equal({f"their/{path}": value for path, value in single.items()}, state)
    check_equal(loading.extract(model, same_names(model)), state)
    before, path = values(model), "stage1_unit3/branch/conv_1/kernel"
    loading.named(model)[path].assign(np.ones(before[path].shape, "float32"))
    check_equal(values(model), before | {path: np.ones(before[path].shape, "float32")})


@pytest.mark.parametrize("stacked", [False, True])
def test_missing_left_over_and_other_shapes_change_nothing(stacked):
    model = network(stacked=stacked)
    before, state, entries = values(model), random_state(model), same_names(model)
    entries[0] = layout.Entry(loading.STEM, f"their/{loading.STEM}", layout.CONV_OIHW)
    state[entries[0].theirs] = layout.CONV_OIHW.to_theirs(state[entries[0].theirs])
    gamma, beta = "stage1_unit2/branch/norm_1/gamma", "head_norm/beta"
    for wrong, found in (
        ({k: v for k, v in state.items() if k != f"their/{gamma}"}, ([gamma], [], {})),
        (state | {"their/other": np.zeros(3)}, ([], ["their/other"], {})),
        (state | {f"their/{beta}": np.zeros((2, 2))}, ([], [], {beta: ((8,), (2, 2))})),
        # of another rank, where the transform itself cannot work
        (state | {entries[0].theirs: np.ones(5)}, ([], [], {loading.STEM: ((7, 7, 3, 64), (5,))})),
    ):
        with pytest.raises(loading.WeightsMismatch, match=model.name) as error:
            loading.load(model, wrong, entries)
        assert (error.value.missing, error.value.left_over, error.value.shapes) == found
        check_equal(values(model), before)


def test_extract_loses_nothing():
    model = network(use_bias=True)
    entries = [entry for entry in same_names(model) if not entry.ours.endswith("bias")]
    with pytest.raises(loading.WeightsMismatch, match="stem_conv/bias") as error:
        loading.extract(model, entries)
    assert all(path.endswith("bias") for path in error.value.missing)


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_a_stem_of_other_channels(channels):
    """For images whose channels are equal it computes what it did: exactly with one or
    a multiple of the known channels.
    """
    source, model = network(), network(input_shape=(34, 34, channels))
    harness.randomize(source)
    state, entries = loading.extract(source, same_names(source)), same_names(source)
    assert loading.load(model, state, entries) == loading.Adapted(input_channels=(3, channels))
    kernel, own = state["their/stem_conv/kernel"], values(model)["stem_conv/kernel"]
    for c in range(channels if channels > 1 else 0):
        np.testing.assert_allclose(own[:, :, c], kernel[:, :, c % 3] * 3 / channels, rtol=1e-6)
    if channels != 2:
        grey = harness.images(2, 34, 34, 1)
        outputs = [
            harness.numpy(net(np.repeat(grey, n, -1)))
            for net, n in ((source, 3), (model, channels))
        ]
        np.testing.assert_allclose(outputs[1], outputs[0], atol=2e-5)
    check_equal(values(source) | {"stem_conv/kernel": own}, values(model))


def test_a_classifier_of_other_classes_keeps_its_weights():
    source, model = network(), network(classes=7)
    harness.randomize(source)
    state = loading.extract(source, same_names(source))
    own = {path: value for path, value in values(model).items() if "classifier" in path}
    assert loading.load(model, state, same_names(source)).classes == (4, 7)
    check_equal(values(model), values(source) | own)
    # a source without one
    state = {name: value for name, value in state.items() if "classifier" not in name}
    with pytest.raises(loading.WeightsMismatch, match="2 missing: head_classifier/kernel"):
        loading.load(model, state, same_names(model))
    loading.load(model, state, same_names(model), new_classifier=True)
    check_equal(values(model), values(source) | own)


RAW = {"arrangement": "full_preactivation_raw_stem"}
SHAPE = (40, 40, 3)


def imagenet(stages, **options):
    options = {"block": "basic", "input_shape": SHAPE, "classes": 5} | options
    model = kp.models.resnet_imagenet(stages, **options)
    harness.randomize(model)
    return model


#: Sources of the converters. Each is one of five classes and of images of `SHAPE`.
SOURCES = {
    "timm": lambda: kp.weights.to_timm(imagenet((1, 1, 1, 1), width_factor=1 / 8, **RAW)),
    "torch_cifar": lambda: kp.weights.to_torch_cifar(
        kp.models.resnet_cifar(8, width_factor=0.25, classes=5)
    ),
    "keras_hub": lambda: kp.weights.to_keras_hub(imagenet((1, 1), **RAW)),
    "keras_applications": lambda: small(SHAPE),
}


@pytest.fixture(scope="module", params=SOURCES)
def source(request):
    """A converter's name, its source, and the converter."""
    if request.param == "keras_hub":
        pytest.importorskip("keras_hub")
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


def test_half_precision_has_more_room():
    state = SOURCES["timm"]()
    x = harness.images(2, *SHAPE)
    outputs = harness.numpy(kp.weights.from_timm(state, input_shape=SHAPE)(x))
    options = {"input_shape": SHAPE, "dtype": "mixed_bfloat16"}
    kp.weights.from_timm(state, **options, check=(x, outputs))
    with pytest.raises(ValueError, match="does not compute"):
        kp.weights.from_timm(state, **options, check=(x, 1.2 * outputs))


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
    ("torch_cifar", lambda: cifar(11, block=BOTTLENECK), "stride_on='3x3' where"),
    ("torch_cifar", lambda: cifar(**RAW), "ports of the networks for CIFAR does: activate_shape"),
    ("torch_cifar", lambda: None, "must be a ResidualNetwork"),
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
    if library == "keras_hub":
        pytest.importorskip("keras_hub")
    convert = getattr(kp.weights, f"to_{library}")
    assert words in harness.error_of(lambda: convert(make()))


def test_what_acts_in_training_alone_does_not_matter():
    model = like_applications((1, 1), stochastic_depth=0.2, dropout=0.1, zero_init_last=True)
    keras_applications.FAMILY.check(model)
