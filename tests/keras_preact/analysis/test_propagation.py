"""Signal propagation against NumPy: every figure of every unit, gradients by finite
differences, any model's graph.
"""

import json

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests import reference
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

FIGURES = (
    *("x_norm", "x_mean", "x_std", "residual_norm", "residual_mean", "residual_std"),
    *("shortcut_norm", "cut", "dead", "gradient_norm"),
)


def network(depth=8, **options):
    """A narrow net with random weights: units of 4, 8, 16 channels on 8x8 images."""
    options = {"width_factor": 0.25, "input_shape": (8, 8, 2)} | options
    model = kp.models.resnet_cifar(depth, **options)
    harness.randomize(model)
    return model


def numpy_units(model, **options):
    """The network's units in NumPy, float64; `options` are those of the builder."""
    units = [
        harness.reference_of(
            unit, block=unit.options.block.name, strides=unit.options.strides, **options
        )
        for unit in model.units
    ]
    units[0].activated_input = True
    for unit in units:
        unit.shape_shortcut = model.units[0].options.shape_shortcut
    return units


def first_input(model, x):
    return harness.numpy(keras.Model(model.input, model.first_input)(x)).astype("float64")


def norm(x):
    return np.sqrt((x**2).sum() / len(x))


@pytest.mark.parametrize(
    ("arrangement", "shortcut"),
    [(row, "identity") for row in kp.ARRANGEMENTS]
    + [("original", name) for name in ("constant_scaling", "exclusive_gating", "conv1x1", "none")],
)
def test_figures(arrangement, shortcut):
    model = network(14, arrangement=arrangement, shortcut=shortcut)
    images = harness.images(3, 8, 8, 2)
    signals = kp.analysis.propagation(model, images, training=False)
    x = first_input(model, images)
    wanted = {name: [] for name in FIGURES[:-1]}

    def see_x(x):
        for name, value in (("x_norm", norm(x)), ("x_mean", x.mean()), ("x_std", x.std())):
            wanted[name].append(value)

    see_x(x)
    for unit in numpy_units(model, arrangement=arrangement, shortcut=shortcut):
        start, branch = unit.paths(x)
        # linear in F once x is given: with F = 0 the sum is h(x)
        through = (
            unit.add(start, np.zeros_like(branch)) if shortcut != "none" else np.zeros_like(branch)
        )
        total = unit.add(start, branch)
        before, after = reference.FIG_4[arrangement][2].split("+")
        first = before.split("|")[0] if "|" in before and not unit.activated_input else ""
        activated = unit.run(first, x, "branch/norm_{}")
        x = unit.run(after, total, "after_addition/norm")
        see_x(x)
        added = total - through
        for name, value in (("norm", norm(added)), ("mean", added.mean()), ("std", added.std())):
            wanted[f"residual_{name}"].append(value)
        wanted["shortcut_norm"].append(norm(through))
        wanted["cut"].append(((x == 0) & (total != 0)).mean())
        wanted["dead"].append((activated == 0).all((0, 1, 2)).mean())
    for name, values in wanted.items():
        harness.close(getattr(signals, name), np.array(values), 1e-4, name)
    assert signals.units == tuple(unit.name for unit in model.units)
    assert (signals.cut[:-1] > 0.1).all() == (
        arrangement in ("original", "bn_after_addition", "bn_only_preactivation")
    )


def test_dead_channels():
    model = network()
    gamma_beta = model.get_layer("stage2_unit1").get_weights()
    names = harness.paths(model.get_layer("stage2_unit1"))
    gamma_beta[names.index("branch/norm_0/beta")][:3] = -100
    model.get_layer("stage2_unit1").set_weights(gamma_beta)
    signals = kp.analysis.propagation(model, harness.images(2, 8, 8, 2))
    assert signals.dead[1] == pytest.approx(3 / 4)  # of the 4 channels that it reads
    assert signals.dead[2] < 0.5


def half_square(x):
    return (x**2).sum() / (2 * len(x))


def differences(function, x, step=1e-5):
    """Gradient of a function of float64 arrays by central differences."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[index] += sign * step
            ends.append(function(moved))
        gradient[index] = (ends[0] - ends[1]) / (2 * step)
    return gradient


@pytest.mark.parametrize("arrangement", ["full_preactivation", "original"])
def test_gradients(arrangement):
    model = network(arrangement=arrangement, include_top=False)
    images = harness.images(2, 8, 8, 2)
    signals = kp.analysis.propagation(model, images, training=False)
    units = numpy_units(model, arrangement=arrangement)
    around = reference.Unit(harness.weights(model), 1, block="basic")

    def loss_from(unit, x):
        for later in units[unit:]:
            x = later(x)
        return half_square(around.run(reference.HEAD[arrangement], x, "head_norm"))

    x = first_input(model, images)
    for i in range(4):
        if i:
            x = units[i - 1](x)
        if i != 1:  # three are enough
            want = np.linalg.norm(differences(lambda x, i=i: loss_from(i, x), x))
            assert signals.gradient_norm[i] == pytest.approx(want, rel=1e-3), i
    assert signals.loss == pytest.approx(loss_from(3, x), rel=1e-4)

    start = units[0](first_input(model, images))

    def loss_of(value):
        units[1].weights["branch/norm_1/gamma"] = value
        return loss_from(1, start)

    want = np.linalg.norm(differences(loss_of, units[1].weights["branch/norm_1/gamma"]))
    assert signals.weight_gradients["branch/norm_1/gamma"][1] == pytest.approx(want, rel=1e-3)
    has_none = [
        np.isnan(norms)
        for name, norms in signals.weight_gradients.items()
        if name == "branch/norm_0/gamma"
    ]
    assert [row.tolist() for row in has_none] == (
        [[True, False, False]] if arrangement == "full_preactivation" else []
    )


@pytest.mark.parametrize(
    "options", [{}, {"arrangement": "original", "remat": 2}], ids=harness.label
)
def test_stacks_are_seen_unit_by_unit(options):
    stacked = network(26, stacked=True, **options)
    assert harness.longest_stack(stacked) == 3
    images, labels = harness.images(4, 8, 8, 2), np.arange(4)
    got = kp.analysis.propagation(stacked, images, labels)
    want = kp.analysis.propagation(kp.models.unstack(stacked), images, labels)
    assert got.units == want.units
    for name in FIGURES:
        harness.close(getattr(got, name), getattr(want, name), 2e-4, name)
    assert got.weight_gradients.keys() == want.weight_gradients.keys()
    for name, norms in got.weight_gradients.items():
        np.testing.assert_allclose(
            norms, want.weight_gradients[name], rtol=5e-3, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("analysis", ["propagation", "check_identities", "direct_path", "audit"])
def test_the_network_stays_as_it_is(analysis):
    model = network(14, stacked=True, shortcut="dropout", stochastic_depth=0.5)
    before = [np.array(variable) for variable in map(keras.ops.convert_to_numpy, model.variables)]
    output = model.layers[1].output
    getattr(kp.analysis, analysis)(model, harness.images(4, 8, 8, 2), labels=np.arange(4))
    for variable, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), old)
    assert model.layers[1].output is output


def foreign(arrangement):
    """A net of Keras' own layers."""
    x = inputs = keras.Input((6,))
    x = keras.layers.Dense(5, name="stem")(x)
    for i in range(3):
        branch = keras.layers.Dense(7, activation="relu")(
            x if arrangement == "post" else keras.layers.LayerNormalization()(x)
        )
        x = keras.layers.Add(name=f"sum{i}")([keras.layers.Dense(5)(branch), x])
        if arrangement == "post":
            x = keras.layers.ReLU(name=f"relu{i}")(x)
    return keras.Model(inputs, keras.layers.Dense(4, activation="softmax")(x))


@pytest.mark.parametrize("arrangement", ["pre", "post"])
def test_models_of_others(arrangement):
    model = foreign(arrangement)
    x, labels = harness.images(5, 6), np.arange(5) % 4
    signals = kp.analysis.propagation(model, x, labels)
    last = "sum" if arrangement == "pre" else "relu"
    names = ["stem", *(f"{last}{i}" for i in range(3))]
    outputs = keras.Model(model.input, [model.get_layer(name).output for name in names])(x)
    outputs = [keras.ops.convert_to_numpy(output) for output in outputs]
    harness.close(signals.x_norm, [norm(output) for output in outputs], 1e-5)
    sums = [model.get_layer(f"sum{i}") for i in range(3)]
    sums = [
        keras.ops.convert_to_numpy(y)
        for y in keras.Model(model.input, [layer.output for layer in sums])(x)
    ]
    harness.close(
        signals.residual_norm,
        [norm(y - before) for y, before in zip(sums, outputs, strict=False)],
        1e-5,
    )
    harness.close(
        signals.cut, [(y < 0).mean() if arrangement == "post" else 0.0 for y in sums], 1e-6
    )
    assert signals.units == ("sum0", "sum1", "sum2")
    probabilities = keras.ops.convert_to_numpy(model(x))
    assert signals.loss == pytest.approx(
        -np.log(probabilities[np.arange(5), labels]).mean(), rel=1e-4
    )
    assert signals.weight_gradients["weight_2/kernel"].shape == (3,)


@pytest.mark.soak
@pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="its many shapes are compiled one by one, for a minute"
)
def test_keras_applications():
    model = keras.applications.ResNet50V2(weights=None, include_top=False, input_shape=(32, 32, 3))
    x = harness.images(2, 32, 32, 3)
    signals = kp.analysis.propagation(model, x, training=False)
    assert len(signals.units) == 16
    names = [layer.name for layer in model.layers if layer.name.endswith("_out")]
    outputs = keras.Model(model.input, [model.get_layer(name).output for name in names])(x)
    harness.close(
        signals.x_norm[1:], [norm(keras.ops.convert_to_numpy(output)) for output in outputs], 1e-4
    )


def test_own_loss():
    model = network()
    images = harness.images(2, 8, 8, 2)
    signals = kp.analysis.propagation(
        model, images, np.ones(2), loss=lambda y, output: 3 * keras.ops.sum(output, axis=-1) * y
    )
    on_x_l = signals.gradient_norm[-1]
    assert signals.loss == pytest.approx(
        3 * keras.ops.convert_to_numpy(model(images, training=True)).sum() / 2, rel=1e-3
    )
    doubled = kp.analysis.propagation(
        model, images, 2 * np.ones(2), loss=lambda y, output: 3 * keras.ops.sum(output, axis=-1) * y
    )
    assert doubled.gradient_norm[-1] == pytest.approx(2 * on_x_l, rel=1e-4)


def test_plain_networks_and_json():
    signals = kp.analysis.propagation(network(shortcut="none"), harness.images(2, 8, 8, 2))
    assert np.isinf(signals.ratio).all()
    assert signals.gradient_ratio == pytest.approx(
        signals.gradient_norm[0] / signals.gradient_norm[-1]
    )
    read = json.loads(json.dumps(signals.to_dict()))
    assert read["units"] == list(signals.units)
    np.testing.assert_array_equal(read["x_norm"], signals.x_norm)


def sequential():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


class Branching(keras.Model):
    """Its graph depends on values."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x) + x if float(keras.ops.sum(x)) > 0 else x


@pytest.mark.parametrize(
    ("model", "x", "parts"),
    [
        (network, np.zeros((0, 8, 8, 2)), ["at least one example", "(0, 8, 8, 2)"]),
        (network, np.full((1, 8, 8, 2), np.nan), ["must be finite", "128 of 128"]),
        (network, np.full((1, 8, 8, 2), "a"), ["must hold numbers"]),
        (network, np.zeros((1, 8, 8, 3)), ["(None, 8, 8, 2)", "(1, 8, 8, 3)"]),
        (network, [np.zeros((1, 8, 8, 2))] * 2, ["1 inputs", "2 arrays"]),
        (sequential, np.zeros((1, 3)), ["no residual unit", "dense"]),
        (Branching, np.zeros((1, 3)), ["cannot be traced", "branching"]),
    ],
    ids=["empty", "nan", "text", "shape", "inputs", "no_unit", "untraceable"],
)
def test_wrong_input(model, x, parts):
    message = harness.error_of(lambda: kp.analysis.propagation(model(), x))
    for part in parts:
        assert part in message


def test_wrong_labels():
    message = harness.error_of(
        lambda: kp.analysis.propagation(network(), harness.images(2, 8, 8, 2), [1, 2, 3])
    )
    assert "3 labels for 2 examples" in message


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 10], "has 10 outputs, so labels must be 0 to 9. Received: labels from 0 to 10"),
        ([-1, 3], "Received: labels from -1 to 3"),
        (np.eye(10)[[1, 2]], "looks one-hot; pass `labels.argmax(axis=1)`"),
    ],
)
def test_labels_that_no_class_has(labels, words):
    model, x = network(), harness.images(2, 8, 8, 2)
    for analysis in (kp.analysis.propagation, kp.analysis.lesions):
        assert words in harness.error_of(lambda analysis=analysis: analysis(model, x, labels))
