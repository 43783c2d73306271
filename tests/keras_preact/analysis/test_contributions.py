"""The parts of a logit against NumPy: every F times the mask and the weights of the head."""

import keras
import numpy as np
import pytest

from keras_preact.analysis import contributions
from tests.keras_preact import harness
from tests.keras_preact.analysis.test_propagation import first_input, network, numpy_units

IMAGES, CLASSES = harness.images(3, 8, 8, 2), np.array([2, 0, 7])


def by_hand(model, classes, **options):
    """Before the last stage, of each branch, and of the shifts: float64."""
    keep = 0.5 if options.get("shortcut") == "constant_scaling" else 1
    x, parts = first_input(model, IMAGES), []
    for unit in numpy_units(model, **options):
        start, branch = unit.paths(x)
        through = unit.add(start, np.zeros_like(branch))
        before, x = x, unit.add(start, branch)
        is_new = before.shape != x.shape
        parts = [through] if is_new else [keep * part for part in parts or [before]]
        parts.append(x - through)
    names = ("gamma", "beta", "moving_mean", "moving_variance")
    gamma, beta, mean, variance = (
        harness.weights(model)[f"head_norm/{name}"].astype("float64") for name in names
    )
    scale = gamma / np.sqrt(variance + model.get_layer("head_norm").epsilon)
    kernel, bias = (
        weight.astype("float64") for weight in model.get_layer("head_classifier").get_weights()
    )
    mask = (x - mean) * scale + beta > 0
    assert 0.2 < mask.mean() < 0.8
    factors = mask * kernel.T[classes][:, None, None] / np.prod(x.shape[1:3])
    rows = [(factors * scale * part).sum((1, 2, 3)) for part in parts]
    return [*rows, (factors * (beta - mean * scale)).sum((1, 2, 3)) + bias[classes]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"stacked": True}, marks=pytest.mark.backend),
        {"shortcut": "constant_scaling"},
        {"classifier_activation": "softmax"},
    ],
    ids=harness.label,
)
def test_by_hand(options):
    model = network(20, **options)
    found = contributions(model, IMAGES, CLASSES)
    assert found.units == tuple(f"stage3_unit{i}" for i in range(1, 4))
    of_units = {key: value for key, value in options.items() if key == "shortcut"}
    start, *residual, bias = by_hand(model, CLASSES, **of_units)
    harness.close(found.start, start, 1e-4)
    harness.close(found.residual, residual, 1e-4)
    harness.close(found.bias, bias, 1e-4)
    logits = harness.numpy(keras.Model(model.input, model.logits)(IMAGES))
    total = found.start + found.residual.sum(axis=0) + found.bias
    np.testing.assert_allclose(total, logits[np.arange(3), CLASSES], rtol=1e-5)
    np.testing.assert_allclose(found.logits, logits[np.arange(3), CLASSES], rtol=1e-5)
    predicted = contributions(model, IMAGES)
    np.testing.assert_array_equal(predicted.classes, logits.argmax(1))
    harness.close(predicted.logits, logits.max(1), 1e-5)


def test_models_of_others():
    """One stage of units made of Keras' layers; the head has a max pooling."""
    inputs = x = keras.Input((6, 6, 3))
    for i in range(2):
        y = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        x = keras.layers.Add(name=f"sum{i}")([x, keras.layers.Conv2D(3, 3, padding="same")(y)])
    y = keras.layers.LeakyReLU()(keras.layers.BatchNormalization()(x))
    y = keras.layers.GlobalMaxPooling2D()(y)
    model = keras.Model(inputs, keras.layers.Dense(4)(y))
    harness.randomize(model)
    images = harness.images(5, 6, 6, 3)
    found = contributions(model, images)
    assert found.units == ("sum0", "sum1")
    total = found.start + found.residual.sum(axis=0) + found.bias
    np.testing.assert_allclose(total, harness.numpy(model(images)).max(1), rtol=1e-5)
    # twice F of the last unit, twice its part, as long as the signs in the head stay
    sums = keras.Model(model.input, [model.get_layer(f"sum{i}").output for i in range(2)])
    x_1, x_2 = map(harness.numpy, sums(images))
    head = keras.Model(model.get_layer("sum1").output, model.output)
    moved = harness.numpy(head(x_2 + 1e-3 * (x_2 - x_1)))[np.arange(5), found.classes]
    np.testing.assert_allclose((moved - found.logits) / 1e-3, found.residual[1], atol=2e-2)
