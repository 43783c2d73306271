"""Curvature and gradient noise of models whose Hessian and gradients are known."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_preact as kp
from keras_preact.analysis import critical_rate, curvature, gradient_noise
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(24, 5)), RNG.normal(size=(24, 2))


def squares(labels, outputs):
    return ops.sum(ops.square(outputs - labels), axis=-1) / 2


def dense(*hidden):
    model = keras.Sequential([keras.Input((5,)), *hidden, layers.Dense(2, use_bias=False)])
    harness.randomize(model)
    return model


def test_of_a_quadratic():
    """The Hessian of half the squared error of a linear map is X^T X / n, once for each
    output.
    """
    want = np.sort(np.repeat(np.linalg.eigvalsh(X.T @ X / len(X)), 2))[::-1]
    found = curvature(dense(), X, Y.astype("float32"), loss=squares, k=3, probes=200)
    np.testing.assert_allclose(found.eigenvalues, want[:3], rtol=1e-4)
    assert abs(found.trace - want.sum()) < 5 * found.trace_error
    assert found.trace_error < 0.1 * want.sum()
    assert np.isnan(curvature(dense(), X, Y, loss=squares, probes=1).trace_error)


def test_statistics_of_the_batch():
    model = dense(layers.BatchNormalization(center=False, scale=False, epsilon=0.1))
    model.layers[0].set_weights([np.zeros(5), np.full(5, 0.9)])
    standardized = (X - X.mean(0)) / np.sqrt(X.var(0) + 0.1)
    for training, x in ((False, X), (True, standardized)):
        found = curvature(model, X, Y.astype("float32"), loss=squares, training=training, probes=1)
        want = np.linalg.eigvalsh(x.T @ x / len(X))[-1:]
        np.testing.assert_allclose(found.eigenvalues, want, rtol=1e-4)


def test_of_a_network_with_a_hidden_layer():
    """Against differences of gradients, in float64."""
    model = dense(layers.Dense(3, activation="tanh"))
    labels = Y.astype("float32")

    def gradient(weights):
        (first, bias, last) = weights
        h = np.tanh(X @ first + bias)
        off = (h @ last - labels) / len(X)
        below = off @ last.T * (1 - h**2)
        return np.concatenate([each.ravel() for each in (X.T @ below, below.sum(0), h.T @ off)])

    weights = [weight.astype("float64") for weight in model.get_weights()]
    columns = []
    for i, weight in enumerate(weights):
        for j in range(weight.size):
            sides = []
            for step in (1e-5, -1e-5):
                moved = [each.copy() for each in weights]
                moved[i].flat[j] += step
                sides.append(gradient(moved))
            columns.append((sides[0] - sides[1]) / 2e-5)
    hessian = np.array(columns)
    found = curvature(model, X, labels, loss=squares, k=2, probes=100)
    np.testing.assert_allclose(found.eigenvalues, np.linalg.eigvalsh(hessian)[::-1][:2], rtol=1e-3)
    assert abs(found.trace - np.trace(hessian)) < 5 * found.trace_error


def test_stacks_have_the_curvature_and_critical_rate_of_their_units():
    model = kp.models.ResidualNetwork(
        [(4, 3)],
        stem="3x3",
        stem_filters=4,
        block="basic",
        input_shape=(6, 6, 1),
        classes=6,
        stacked=False,
    )
    harness.randomize(model)
    before = model.get_weights()
    x, labels = harness.images(6, 6, 6, 1), np.arange(6)
    options = {"training": True, "probes": 1}
    one, other = (
        curvature(each, x, labels, **options).eigenvalues
        for each in (model, kp.models.stack(model))
    )
    np.testing.assert_allclose(other, one, rtol=2e-3)
    one, other = (
        critical_rate(each, x, labels, keras.optimizers.SGD(0.1)).rate
        for each in (model, kp.models.stack(model))
    )
    assert 0 < other == pytest.approx(one, rel=0.2)
    for weight, was in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, was)


def test_noise_of_single_examples():
    model, labels = dense(), Y.astype("float32")
    [kernel] = model.get_weights()
    gradients = (X[:, :, None] * (X @ kernel - labels)[:, None]).reshape(len(X), -1)
    variance = gradients.var(axis=0, ddof=1).sum()
    square = (gradients.mean(0) ** 2).sum() - variance / len(X)
    found = gradient_noise(model, X, labels, loss=squares, parts=len(X))
    np.testing.assert_allclose(found.variance, variance, rtol=1e-4)
    np.testing.assert_allclose(found.square, square, rtol=1e-4)
    assert found.scale == pytest.approx(variance / square, rel=1e-3)
    assert found.batch_size / 2**0.5 <= found.scale <= found.batch_size * 2**0.5


def test_noise_without_a_gradient():
    labels = np.tile([[1.0], [-1.0]], (12, 2)).astype("float32")
    model = dense()
    model.set_weights([np.zeros((5, 2), "float32")])
    found = gradient_noise(model, np.ones((24, 5)), labels, loss=squares, parts=24)
    assert found.square < 0
    assert (found.scale, found.batch_size) == (float("inf"), None)


def quadratic(model):
    """The gradient and the Hessian's product with a matrix, of `squares`, in NumPy."""
    [kernel] = model.get_weights()
    return X.T @ (X @ kernel - Y) / len(X), lambda d: X.T @ X @ d / len(X)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(1e-3),
        lambda: keras.optimizers.SGD(3.0),
        lambda: kp.optimizers.CoupledSGD(0.1, momentum=0.5, coupled_weight_decay=0.1),
        lambda: kp.optimizers.AdamW(0.01, weight_decay=0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    ],
)
def test_critical_rate_of_a_quadratic(make):
    """L(a d) - L(0) = a g d + a^2 d H d / 2 is 0 at a = -2 g d / d H d; d is the update
    that the optimizer then really makes.
    """
    model, optimizer, labels = dense(), make(), Y.astype("float32")
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    optimizer.build(model.trainable_variables)
    gradient, _ = quadratic(model)
    inner.apply([ops.convert_to_tensor(gradient, "float32")])  # momentum
    gradient, hessian = quadratic(model)
    before = [harness.numpy(each) for each in optimizer.variables]
    [old] = model.get_weights()
    found = critical_rate(model, X, labels, optimizer, loss=squares)
    for variable, was in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(harness.numpy(variable), was)
    np.testing.assert_array_equal(model.get_weights()[0], old)
    scale = inner.loss_scale_factor or 1
    inner.apply([ops.convert_to_tensor(scale * gradient, "float32")])
    update = model.get_weights()[0].astype("float64") - old
    factor = -2 * (gradient * update).sum() / (update * hessian(update)).sum()
    rate = float(ops.convert_to_numpy(optimizer.learning_rate))
    assert found.learning_rate == pytest.approx(rate)
    assert found.rate == pytest.approx(factor * rate, rel=0.1)
    assert found.share == pytest.approx(1 / factor, rel=0.1)
    assert found.sharpness == pytest.approx(2 / (factor * rate), rel=0.1)
    assert found.passes <= 6 + abs(np.log2(factor)) / 2


def test_the_same_dropout_in_every_pass():
    model, sgd = dense(layers.Dropout(0.5)), keras.optimizers.SGD(0.1)
    options = {"loss": squares, "training": True, "probes": 1}
    one, other = (curvature(model, X, Y.astype("float32"), **options) for _ in range(2))
    np.testing.assert_allclose(other.eigenvalues, one.eigenvalues, rtol=1e-5)
    one, other = (critical_rate(model, X, Y.astype("float32"), sgd, loss=squares) for _ in range(2))
    assert one == other
    assert 0 < one.rate < np.inf


def test_critical_rate_uphill_and_without_end():
    model, labels = dense(), Y.astype("float32")
    uphill = keras.optimizers.SGD(0.1, momentum=0.9)
    uphill.build(model.trainable_variables)
    gradient, _ = quadratic(model)
    velocity = next(each for each in uphill.variables if each.shape == (5, 2))
    velocity.assign(gradient.astype("float32"))
    found = critical_rate(model, X, labels, uphill, loss=squares)
    assert (found.rate, found.share, found.sharpness) == (0, np.inf, np.inf)
    assert "not go downhill" in found.note
    found = critical_rate(
        model, X, optimizer=keras.optimizers.SGD(1.0), loss=lambda _, y: ops.mean(y, axis=-1)
    )
    assert (found.rate, found.share, found.sharpness) == (np.inf, 0, 0)
    assert "million" in found.note


def test_critical_rate_below_the_rounding_of_the_loss():
    model, sgd, labels = dense(), keras.optimizers.SGD(1e-4), Y.astype("float32")
    assert critical_rate(model, X, labels, sgd, loss=squares).note == ""
    found = critical_rate(model, X, labels, sgd, loss=lambda y, z: squares(y, z) + 1e9)
    assert "rounding error" in found.note
