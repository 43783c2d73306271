"""Whole networks: what the appendix says about their first and last units, against
NumPy and by following every path.
"""

import json

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.graph import Graph
from keras_preact.layers.batch_norm import BatchNormalization
from tests import reference
from tests.keras_preact import harness

SIZE = (9, 10, 3)


def cifar_stages(width, units):
    return [(width * 2**s, units, 1 if s == 0 else 2) for s in range(3)]


def of(build, *arguments, **own):
    """Return a function that builds a network with more options."""
    return lambda **options: build(*arguments, **own, **options)


ZERO_PAD = {"shape_shortcut": "zero_pad"}
#: Builder, then what the NumPy network needs to know. Two units a stage: one changes the shape, one
#: keeps it.
NETWORKS = {
    "cifar basic": (
        of(kp.models.resnet_cifar, 14, width_factor=0.25, input_shape=SIZE),
        {"stages": cifar_stages(4, 2), "stem": "3x3", "block": "basic", "options": ZERO_PAD},
    ),
    "cifar bottleneck": (
        of(kp.models.resnet_cifar, 20, block="bottleneck", width_factor=0.125, input_shape=SIZE),
        {"stages": cifar_stages(2, 2), "stem": "3x3", "block": "bottleneck"},
    ),
    "cifar single": (
        of(kp.models.resnet_cifar, 8, block="single", width_factor=0.25, input_shape=SIZE),
        {"stages": cifar_stages(4, 2), "stem": "3x3", "block": "single", "options": ZERO_PAD},
    ),
    "wide": (
        of(kp.models.wide_resnet, 16, 0.5, input_shape=SIZE),
        {"stages": cifar_stages(8, 2), "stem": "3x3", "block": "basic"},
    ),
    "imagenet": (
        of(
            kp.models.resnet_imagenet,
            (1, 2),
            width_factor=1 / 16,
            classes=10,
            input_shape=(19, 18, 3),
        ),
        {
            "stages": [(4, 1, 1), (8, 2, 2)],
            "stem": "7x7",
            "block": "bottleneck",
            "options": {"stride_on": "3x3"},
        },
    ),
    "dense": (
        of(kp.models.dense_resnet, 6, width=5, input_shape=(7,)),
        {"stages": [(5, 2, 1)], "stem": "dense", "block": "dense"},
    ),
}


def compare(name, **options):
    build, facts = NETWORKS[name]
    model = build(**options)
    harness.randomize(model)
    x = harness.images(2, *model.input_shape[1:])
    unit_options = facts.get("options", {}) | {
        k: v for k, v in options.items() if k in harness.SHARED_OPTIONS
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


@pytest.mark.backend
@pytest.mark.parametrize("name", ["cifar basic", "cifar bottleneck"])
@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_cifar_networks(arrangement, name):
    compare(name, arrangement=arrangement)


@pytest.mark.backend
@pytest.mark.parametrize("name", ["cifar single", "wide", "imagenet", "dense"])
@pytest.mark.parametrize("arrangement", ["original", "full_preactivation"])
def test_other_networks(arrangement, name):
    compare(name, arrangement=arrangement)


@pytest.mark.backend
@pytest.mark.parametrize(
    "options",
    [
        {"activate_shape_shortcut": False},
        {"stride_on": "3x3"},
        {"shape_shortcut": "zero_pad", "shortcut": "shortcut_only_gating"},
        {"shortcut": "conv1x1"},
        {"normalization": "layer", "activation": "silu"},
    ],
    ids=str,
)
def test_options_reach_every_unit(options):
    compare("cifar bottleneck", **options)


@pytest.mark.backend
def test_stem_pooling_pads_with_minus_infinity():
    """tanh is negative where a padding with zeros would win the maximum at the border."""
    model, x = compare("imagenet", activation="tanh")
    pooled = harness.numpy(keras.Model(model.input, model.units[0].input)(x))
    assert (pooled[:, 0] < 0).any()


def names_around_the_units(model):
    names = [layer.name for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    units = [i for i, name in enumerate(names) if name.startswith("stage")]
    return names[: units[0]], names[units[-1] + 1 :]


STEM_NORM_ACTIVATION = ["stem_conv", "stem_norm", "stem_activation"]
POOL_AND_CLASSIFIER = ["head_pool", "head_classifier"]


@pytest.mark.backend
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
    """In a full pre-activation net exactly one BN-ReLU stands between the last addition
    and the pooling.
    """
    model = kp.models.resnet_cifar(8, arrangement=arrangement)
    assert names_around_the_units(model) == (stem, head + POOL_AND_CLASSIFIER)
    last = harness.paths(model.units[-1])
    assert (
        not [path for path in last if path.startswith("after_addition")]
        or arrangement == "bn_after_addition"
    )


@pytest.mark.backend
@pytest.mark.parametrize("arrangement", ["relu_only_preactivation", "full_preactivation"])
def test_both_paths_of_the_first_unit_see_the_first_activation(arrangement):
    model = kp.models.resnet_cifar(14, arrangement=arrangement, width_factor=0.25, input_shape=SIZE)
    harness.randomize(model)
    x = harness.images(2, *SIZE)
    ends = keras.Model(
        model.input, [model.get_layer("stem_activation").output, model.units[0].output]
    )(x)
    activated, y = (harness.numpy(value) for value in ends)
    branch = kp.ResidualUnit(4, arrangement=model.units[0].options.arrangement, shortcut="none")
    branch.build(activated.shape)
    branch.set_weights(model.units[0].get_weights())
    assert "branch/norm_0/gamma" not in harness.paths(
        branch
    )  # no second activation in front of the branch
    assert (activated == 0).any()
    np.testing.assert_allclose(y - harness.numpy(branch(activated)), activated, 1e-3, 1e-4)


def norms_back_to_back(model) -> tuple[int, list[str]]:
    """Return the number of norms that a signal meets, and the names of those that it
    meets right after another one, on any path.
    """
    graph = Graph(model, np.zeros((1, *model.input_shape[1:]), "float32"))
    last = dict.fromkeys(graph.inputs, frozenset({"start"}))
    norms, found = 0, []
    for step in graph.steps:
        before = frozenset().union(*(last[tensor] for tensor in step.inputs))
        is_norm = isinstance(step.operation, BatchNormalization)
        norms += is_norm
        found += [step.name] if is_norm and "norm" in before else []
        passes = step.kind in ("Add", "Pad", "GetItem", "Identity", "ZeroPad")
        after = before if passes else frozenset({"norm" if is_norm else step.kind})
        last |= dict.fromkeys(step.outputs, after)
    return norms, found


@pytest.mark.backend
@pytest.mark.parametrize("depth", [14, 20])
@pytest.mark.parametrize("arrangement", kp.ARRANGEMENTS)
def test_no_two_norms_back_to_back(arrangement, depth):
    options = {"block": "bottleneck"} if depth == 20 else {}
    model = kp.models.resnet_cifar(
        depth, arrangement=arrangement, width_factor=0.125, input_shape=(8, 8, 3), **options
    )
    gammas = sum(path.endswith("gamma") for path in harness.paths(model))
    assert norms_back_to_back(model) == (gammas, [])  # every norm was met


@pytest.mark.backend
def test_two_norms_back_to_back_are_found():
    """Two units that begin and end with a norm: the test above can fail."""
    ill = kp.Arrangement(first=("norm",), last=("norm",))
    inputs = x = keras.Input((4, 4, 2))
    for _ in range(2):
        x = kp.ResidualUnit(2, arrangement=ill)(x)
    assert norms_back_to_back(keras.Model(inputs, x))[1]


@pytest.mark.backend
@pytest.mark.parametrize(
    ("pooling", "shape"),
    [(None, (None, 3, 3, 16)), ("avg", (None, 16)), ("max", (None, 16))],
    ids=["none", "avg", "max"],
)
def test_without_top(pooling, shape):
    model = kp.models.resnet_cifar(
        8, width_factor=0.25, input_shape=SIZE, include_top=False, pooling=pooling
    )
    assert model.output_shape == shape
    assert model.logits is None
    harness.randomize(model)
    x = harness.images(2, *SIZE)
    features = np.maximum(
        harness.numpy(keras.Model(model.input, model.get_layer("head_norm").output)(x)),
        0,
    )
    want = {None: features, "avg": features.mean((1, 2)), "max": features.max((1, 2))}[pooling]
    np.testing.assert_allclose(harness.numpy(model(x)), want, 1e-4, 1e-5)


@pytest.mark.backend
def test_classifier_activation_stands_behind_the_logits():
    model = kp.models.dense_resnet(4, width=4, input_shape=(3,), classifier_activation="softmax")
    logits, y = keras.Model(model.input, [model.logits, model.output])(harness.images(5, 3))
    logits, y = harness.numpy(logits), harness.numpy(y)
    np.testing.assert_allclose(
        y, np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), 1e-4, 1e-6
    )


@pytest.mark.backend
@pytest.mark.parametrize(
    ("mean", "std"),
    [(127.5, None), (None, 2.0), ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]), ([125], 60.0)],
    ids=str,
)
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_preprocessing(data_format, mean, std):
    shape = (3, 8, 9) if data_format == "channels_first" else (8, 9, 3)
    options = {"width_factor": 0.125, "input_shape": shape, "data_format": data_format}
    plain = kp.models.resnet_cifar(8, **options)
    harness.randomize(plain)
    with_preprocessing = kp.models.resnet_cifar(8, mean=mean, std=std, **options)
    with_preprocessing.set_weights(plain.get_weights())
    pixels = np.random.default_rng(0).integers(0, 256, (2, *shape), "uint8")
    per_channel = (3, 1, 1) if data_format == "channels_first" else (1, 1, 3)
    mean, std = (
        np.broadcast_to(default if v is None else v, 3).reshape(per_channel)
        for v, default in ((mean, 0), (std, 1))
    )
    want = harness.numpy(plain(((pixels - mean) / std).astype("float32")))
    np.testing.assert_allclose(harness.numpy(with_preprocessing(pixels)), want, 1e-3, 1e-3)


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
    assert [unit.name for unit in model.units] == names
    assert {unit.options.block.name for unit in model.units} == {block}
    strides = [unit.options.strides for unit in model.units if unit.name.endswith("unit1")]
    assert strides == [1] + [2] * (len(stages) - 1)


@pytest.mark.backend
def test_config_is_plain_json():
    model = kp.models.resnet_cifar(
        8, mean=(1, 2, 3), std=np.float32(2), shortcut="conv1x1", activation="gelu"
    )
    assert json.loads(json.dumps(model.get_config())) == model.get_config()
