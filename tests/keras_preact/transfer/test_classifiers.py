"""A new classifier: everything else is the old network's, to the bit, and a copy."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact import transfer
from tests.keras_preact import harness

pytestmark = pytest.mark.backend


def network(**options):
    options = {
        "width_factor": 0.25,
        "input_shape": (8, 8, 3),
        "classes": 5,
        "mean": 100.0,
        "std": 50.0,
    } | options
    model = kp.models.resnet_cifar(26 if options.get("stacked") else 14, **options)
    harness.randomize(model)
    return model


def below_top(model) -> dict[str, np.ndarray]:
    """Weights and seeds, these by order: their names count on."""
    weights = {weight.path: weight for weight in model.weights}
    seeds = [
        variable
        for variable in model.variables
        if id(variable) not in {id(w) for w in model.weights}
    ]
    found = weights | {f"seed{i}": seed for i, seed in enumerate(seeds)}
    return {
        path: keras.ops.convert_to_numpy(each.value)
        for path, each in found.items()
        if "classifier" not in path
    }


@pytest.mark.parametrize(("classes", "stacked"), [(3, False), (3, True), (5, False), (0, True)])
def test_the_rest_is_kept(stacked, classes, tmp_path):
    model = network(stacked=stacked, dropout=0.2)
    assert harness.longest_stack(model) == (3 if stacked else 0)
    transfer.freeze(model, "stage2")
    before = below_top(model)
    assert any(name.startswith("seed") for name in before)
    new = transfer.reset_classifier(model, classes)
    assert type(new) is type(model)
    after = below_top(new)
    assert after.keys() == before.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    assert [
        (each.name, each.trainable) for each in new.layers if "classifier" not in each.name
    ] == [(each.name, each.trainable) for each in model.layers if "classifier" not in each.name]
    x = harness.images(2, 8, 8, 3) * 100
    pool = transfer.feature_extractor(model, ["pool"])(x)["pool"]
    found = new(x)
    if classes:
        top = new.get_layer("head_classifier")
        assert top.trainable
        assert tuple(top.bias.shape) == (classes,)
        np.testing.assert_array_equal(top.get_weights()[1], np.zeros(classes))
        pool = top(pool)
    np.testing.assert_allclose(
        *map(keras.ops.convert_to_numpy, (found, pool)), rtol=1e-5, atol=1e-5
    )
    new.save(tmp_path / "new.keras")
    again = keras.saving.load_model(tmp_path / "new.keras")
    np.testing.assert_allclose(
        *map(keras.ops.convert_to_numpy, (again(x), new(x))), rtol=1e-6, atol=1e-6
    )
    assert [each.trainable for each in again.layers] == [each.trainable for each in new.layers]


def test_the_old_network_is_not_touched():
    model = network()
    before = [np.array(weight) for weight in model.get_weights()]
    new = transfer.reset_classifier(model, 3)
    new.set_weights([weight + 1 for weight in new.get_weights()])
    for value, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)


def test_the_new_classifier_is_drawn_as_the_builder_draws_it():
    seeded = keras.initializers.HeNormal(seed=7)
    model = network(kernel_initializer=seeded)
    built = kp.models.resnet_cifar(
        14, width_factor=0.25, input_shape=(8, 8, 3), classes=5, kernel_initializer=seeded
    )
    new = transfer.reset_classifier(model, 5)
    found, expected, old = (
        each.get_layer("head_classifier").get_weights()[0] for each in (new, built, model)
    )
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found - old).max() > 0.1


def test_a_frozen_classifier_is_not_passed_on():
    model = network()
    model.trainable = False
    new = transfer.reset_classifier(model, 3)
    assert {weight.path for weight in new.trainable_weights} == {
        "head_classifier/kernel",
        "head_classifier/bias",
    }


def test_activation_and_a_network_without_top():
    bare = kp.models.resnet_cifar(14, width_factor=0.25, input_shape=(8, 8, 3), include_top=False)
    new = transfer.reset_classifier(bare, 4, activation="softmax")
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(new(harness.images(2, 8, 8, 3))).sum(-1), 1, rtol=1e-5
    )
    assert transfer.reset_classifier(bare, 0).output_shape == (None, 16)
    largest = kp.models.resnet_cifar(
        14, width_factor=0.25, input_shape=(8, 8, 3), include_top=False, pooling="max"
    )
    assert transfer.reset_classifier(largest, 0).get_config()["pooling"] == "max"


def test_a_transformer():
    model = kp.models.pre_ln_transformer(1, width=8, input_shape=(8, 8, 1))
    new = transfer.reset_classifier(model, 3)
    assert new.output_shape == (None, 3)
    assert "has a classifier" in harness.error_of(lambda: transfer.reset_classifier(model, 0))


@pytest.mark.parametrize("classes", [-1, 2.5, True, False, None])
def test_classes(classes):
    assert "`classes` must be a positive integer" in harness.error_of(
        lambda: transfer.reset_classifier(network(), classes)
    )
