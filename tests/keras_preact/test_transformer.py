"""Transformers: their units and networks against NumPy, and what attention, its mask
and the two orders must do.
"""

import dataclasses
import json

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.backend import autodiff
from keras_preact.transformer import TransformerUnit
from tests import reference
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

SHAPE = (2, 5, 12)  # neither the tokens nor the features of a head (4) are equal to another size
HEADS = 3


numpy = harness.numpy


def unit_on(x, seed=0, **options):
    unit = TransformerUnit(x.shape[-1], num_heads=HEADS, **options)
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
]


@pytest.mark.parametrize("options", OPTIONS, ids=harness.label)
def test_unit(options):
    x = harness.images(*SHAPE)
    unit = unit_on(x, **options)
    assert unit.compute_output_shape(x.shape) == x.shape
    between, after = reference_of(unit, **options)(x)
    harness.close(numpy(unit.attention(x)), between)
    for training in (False, True):
        harness.close(numpy(unit(x, training=training)), after)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3], OPTIONS[4]], ids=harness.label)
def test_gradients(options):
    """Against central differences of the NumPy unit, in a random direction for x and
    for every weight.
    """
    x = harness.images(*SHAPE)
    unit = unit_on(x, **options)
    cotangent = harness.images(*SHAPE, seed=2)
    value, on_x, on_weights = harness.value_and_grad(unit, x, cotangent)
    weights = {path: array.astype("float64") for path, array in harness.weights(unit).items()}
    expected = reference_of(unit, **options)

    def loss(moved, x):
        own = {f"{name}_weights": reference.below(moved, name) for name in ("attention", "mlp")}
        return (dataclasses.replace(expected, **own)(x)[1] * cotangent).sum()

    np.testing.assert_allclose(value, loss(weights, x), 1e-4, 1e-4)
    assert set(on_weights) == set(weights)
    rng, step = np.random.default_rng(3), 1e-6
    x = x.astype("float64")
    for path, gradient in [(None, on_x), *on_weights.items()]:
        direction = rng.normal(size=gradient.shape)

        def moved(step, path=path, direction=direction):
            if path is None:
                return loss(weights, x + step * direction)
            return loss(weights | {path: weights[path] + step * direction}, x)

        difference = (moved(step) - moved(-step)) / (2 * step)
        np.testing.assert_allclose(
            (gradient * direction).sum(), difference, 1e-3, 1e-3, err_msg=str(path)
        )


def test_forward_derivative_is_the_transpose_of_the_backward_one():
    x, tangent, cotangent = (harness.images(*SHAPE, seed=seed) for seed in (1, 2, 3))
    unit = unit_on(x, mlp="swiglu", causal=True)
    forward = numpy(autodiff.jvp(unit, x, tangent))
    backward = numpy(autodiff.vjp(unit, x)[1](keras.ops.convert_to_tensor(cotangent)))
    np.testing.assert_allclose((forward * cotangent).sum(), (backward * tangent).sum(), 1e-4)


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
    model = kp.models.pre_ln_transformer(
        depth, width=12, num_heads=HEADS, classes=4, **NETWORKS[shape] | options
    )
    harness.randomize(model, seed)
    return model, harness.images(3, *model.input_shape[1:])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"arrangement": "post_norm"},
        {"mlp": "swiglu", "normalization": "rms", "causal": True},
    ],
    ids=harness.label,
)
@pytest.mark.parametrize("shape", NETWORKS)
def test_network(shape, options):
    model, x = network(shape, **options)
    patch_size = NETWORKS[shape]["patch_size"]
    expected = reference.Transformer(
        harness.weights(model), 2, patch_size, {"heads": HEADS, **options}
    )
    logits = expected(np.moveaxis(x, 1, -1) if "first" in shape else x)
    every = keras.Model(model.input, [*model.unit_outputs, model.logits, model.output])(x)
    for got, want in zip(every, [*expected.outputs, logits, logits], strict=True):
        harness.close(numpy(got), want)
    assert [unit.name for unit in model.units] == [
        f"layer{n}_{name}" for n in (1, 2) for name in ("attention", "mlp")
    ]


def test_probe():
    """The base class's way into every x_l holds for a transformer as well."""
    model, x = network()
    probe = model.probe()
    zeros = [
        np.zeros((1, *x.shape[:1], *tensor.shape[2:]), "float32") for tensor in probe.inputs[1:]
    ]
    output, *outputs = probe([x, *zeros])
    wanted = keras.Model(model.input, model.unit_outputs)(x)
    for got, want in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(numpy(got)[0], numpy(want), 1e-6, 1e-6)
    np.testing.assert_allclose(numpy(output), numpy(model(x)), 1e-5, 1e-6)
    moved = [harness.images(*zeros[0].shape), *zeros[1:]]
    assert not np.allclose(numpy(probe([x, *moved])[0]), numpy(output))


def layers_around_the_units(**options):
    names = [layer.name for layer in network(**options)[0].layers[1:]]
    units = [i for i, name in enumerate(names) if name.startswith("layer")]
    return names[: units[0]], names[units[-1] + 1 :]


def test_layers_around_the_units():
    """One norm stands behind the last addition: the head's, or that unit's own."""
    stem, top = ["stem_patches", "stem_dense", "stem_positions"], ["head_pool", "head_classifier"]
    assert layers_around_the_units() == (stem, ["head_norm", *top])
    assert layers_around_the_units(arrangement="post_norm") == (stem, top)
    assert layers_around_the_units(
        shape="tokens",
        mean=1.0,
        classifier_activation="softmax",
        arrangement=kp.Arrangement(stem=("norm",)),
    ) == (
        ["preprocessing", "stem_dense", "stem_positions", "stem_norm"],
        [*top, "head_predictions"],
    )


def test_preprocessing_and_predictions():
    model, x = network(
        "tokens", mean=2.0, std=[1.0, 2, 3, 4, 5, 6, 7], classifier_activation="softmax"
    )
    plain = network("tokens")[0]
    plain.set_weights(model.get_weights())
    logits = numpy(plain(((x - 2) / np.arange(1, 8)).astype("float32")))
    got_logits, y = keras.Model(model.input, [model.logits, model.output])(x)
    harness.close(numpy(got_logits), logits)
    harness.close(numpy(y), reference.softmax(logits))


def influence(unit, x):
    """Which token's output, in the rows, each token's input moves, in the columns."""
    y = numpy(unit(x))
    moved = []
    for token in range(x.shape[1]):
        other = x.copy()
        other[:, token] += harness.images(x.shape[-1], seed=9)
        moved.append(np.abs(numpy(unit(other)) - y).max((0, 2)))
    return np.array(moved).T > 1e-6


@pytest.mark.parametrize("arrangement", ["pre_norm", "post_norm"])
def test_causal_attention_sees_no_later_token(arrangement):
    x = harness.images(*SHAPE)
    options = {"arrangement": arrangement, "normalization": "layer"}
    np.testing.assert_array_equal(
        influence(unit_on(x, causal=True, **options), x), np.tri(5, dtype=bool)
    )
    assert influence(unit_on(x, **options), x).all()


@pytest.mark.parametrize(
    ("options", "in_mlp", "norm"),
    [
        ({}, 2 * 12 * 48 + 48 + 12, 2 * 12),
        ({"arrangement": "post_norm"}, 2 * 12 * 48 + 48 + 12, 2 * 12),
        ({"mlp": "swiglu", "normalization": "rms"}, 3 * 12 * 32 + 2 * 32 + 12, 12),
        ({"hidden": 5, "mlp": "swiglu"}, 3 * 12 * 5 + 2 * 5 + 12, 2 * 12),
    ],
    ids=harness.label,
)
def test_parameter_counts(options, in_mlp, norm):
    """Width 12, 4 classes, patches of 2 x 2 x 3 values, 3 x 4 of them."""
    model = network(depth=3, **options)[0]
    in_attention = 4 * (12 * 12 + 12)
    heads_norm = 0 if "arrangement" in options else norm
    stem, head = 12 * 12 + 12 + 12 * 12, 12 * 4 + 4
    assert model.count_params() == stem + 3 * (in_attention + in_mlp + 2 * norm) + heads_norm + head


@pytest.mark.parametrize(("width", "hidden"), [(3, 8), (12, 32), (16, 48), (64, 176), (768, 2048)])
def test_swiglu_is_two_thirds_as_wide_as_an_mlp(width, hidden):
    """Up to the next multiple of 8."""
    assert kp.blocks.SwiGLU().channels(width) == (hidden, width)
    assert kp.blocks.MLP().channels(width) == (4 * width, width)


@pytest.mark.parametrize("block", ["attention", "mlp", "swiglu"])
def test_other_widths_and_orders(block):
    """A unit that widens its tokens takes a projection; the six arrangements of images
    work on tokens as well.
    """
    x = harness.images(2, 5, 6)
    for arrangement in (*kp.ARRANGEMENTS, "pre_norm", "post_norm"):
        unit = harness.unit_on(x, 8, block=block, arrangement=arrangement, normalization="layer")
        assert tuple(unit(x).shape) == unit.compute_output_shape(x.shape) == (2, 5, 8)
        assert "projection/dense/kernel" in harness.paths(unit)


def initial(initializer, **options):
    unit = TransformerUnit(
        32, num_heads=HEADS + 1, kernel_initializer=initializer, name="unit", **options
    )
    unit.build((None, 5, 32))
    return harness.weights(unit)


def test_every_weight_draws_its_own_values():
    """Under one seeded initialiser as well, and the same ones again."""
    first, again = (
        initial(keras.initializers.GlorotNormal(seed=3), mlp="swiglu") for _ in range(2)
    )
    kernels = [path for path in first if path.endswith("kernel")]
    assert len(kernels) == 7
    for path in kernels:
        np.testing.assert_array_equal(first[path], again[path])
    for i, path in enumerate(kernels):
        for other in kernels[:i]:
            same = first[path].shape == first[other].shape
            assert not (same and np.isclose(first[path], first[other]).any())
    model = kp.models.pre_ln_transformer(
        2, width=12, kernel_initializer=keras.initializers.GlorotNormal(seed=3)
    )
    one, other = (
        harness.weights(unit)["branch/attention_1/query/kernel"] for unit in model.units[::2]
    )
    assert not np.isclose(one, other).any()


def test_variances_follow_the_size_of_the_dense_layers():
    for path, value in initial(None).items():
        if path.endswith("kernel"):
            np.testing.assert_allclose(
                value.std(), np.sqrt(2 / sum(value.shape)), 0.1, err_msg=path
            )
    for path, value in initial(kp.initializers.released_he()).items():
        if path.endswith("kernel"):
            np.testing.assert_allclose(value.std(), np.sqrt(2 / value.shape[1]), 0.1, err_msg=path)


def test_initializers_for_depth_know_the_last_weight_of_each_branch():
    """That of attention is the one behind the heads."""
    last = ("attention_1/output/kernel", "mlp/branch/dense_2/kernel")
    scaled = initial(kp.initializers.DepthScaledHe(units=100), mlp="swiglu")
    fixup = initial(kp.initializers.Fixup(units=16))
    for path, value in scaled.items():
        if path.endswith("kernel"):
            factor = 0.1 if path.endswith(last) else 1
            np.testing.assert_allclose(
                value.std(), factor * np.sqrt(2 / value.shape[1]), 0.1, err_msg=path
            )
    for path, value in fixup.items():
        if path.endswith("kernel"):
            factor = 0 if path.endswith(last) else 16**-0.5
            np.testing.assert_allclose(
                value.std(), factor * np.sqrt(2 / value.shape[1]), 0.1, err_msg=path
            )
    model = kp.models.pre_ln_transformer(3, kernel_initializer=kp.initializers.DepthScaledHe())
    assert {unit.options.kernel_initializer.units for unit in model.units} == {6}


def test_dropout_leaves_the_shortcut_alone():
    x = harness.images(64, 5, 12)
    unit = unit_on(x, dropout=0.5)
    branch, shortcut = unit.attention, x
    full = numpy(branch(x, training=False)) - shortcut
    got = numpy(branch(x, training=True)) - shortcut
    dropped = np.isclose(got, 0, atol=1e-6)
    assert 0.45 < dropped.mean() < 0.55
    np.testing.assert_allclose(got[~dropped], 2 * full[~dropped], 1e-3, 1e-4)
    assert [layer.name for layer in unit.mlp.rest if isinstance(layer, keras.layers.Dropout)] == [
        "dropout_2"
    ]


def test_stochastic_depth_grows_with_the_unit():
    model, x = network(stochastic_depth=0.4)
    np.testing.assert_allclose(
        [unit.options.stochastic_depth for unit in model.units], [0.1, 0.2, 0.3, 0.4]
    )
    np.testing.assert_array_equal(numpy(model(x)), numpy(network()[0](x)))


@pytest.mark.parametrize(
    "options",
    [
        {"block": "attention", "num_heads": 2, "causal": True},
        {"block": "mlp", "activation": "gelu"},
        {"block": "swiglu"},
    ],
    ids=harness.label,
)
def test_stacks(options):
    """Units of one kind make a stack, as any other unit does."""
    x = harness.images(2, 5, 8)
    options = {"arrangement": "pre_norm", "normalization": "layer", **options}
    units = [harness.unit_on(x, 8, seed, **options) for seed in range(3)]
    stack = kp.UnitStack.from_units(units, name="stack")
    want = x
    for unit in units:
        want = unit(want)
    np.testing.assert_allclose(numpy(stack(x)), numpy(want), 1e-4, 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS[4],
        {
            "kernel_initializer": keras.initializers.HeNormal(seed=1),
            "dropout": 0.1,
            "dtype": "mixed_bfloat16",
        },
    ],
    ids=harness.label,
)
def test_unit_survives_its_config(options):
    x = harness.images(*SHAPE)
    unit = unit_on(x, name="a_name", **options)
    copy = TransformerUnit.from_config(unit.get_config())
    assert copy.get_config() == unit.get_config()
    copy.build(x.shape)
    assert harness.paths(copy) == harness.paths(unit)
    copy.set_weights(unit.get_weights())
    np.testing.assert_array_equal(
        numpy(keras.ops.cast(copy(x), "float32")), numpy(keras.ops.cast(unit(x), "float32"))
    )


def test_frozen_units_have_no_trainable_weights():
    x = harness.images(*SHAPE)
    unit = TransformerUnit(12, num_heads=3, trainable=False)
    unit(x)
    assert unit.weights
    assert not unit.trainable_weights
    assert not unit.attention.trainable


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("images", {"mlp": "swiglu", "hidden": 9, "dropout": 0.2, "std": 3.0, "name": "a_name"}),
        ("tokens", {"normalization": "rms", "classifier_activation": "softmax"}),
    ],
)
def test_files_precision_and_formats(shape, options, tmp_path):
    def build(**more):
        if "data_format" in more and shape == "images":
            more["input_shape"] = NETWORKS[f"{shape}, channels first"]["input_shape"]
        return network(shape, **options, **more)[0]

    harness.check_model(build, tmp_path)


@pytest.mark.parametrize(
    ("suffix", "arrangement"), [("preln", "pre_norm"), ("postln", "post_norm")]
)
def test_registered_models(suffix, arrangement):
    name = f"digits_transformer6_{suffix}"
    entry = kp.model_entry(name)
    assert (entry.builder, entry.arguments["depth"]) == (kp.models.pre_ln_transformer, 6)
    options = {"depth": 1, "mlp": "swiglu", "classes": 3}  # in place of the entry's
    model = kp.create_model(name, include_preprocessing=True, **options)
    assert (model.name, model.input_shape, model.output_shape) == (name, (None, 8, 8, 1), (None, 3))
    assert {unit.options.arrangement for unit in model.units} == {
        kp.arrangements.TRANSFORMER_ARRANGEMENTS[arrangement]
    }
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1)).astype("float32")
    plain = kp.create_model(name, **options)
    plain.set_weights(model.get_weights())
    harness.close(numpy(model(pixels)), numpy(plain(entry.preprocessing.normalize(pixels))))


@pytest.mark.soak
def test_export(tmp_path):
    """`save` itself compares what TensorFlow alone computes with the model; the
    channels stand last in every export.
    """
    model, _ = network("images, channels first", mlp="swiglu", causal=True)
    path = kp.export.save(model, tmp_path / "transformer", classes=list("abcd"))
    card = json.loads((path.parent / "model_card.json").read_text())
    assert card["signatures"]["serving_default"]["inputs"]["images"]["shape"] == [None, 6, 8, 3]


def heads(number=2, **options):
    return TransformerUnit(12, num_heads=number, **options)


def block(name="basic", **options):
    return kp.ResidualUnit(12, block=name, **options)


WRONG = [
    (lambda: heads(5), ("multiple of `num_heads`", "filters=12, num_heads=5")),
    (lambda: heads(0), ("`num_heads` must be a positive integer",)),
    (lambda: heads(hidden=0), ("`hidden` must be a positive integer",)),
    (lambda: heads(arrangement="prenorm"), ("Unknown arrangement", "'pre_norm'")),
    (lambda: heads()(np.zeros((2, 5, 8))), ("as many features", "12", "(2, 5, 8)")),
    (lambda: heads()(np.zeros((2, 12))), ("(batch, tokens, features)", "(2, 12)")),
    (lambda: block(num_heads=3), ("'num_heads'", "kp.blocks.Attention(num_heads=...)")),
    (lambda: block("mlp", causal=True), ("kp.blocks.Attention(causal=...)",)),
    (
        lambda: block(hidden=3),
        ("kp.blocks.Dense(hidden=...) or kp.blocks.MLP(hidden=...)",),
    ),
    (lambda: block("swiglu", activation="gelu"), ("'silu'", "activation='gelu'")),
    (lambda: block("attention", strides=2), ("no strides", "strides=2")),
    (lambda: block("attention", dropout=0.1), ("dropout_at='before_addition'",)),
    (lambda: network(depth=0), ("`depth` must be a positive integer", "depth=0")),
    (
        lambda: network(input_shape=(6, 7, 3)),
        ("multiples of `patch_size`", "(6, 7, 3), patch_size=2"),
    ),
    (lambda: network(input_shape=(None, 8, 3)), ("(height, width, channels)", "(None, 8, 3)")),
    (lambda: network(patch_size=None), ("(tokens, features)", "(6, 8, 3), patch_size=None")),
    (lambda: network(patch_size=0), ("`patch_size` must be a positive integer", "patch_size=0")),
    (lambda: network(data_format="last"), ("data_format", "'last'")),
    (lambda: kp.UnitStack(heads(), 3), ("must be a ResidualUnit", "TransformerUnit")),
]


@pytest.mark.parametrize(("make", "parts"), WRONG, ids=[" ".join(parts) for _, parts in WRONG])
def test_errors(make, parts):
    message = harness.error_of(make)
    assert all(part in message for part in parts), message
