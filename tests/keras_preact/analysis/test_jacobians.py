"""Jacobians and their singular values: linear maps, the NumPy unit, products of units,
the methods against one another.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from keras_preact.analysis import jacobians
from tests import reference
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

ITERATIVE = ("lanczos", "randomized")


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


def differences(function, x, h=1e-6):
    """The Jacobian of a NumPy function by central differences."""
    x = np.asarray(x, "float64")
    columns = []
    for i in range(x.size):
        step = np.zeros(x.size)
        step[i] = h
        step = step.reshape(x.shape)
        columns.append((function(x + step) - function(x - step)).ravel() / (2 * h))
    return np.stack(columns, axis=1)


@pytest.mark.parametrize(("outputs", "inputs"), [(5, 8), (8, 5), (6, 6)])
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


DECAYS = {
    "isometry": [3.0] * 40,
    "two values": [3.0] * 4 + [1.0] * 36,
    "rank 5": [3.0, 2.0, 2.0, 2.0, 1.0] + [0.0] * 35,
    "zero": [0.0] * 40,
    "slow decay": list(1 / np.arange(1, 41)),
    "fast decay": list(0.9 ** np.arange(40)),
}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("method", jacobians.METHODS)
def test_the_largest_values(method, decay):
    """Equal values are found as often as they occur, and zeros beyond the rank."""
    values = np.array(DECAYS[decay])
    function = linear(matrix_of(values, 40, 50))
    for k in (1, 6, 39, 40):
        found = jacobians.spectrum(function, np.ones((1, 50), "float32"), k=k, method=method)
        assert found.is_complete == (k == 40)
        assert found.exact == (method in ("auto", "exact") or k == 40)
        harness.close(found.values, values[:k], 1e-4)


def test_iterative_methods_do_not_form_the_jacobian():
    """Of a map of 50,000 inputs: a matrix of that size would hold 2.5e9 numbers."""
    factors = np.ones((1, 50_000), "float32")
    factors[0, [7, 70, 700]] = 9.0, 5.0, 3.0
    for method in (*ITERATIVE, "auto"):
        found = jacobians.spectrum(
            lambda x: x * ops.convert_to_tensor(factors), np.ones_like(factors), k=3, method=method
        )
        assert (found.shape, found.exact) == ((50_000, 50_000), False)
        harness.close(found.values, np.array([9.0, 5.0, 3.0]), 1e-4)


@pytest.mark.parametrize("strides", [1, 2])
def test_convolution_as_a_matrix(strides):
    """Each entry of the matrix is an element of the kernel, at the offset between two
    pixels.
    """
    size, inputs, outputs = 5, 2, 3
    unit = kp.ResidualUnit(
        outputs,
        block="single",
        shortcut="none",
        strides=strides,
        normalization="none",
        activation="linear",
    )
    x = harness.images(1, size, size, inputs)
    unit.build(x.shape)
    harness.randomize(unit)
    kernel = harness.weights(unit)["branch/conv_1/kernel"]
    small = -(-size // strides)
    matrix = np.zeros((small, small, outputs, size, size, inputs))
    for row in range(small):
        for column in range(small):
            for i in range(size):
                for j in range(size):
                    down, right = i - strides * row + 1, j - strides * column + 1
                    if 0 <= down < 3 and 0 <= right < 3:
                        matrix[row, column, :, i, j] = kernel[down, right].T
    matrix = matrix.reshape(small * small * outputs, -1)
    harness.close(jacobians.jacobian(unit, x), matrix)
    harness.close(jacobians.spectrum(unit, x).values, np.linalg.svd(matrix, compute_uv=False))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("arrangement", ["full_preactivation", "original"])
def test_a_unit_is_the_identity_and_its_branch(arrangement, training):
    """J = D (I + J_F) with J_F by central differences of the NumPy branch, D the
    derivative of f (Sec. 2 of the paper).
    """
    x = harness.images(2, 3, 3, 2)
    options = {"arrangement": arrangement, "activation": "tanh"}
    unit = harness.unit_on(x, 2, **options)
    exact = harness.reference_of(unit, training=training, **options)
    identity_and_branch = np.eye(x.size) + differences(lambda x: exact.paths(x)[1], x)
    if arrangement == "original":
        identity_and_branch *= (1 - np.tanh(sum(exact.paths(x))) ** 2).reshape(-1, 1)
    before = harness.weights(unit)
    found = jacobians.jacobian(lambda x: unit(x, training=training), x)
    harness.close(found, identity_and_branch, 1e-4)
    after = harness.weights(unit)
    assert all(np.array_equal(before[path], after[path]) for path in before)


def network(stacked=False, **options):
    options = {"input_shape": (4, 4, 1), "activation": "tanh"} | options
    model = kp.models.ResidualNetwork(
        [kp.models.Stage(2, 4), kp.models.Stage(3, 1, 2)],
        stem="3x3",
        stem_filters=2,
        block="single",
        classes=3,
        stacked=stacked,
        **options,
    )
    harness.randomize(model)
    return model


def test_product_rule():
    """The Jacobian of a whole is the product of those of its parts, each where the one
    before ends.
    """
    model, images = network(), harness.images(1, 4, 4, 1)
    x = jacobians.between(model, None, 0)(images)
    product = np.eye(4 * 4 * 2)
    for i in range(5):
        part = jacobians.between(model, i, i + 1)
        product = jacobians.jacobian(part, x) @ product
        x = part(x)
    start = jacobians.between(model, None, 0)(images)
    harness.close(jacobians.jacobian(jacobians.between(model, 0), start), product, 1e-4)
    stem = jacobians.jacobian(jacobians.between(model, None, 0), images)
    harness.close(jacobians.jacobian(jacobians.between(model), images), product @ stem, 1e-4)


def test_between_is_what_the_network_computes():
    model, images = network(), harness.images(2, 4, 4, 1)
    exact = reference.Network(
        harness.weights(model), [(2, 4, 1), (3, 1, 2)], "3x3", "single", {"activation": "tanh"}
    )
    exact(images)
    outputs = [exact.first_input, *exact.outputs]
    for last, x in enumerate(outputs):
        harness.close(ops.convert_to_numpy(jacobians.between(model, None, last)(images)), x, 1e-4)
    for first, last in [(0, 5), (1, 3), (2, 5), (4, 5)]:
        y = jacobians.between(model, first, last)(outputs[first].astype("float32"))
        harness.close(ops.convert_to_numpy(y), outputs[last], 1e-4)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_stacked_as_single_units(training):
    """Whole stacks, parts of stacks and both, and the network's variables stay as they
    are.
    """
    single = network()
    stacked = kp.models.stack(single)
    before = harness.weights(stacked)
    for first, last in [(0, 5), (2, 5)]:
        x = ops.convert_to_numpy(jacobians.between(single, None, first)(harness.images(2, 4, 4, 1)))
        maps = [
            jacobians.between(model, first, last, training=training) for model in (single, stacked)
        ]
        want, got = (jacobians.jacobian(map_, x) for map_ in maps)
        assert np.abs(want).max() > 0.1
        harness.close(got, want, 1e-4)
    after = harness.weights(stacked)
    assert all(np.array_equal(before[path], after[path]) for path in before)


def test_batch_statistics_couple_examples():
    """At inference the Jacobian of a batch has a block for each example, and nothing
    elsewhere.
    """
    x = harness.images(3, 2, 2, 2)
    unit = harness.unit_on(x, 2)
    blocks = jacobians.jacobian(unit, x).reshape(3, 8, 3, 8)
    for i in range(3):
        harness.close(blocks[i, :, i], jacobians.jacobian(unit, x[i : i + 1]))
        blocks[i, :, i] = 0
    assert not blocks.any()
    coupled = jacobians.jacobian(lambda x: unit(x, training=True), x).reshape(3, 8, 3, 8)
    assert np.abs(coupled[0, :, 1]).max() > 1e-3


def test_methods_agree_on_a_network():
    body = jacobians.between(network(stacked=True), 0, 4)
    x = harness.images(1, 4, 4, 2)
    exact = jacobians.spectrum(body, x)
    for method in ITERATIVE:
        found = jacobians.spectrum(body, x, k=12, method=method)
        harness.close(found.values, exact.values[:12], 1e-4)


@pytest.mark.parametrize("method", ITERATIVE)
def test_seeds_repeat(method):
    matrix = matrix_of(0.9 ** np.arange(40), 40, 40)
    found = [
        jacobians.spectrum(
            linear(matrix), np.ones((1, 40), "float32"), k=2, method=method, seed=seed
        ).values.tolist()
        for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]


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
    """ReLU in front of which nothing is positive: J = 0 in its rows, and the condition
    number infinite.
    """
    found = jacobians.spectrum(ops.relu, np.array([[1.0, -1.0, 2.0]], "float32"))
    assert found.values.tolist() == [1.0, 1.0, 0.0]
    assert found.condition_number == float("inf")
    assert found.mean_square == pytest.approx(2 / 3)
    assert found.isometry_distance == pytest.approx((1 / 3) ** 0.5)
    assert jacobians.spectrum(
        lambda x: 0.0 * x, np.ones((1, 3), "float32")
    ).condition_number == float("inf")


def double(x):
    return 2 * x


FLOATS = np.ones((1, 3), "float32")
ERRORS = {
    "empty": (lambda: jacobians.jacobian(double, FLOATS[:0]), ["at least one example", "(0, 3)"]),
    "nan": (lambda: jacobians.jacobian(double, FLOATS * np.nan), ["finite"]),
    "integers": (
        lambda: jacobians.jacobian(double, np.ones((1, 3), "int32")),
        ["floats", "int32"],
    ),
    "list": (lambda: jacobians.jacobian(lambda x: [x, x], FLOATS), ["one tensor", "list"]),
    "bool": (lambda: jacobians.jacobian(lambda x: x > 0, FLOATS), ["tensor of floats", "bool"]),
    "k": (lambda: jacobians.spectrum(double, FLOATS, k=4), ["(3, 3)", "k=4"]),
    "zero": (lambda: jacobians.spectrum(double, FLOATS, k=0), ["positive integer", "k=0"]),
    "method": (
        lambda: jacobians.spectrum(double, FLOATS, method="svd"),
        ["'lanczos'", "method='svd'"],
    ),
    "beyond": (lambda: jacobians.between(network(), 3, 8), ["0 to 5", "last=8"]),
    "none": (lambda: jacobians.between(network(), 3, 3), ["first=3, last=3"]),
    "negative": (lambda: jacobians.between(network(), -1, 3), ["first=-1"]),
    "name": (lambda: jacobians.between(network(), "x", 3), ["first='x'"]),
} | {
    name: (
        lambda name=name: getattr(jacobians.spectrum(double, FLOATS, k=2), name),
        [name, "2 largest of 3"],
    )
    for name in ("condition_number", "mean_square", "isometry_distance")
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, words = ERRORS[name]
    message = harness.error_of(call)
    assert all(word in message for word in words), message


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="it traces the function, once")
def test_random_functions_are_refused():
    calls = []

    def function(x):
        calls.append(None)
        return x * len(calls)

    message = harness.error_of(lambda: jacobians.jacobian(function, FLOATS))
    assert "same for the same x" in message
