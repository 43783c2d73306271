"""Signal propagation against NumPy: every figure of every unit, gradients by finite
differences, any model's graph.
"""

import itertools

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests import reference
from tests.keras_preact import harness

FIGURES = (
    *("x_norm", "x_mean", "x_std", "residual_norm", "residual_mean", "residual_std"),
    *("shortcut_norm", "cut", "dead"),
    *("residual_cosine", "residual_parallel", "output_cosine", "gradient_norm"),
)


def network(depth=8, **options):
    """A narrow net with random weights: units of 4, 8, 16 channels on 8x8 images."""
    options = {"width_factor": 0.25, "input_shape": (8, 8, 2)} | options
    model = kp.models.resnet_cifar(depth, **options)
    harness.randomize(model)
    return model


def numpy_units(model, **options):
    """The network's units in NumPy, float64; `options` are those of the builder."""
    copies, units = model.copy_units(), []
    for unit in copies:
        own = {"block": unit.block.name, "strides": unit.strides}
        units.append(harness.reference_of(unit, **own, **options))
        units[-1].shape_shortcut = copies[0].shape_shortcut
    units[0].activated_input = True
    return units


def first_input(model, x):
    return harness.numpy(keras.Model(model.input, model.first_input)(x)).astype("float64")


def norm(x):
    return np.sqrt((x**2).sum() / len(x))


def cosine(a, b):
    """The cosine between two tensors, for each example."""
    a, b = (x.reshape(len(x), -1) for x in (a, b))
    with np.errstate(invalid="ignore"):
        return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


@pytest.mark.parametrize(
    ("arrangement", "shortcut"),
    [
        pytest.param("full_preactivation", "exclusive_gating", marks=pytest.mark.backend),
        *[(row, "identity") for row in kp.ARRANGEMENTS],
        *[("original", name) for name in ("constant_scaling", "conv1x1", "none")],
    ],
)
def test_figures(arrangement, shortcut):
    model = network(14, arrangement=arrangement, shortcut=shortcut)
    for weight in model.weights:
        if weight.path.endswith("norm_0/beta"):  # kills a channel
            weight.assign(np.append(harness.numpy(weight)[1:], -100))
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
        through = np.zeros_like(branch)
        through = unit.add(start, through) if shortcut != "none" else through
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
        wanted["residual_cosine"].append(cosine(through, added).mean())
        wanted["residual_parallel"].append((cosine(through, added) ** 2).mean())
        wanted["output_cosine"].append(cosine(through, x).mean())
        wanted["cut"].append(((x == 0) & (total != 0)).mean())
        wanted["dead"].append((activated == 0).all((0, 1, 2)).mean())
    for name, values in wanted.items():
        harness.close(getattr(signals, name), np.array(values), 1e-4, name)
    assert signals.units == tuple(model.unit_names)
    assert (signals.cut[:-1] > 0.1).all() == (
        arrangement in ("original", "bn_after_addition", "bn_only_preactivation")
    )


def half_square(x):
    return (x**2).sum() / (2 * len(x))


def differences(function, x, step=1e-5):
    """Derivatives of a function of a float64 array by central differences, one for each
    element of the array.
    """
    rows = []
    for index in np.ndindex(x.shape):
        shift = np.zeros_like(x)
        shift[index] = step
        rows.append((function(x + shift) - function(x - shift)) / (2 * step))
    return np.stack(rows).reshape(x.shape + np.shape(rows[0]))


@pytest.mark.parametrize(
    "arrangement", [pytest.param("full_preactivation", marks=pytest.mark.backend), "original"]
)
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
    norms = signals.weight_gradients.get("branch/norm_0/gamma")
    if arrangement == "full_preactivation":  # the stem's normalisation is that of the first unit
        assert np.isnan(norms).tolist() == [True, False, False]
    else:
        assert norms is None


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.backend), {"arrangement": "original", "remat": 2}],
    ids=harness.label,
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
    before = [harness.numpy(variable) for variable in model.variables]
    output = model.layers[1].output
    getattr(kp.analysis, analysis)(model, harness.images(4, 8, 8, 2), labels=np.arange(4))
    for variable, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(harness.numpy(variable), old)
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

    def outputs(*names):
        layers = [model.get_layer(name).output for name in names]
        return [harness.numpy(output) for output in keras.Model(model.input, layers)(x)]

    units = ("sum0", "sum1", "sum2")
    assert signals.units == units
    sums = outputs(*units)
    ends = outputs("stem", *(units if arrangement == "pre" else ("relu0", "relu1", "relu2")))
    harness.close(signals.x_norm, [norm(end) for end in ends], 1e-5)
    added = [norm(y - start) for y, start in zip(sums, ends, strict=False)]
    harness.close(signals.residual_norm, added, 1e-5)
    angles = [cosine(start, y - start).mean() for y, start in zip(sums, ends, strict=False)]
    harness.close(signals.residual_cosine, angles, 1e-5)
    turned = [cosine(*pair).mean() for pair in itertools.pairwise(ends)]
    harness.close(signals.output_cosine, turned, 1e-5)
    cut = [(y < 0).mean() if arrangement == "post" else 0.0 for y in sums]
    harness.close(signals.cut, cut, 1e-6)
    probabilities = harness.numpy(model(x))[np.arange(5), labels]
    assert signals.loss == pytest.approx(-np.log(probabilities).mean(), rel=1e-4)
    assert signals.weight_gradients["weight_2/kernel"].shape == (3,)


@pytest.mark.backend
@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_cosines_leave_out_vectors_that_are_zero(scale):
    x = scale * np.array([[1.0, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1]])
    inputs = keras.Input((3,))
    branch = keras.layers.Dense(3, use_bias=False, name="branch")(inputs)
    model = keras.Model(inputs, keras.layers.Add()([inputs, branch]))
    model.get_layer("branch").set_weights([np.diag([1.0, -1, 0])])
    signals = kp.analysis.propagation(model, x)  # F is 0 for the last example, x_1 for the third
    assert signals.residual_cosine == pytest.approx([0], abs=1e-6)
    assert signals.residual_parallel == pytest.approx([2 / 3])
    assert signals.output_cosine == pytest.approx([(2 + 0.5**0.5) / 3])


def test_each_weight_of_a_layer_has_a_name():
    inputs = keras.Input((4, 6))
    branch = keras.layers.MultiHeadAttention(2, 3, use_bias=False)(inputs, inputs)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Add()([branch, inputs]))
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    signals = kp.analysis.propagation(model, harness.images(2, 4, 6), [0, 1])
    kernels = ("query", "key", "value", "attention_output")
    assert set(signals.weight_gradients) == {f"weight_1/{name}/kernel" for name in kernels}


def test_a_network_of_images_of_any_size():
    fixed = kp.models.resnet_cifar(14, input_shape=(8, 12, 1), stacked=True)
    harness.randomize(fixed)
    free = kp.models.resnet_cifar(14, input_shape=(None, None, 1), stacked=True)
    free.set_weights(fixed.get_weights())
    x = harness.images(3, 8, 12, 1)
    want, got = (kp.analysis.propagation(each, x, [0, 1, 2]) for each in (fixed, free))
    np.testing.assert_allclose(got.gradient_norm, want.gradient_norm, rtol=1e-4)
    np.testing.assert_allclose(got.x_norm, want.x_norm, rtol=1e-4)


def test_own_loss():
    model, x = network(), harness.images(2, 8, 8, 2)
    found = kp.analysis.propagation(
        model, x, [1.0, 2.0], loss=lambda y, output: keras.ops.sum(output, axis=-1) * y
    )
    sums = harness.numpy(model(x, training=True)).sum(-1)
    assert found.loss == pytest.approx((sums[0] + 2 * sums[1]) / 2, rel=1e-3)


def test_ratios_of_a_plain_network():
    signals = kp.analysis.propagation(network(shortcut="none"), harness.images(2, 8, 8, 2))
    assert np.isinf(signals.ratio).all()
    gradients = signals.gradient_norm
    assert signals.gradient_ratio == pytest.approx(gradients[0] / gradients[-1])
