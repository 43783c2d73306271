"""The shortcuts after Table 1, each alone against NumPy, and all of them in one model with
every kind of feature.
"""

import functools

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import shortcuts
from keras_preact.export import _check, _children, _replay
from keras_preact.layers.components import Weights
from tests.keras_preact import harness
from tests.keras_preact import test_both_stacks as both
from tests.keras_preact import test_features_by_precision as features
from tests.keras_preact.export import one_process

#: A map, a vector, and tokens.
SHAPES = [(2, 3, 4, 5), (3, 5), (2, 4, 5)]


def made(h, shape, data_format="channels_last", dtype="float32"):
    """The layers of a shortcut, with random weights."""
    weights = Weights(None, None, None, data_format, keras.dtype_policies.get(dtype))
    site = shortcuts.Site(len(shape), shape[-1], strides=1, weights=weights, seed=None)
    layers = shortcuts.ShortcutLayers(h, site)
    layers.build(shape if data_format == "channels_last" else (shape[0], shape[-1], *shape[1:-1]))
    harness.randomize(layers)
    return layers


def across(x, residual, epsilon=1e-6):
    """The part of a vector that is orthogonal to x."""
    return residual - (x @ residual) / (x @ x + epsilon) * x


def across_pixels(x, residual):
    rows = zip(x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1]), strict=True)
    return np.stack([across(*pair) for pair in rows]).reshape(x.shape)


def across_maps(x, residual):
    maps = zip(x.reshape(len(x), -1), residual.reshape(len(x), -1), strict=True)
    return np.stack([across(*pair) for pair in maps]).reshape(x.shape)


#: Name to the shortcut, and its sum of x, F(x) and its weights.
ROWS = {
    "scaled": (kp.shortcuts.ScaledResidual(0.3), lambda x, f, alpha: x + alpha * f),
    "scaled per channel": (
        kp.shortcuts.ScaledResidual(0.3, per_channel=True),
        lambda x, f, alpha: x + alpha * f,
    ),
    "over channels": (kp.shortcuts.Orthogonal(), lambda x, f: x + across_pixels(x, f)),
    "over map": (kp.shortcuts.Orthogonal("map"), lambda x, f: x + across_maps(x, f)),
    "decayed": (kp.shortcuts.DecayedIdentity(factor=0.9), lambda x, f: 0.9 * x + f),
    "depth scaled": (kp.shortcuts.DepthScaling(0.5, base=4, units=64), lambda x, f: x + f / 4),
}


@pytest.mark.backend
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in ROWS for shape in SHAPES if (name, len(shape)) != ("over map", 3)],
)
def test_values_and_gradients(name, shape):
    """To 1e-6 of float64, and gradients on x, F(x) and weights by central differences; with
    the channels first, the same.
    """
    h, want = ROWS[name]
    x, f, cotangent = (harness.images(*shape, seed=seed) for seed in (1, 2, 3))
    layers = made(h, shape)
    weights = harness.weights(layers)

    def function(x, f):
        y = shortcuts.add(*layers.paths(x, f))
        return keras.ops.sum(keras.ops.multiply(y, cotangent)), [y]

    (y,), (on_x, on_f), on_weights = harness.step(function, layers)(x, f)
    exact = {"x": x, "f": f} | weights
    exact = {path: array.astype("float64") for path, array in exact.items()}
    harness.close(y, want(*exact.values()), 1e-6)

    def loss(path, move):
        moved = exact | {path: exact[path] + move} if path else exact
        return (want(*moved.values()) * cotangent).sum()

    names = dict(zip(map(id, layers.weights), weights, strict=True))
    gradients = {"f": on_f} | {names[key]: value for key, value in on_weights.items()}
    harness.check_directions(
        lambda path, move: loss(path or "x", move), on_x, gradients, np.random.default_rng(4)
    )
    if len(shape) == 4:
        first = made(h, shape, "channels_first")
        first.set_weights(layers.get_weights())
        moved = (keras.ops.convert_to_tensor(np.moveaxis(each, -1, 1)) for each in (x, f))
        sums = harness.numpy(shortcuts.add(*first.paths(*moved)))
        harness.close(np.moveaxis(sums, 1, -1), y, 1e-6)


@pytest.mark.backend
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("over", ["channels", "map"])
def test_inner_products_are_in_float32(over, dtype):
    """The squares of x overflow in float16, and their sum has few digits in bfloat16."""
    compute = keras.dtype_policies.get(dtype).compute_dtype
    shape = (2, 8, 8, 64)
    x, f = (keras.ops.cast(100 * harness.images(*shape, seed=i), compute) for i in (1, 2))
    shortcut, residual = made(kp.shortcuts.Orthogonal(over), shape, dtype=dtype).paths(x, f)
    assert shortcut is x
    assert keras.backend.standardize_dtype(residual.dtype) == compute
    rejection = across_pixels if over == "channels" else across_maps
    want = rejection(*(harness.numpy(tensor).astype("float64") for tensor in (x, f)))
    rounding = 2.0**-8 if dtype == "mixed_bfloat16" else 2.0**-11
    np.testing.assert_allclose(harness.numpy(residual), want, rounding, 1e-4)


def test_x_of_zeros():
    """Nothing is parallel to it."""
    f = harness.images(2, 3, 3, 4)
    _, residual = made(kp.shortcuts.Orthogonal(), f.shape).paths(0 * f, f)
    np.testing.assert_array_equal(harness.numpy(residual), f)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_new_network_with_scaled_residuals(stacked):
    """Each unit that keeps the shape returns its input."""
    options = {"input_shape": (8, 8, 1), "width_factor": 0.25, "stacked": stacked}
    model = kp.models.resnet_cifar(20, shortcut="scaled_residual", **options)
    paths = [path for path in harness.paths(model) if path.endswith("/scale/factor")]
    assert paths[0] == "stage1_unit1/shortcut/scale/factor"
    assert not any(np.any(value) for path, value in harness.weights(model).items() if path in paths)
    x = harness.images(2, 8, 8, 1)
    outputs = keras.Model(model.input, [model.first_input, *model.unit_outputs])(x)
    first, *others = (harness.numpy(tensor) for tensor in outputs)
    for output in others[:3]:
        np.testing.assert_array_equal(output, first)


@pytest.mark.backend
def test_factors_in_a_stack():
    """Output and gradient equal those of single units, also where they are recomputed."""
    unit = kp.ResidualUnit(5, block="dense", shortcut="decayed_identity")
    stack = kp.UnitStack(unit, 3, shortcut_factors=[0.9, 0.5, 0.1], remat=2)
    x, cotangent = harness.images(3, 5), harness.images(3, 5, seed=2)
    stack.build(x.shape)
    harness.randomize(stack)
    chain = keras.Sequential([keras.Input((5,)), *(stack.unit(i) for i in range(3))])
    assert [each.h.factor for each in chain.layers] == [0.9, 0.5, 0.1]
    value, on_x, _ = harness.value_and_grad(stack, x, cotangent)
    want, want_on_x, _ = harness.value_and_grad(chain, x, cotangent)
    np.testing.assert_allclose(value, want, 1e-5)
    np.testing.assert_allclose(on_x, want_on_x, 1e-4, 1e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_depth_scaling_of_a_network(stacked):
    """With `base` units the network is the ordinary one. With others it is one of constant
    factors.
    """
    h = kp.shortcuts.DepthScaling(0.5, base=6)
    x = harness.images(2, 8, 8, 1)
    for depth, same in (
        (14, "identity"),
        (50, kp.shortcuts.ConstantScaling(1.0, 0.5)),
        (26, kp.shortcuts.DepthScaling(0.5, base=6, units=12)),
    ):
        scaled, want = (
            kp.models.resnet_cifar(
                depth, shortcut=each, width_factor=0.25, input_shape=(8, 8, 1), stacked=stacked
            )
            for each in (h, same)
        )
        want.set_weights(scaled.get_weights())
        np.testing.assert_array_equal(harness.numpy(scaled(x)), harness.numpy(want(x)))


def test_both_units_of_a_transformer_layer_count():
    model = kp.models.transformer(
        2, width=8, input_shape=(8, 8, 1), shortcut=kp.shortcuts.DepthScaling(1, base=1)
    )
    assert [unit.h.multiplier for unit in model.units] == [0.25] * 4


def test_decay_of_the_scale():
    """It is decayed as any weight, and a word excludes it."""
    unit = kp.ResidualUnit(4, shortcut=kp.shortcuts.ScaledResidual(1.0))
    unit.build((2, 4, 4, 4))
    optimizers = [
        kp.optimizers.CoupledSGD(1.0, coupled_weight_decay=0.5, exclude_from_decay=words)
        for words in ((), ("scale",))
    ]
    factors = []
    for optimizer in optimizers:
        unit.shortcut.transform[0].factor.assign(1.0)
        weights = unit.trainable_weights
        optimizer.apply([keras.ops.zeros(weight.shape) for weight in weights], weights)
        factors.append(float(harness.numpy(unit.shortcut.transform[0].factor)))
    assert factors == [0.5, 1.0]


WRONG = [
    (lambda: kp.shortcuts.Orthogonal("pixels"), "over='pixels'"),
    (lambda: made(kp.shortcuts.Orthogonal("map"), (2, 4, 5)), "an input of 3 dimensions"),
    (lambda: kp.shortcuts.DecayedIdentity(1.5), "last=1.5"),
    (lambda: made(kp.shortcuts.DecayedIdentity(), (2, 5)), "needs DecayedIdentity(factor=...)"),
    (lambda: kp.shortcuts.DepthScaling(2), "power=2"),
    (lambda: kp.shortcuts.DepthScaling(base=0), "base=0"),
    (lambda: kp.shortcuts.DepthScaling(units=0), "units=0"),
    (lambda: made(kp.shortcuts.DepthScaling(), (2, 5)), "needs DepthScaling(units=...)"),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_arguments(call, words):
    assert words in harness.error_of(call)


# --- All rows in one model, with features that meet them

X = features.X


def training(model):
    optimizer = kp.optimizers.CoupledSGD(0.01, coupled_weight_decay=0.1)
    return both.trained(model, optimizer, **both.UNTRACED)


FEATURES = {
    each.__name__: each
    for each in (
        *(features.propagation, features.direct_path, features.grad_cam),
        *(training, both.training_health, both.folded),
    )
}


@functools.cache
def network(precision: str, stacked: bool) -> keras.Model:
    """Two units of each row, separate or in a stack. Features leave it as it is."""
    settings = {"dtype": precision}
    inputs = keras.Input(X.shape[1:])
    x = keras.layers.Conv2D(4, 3, padding="same", name="stem", **settings)(inputs)
    for i, (h, _) in enumerate(ROWS.values(), 1):
        # two factors of one row: a stack must not take the first for both
        pair = [h, h.with_factor(0.5)] if h.differs else [h, h]
        units = [
            kp.ResidualUnit(4, shortcut=each, name=f"row{i}_unit{u}", **settings)
            for u, each in enumerate(pair, 1)
        ]
        for unit in units:
            unit.build((None, *X.shape[1:-1], 4))
        if stacked:
            units = [kp.UnitStack.from_units(units, name=f"row{i}_units")]
        for unit in units:
            x = unit(x)
    x = keras.layers.GlobalAveragePooling2D(**settings)(x)
    model = keras.Model(inputs, keras.layers.Dense(3, name="head", dtype="float32")(x))
    if precision == "float32" and not stacked:
        harness.randomize(model)
        return model
    if stacked:
        separate = network(precision, False)
        for layer in model.layers:
            if isinstance(layer, kp.UnitStack):
                layer.load_units([separate.get_layer(name) for name in layer.unit_names])
            elif layer.weights:
                layer.set_weights(separate.get_layer(layer.name).get_weights())
    else:
        model.set_weights(network("float32", False).get_weights())
    return model


@functools.cache
def expected(feature: str) -> dict[str, np.ndarray]:
    return FEATURES[feature](network("float32", False))


@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_stacks(feature):
    got = FEATURES[feature](network("float32", True))
    features.check(feature, got, expected(feature), "float32")


@pytest.mark.parametrize(
    ("precision", "stacked"), [("mixed_bfloat16", True), ("mixed_float16", False)]
)
def test_precisions(precision, stacked):
    for feature in ("propagation", "direct_path"):
        got = FEATURES[feature](network(precision, stacked))
        features.check(feature, got, expected(feature), precision)


@pytest.mark.parametrize("stacked", [False, True])
def test_files(stacked, tmp_path):
    model = network("float32", stacked)
    want = harness.numpy(model(X))
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        harness.numpy(keras.saving.load_model(tmp_path / "model.keras")(X)), want
    )


@pytest.mark.soak
def test_exports(tmp_path, monkeypatch):
    with one_process.started() as run:
        monkeypatch.setattr(_children, "run", run)
        monkeypatch.setattr(_check, "compare", lambda *_: {})  # closer below, in this process
        for name, (save, file) in features.EXPORTS.items():
            model = network("float32", name == "saved_model")
            path = save(model, tmp_path / file, classes=["a", "b", "c"])
            got = _replay.RUNTIMES[name](str(path))(X)["logits"]
            harness.close(got, harness.numpy(model(X)), 1e-4, name)
