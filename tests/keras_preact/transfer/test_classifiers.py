"""A new classifier: everything else is the old network's, to the bit, and a copy."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import transfer
from tests.keras_preact import harness


def network(**options):
    options = {"width_factor": 0.25, "input_shape": (8, 8, 3), "classes": 5} | options
    model = kp.models.resnet_cifar(26 if options.get("stacked") else 14, **options)
    harness.randomize(model)
    return model


def below_top(model) -> dict[str, np.ndarray]:
    """Weights and seeds, these by order: their names count on."""
    ids = {id(weight) for weight in model.weights}
    found = {weight.path: weight for weight in model.weights if "classifier" not in weight.path}
    seeds = [variable for variable in model.variables if id(variable) not in ids]
    found |= {f"seed{i}": seed for i, seed in enumerate(seeds)}
    return {path: harness.numpy(each.value) for path, each in found.items()}


@pytest.mark.parametrize(
    ("classes", "stacked"),
    [(3, False), (3, True), (5, False), (0, True)],
)
def test_the_rest_is_kept(stacked, classes):
    model = network(stacked=stacked, dropout=0.2, mean=100.0, std=50.0)
    assert harness.longest_stack(model) == (3 if stacked else 0)
    transfer.freeze(model, "stage2")
    before = below_top(model)
    assert any(name.startswith("seed") for name in before)
    new = transfer.reset_classifier(model, classes)
    assert type(new) is type(model)
    for layer in model.layers:
        if "classifier" not in layer.name:
            assert new.get_layer(layer.name).trainable == layer.trainable
    x = harness.images(2, 8, 8, 3) * 100
    expected = transfer.feature_extractor(model, ["pool"])(x)["pool"]
    found = new(x)
    if classes:
        top = new.get_layer("head_classifier")
        assert top.trainable
        assert tuple(top.bias.shape) == (classes,)
        np.testing.assert_array_equal(top.get_weights()[1], np.zeros(classes))
        expected = top(expected)
    np.testing.assert_allclose(*map(harness.numpy, (found, expected)), rtol=1e-5, atol=1e-5)

    after = below_top(new)
    new.set_weights([weight + 1 for weight in new.get_weights()])
    for found in (after, below_top(model)):
        np.testing.assert_equal(found, before)


def test_the_new_classifier_is_drawn_as_the_builder_draws_it():
    seeded = keras.initializers.HeNormal(seed=7)
    model = network(kernel_initializer=seeded)
    built = kp.models.resnet_cifar(
        14, width_factor=0.25, input_shape=(8, 8, 3), classes=5, kernel_initializer=seeded
    )
    model.trainable = False  # a frozen classifier is not passed on
    new = transfer.reset_classifier(model, 5)
    found, expected, old = (
        each.get_layer("head_classifier").get_weights()[0] for each in (new, built, model)
    )
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found - old).max() > 0.1
    paths = [weight.path for weight in new.trainable_weights]
    assert paths == ["head_classifier/kernel", "head_classifier/bias"]


def test_a_transformer():
    model = kp.models.transformer(1, width=8, input_shape=(8, 8, 1))
    new = transfer.reset_classifier(model, 3, activation="softmax")
    shares = harness.numpy(new(harness.images(2, 8, 8, 1)))
    np.testing.assert_allclose(shares.sum(-1), [1, 1], rtol=1e-5)
    assert "has a classifier" in harness.error_of(lambda: transfer.reset_classifier(model, 0))
    for classes in (-1, 2.5, True, None):
        message = harness.error_of(lambda n=classes: transfer.reset_classifier(model, n))
        assert "`classes`" in message
