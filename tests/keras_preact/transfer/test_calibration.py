"""Temperature scaling: the best of a fine grid, found and applied; predictions stay."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.transfer import apply_temperature, fit_temperature

pytestmark = pytest.mark.backend


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


@pytest.mark.parametrize("scale", [0.1, 1.0, 7.0])
def test_has_the_lowest_cross_entropy(scale):
    logits, labels = overconfident(scale)
    temperature = fit_temperature(logits, labels)
    assert temperature == pytest.approx(scale, rel=0.15)
    grid = temperature * np.geomspace(0.9, 1.1, 201)
    losses = [cross_entropy(logits / each, labels) for each in grid]
    assert grid[np.argmin(losses)] == pytest.approx(temperature, rel=2e-3)


def test_is_one_after_it_was_applied_and_ignores_offsets():
    logits, labels = overconfident(3.0)
    temperature = fit_temperature(logits, labels)
    assert fit_temperature(logits / temperature, labels) == pytest.approx(1, rel=1e-9)
    offsets = np.random.default_rng(1).normal(size=(len(labels), 1)) * 1000
    assert fit_temperature(logits + offsets, labels) == pytest.approx(temperature, rel=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        ([[2, 1], [0, 3]], [0, 1], "No temperature is the best.*2 images, all classified"),
        ([[2, 2], [0, 3]], [1, 1], "No temperature is the best"),  # a tie
        ([[2, 1], [0, 3]], [1, 0], "No temperature is the best.*no better than by chance"),
        ([[2, np.nan], [0, 3]], [1, 0], "must be finite"),
        ([[2, 1], [0, 3]], [1, 2], "integers from 0 to 1. Received: int64 from 1 to 2"),
        ([[2, 1], [0, 3]], [0.0, 1.0], "integers from 0 to 1. Received: float64"),
        ([[2, 1], [0, 3]], [0], r"shapes \(2, 2\) and \(1,\)"),
        (np.zeros((0, 2)), np.zeros(0, int), r"shapes \(0, 2\) and \(0,\)"),
    ],
)
def test_what_cannot_be_fitted(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        fit_temperature(logits, np.array(labels))


@pytest.mark.parametrize("options", [{}, {"stacked": True}, {"classifier_activation": "softmax"}])
def test_logits_are_divided(options):
    network = kp.models.resnet_cifar(20, input_shape=(8, 8, 1), **options)
    kernel = network.get_layer("head_classifier").kernel
    bias = network.get_layer("head_classifier").bias
    bias.assign(np.arange(10) / 10)
    kept = [np.array(weight) for weight in network.get_weights()]
    images = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype("float32")
    copy = apply_temperature(network, 0.25)
    logits, divided = (
        keras.ops.convert_to_numpy(keras.Model(each.input, each.logits)(images, training=False))
        for each in (network, copy)
    )
    np.testing.assert_allclose(divided, 4 * logits, rtol=1e-5, atol=1e-5)
    assert np.ptp(logits) > 0.5
    for before, now in zip(kept, network.get_weights(), strict=True):
        np.testing.assert_array_equal(before, now)
    assert kernel is network.get_layer("head_classifier").kernel


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf")])
def test_temperatures_that_are_none(temperature):
    network = kp.models.resnet_cifar(20, input_shape=(8, 8, 1))
    with pytest.raises(ValueError, match="must be positive and finite"):
        apply_temperature(network, temperature)


def test_networks_without_logits():
    network = kp.models.resnet_cifar(20, input_shape=(8, 8, 1), include_top=False)
    with pytest.raises(ValueError, match="no classifier, so there are no logits to divide"):
        apply_temperature(network, 2.0)
    with pytest.raises(ValueError, match="`model` must be a network of residual units"):
        apply_temperature(keras.Sequential(), 2.0)
