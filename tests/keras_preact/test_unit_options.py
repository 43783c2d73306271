"""Options of residual units that are newer than the paper: each against NumPy, and its
effects on the rest of the unit.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.downsampling import POOLINGS, Downsampling
from keras_preact.layers import spatial
from tests import reference
from tests.keras_preact import harness

#: Options, and the strides of the unit.
OPTIONS = [
    ({"downsampling": "average"}, 2),
    ({"downsampling": "average", "shape_shortcut": "zero_pad"}, 2),
    ({"downsampling": "average", "shortcut": "conv1x1"}, 2),
    ({"downsampling": "blur"}, 2),
    ({"downsampling": "blur", "stride_on": "3x3", "block": "bottleneck"}, 2),
    ({"downsampling": "blur", "shape_shortcut": "zero_pad", "activate_shape_shortcut": False}, 2),
    ({"downsampling": "blur", "shortcut": "none"}, 3),
    ({"downsampling": "max"}, 2),
    ({"downsampling": "max", "shape_shortcut": "zero_pad", "block": "single"}, 2),
    ({"downsampling": "max", "stride_on": "3x3", "block": "bottleneck"}, 2),
    ({"downsampling": "max", "shortcut": "conv1x1"}, 3),
    ({"squeeze_excitation": 2, "block": "bottleneck"}, 1),
    ({"squeeze_excitation": 99, "shortcut": "exclusive_gating"}, 2),
    (
        {"standardize_weights": True, "normalization": "group", "shortcut": "shortcut_only_gating"},
        1,
    ),
    (
        {"standardize_weights": True, "normalization": "group", "groups": 2, "block": "bottleneck"},
        2,
    ),
    ({"dilation": 2}, 1),
    ({"dilation": 2, "dilated_strides": 2, "block": "bottleneck"}, 1),
    ({"dilated_strides": 2, "stride_on": "3x3", "block": "bottleneck"}, 1),
]


@pytest.mark.parametrize(
    ("options", "strides"),
    [
        pytest.param(*case, marks=pytest.mark.backend if i % 4 == 3 else ())
        for i, case in enumerate(OPTIONS)
    ],
    ids=harness.label,
)
@pytest.mark.parametrize("arrangement", ["original", "full_preactivation"])
def test_is_what_numpy_computes(arrangement, options, strides):
    options = {"arrangement": arrangement, "strides": strides} | options
    x = harness.images(2, 7, 6, 3)
    unit = harness.unit_on(x, 4, **options)
    want = harness.reference_of(unit, **options)(x)
    assert unit.compute_output_shape(x.shape) == want.shape
    np.testing.assert_allclose(harness.numpy(unit(x)), want, 1e-4, 1e-4)
    copy = kp.ResidualUnit.from_config(unit.get_config())
    copy.build(x.shape)
    copy.set_weights(unit.get_weights())
    np.testing.assert_array_equal(harness.numpy(copy(x)), harness.numpy(unit(x)))


@pytest.mark.backend
@pytest.mark.parametrize(
    ("sizes", "strides"), [((8, 6), 2), ((7, 5), 2), ((8, 6), 1), ((7, 8), 3)], ids=str
)
@pytest.mark.parametrize(
    ("name", "want"),
    [("average", reference.average), ("blur", reference.blur), ("max", reference.max_of_pairs)],
)
def test_every_backend_pools_alike(name, want, sizes, strides):
    """Each backend has its own kernels, and another one for even sizes."""
    x = harness.images(2, *sizes, 3)
    pooling = POOLINGS[name](strides=strides)
    np.testing.assert_allclose(harness.numpy(pooling(x)), want(x, strides), 1e-5, 1e-6)


def test_blur_after_the_max_pooling_of_the_stem():
    """The pooling has stride 1 instead of 2, and the blur has stride 2."""
    model = kp.models.resnet_imagenet(
        (1,), width_factor=0.125, input_shape=(16, 16, 3), classes=5, downsampling="blur"
    )
    harness.randomize(model)
    before = model.get_layer("stem_pool").input
    activated, x = keras.Model(model.input, [before, model.first_input])(
        harness.images(2, 16, 16, 3)
    )
    want = reference.blur(reference.max_pool(harness.numpy(activated), 3, 1), 2)
    np.testing.assert_allclose(harness.numpy(x), want, 1e-5, 1e-5)


@pytest.mark.parametrize(("channels", "inside"), [(8, 2), (11, 2), (3, 1)])
def test_squeeze_excitation_reduces_the_channels(channels, inside):
    layer = kp.squeeze_excitation.SqueezeExcitation(4)
    layer.build((None, 5, 5, channels))
    shapes = [tuple(weight.shape) for weight in layer.weights if "kernel" in weight.path]
    assert shapes == [(channels, inside), (inside, channels)]


#: Block and normalisation; each is combined with every arrangement.
ZEROS = [("basic", "batch"), ("bottleneck", "rms"), ("single", "none"), ("dense", "batch")]


@pytest.mark.parametrize(("block", "normalization"), ZEROS)
@pytest.mark.parametrize(
    "arrangement",
    [*(name for name in kp.ARRANGEMENTS if name != "relu_before_addition"), kp.arrangements.FIXUP],
)
def test_zeros_at_the_end_of_the_branch(arrangement, block, normalization):
    """At the start the unit is its shortcut; training changes that."""
    x = np.abs(harness.images(*((3, 4) if block == "dense" else (2, 5, 6, 4))))
    filters = 1 if block == "bottleneck" else 4
    unit = kp.ResidualUnit(
        filters,
        block=block,
        arrangement=arrangement,
        normalization=normalization,
        zero_init_last=True,
    )
    unit.build(x.shape)
    zeros = [
        path
        for path, value in harness.weights(unit).items()
        if path.endswith(("kernel", "gamma")) and not value.any()
    ]
    assert len(zeros) == 1, zeros
    f = x
    for layer in unit.after_addition:
        f = harness.numpy(layer(f))
    harness.close(harness.numpy(unit(x)), f, 1e-6)
    cotangent = np.cos(np.arange(f.size, dtype="float32")).reshape(f.shape)
    _, _, gradients = harness.value_and_grad(unit, x, cotangent)
    assert np.abs(gradients[zeros[0]]).max() > 0


@pytest.mark.parametrize(
    "options",
    [
        {"block": kp.blocks.Attention(num_heads=2), "normalization": "layer"},
        {
            "block": "dense",
            "arrangement": "original",
            "normalization": keras.layers.BatchNormalization(scale=False),
        },
    ],
    ids=["attention", "no gamma"],
)
def test_zeros_at_the_end_of_other_branches(options):
    """Only the last kernel is zero, so it has a gradient."""
    options = {"arrangement": "pre_norm"} | options
    unit = kp.ResidualUnit(4, zero_init_last=True, **options)
    x = np.abs(harness.images(3, 5, 4))
    harness.close(harness.numpy(unit(x)), x, 1e-6)
    zeros = {
        path
        for path, value in harness.weights(unit).items()
        if path.endswith("kernel") and not value.any()
    }
    last = "attention_1/output" if options["normalization"] == "layer" else "dense_2"
    assert zeros == {f"branch/{last}/kernel"}
    cotangent = np.cos(np.arange(x.size, dtype="float32")).reshape(x.shape)
    _, _, gradients = harness.value_and_grad(unit, x, cotangent)
    assert np.abs(gradients[f"branch/{last}/kernel"]).max() > 0


@pytest.mark.parametrize("shortcut", ["conv1x1", "exclusive_gating", "shortcut_only_gating"])
def test_a_trace_in_training_normalises_in_the_shortcut_as_a_call(shortcut):
    unit = harness.unit_of(4, shortcut=kp.SHORTCUTS[shortcut](normalization="batch"))
    x = harness.images(3, 5, 5, 4)
    unit.build(x.shape)
    harness.randomize(unit)
    called = harness.numpy(unit(x, training=True))
    harness.close(harness.numpy(unit.trace(x, training=True).output), called, 1e-6)
    assert np.abs(called - harness.numpy(unit(x))).max() > 0.1


ALL_CONVS = {"branch/conv_1", "branch/conv_2", "branch/conv_3", "projection/conv"}


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({}, {"branch/conv_3", "projection/conv"}),
        ({"arrangement": "original"}, set()),
        ({"arrangement": "bn_only_preactivation"}, ALL_CONVS | {"stem"}),
        ({"arrangement": kp.arrangements.RAW_STEM}, {"branch/conv_3", "projection/conv", "stem"}),
        ({"normalization": "none"}, ALL_CONVS | {"stem"}),
    ],
    ids=["preact", "original", "bn only", "raw stem", "no norm"],
)
def test_biases_where_no_normalisation_takes_them_away(options, places):
    model = kp.models.resnet_imagenet(
        (1,), width_factor=0.125, input_shape=(32, 32, 3), use_bias="unless_norm", **options
    )
    found = {path for path in harness.paths(model) if path.endswith("/bias")}
    names = {"stem_conv" if each == "stem" else f"stage1_unit1/{each}" for each in places}
    assert found == {f"{name}/bias" for name in names | {"head_classifier"}}


@pytest.mark.backend
@pytest.mark.parametrize(("policy", "limit"), [("float32", 0.01), ("mixed_bfloat16", 0.03)])
def test_kernels_are_standardised_in_float32(policy, limit):
    """The values of a filter are far from 0, and so close that 16 bits cannot tell them
    apart.
    """
    layer = spatial.PaddedConv2D(4, 3, standardize=True, use_bias=False, dtype=policy)
    x = harness.images(2, 6, 6, 3)
    layer.build(x.shape)
    kernel = 10 + 0.01 * np.random.default_rng(0).normal(size=layer.kernel.shape)
    layer.set_weights([kernel])
    exact = np.asarray(kernel, "float32").astype("float64")
    want = reference.conv(x, reference.standardized(exact))
    np.testing.assert_allclose(harness.numpy(layer(x)), want, atol=limit * np.abs(want).max())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"use_bias": "sometimes"}, "unless_norm"),
        ({"downsampling": "blurr"}, "'blur'"),
        ({"squeeze_excitation": 0}, "squeeze_excitation"),
        ({"zero_init_last": True, "arrangement": "relu_before_addition"}, "zero_init_last"),
        ({"dilation": 2, "strides": 2}, "dilated_strides"),
        ({"dilated_strides": 2, "downsampling": "blur"}, "downsampling='strided' and 'average'"),
    ],
    ids=harness.label,
)
def test_wrong_options(options, word):
    assert word in harness.error_of(lambda: harness.unit_of(4, **options))


def test_a_downsampling_of_ones_own():
    """The config holds a name if there is one."""
    own = Downsampling(projection="average", branch="average")
    unit = harness.unit_of(4, strides=2, downsampling=own)
    x = harness.images(2, 6, 6, 4)
    y = harness.numpy(unit(x))
    copy = kp.ResidualUnit.from_config(unit.get_config())
    assert copy.downsampling == own
    copy.build(x.shape)
    copy.set_weights(unit.get_weights())
    np.testing.assert_array_equal(harness.numpy(copy(x)), y)
    average = harness.unit_of(4, strides=2, downsampling=Downsampling(projection="average"))
    assert average.get_config()["downsampling"] == "average"
    assert "Did you mean 'average'" in harness.error_of(lambda: Downsampling(branch="avrage"))


@pytest.mark.backend
@pytest.mark.parametrize("block", ["bottleneck", "swiglu", kp.blocks.Attention(num_heads=2)])
def test_a_regulariser_of_all_kernels(block):
    options = {"block": block, "kernel_regularizer": keras.regularizers.L2(0.1)}
    if block == "bottleneck":
        options |= {"strides": 2, "shortcut": "exclusive_gating", "squeeze_excitation": 2}
        x = harness.images(2, 4, 4, 4)
    else:
        options |= {"arrangement": "pre_norm", "normalization": "layer", "shortcut": "conv1x1"}
        x = harness.images(2, 3, 4)
    unit = harness.unit_on(x, 4, **options)
    copy = kp.ResidualUnit.from_config(unit.get_config())
    copy.build(x.shape)
    copy.set_weights(unit.get_weights())
    expected = 0.1 * sum((kernel**2).sum() for kernel in harness.kernels(unit).values())
    for each in (unit, copy):
        np.testing.assert_allclose(sum(map(harness.numpy, each.losses)), expected, 1e-5)


def test_a_regulariser_in_a_network():
    """It reaches the stem and all units, stacked or not, and not the classifier."""
    options = {"input_shape": (8, 8, 1), "kernel_regularizer": keras.regularizers.L2(0.1)}
    network = kp.models.resnet_cifar(14, width_factor=0.25, **options)
    tokens = kp.models.transformer(2, width=8, mlp="swiglu", **options)
    copies = kp.models.stack(network), type(tokens).from_config(tokens.get_config())
    copies[1].set_weights(tokens.get_weights())
    for model, copy in zip((network, tokens), copies, strict=True):
        kernels = harness.kernels(model)
        kernels.pop("head_classifier/kernel")
        expected = 0.1 * sum((kernel**2).sum() for kernel in kernels.values())
        for each in (model, copy):
            np.testing.assert_allclose(sum(map(harness.numpy, each.losses)), expected, 1e-5)


@pytest.mark.backend
def test_a_seed_sets_initial_values_and_masks():
    x = harness.images(2, 6, 6, 4)

    def outputs(**options) -> tuple[np.ndarray, np.ndarray]:
        template = harness.unit_of(
            4, dropout=0.5, stochastic_depth=0.5, shortcut="dropout", **options
        )
        units = template, template.at("another")
        return tuple(harness.numpy(unit(x, training=True)) for unit in units)

    one, another = outputs(seed=1)
    for first, second in zip(outputs(seed=1), (one, another), strict=True):
        np.testing.assert_array_equal(first, second)
    assert np.abs(one - another).max() > 0.1
    assert np.abs(one - outputs(seed=2)[0]).max() > 0.1
    unit = harness.unit_of(4, shortcut="dropout", seed=1)
    masks = [
        harness.numpy(each.trace(np.ones_like(x), training=True).shortcut)
        for each in (unit.at("one"), unit.at("another"))
    ]
    assert not np.array_equal(*masks)


@pytest.mark.parametrize(
    "network",
    [
        lambda **o: kp.models.resnet_cifar(8, width_factor=0.25, input_shape=(8, 8, 1), **o),
        lambda **o: kp.models.transformer(2, width=8, input_shape=(8, 8, 1), **o),
    ],
    ids=["resnet", "transformer"],
)
def test_a_seed_of_a_network(network):
    model = network(seed=1)
    kernels = harness.kernels(model)
    harness.check_distinct(kernels)
    for copy in (network(seed=1), type(model).from_config(model.get_config())):
        for path, kernel in harness.kernels(copy).items():
            np.testing.assert_array_equal(kernel, kernels[path], path)
    own = keras.initializers.HeNormal(seed=3)
    for path, kernel in harness.kernels(network(seed=1, kernel_initializer=own)).items():
        expected = harness.kernels(network(kernel_initializer=own))[path]
        np.testing.assert_array_equal(kernel, expected, path)
