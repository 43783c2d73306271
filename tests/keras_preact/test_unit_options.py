"""What residual networks have got since the paper, unit by unit against NumPy, and what
each leaves as it is.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.layers import spatial
from tests import reference
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

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


@pytest.mark.parametrize(("options", "strides"), OPTIONS, ids=harness.label)
@pytest.mark.parametrize("arrangement", ["original", "full_preactivation", "bn_only_preactivation"])
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


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("size", [(6, 6), (5, 8), (2, 3)], ids=str)
@pytest.mark.parametrize(
    ("window", "want"), [((1, 1), reference.average), ((1, 2, 1), reference.blur)]
)
def test_pooling(window, want, size, data_format):
    x = harness.images(2, *size, 3)
    layer = spatial.WindowPooling2D(window, 2, data_format)
    given = x.transpose(0, 3, 1, 2) if data_format == "channels_first" else x
    y = harness.numpy(layer(given))
    assert layer.compute_output_shape(given.shape) == y.shape
    y = y.transpose(0, 2, 3, 1) if data_format == "channels_first" else y
    np.testing.assert_allclose(y, want(x, 2), 1e-5, 1e-5)
    constant = harness.numpy(layer(np.full_like(given, 3.5)))
    np.testing.assert_allclose(constant, 3.5, 1e-6)


def test_blur_after_the_max_pooling_of_the_stem():
    """The pooling looks at every pixel, and the blur has its stride."""
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


def test_squeeze_excitation_in_channels_first():
    x = harness.images(2, 5, 6, 8)
    last, first = (
        kp.squeeze_excitation.SqueezeExcitation(4, data_format=f"channels_{place}")
        for place in ("last", "first")
    )
    y = harness.numpy(last(x))
    first.build((2, 8, 5, 6))
    first.set_weights(last.get_weights())
    np.testing.assert_allclose(
        harness.numpy(first(x.transpose(0, 3, 1, 2))).transpose(0, 2, 3, 1),
        y,
        1e-5,
        1e-6,
    )


@pytest.mark.parametrize("block", ["basic", "bottleneck", "single", "dense"])
@pytest.mark.parametrize(
    "arrangement", [name for name in kp.ARRANGEMENTS if name != "relu_before_addition"]
)
@pytest.mark.parametrize("normalization", ["batch", "rms", "none"])
def test_zeros_at_the_end_of_the_branch(arrangement, block, normalization):
    """The unit starts as its shortcut, and is trained away from it."""
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
    y = harness.numpy(unit(x))
    f = x
    for layer in unit.after_addition:
        f = harness.numpy(layer(f))
    np.testing.assert_allclose(y, f, 1e-6, 1e-6)
    _, _, gradients = harness.value_and_grad(
        unit, x, np.cos(np.arange(y.size, dtype="float32")).reshape(y.shape)
    )
    assert np.abs(gradients[zeros[0]]).max() > 0


@pytest.mark.parametrize(
    ("arrangement", "places"),
    [
        ("full_preactivation", {"branch/conv_3", "projection/conv"}),
        ("original", set()),
        (
            "bn_only_preactivation",
            {"branch/conv_1", "branch/conv_2", "branch/conv_3", "projection/conv"},
        ),
    ],
)
def test_biases_where_no_normalisation_takes_them_away(arrangement, places):
    unit = kp.ResidualUnit(
        4, block="bottleneck", strides=2, arrangement=arrangement, use_bias="unless_norm"
    )
    unit.build((None, 6, 6, 3))
    assert {
        path.removesuffix("/bias") for path in harness.paths(unit) if path.endswith("/bias")
    } == places


def test_biases_of_a_network():
    def biases(**options):
        model = kp.models.resnet_imagenet(
            (1,), input_shape=(32, 32, 3), use_bias="unless_norm", **options
        )
        return {weight.path for weight in model.weights if weight.path.endswith("/bias")}

    unit = {
        "stage1_unit1/branch/conv_3/bias",
        "stage1_unit1/projection/conv/bias",
        "head_classifier/bias",
    }
    assert biases() == unit
    assert biases(arrangement=kp.arrangements.RAW_STEM) == {"stem_conv/bias", *unit}
    norms = {"stage1_unit1/branch/conv_1/bias", "stage1_unit1/branch/conv_2/bias", "stem_conv/bias"}
    assert biases(normalization="none") == unit | norms


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_kernels_are_standardised_in_float32(policy):
    """Filters that lie far from 0, by as much as 16 bits cannot tell apart."""
    layer = spatial.PaddedConv2D(4, 3, standardize=True, use_bias=False, dtype=policy)
    x = harness.images(2, 6, 6, 3)
    layer.build(x.shape)
    kernel = 10 + 0.01 * np.random.default_rng(0).normal(size=layer.kernel.shape)
    layer.set_weights([kernel])
    want = reference.conv(
        x, reference.standardized(np.asarray(kernel, "float32").astype("float64"))
    )
    y = harness.numpy(keras.ops.cast(layer(x), "float32"))
    np.testing.assert_allclose(
        y,
        want,
        atol=0.01 * np.abs(want).max() if policy == "float32" else 0.03 * np.abs(want).max(),
    )


def test_networks_with_everything():
    """The stacked one holds the same units, and trains."""
    options = {
        "downsampling": "blur",
        "squeeze_excitation": 4,
        "zero_init_last": True,
        "standardize_weights": True,
        "normalization": "group",
        "stochastic_depth": 0.1,
    }
    model = kp.models.resnet_imagenet(
        (3, 2), width_factor=0.125, input_shape=(32, 32, 3), classes=5, **options
    )
    harness.randomize(model)
    x = harness.images(2, 32, 32, 3)
    stacked = kp.models.stack(model)
    np.testing.assert_allclose(harness.numpy(stacked(x)), harness.numpy(model(x)), 1e-4, 1e-4)
    eagerly = keras.backend.backend() == "tensorflow"
    stacked.compile("sgd", kp.losses.SparseCategoricalCrossentropy(), run_eagerly=eagerly)
    stacked.fit(x, np.arange(2), verbose=0)
    assert np.isfinite(harness.numpy(stacked(x))).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_bias": "sometimes"}, ["use_bias", "unless_norm", "sometimes"]),
        ({"downsampling": "blurr"}, ["downsampling", "'blur'", "blurr"]),
        ({"squeeze_excitation": 0}, ["squeeze_excitation", "positive"]),
        (
            {"zero_init_last": True, "arrangement": "relu_before_addition"},
            ["zero_init_last", "'activation'"],
        ),
        ({"dilation": 2, "strides": 2}, ["dilated_strides", "strides=2", "dilation=2"]),
        (
            {"dilated_strides": 2, "downsampling": "average"},
            ["downsampling='strided'", "dilated_strides=2"],
        ),
        (
            {"block": "dense", "squeeze_excitation": 4},
            ["kp.blocks.Basic(squeeze_excitation=...)"],
        ),
        (
            {"block": "dense", "standardize_weights": True},
            ["kp.blocks.Basic(standardize_weights=...)"],
        ),
    ],
    ids=harness.label,
)
def test_wrong_options(options, words):
    message = harness.error_of(lambda: harness.unit_of(4, **options))
    assert all(word in message for word in words), message
