"""The parts of a logit against NumPy: every F times the mask and the weights of the head."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.analysis import contributions
from tests.keras_preact import harness
from tests.keras_preact.analysis.test_propagation import first_input, network, numpy_units

IMAGES, CLASSES = harness.images(3, 8, 8, 2), np.array([2, 0, 7])


def by_hand(model, classes, **options):
    """Before the last stage, of each branch, and of the shifts: float64."""
    x, parts = first_input(model, IMAGES), []
    for unit in numpy_units(model, **options):
        start, branch = unit.paths(x)
        through = unit.add(start, np.zeros_like(branch))
        before, x = x, unit.add(start, branch)
        if before.shape != x.shape:
            parts = [through]
        elif options.get("shortcut") == "shortcut_only_gating":
            parts = [through / start * part for part in parts]
        else:  # linear; coefficients of streams are those of x
            parts = [unit.add(part, np.zeros_like(branch)) for part in parts or [before]]
        parts.append(x - through)
    n = options.get("hyper", [1])[0]
    x, *parts = (each.reshape(*each.shape[:-1], n, -1).mean(-2) for each in (x, *parts))
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
        {"shortcut": "shortcut_only_gating"},
        {"classifier_activation": "softmax"},
        {"dtype": "float64"},
        {"hyper": (2, "none", "map"), "stacked": True},
        pytest.param({"hyper": (4, "sinkhorn", "pixel")}, marks=pytest.mark.backend),
        pytest.param(
            {"hyper": (3, "permutations", "pixel"), "stacked": True}, marks=pytest.mark.backend
        ),
    ],
    ids=harness.label,
)
def test_by_hand(options):
    """In a unit with a gate, or with coefficients of streams, these count as constants."""
    of_units = {key: options[key] for key in ("shortcut", "hyper") if key in options}
    if "hyper" in options:
        of_units["shortcut"] = "hyper_connections"
        options = options | {"shortcut": kp.shortcuts.HyperConnections(*options["hyper"])}
        del options["hyper"]
    model = network(20, **options)
    found = contributions(model, IMAGES, CLASSES)
    assert found.units == tuple(f"stage3_unit{i}" for i in range(1, 4))
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
    """One stage of units made of Keras' layers; the head has a max pooling, and layers that
    change nothing at inference.
    """
    inputs = x = keras.Input((6, 6, 3))
    for i in range(2):
        y = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        x = keras.layers.Add(name=f"sum{i}")([x, keras.layers.Conv2D(3, 3, padding="same")(y)])
    y = keras.layers.LeakyReLU()(keras.layers.BatchNormalization()(x))
    y = keras.layers.ZeroPadding2D()(keras.layers.Identity()(y))
    y = keras.layers.GlobalMaxPooling2D()(keras.layers.GaussianDropout(0.1)(y))
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
