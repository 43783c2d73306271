"""Jacobians and their singular values: linear maps, the NumPy unit, products of units,
the methods against one another.
"""

import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from keras_preact.analysis import jacobians
from tests import reference
from tests.keras_preact import harness
from tests.keras_preact.analysis.test_propagation import differences


def rotation(n, seed):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0]


def matrix_of(values, outputs, inputs):
    """A matrix with these singular values."""
    middle = np.zeros((outputs, inputs))
    np.fill_diagonal(middle, values)
    return (rotation(outputs, 1) @ middle @ rotation(inputs, 2)).astype("float32")


def linear(matrix):
    """`x -> matrix x` on a batch of one."""
    return lambda x: ops.matmul(x, ops.convert_to_tensor(matrix.T))


@pytest.mark.backend
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 8), (8, 5)])
def test_known_singular_values(outputs, inputs):
    values = np.array([4.0, 2.0, 1.0, 0.5, 0.1, 0.05])[: min(outputs, inputs)]
    matrix = matrix_of(values, outputs, inputs)
    x = harness.images(1, inputs)
    harness.close(jacobians.jacobian(linear(matrix), x), matrix)
    found = jacobians.spectrum(linear(matrix), x)
    assert (found.shape, found.exact) == ((outputs, inputs), True)
    harness.close(found.values, values)
    np.testing.assert_allclose(found.condition_number, values[0] / values[-1], rtol=1e-4)
    np.testing.assert_allclose(found.mean_square, np.sum(values**2) / len(values), rtol=1e-5)
    nearest = np.linalg.svd(matrix, full_matrices=False)
    distance = np.linalg.norm(matrix - nearest[0] @ nearest[2]) / np.sqrt(len(values))
    np.testing.assert_allclose(found.isometry_distance, distance, rtol=1e-5)


#: Equal values, which are found as often as they occur, and zeros beyond the rank.
DECAYS = {
    "two values": [3.0] * 4 + [1.0] * 36,
    "rank 5": [3.0, 2.0, 2.0, 2.0, 1.0] + [0.0] * 35,
    "slow": list(1 / np.arange(1, 41)),
}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("method", jacobians.METHODS)
def test_the_largest_values(method, decay):
    values = np.array(DECAYS[decay])
    function = linear(matrix_of(values, 40, 50))
    for k in (6, 40):
        found = jacobians.spectrum(function, np.ones((1, 50), "float32"), k=k, method=method)
        assert found.is_complete == (k == 40)
        assert found.exact == (method in ("auto", "exact") or k == 40)
        harness.close(found.values, values[:k], 1e-4)


@pytest.mark.backend
@pytest.mark.parametrize("method", ["lanczos", "auto"])
def test_lanczos_does_not_form_the_jacobian(method):
    """Of a map of 50,000 inputs: a matrix of that size would hold 2.5e9 numbers."""
    factors = np.ones((1, 50_000), "float32")
    factors[0, [7, 70, 700]] = 9.0, 5.0, 3.0
    found = jacobians.spectrum(
        lambda x: x * ops.convert_to_tensor(factors), np.ones_like(factors), k=3, method=method
    )
    assert (found.shape, found.exact) == ((50_000, 50_000), False)
    harness.close(found.values, np.array([9.0, 5.0, 3.0]), 1e-4)


@pytest.mark.parametrize(
    ("arrangement", "training"),
    [
        pytest.param("full_preactivation", True, marks=pytest.mark.backend),
        ("full_preactivation", False),
        ("original", False),
    ],
)
def test_a_unit_is_the_identity_and_its_branch(arrangement, training):
    """J = D (I + J_F) with J_F by central differences of the NumPy branch, D the
    derivative of f (Sec. 2 of the paper).
    """
    x = harness.images(2, 3, 3, 2)
    options = {"arrangement": arrangement, "activation": "tanh"}
    unit = harness.unit_on(x, 2, **options)
    exact = harness.reference_of(unit, training=training, **options)
    branch = differences(lambda x: exact.paths(x)[1], x.astype("float64"))
    identity_and_branch = np.eye(x.size) + branch.reshape(x.size, x.size).T
    if arrangement == "original":
        identity_and_branch *= (1 - np.tanh(sum(exact.paths(x))) ** 2).reshape(-1, 1)
    found = jacobians.jacobian(lambda x: unit(x, training=training), x)
    harness.close(found, identity_and_branch, 1e-4)


def network():
    stages = [kp.models.Stage(2, 4), kp.models.Stage(3, 1, 2)]
    options = {"stem": "3x3", "stem_filters": 2, "block": "single", "activation": "tanh"}
    model = kp.models.ResidualNetwork(stages, classes=3, input_shape=(4, 4, 1), **options)
    harness.randomize(model)
    return model


def test_between_is_what_the_network_computes():
    model, images = network(), harness.images(2, 4, 4, 1)
    exact = reference.Network(
        harness.weights(model), [(2, 4, 1), (3, 1, 2)], "3x3", "single", {"activation": "tanh"}
    )
    exact(images)
    outputs = [exact.first_input, *exact.outputs]
    for last, x in enumerate(outputs):
        harness.close(harness.numpy(jacobians.between(model, None, last)(images)), x, 1e-4)
    for first, last in [(0, 5), (1, 3), (2, 5), (4, 5)]:
        y = jacobians.between(model, first, last)(outputs[first].astype("float32"))
        harness.close(harness.numpy(y), outputs[last], 1e-4)


@pytest.mark.backend
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_stacked_as_single_units(training):
    """Whole stacks and parts of stacks, and the network's variables stay as they are."""
    single = network()
    stacked = kp.models.stack(single)
    before = harness.weights(stacked)
    for first in (0, 2):
        x = harness.numpy(jacobians.between(single, None, first)(harness.images(2, 4, 4, 1)))
        want, got = (
            jacobians.jacobian(jacobians.between(model, first, 5, training=training), x)
            for model in (single, stacked)
        )
        assert np.abs(want).max() > 0.1
        harness.close(got, want, 1e-4)
    for path, weight in harness.weights(stacked).items():
        np.testing.assert_array_equal(weight, before[path])


@pytest.mark.backend
def test_orthogonal_vanilla_network_is_an_isometry():
    """Without a nonlinearity, all singular values of a delta-orthogonal CNN are gain **
    layers (arXiv 1806.05393).
    """
    gain, layers = 1.05, 20
    initializer = kp.initializers.DeltaOrthogonal(gain, seed=1)
    options = {"activation": "linear", "kernel_initializer": initializer, "input_shape": (5, 5, 1)}
    model = kp.models.vanilla_cnn(layers + 2, filters=4, **options)
    found = jacobians.spectrum(jacobians.between(model, 0), harness.images(1, 5, 5, 4))
    harness.close(found.values, np.full(100, gain**layers), 1e-4)
    assert found.condition_number < 1 + 1e-4
    np.testing.assert_allclose(found.isometry_distance, gain**layers - 1, rtol=1e-4)


def test_singular_jacobian():
    """ReLU before which nothing is positive: J = 0 in its rows."""
    found = jacobians.spectrum(ops.relu, np.array([[1.0, -1.0, 2.0]], "float32"))
    assert found.values.tolist() == [1.0, 1.0, 0.0]
    assert found.condition_number == float("inf")
    assert found.isometry_distance == pytest.approx((1 / 3) ** 0.5)
