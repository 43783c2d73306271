"""Transformers: units and networks against NumPy, and properties of attention, its mask
and the two orders.
"""

import dataclasses

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.models import resnet_cifar
from keras_preact.transformer import TransformerUnit
from tests import reference
from tests.keras_preact import harness

SHAPE = (2, 5, 12)  # all sizes differ, and no size is that of a head (4)
HEADS = 3


numpy = harness.numpy


def unit_on(x, seed=0, **options):
    options = harness.alone(options)
    streams = kp.shortcuts.get(options.get("shortcut", "identity")).streams
    unit = TransformerUnit(x.shape[-1] // streams, num_heads=HEADS, **options)
    unit.build(x.shape)
    harness.randomize(unit, seed)
    return unit


def reference_of(unit, **options):
    weights = harness.weights(unit)
    own = (reference.below(weights, name) for name in ("attention", "mlp"))
    known = {field.name for field in dataclasses.fields(reference.TransformerUnit)}
    return reference.TransformerUnit(
        *own, HEADS, **{key: value for key, value in options.items() if key in known}
    )


OPTIONS = [
    *(
        {"arrangement": arrangement, "mlp": mlp}
        for arrangement in ("pre_norm", "post_norm")
        for mlp in ("gelu", "swiglu")
    ),
    {"normalization": "rms", "mlp": "swiglu", "causal": True, "use_bias": False},
    {"normalization": "rms", "arrangement": "post_norm", "mlp": "relu", "hidden": 7},
    {"arrangement": "peri_norm", "mlp": "swiglu", "shortcut": "orthogonal"},
    {"arrangement": "peri_norm", "normalization": "rms"},
    *({"shortcut": name} for name in kp.SHORTCUTS if name != "identity"),
    {"arrangement": "post_norm", "shortcut": "hyper_connections"},
]


@pytest.mark.backend
@pytest.mark.parametrize("options", OPTIONS, ids=harness.label)
def test_unit(options):
    x = harness.images(*harness.with_streams(SHAPE, options.get("shortcut", "identity")))
    unit = unit_on(x, **options)
    assert unit.compute_output_shape(x.shape) == x.shape
    between, after = reference_of(unit, **options)(x)
    harness.close(numpy(unit.attention(x)), between)
    for training in (False, *[True] * (options.get("shortcut") != "dropout")):  # it is random
        harness.close(numpy(unit(x, training=training)), after)


@pytest.mark.backend
@pytest.mark.parametrize("options", [OPTIONS[3], OPTIONS[4], OPTIONS[6]], ids=harness.label)
def test_gradients(options):
    """Compare with central differences of the NumPy unit, in a random direction for x and
    for every weight.
    """
    x = harness.images(*SHAPE)
    unit = unit_on(x, **options)
    cotangent = harness.images(*SHAPE, seed=2)
    value, on_x, on_weights = harness.value_and_grad(unit, x, cotangent)
    weights = {path: array.astype("float64") for path, array in harness.weights(unit).items()}
    expected = reference_of(unit, **options)

    def loss(path, move):
        moved = weights if path is None else weights | {path: weights[path] + move}
        own = {f"{name}_weights": reference.below(moved, name) for name in ("attention", "mlp")}
        at = x + move if path is None else x.astype("float64")
        return (dataclasses.replace(expected, **own)(at)[1] * cotangent).sum()

    np.testing.assert_allclose(value, loss(None, 0.0), 1e-4, 1e-4)
    assert set(on_weights) == set(weights)
    harness.check_directions(loss, on_x, on_weights, np.random.default_rng(3))


#: Options of a network that change nothing in its units.
AROUND = ("classifier_activation", "mean", "std")
NETWORKS = {
    "images": {"input_shape": (6, 8, 3), "patch_size": 2},
    "images, channels first": {
        "input_shape": (3, 6, 8),
        "patch_size": 2,
        "data_format": "channels_first",
    },
    "tokens": {"input_shape": (5, 7), "patch_size": None},
}


def network(shape="images", depth=2, seed=0, **options):
    model = kp.models.transformer(
        depth, width=12, num_heads=HEADS, classes=4, **NETWORKS[shape] | options
    )
    harness.randomize(model, seed)
    return model, harness.images(3, *model.input_shape[1:])


@pytest.mark.backend
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("images", {"classifier_activation": "softmax", "mean": 2.0, "std": 3.0}),
        ("images, channels first", {"arrangement": "post_norm"}),
        ("tokens", {"mlp": "swiglu", "normalization": "rms", "causal": True}),
    ],
)
def test_network(shape, options):
    model, x = network(shape, **options)
    patch_size = NETWORKS[shape]["patch_size"]
    known = {key: value for key, value in options.items() if key not in AROUND}
    weights = harness.weights(model)
    expected = reference.Transformer(weights, 2, patch_size, {"heads": HEADS, **known})
    given = (np.moveaxis(x, 1, -1) if "first" in shape else x) - options.get("mean", 0)
    logits = expected(given / options.get("std", 1))
    y = reference.softmax(logits) if "classifier_activation" in options else logits
    every = keras.Model(model.input, [*model.unit_outputs, model.logits, model.output])(x)
    for got, want in zip(every, [*expected.outputs, logits, y], strict=True):
        harness.close(numpy(got), want)


def test_swiglu_is_two_thirds_as_wide_as_an_mlp():
    """The width is rounded up to a multiple of 8."""
    assert kp.blocks.MLP().channels(12) == (48, 12)
    widths = [kp.blocks.SwiGLU().channels(width)[0] for width in (3, 12, 16, 64, 768)]
    assert widths == [8, 32, 48, 176, 2048]


def initial(initializer, **options):
    unit = TransformerUnit(
        32, num_heads=HEADS + 1, kernel_initializer=initializer, name="unit", **options
    )
    unit.build((None, 5, 32))
    return harness.kernels(unit)


def test_every_weight_draws_its_own_values():
    """This holds for one seeded initialiser too; a second network has the same values."""
    seeded = keras.initializers.GlorotNormal(seed=3)
    first, again = (initial(seeded, mlp="swiglu") for _ in range(2))
    assert len(first) == 7
    harness.check_distinct(first)
    for path, value in first.items():
        np.testing.assert_array_equal(value, again[path])
    model = kp.models.transformer(
        2, width=12, num_heads=HEADS, input_shape=(5, 7), patch_size=None, kernel_initializer=seeded
    )
    harness.check_distinct(harness.kernels(model))


#: Initialiser, then two standard deviations, times the root of half the fan-out: of the last weight
#: of each branch, and of the other weights. In attention, the last weight is after the heads.
@pytest.mark.parametrize(
    ("initializer", "last", "others"),
    [
        (kp.initializers.released_he(), 1, 1),
        (kp.initializers.DepthScaledHe(units=100), 0.1, 1),
        (kp.initializers.Fixup(units=16), 0, 16**-0.5),
        (None, None, None),
        (kp.initializers.DeepNorm(units=4), None, None),
    ],
    ids=harness.label,
)
def test_initial_deviations(initializer, last, others):
    for path, value in initial(initializer).items():
        is_last = path.endswith(("attention_1/output/kernel", "mlp/branch/dense_2/kernel"))
        want = (
            np.sqrt(2 / sum(value.shape))
            if others is None
            else (last if is_last else others) * np.sqrt(2 / value.shape[1])
        )
        if initializer is not None and others is None:  # DeepNorm: two layers, beta = 16^(-1/4)
            want *= 1.0 if "query" in path or "key" in path else 0.5
        np.testing.assert_allclose(value.std(), want, 0.1, err_msg=path)


def test_initializers_know_the_number_of_units():
    model = network(depth=3, kernel_initializer=kp.initializers.DepthScaledHe())[0]
    assert {unit.kernel_initializer.units for unit in model.units} == {6}


@pytest.mark.backend
def test_deep_norm(tmp_path):
    """LN(alpha x + F(x)) with alpha = (2 N)^(1/4) for N layers, also in files; the branch
    starts with beta = (8 N)^(-1/4).
    """
    model, x = network(depth=3, **kp.models.DEEP_NORM)
    options = {"heads": HEADS, "arrangement": "post_norm", "shortcut": "constant_scaling"}
    options["factors"] = (6**0.25, 1.0)
    expected = reference.Transformer(harness.weights(model), 3, 2, options)
    harness.close(numpy(model(x)), expected(x))
    model.save(tmp_path / "model.keras")
    copy = keras.saving.load_model(tmp_path / "model.keras")
    assert copy.get_config() == model.get_config()
    np.testing.assert_array_equal(numpy(copy(x)), numpy(model(x)))
    wide = {"width": 64, "num_heads": 4, "input_shape": (8, 8, 1), "patch_size": 2}
    new = harness.kernels(kp.models.transformer(2, **wide, **kp.models.DEEP_NORM))
    stds = [
        new[f"layer1_{path}/kernel"].std() / np.sqrt(2 / size)
        for path, size in (
            ("attention/branch/attention_1/query", 128),
            ("attention/branch/attention_1/value", 128),
            ("mlp/branch/dense_1", 64 + 256),
        )
    ]
    np.testing.assert_allclose(stds, [1, 0.5, 0.5], rtol=0.05)


def test_stochastic_depth_grows_with_the_unit():
    model, x = network(stochastic_depth=0.4)
    np.testing.assert_allclose(
        [unit.stochastic_depth for unit in model.units], [0.1, 0.2, 0.3, 0.4]
    )
    np.testing.assert_array_equal(numpy(model(x)), numpy(network()[0](x)))


def test_decay_falls_with_the_unit():
    """Attention and MLP are two units."""
    model = network(shortcut=kp.shortcuts.DecayedIdentity(0.6))[0]
    np.testing.assert_allclose([unit.h.factor for unit in model.units], [0.9, 0.8, 0.7, 0.6])


def test_masks_of_attention_and_mlp_differ():
    unit = TransformerUnit(12, num_heads=HEADS, shortcut=kp.shortcuts.Dropout(seed=1))
    x = np.ones(SHAPE, "float32")
    masks = [numpy(each.trace(x, training=True).shortcut) for each in unit.units]
    assert not np.array_equal(*masks)


@pytest.mark.backend
@pytest.mark.parametrize(
    "options",
    [{"mlp": "swiglu"}, {"arrangement": "peri_norm", "shortcut": "decayed_identity"}],
    ids=str,
)
def test_files_precision_and_formats(options, tmp_path):
    def build(**more):
        if "data_format" in more:
            more["input_shape"] = NETWORKS["images, channels first"]["input_shape"]
        return network(hidden=9, dropout=0.2, std=3.0, name="a_name", **options, **more)[0]

    harness.check_model(build, tmp_path)


@pytest.mark.parametrize("block", ["attention", "mlp", "swiglu"])
def test_other_widths_and_orders(block):
    """A unit that widens its tokens has a projection, also in the arrangements for images."""
    x = harness.images(2, 5, 6)
    for arrangement in ("original", "full_preactivation", "post_norm"):
        unit = harness.unit_on(x, 8, block=block, arrangement=arrangement, normalization="layer")
        assert tuple(unit(x).shape) == unit.compute_output_shape(x.shape) == (2, 5, 8)


def heads(number=2, **options):
    return TransformerUnit(12, num_heads=number, **options)


def block(name, **options):
    return kp.ResidualUnit(12, block=name, **options)


WRONG = [
    (lambda: heads(5), "filters=12, num_heads=5"),
    (lambda: heads(0), "`num_heads` must be a positive integer"),
    (lambda: heads(hidden=0), "`hidden` must be a positive integer"),
    (lambda: heads(arrangement="prenorm"), "'pre_norm'"),
    (lambda: heads()(np.zeros((2, 5, 8))), "as many features"),
    (lambda: heads()(np.zeros((2, 12))), "(batch, tokens, features)"),
    (lambda: resnet_cifar(8, num_heads=3), "kp.blocks.Attention(num_heads=...)"),
    (lambda: resnet_cifar(8, hidden=3), "kp.blocks.Dense(hidden=...) or kp.blocks.MLP(hidden=...)"),
    (lambda: block("swiglu", activation="gelu"), "activation='gelu'"),
    (lambda: block("attention", strides=2), "strides=2"),
    (lambda: block("attention", dropout=0.1), "dropout_at='before_addition'"),
    (lambda: network(depth=0), "depth=0"),
    (lambda: network(input_shape=(6, 7, 3)), "multiples of 2, the size of a square"),
    (lambda: network(input_shape=(None, 8, 3)), "(None, 8, 3)"),
    (lambda: network(patch_size=None), "(6, 8, 3), patch_size=None"),
    (lambda: network(patch_size=0), "patch_size=0"),
    (lambda: network(data_format="last"), "'last'"),
    (lambda: kp.UnitStack(heads(), 3), "TransformerUnit"),
    (lambda: heads(**kp.models.DEEP_NORM)(np.zeros(SHAPE)), "needs DeepNorm(units=...)"),
    (
        lambda: heads(shortcut=kp.shortcuts.DeepNormScaling())(np.zeros(SHAPE)),
        "ConstantScaling(L ** 0.25, 1.0)",
    ),
    (lambda: network(shortcut=kp.shortcuts.Orthogonal("map")), "an input of 3 dimensions"),
    (lambda: heads(shortcut="decayed_identity")(np.zeros(SHAPE)), "DecayedIdentity(factor=...)"),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_arguments(call, words):
    assert words in harness.error_of(call)
