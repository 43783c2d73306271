"""Whole networks, against NumPy and layer by layer, with the first and last units as the
appendix describes them.
"""

import functools

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests import reference
from tests.keras_preact import harness

SIZE = (9, 10, 3)


def cifar_stages(width, units):
    return [(width * 2**s, units, 1 if s == 0 else 2) for s in range(3)]


SMALL_IMAGENET = functools.partial(
    kp.models.resnet_imagenet,
    (1, 2),
    width_factor=1 / 16,
    classes=10,
    input_shape=(19, 18, 3),
)
ZERO_PAD = {"shape_shortcut": "zero_pad"}
#: Builder, then the arguments of the NumPy network. Each stage has two units: one changes the
#: shape, one keeps it.
NETWORKS = {
    "cifar basic": (
        functools.partial(kp.models.resnet_cifar, 14, width_factor=0.25, input_shape=SIZE),
        {"stages": cifar_stages(4, 2), "stem": "3x3", "block": "basic", "options": ZERO_PAD},
    ),
    "cifar bottleneck": (
        functools.partial(
            kp.models.resnet_cifar, 20, block="bottleneck", width_factor=0.125, input_shape=SIZE
        ),
        {"stages": cifar_stages(2, 2), "stem": "3x3", "block": "bottleneck"},
    ),
    "cifar single": (
        functools.partial(
            kp.models.resnet_cifar, 8, block="single", width_factor=0.25, input_shape=SIZE
        ),
        {"stages": cifar_stages(4, 2), "stem": "3x3", "block": "single", "options": ZERO_PAD},
    ),
    "wide": (
        functools.partial(kp.models.wide_resnet, 16, 0.5, input_shape=SIZE),
        {"stages": cifar_stages(8, 2), "stem": "3x3", "block": "basic"},
    ),
    "imagenet": (
        SMALL_IMAGENET,
        {
            "stages": [(4, 1, 1), (8, 2, 2)],
            "stem": "7x7",
            "block": "bottleneck",
            "options": {"stride_on": "3x3"},
        },
    ),
    "ResNet-D": (
        functools.partial(SMALL_IMAGENET, stem="deep", downsampling="average"),
        {
            "stages": [(4, 1, 1), (8, 2, 2)],
            "stem": "deep",
            "block": "bottleneck",
            "options": {"stride_on": "3x3", "downsampling": "average"},
        },
    ),
    "dense": (
        functools.partial(kp.models.dense_resnet, 6, width=5, input_shape=(7,)),
        {"stages": [(5, 2, 1)], "stem": "dense", "block": "dense"},
    ),
}


def compare(name, **options):
    build, facts = NETWORKS[name]
    model = build(**options)
    harness.randomize(model)
    x = harness.images(2, *model.input_shape[1:])
    unit_options = facts.get("options", {}) | {
        k: v for k, v in options.items() if k in harness.REFERENCE_OPTIONS
    }
    expected = reference.Network(harness.weights(model), **facts | {"options": unit_options})
    logits = expected(x)
    *outputs, first_input, y = keras.Model(
        model.input, [*model.unit_outputs, model.units[0].input, model.output]
    )(x)
    np.testing.assert_allclose(harness.numpy(first_input), expected.first_input, 1e-4, 1e-4)
    for output, want in zip(outputs, expected.outputs, strict=True):
        np.testing.assert_allclose(harness.numpy(output), want, 1e-3, 1e-4)
    np.testing.assert_allclose(harness.numpy(y), logits, 1e-3, 1e-4)
    return model, x


#: These two run on all backends. On one backend, every arrangement is tested with both networks.
ON_ALL = [("original", "cifar basic"), ("full_preactivation", "cifar bottleneck")]
CIFAR = [
    pytest.param(
        arrangement, name, marks=pytest.mark.backend if (arrangement, name) in ON_ALL else ()
    )
    for arrangement in kp.ARRANGEMENTS
    for name in ("cifar basic", "cifar bottleneck")
]


@pytest.mark.parametrize(("arrangement", "name"), CIFAR)
def test_cifar_networks(arrangement, name):
    compare(name, arrangement=arrangement)


@pytest.mark.parametrize("name", ["cifar single", "wide", "imagenet", "ResNet-D", "dense"])
@pytest.mark.parametrize("arrangement", ["original", "full_preactivation"])
def test_other_networks(arrangement, name):
    compare(name, arrangement=arrangement)


@pytest.mark.backend
def test_stem_pooling_pads_with_minus_infinity():
    """tanh can be negative; zeros as padding would then win the maximum at the border."""
    model, x = compare("imagenet", activation="tanh")
    pooled = harness.numpy(keras.Model(model.input, model.units[0].input)(x))
    assert (pooled[:, 0] < 0).any()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cifar bottleneck", {"shortcut": "shortcut_only_gating"}),
        ("wide", {"dropout": 0.3}),
        ("imagenet", {"shortcut": "dropout"}),
        ("cifar single", {"shortcut": "hyper_connections"}),
        ("ResNet-D", {}),
        ("dense", {"arrangement": "original"}),
    ],
)
def test_fit_moves_every_weight(name, options):
    model = NETWORKS[name][0](**options)
    before = harness.weights(model)
    harness.compiled(model, run_eagerly=True)
    x = harness.images(8, *model.input_shape[1:])
    history = model.fit(x, np.arange(8), batch_size=4, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert harness.changed(model, before) == before.keys()


def names_around_the_units(model):
    names = [layer.name for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    units = [i for i, name in enumerate(names) if name.startswith("stage")]
    return names[: units[0]], names[units[-1] + 1 :]


STEM_NORM_ACTIVATION = ["stem_conv", "stem_norm", "stem_activation"]
POOL_AND_CLASSIFIER = ["head_pool", "head_classifier"]


@pytest.mark.parametrize(
    ("arrangement", "stem", "head"),
    [
        ("original", STEM_NORM_ACTIVATION, []),
        ("bn_after_addition", STEM_NORM_ACTIVATION, []),
        ("relu_before_addition", STEM_NORM_ACTIVATION, []),
        ("relu_only_preactivation", STEM_NORM_ACTIVATION, ["head_activation"]),
        ("full_preactivation", STEM_NORM_ACTIVATION, ["head_norm", "head_activation"]),
        ("bn_only_preactivation", ["stem_conv", "stem_activation", "stem_norm"], ["head_norm"]),
    ],
)
def test_layers_around_the_units(arrangement, stem, head):
    """In a full pre-activation net exactly one BN-ReLU is between the last addition
    and the pooling.
    """
    model = kp.models.resnet_cifar(8, arrangement=arrangement)
    assert names_around_the_units(model) == (stem, head + POOL_AND_CLASSIFIER)


@pytest.mark.parametrize("pooling", [None, "avg", "max"])
def test_without_top(pooling):
    model = kp.models.resnet_cifar(
        8, width_factor=0.25, input_shape=SIZE, include_top=False, pooling=pooling
    )
    harness.randomize(model)
    x = harness.images(2, *SIZE)
    before = keras.Model(model.input, model.get_layer("head_norm").output)(x)
    maps = np.maximum(harness.numpy(before), 0)
    want = {None: maps, "avg": maps.mean((1, 2)), "max": maps.max((1, 2))}[pooling]
    assert model.output_shape[1:] == want.shape[1:]
    assert model.logits is None
    harness.close(harness.numpy(model(x)), want)


@pytest.mark.parametrize(
    ("mean", "std"), [(127.5, None), ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]), ([125], 60.0)], ids=str
)
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_preprocessing(data_format, mean, std):
    """Channels first gives the values of channels last."""
    options = {"width_factor": 0.125, "mean": mean, "std": std, "data_format": data_format}
    plain = kp.models.resnet_cifar(8, width_factor=0.125, input_shape=(8, 8, 3))
    harness.randomize(plain)
    shape = (3, 8, 8) if data_format == "channels_first" else (8, 8, 3)
    model = kp.models.resnet_cifar(8, input_shape=shape, **options)
    model.set_weights(plain.get_weights())
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), "uint8")
    given = np.moveaxis(pixels, -1, 1) if data_format == "channels_first" else pixels
    want = plain(
        ((pixels - np.array(mean)) / (1 if std is None else np.array(std))).astype("float32")
    )
    harness.close(harness.numpy(model(given)), harness.numpy(want), 1e-3)


@pytest.mark.parametrize(
    ("builder", "depth", "options", "units"),
    [
        ("resnet_cifar", 20, {}, "basic 3 3 3"),
        ("resnet_cifar", 11, {}, "bottleneck 1 1 1"),
        ("resnet_cifar", 20, {"block": "bottleneck"}, "bottleneck 2 2 2"),
        ("resnet_cifar", 8, {"block": "single"}, "single 2 2 2"),
        ("wide_resnet", 16, {}, "basic 2 2 2"),
        ("resnet_imagenet", 18, {}, "basic 2 2 2 2"),
        ("dense_resnet", 8, {"width": 8}, "dense 3"),
    ],
)
def test_units_of_every_depth(builder, depth, options, units):
    """20 = 6 * 3 + 2 = 9 * 2 + 2 fits two rules. Deeper ones are in
    models/test_registry.py.
    """
    block, *stages = units.split()
    width = {} if builder == "dense_resnet" else {"width_factor": 0.125}
    model = getattr(kp.models, builder)(depth, kernel_initializer="zeros", **width, **options)
    names = [f"stage{s}_unit{u}" for s, n in enumerate(stages, 1) for u in range(1, int(n) + 1)]
    assert [unit.name for unit in model.copy_units()] == model.unit_names == names
    assert {unit.block.name for unit in model.copy_units()} == {block}
    strides = [unit.strides for unit in model.copy_units() if unit.name.endswith("unit1")]
    assert strides == [1] + [2] * (len(stages) - 1)


@pytest.mark.parametrize(
    ("build", "given"),
    [
        (lambda **options: kp.models.resnet_cifar(8, **options), {"stem": "7x7"}),
        (lambda **options: kp.models.resnet_cifar(8, **options), {"stem_filters": 8}),
        (lambda **options: kp.models.wide_resnet(10, 1, **options), {"block": "bottleneck"}),
        (kp.models.fast_resnet, {"stem": "3x3"}),
        (lambda **options: kp.models.dense_resnet(4, **options), {"block": "basic"}),
        (lambda **options: kp.models.vanilla_cnn(4, **options), {"block": "basic"}),
        (
            lambda **options: kp.models.resnet_1d(8, input_shape=(8, 1), classes=2, **options),
            {"stem_filters": 8},
        ),
        (lambda **options: kp.models.resnet_imagenet(18, **options), {"stem_filters": 8}),
    ],
)
def test_options_that_a_builder_chooses(build, given):
    message = harness.error_of(lambda: build(**given))
    [(name, value)] = given.items()
    assert (
        f"Use kp.models.ResidualNetwork for other networks. Received: {name}={value!r}" in message
    )
