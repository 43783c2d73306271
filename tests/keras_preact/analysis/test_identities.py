"""Eq. 4 and 5 and the direct path, against NumPy and closed forms."""

import functools
import math
from typing import ClassVar

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.analysis.observed import Observed
from keras_preact.layers import streams
from tests import reference
from tests.keras_preact import harness
from tests.keras_preact.analysis.test_propagation import (
    differences,
    first_input,
    network,
    numpy_units,
)

CLEAN = ("relu_before_addition", "relu_only_preactivation", "full_preactivation")


@pytest.mark.parametrize(
    ("arrangement", "shortcut"),
    [
        *[(row, "identity") for row in kp.ARRANGEMENTS],
        *[("full_preactivation", name) for name in ("constant_scaling", "conv1x1", "none")],
        *[("full_preactivation", name) for name in harness.IDENTITIES if name != "identity"],
    ],
)
def test_what_is_clean(arrangement, shortcut):
    clean = arrangement in CLEAN and shortcut in harness.IDENTITIES
    model = network(20, arrangement=arrangement, shortcut=shortcut, stacked=clean)
    check = kp.analysis.check_identities(model, harness.images(3, 8, 8, 2), np.arange(3))
    np.testing.assert_array_equal(check.ends, [2, 2, 2, -1, 5, 5, -1, 8, 8])
    changes = check.ends < 0
    for name in ("forward_error", "direct_norm", "residual_norm", "gradient_error"):
        np.testing.assert_array_equal(np.isnan(getattr(check, name)), changes, name)
    errors = np.array([check.forward_error, check.gradient_error])[:, ~changes]
    assert errors.max() < 1e-4 if clean else errors.min() > 0.01


@keras.saving.register_keras_serializable("tests")
class ScalarGate(kp.shortcuts.Shortcut):
    """One gate per example, between 0 and 2, without an option for its bias."""

    computes_coefficients = True

    def layers(self, site):
        return [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1), keras.layers.ELU()]

    def paths(self, x, residual, transformed):
        gate = 1 + keras.ops.tanh(transformed[:, None, None])
        return gate * x, (2 - gate) * residual


#: Shortcuts that are linear in x once their gates are fixed, by what they are called here.
LINEAR = {
    **{name: kp.shortcuts.get(name) for name in ("constant_scaling", "conv1x1", "none")},
    **{name: kp.shortcuts.get(name, -1.0) for name in ("exclusive_gating", "shortcut_only_gating")},
    "decayed_identity": kp.shortcuts.DecayedIdentity(0.4),
    "dropout": kp.shortcuts.Dropout(0.3),
    **{f"streams, {c}": kp.shortcuts.HyperConnections(4, c) for c in streams.CONSTRAINTS},
    "own gate": ScalarGate(),
    "streams on maps": kp.shortcuts.HyperConnections(2, "none", "map"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.backend] * (name in ("dropout", "streams, sinkhorn"))
            + [pytest.mark.soak] * (name in ("streams, sinkhorn", "streams, permutations")),
        )
        for name in LINEAR
    ],
)
def test_composite_maps_of_linear_shortcuts(name):
    """With them Eq. 4 and 5 hold again, in both kinds of stack. Masks are the same if the
    shortcut runs twice.
    """
    model = network(
        20, shortcut=LINEAR[name], stacked=name in ("conv1x1", "streams, none", "dropout")
    )
    batch = harness.images(3, 8, 8, 2), np.arange(3)
    check = kp.analysis.check_identities(model, *batch, composite=True)
    for errors in (check.forward_error, check.gradient_error):
        assert np.nanmax(errors) < 2e-5
    plain = kp.analysis.check_identities(model, *batch)
    assert np.nanmax(plain.forward_error) > 1e-3


def units_of_layers():
    x = inputs = keras.Input((6,))
    for _ in range(2):
        branch = keras.layers.Dropout(0.3)(keras.layers.Dense(6, activation="tanh")(x))
        x = keras.layers.add([x, branch])
    return keras.Model(inputs, x)


@pytest.mark.backend
@pytest.mark.parametrize(
    "make",
    [
        lambda: network(14, dropout=0.3, stochastic_depth=0.3),
        lambda: network(20, dropout=0.3, stochastic_depth=0.3, stacked=True),
        units_of_layers,
    ],
    ids=["units", "stacks", "model of others"],
)
def test_masks_without_a_seed_are_the_same_in_every_pass(make):
    """Afterwards the network draws new ones, as before."""
    model = make()
    images = harness.images(3, *model.input_shape[1:])
    check = kp.analysis.check_identities(model, images)
    assert np.nanmax([check.forward_error, check.gradient_error]) < 1e-4
    one, other = (harness.numpy(model(images, training=True)) for _ in range(2))
    assert np.abs(one - other).max() > 1e-3


def test_composite_maps_need_identities_after_the_addition():
    """Without them the error is what Eq. 7 leaves of x_E."""
    model = network(20, arrangement="original", shortcut="constant_scaling")
    images = harness.images(3, 8, 8, 2)
    check = kp.analysis.check_identities(model, images, composite=True)
    assert np.nanmin([check.forward_error, check.gradient_error]) > 0.01
    observed = Observed(model, images)
    _, parts = observed.run(lambda trace, axis: keras.ops.stack([trace.output, trace.residual]))
    x, residual = zip(*(harness.numpy(row) for rows in parts for row in rows), strict=True)
    for first in range(4, 6):  # x_6 is the end of the second stage
        rest = x[5] - 0.5 ** (6 - first) * x[first - 1]
        rest -= sum(0.5 ** (5 - i) * residual[i] for i in range(first, 6))
        want = np.linalg.norm(rest) / np.linalg.norm(x[5])
        assert check.forward_error[first] == pytest.approx(want, rel=1e-5)


@keras.saving.register_keras_serializable("tests")
class CountedIdentity(kp.shortcuts.Identity):
    calls: ClassVar[int] = 0

    def paths(self, x, residual, transformed):
        type(self).calls += 1
        return super().paths(x, residual, transformed)


def test_composite_maps_of_many_units():
    """The maps of 20 units are not applied to each vector of the units before them."""
    options = {"width": 4, "input_shape": (3,), "stacked": True}
    model = kp.models.dense_resnet(42, shortcut=CountedIdentity(), **options)
    CountedIdentity.calls = 0
    check = kp.analysis.check_identities(model, harness.images(2, 3), composite=True)
    assert np.max([check.forward_error, check.gradient_error]) < 1e-5
    assert CountedIdentity.calls < 8 * len(check.units)


def test_composite_maps_of_any_model():
    inputs = keras.Input((8, 8, 4))
    x = keras.layers.Conv2D(4, 3, padding="same")(inputs)
    for _ in range(3):
        branch = keras.layers.Conv2D(4, 3, padding="same", activation="tanh")(x)
        x = keras.layers.add([keras.layers.Conv2D(4, 1, use_bias=False)(x), branch])
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(x))
    check = kp.analysis.check_identities(model, harness.images(3, 8, 8, 4), composite=True)
    assert max(check.forward_error.max(), check.gradient_error.max()) < 1e-5
    with pytest.raises(ValueError, match="mixes channels"):
        kp.analysis.composite_gain(model, harness.images(3, 8, 8, 4))


class Counted(keras.layers.Conv2D):
    """A convolution that counts its calls with tensors."""

    calls = 0

    def call(self, x):
        type(self).calls += keras.ops.is_tensor(x)
        return super().call(x)


def test_a_branch_runs_without_its_shortcut():
    x = inputs = keras.Input((8, 8, 4))
    branch = keras.layers.Conv2D(4, 3, padding="same", activation="tanh")(x)
    x = keras.layers.add([Counted(4, 1, use_bias=False)(x), branch])
    observed = Observed(keras.Model(inputs, x), harness.images(3, 8, 8, 4))
    values, _ = observed.run(lambda trace, axis: trace.output)
    [unit] = observed.units
    Counted.calls = 0
    for number, options in ((unit.residual, {}), (unit.total, {"with_shortcut": True})):
        [branch] = observed.branches(unit, values, **options)
        harness.close(harness.numpy(branch(values[unit.start])), harness.numpy(values[number]))
        assert Counted.calls == (number == unit.total)


@pytest.mark.parametrize("constraint", streams.CONSTRAINTS)
def test_composite_gains_of_streams(constraint):
    """Products of the matrices that NumPy computes."""
    h = kp.shortcuts.HyperConnections(3, constraint)
    model = network(20, shortcut=h, stacked=constraint == "none")
    images = harness.images(2, 8, 8, 2)
    gain = kp.analysis.composite_gain(model, images)
    x, matrices = first_input(model, images), []
    for unit in numpy_units(model, shortcut="hyper_connections", hyper=(3, constraint, "pixel")):
        x = unit(x)
        matrices.append(unit.coefficients[2])
    for i, end in enumerate(gain.ends):
        if end < 0:
            assert np.isnan([gain.forward[i], gain.backward[i]]).all()
            continue
        product = np.abs(functools.reduce(lambda later, h: h @ later, matrices[i : end + 1]))
        assert gain.forward[i] == pytest.approx(product.sum(-1).max(-1).mean(), rel=1e-4)
        assert gain.backward[i] == pytest.approx(product.sum(-2).max(-1).mean(), rel=1e-4)
    if constraint == "permutations":
        np.testing.assert_allclose([gain.forward[:3], gain.backward[:3]], 1, rtol=1e-5)


@pytest.mark.parametrize("constraint", streams.CONSTRAINTS)
def test_new_streams_let_everything_through(constraint):
    h, images = kp.shortcuts.HyperConnections(3, constraint), harness.images(2, 8, 8, 2)
    options = {"width_factor": 0.25, "input_shape": (8, 8, 2), "shortcut": h}
    model = kp.models.resnet_cifar(14, **options)
    want = kp.analysis.expected_gain(h, 2)
    assert want == 1
    np.testing.assert_allclose(kp.analysis.direct_path(model, images).gain, want, rtol=1e-5)
    gain = kp.analysis.composite_gain(model, images)
    kept = gain.ends >= 0
    np.testing.assert_allclose([gain.forward[kept], gain.backward[kept]], want, rtol=1e-5)


def test_composite_gains_of_one_stream():
    images = harness.images(2, 8, 8, 2)
    gains = {
        name: kp.analysis.composite_gain(network(14, shortcut=h), images)
        for name, h in LINEAR.items()
        if name in ("constant_scaling", "none", "shortcut_only_gating")
    }
    for gain in gains.values():
        np.testing.assert_array_equal(gain.forward, gain.backward)
        np.testing.assert_array_equal(gain.ends, [1, 1, -1, 3, -1, 5])
    assert gains["constant_scaling"].forward[[0, 1, 3]].tolist() == [0.25, 0.5, 0.5]
    assert gains["none"].forward[[0, 1, 3]].tolist() == [0, 0, 0]
    assert (gains["shortcut_only_gating"].forward[[0, 1, 3]] < 1).all()


@pytest.mark.backend
def test_the_parts_of_the_gradient():
    """dE/dx_E, and what J_F^T makes of it, by finite differences of the branch alone."""
    model = network(14, include_top=False)
    images = harness.images(1, 8, 8, 2)
    check = kp.analysis.check_identities(model, images, training=False)
    units = numpy_units(model)
    around = reference.Unit(harness.weights(model), 1, block="basic")
    x = first_input(model, images)
    for unit in units[:5]:
        x = unit(x)
    x_e = units[5](x)  # the last two units: 2 x 2 pixels, 16 channels

    def loss(x):
        return (around.run("N A", x, "head_norm") ** 2).sum() / 2

    gradient = differences(loss, x_e)
    assert check.direct_norm[5] == pytest.approx(np.linalg.norm(gradient), rel=1e-3)
    through = differences(lambda x: (units[5].paths(x)[1] * gradient).sum(), x)
    assert check.residual_norm[5] == pytest.approx(np.linalg.norm(through), rel=1e-3)


@pytest.mark.parametrize(("factor", "stacked"), [(0.5, False), (1.25, True)])
def test_scaled_shortcuts_attenuate(factor, stacked):
    shortcut = kp.shortcuts.ConstantScaling(factor, 1.0)
    model = network(20, shortcut=shortcut, stacked=stacked)
    path = kp.analysis.direct_path(model, harness.images(2, 8, 8, 2))
    # stages of 3 units; the first of the second and third changes the shape
    left = np.array([3, 2, 1, 0, 2, 1, 0, 2, 1, 0])
    np.testing.assert_allclose(path.gain, factor**left, rtol=1e-5)
    np.testing.assert_allclose(
        path.gain, [kp.analysis.expected_gain(shortcut, int(n)) for n in left], rtol=1e-5
    )
    np.testing.assert_array_equal(path.survival, 1.0)


@pytest.mark.parametrize("shortcut", harness.IDENTITIES)
def test_identities_let_everything_through(shortcut):
    """What happens to F(x) before the addition is not on the direct path."""
    model = network(14, shortcut=shortcut)
    gain = kp.analysis.direct_path(model, harness.images(2, 8, 8, 2)).gain
    np.testing.assert_allclose(gain, 1, rtol=1e-5)
    assert kp.analysis.expected_gain(shortcut, 2) == 1


@pytest.mark.parametrize("stacked", [False, True])
def test_decayed_shortcuts_attenuate(stacked):
    """Gains between two units are products of the factors in between; those of a whole
    network are in `expected_gain`.
    """
    model = network(20, shortcut=kp.shortcuts.DecayedIdentity(0.1), stacked=stacked)
    path = kp.analysis.direct_path(model, harness.images(2, 8, 8, 2))
    alphas = 1 - 0.9 * np.arange(1, 10) / 9
    # stages of 3 units; the first of the second and third changes the shape
    ends = [3, 3, 3, 3, 6, 6, 6, 9, 9, 9]
    want = [alphas[i:end].prod() for i, end in enumerate(ends)]
    np.testing.assert_allclose(path.gain, want, rtol=1e-5)
    gain = kp.analysis.expected_gain(kp.shortcuts.DecayedIdentity(0.1), 9)
    assert gain == pytest.approx(alphas.prod())
    assert kp.analysis.expected_gain(kp.shortcuts.DecayedIdentity(factor=0.5), 3) == 0.5**3


@pytest.mark.backend
def test_dropout_shortcuts_let_few_entries_through():
    rate = 0.3
    shortcut = kp.shortcuts.Dropout(rate)
    # nothing follows the last addition, and the loss is a sum: the gradient at x_L is 1
    # everywhere
    options = {"arrangement": "relu_before_addition", "include_top": False}
    model = kp.models.dense_resnet(14, width=64, input_shape=(5,), shortcut=shortcut, **options)
    images = harness.images(400, 5)
    path = kp.analysis.direct_path(model, images, loss=lambda _, output: keras.ops.sum(output))
    left = np.array([6, 5, 4, 3, 2, 1, 0])
    expected = np.array([kp.analysis.expected_gain(shortcut, int(n)) for n in left])
    np.testing.assert_allclose(expected, 0.7**left, rtol=1e-12)
    # 25,600 entries: a standard deviation of at most 0.003
    np.testing.assert_allclose(path.survival, expected, atol=0.015)
    # what arrives is scaled by 1/(1-p) each time
    np.testing.assert_allclose(path.gain**2, 0.7**-left, rtol=0.1)
    assert (kp.analysis.direct_path(model, images, training=False).gain == 1).all()


def test_the_relu_after_the_addition_blocks_entries():
    model = network(14, arrangement="original")
    images = harness.images(3, 8, 8, 2)
    path = kp.analysis.direct_path(model, images, training=False)
    last = harness.numpy(keras.Model(model.input, model.unit_outputs[-1])(images))
    # after the last unit, there is only the pooling: all entries of the gradient arrive there, and
    # one ReLU is on the way
    assert path.survival[5] == pytest.approx((last > 0).mean())
    assert path.survival[[2, 4, 6]].tolist() == [1, 1, 1]
    assert (path.gain <= 1 + 1e-6).all()


@pytest.mark.parametrize("gating", ["ShortcutOnlyGating", "ExclusiveGating"])
def test_gates(gating):
    gates = getattr(kp.shortcuts, gating)(bias=-2.0, kernel_initializer="zeros")
    model = kp.models.resnet_cifar(14, width_factor=0.25, input_shape=(8, 8, 2), shortcut=gates)
    path = kp.analysis.direct_path(model, harness.images(2, 8, 8, 2))
    one = 1 - 1 / (1 + math.exp(2.0))  # a negative bias opens the shortcut
    np.testing.assert_allclose(path.gain, [one**2, one, 1, one, 1, one, 1], rtol=1e-5)
    assert kp.analysis.expected_gain(gates, 3) == pytest.approx(one**3)


def test_where_nothing_arrives_nothing_is_measured():
    """Not 0: what x_E lets through is unknown if the gradient at x_E is 0."""
    images = harness.images(2, 8, 8, 2)
    path = kp.analysis.direct_path(network(20, shortcut=kp.shortcuts.Dropout(1 - 1e-6)), images)
    for values in (path.gain, path.survival):
        np.testing.assert_array_equal(values, [np.nan] * 7 + [0, 0, 1])
    plain = kp.analysis.direct_path(network(14, shortcut="none"), images)
    np.testing.assert_array_equal(plain.gain, [np.nan] * 5 + [0, 1])
    assert kp.analysis.expected_gain("none", 1) == 0
