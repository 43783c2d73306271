"""Temperature scaling: the best of a fine grid, found and applied; predictions stay."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.transfer import apply_temperature, fit_temperature
from tests.keras_preact import harness


def overconfident(scale: float, images: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Return logits whose softmax after division by `scale` are the odds of the labels."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(images, 5)) * 2
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = np.array([random.choice(5, p=row) for row in shares])
    return scale * logits, labels


def cross_entropy(logits, labels) -> float:
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return -np.log(shares[np.arange(len(labels)), labels]).mean()


@pytest.mark.parametrize("scale", [0.1, 7.0])
def test_has_the_lowest_cross_entropy(scale):
    logits, labels = overconfident(scale)
    temperature = fit_temperature(logits, labels)
    assert temperature == pytest.approx(scale, rel=0.15)
    grid = temperature * np.geomspace(0.9, 1.1, 201)
    losses = [cross_entropy(logits / each, labels) for each in grid]
    assert grid[np.argmin(losses)] == pytest.approx(temperature, rel=2e-3)
    offsets = np.random.default_rng(1).normal(size=(len(labels), 1)) * 1000
    assert fit_temperature(logits + offsets, labels) == pytest.approx(temperature, rel=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels", "word"),
    [
        ([[2, 1], [0, 3]], [0, 1], "are classified correctly"),
        ([[2, 1], [0, 3]], [1, 0], "no better than by chance"),
        ([[2, np.nan], [0, 3]], [1, 0], "must be finite"),
        ([[2, 1], [0, 3]], [1, 2], "from 1 to 2"),
        ([[2, 1], [0, 3]], [0], "shapes (2, 2) and (1,)"),
        (keras.Sequential(name="mine"), [0], "`model.predict(images)`"),
        (keras.Sequential(name="mine"), [0], "Received: the model 'mine'"),
    ],
)
def test_what_cannot_be_fitted(logits, labels, word):
    assert word in harness.error_of(lambda: fit_temperature(logits, np.array(labels)))


@pytest.mark.parametrize("options", [{"stacked": True}, {"classifier_activation": "softmax"}])
def test_logits_are_divided(options):
    network = kp.models.resnet_cifar(20, input_shape=(8, 8, 1), **options)
    network.get_layer("head_classifier").bias.assign(np.arange(10) / 10)
    before = harness.weights(network)
    images = harness.images(3, 8, 8, 1)
    copy = apply_temperature(network, 0.25)
    logits, divided = (
        harness.numpy(keras.Model(each.input, each.logits)(images, training=False))
        for each in (network, copy)
    )
    np.testing.assert_allclose(divided, 4 * logits, rtol=1e-5, atol=1e-5)
    assert np.ptp(logits) > 0.5
    np.testing.assert_equal(harness.weights(network), before)


def test_networks_and_temperatures_that_do_not_fit():
    network = kp.models.resnet_cifar(8, input_shape=(8, 8, 1))
    for temperature in (0, -1.0, float("nan"), float("inf")):
        assert "positive" in harness.error_of(lambda t=temperature: apply_temperature(network, t))
    bare = kp.models.resnet_cifar(8, input_shape=(8, 8, 1), include_top=False)
    assert "no classifier" in harness.error_of(lambda: apply_temperature(bare, 2.0))
    assert "residual" in harness.error_of(lambda: apply_temperature(keras.Sequential(), 2.0))
