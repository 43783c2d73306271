"""Grad-CAM, compared with maps computed by hand: with an average pooling and a dense layer
at the end, the gradient of a logit is a row of the dense kernel.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_preact as kp
from keras_preact.analysis import grad_cam
from tests.keras_preact import harness

IMAGES = harness.images(3, 12, 16, 3)
CLASSES = np.array([2, 0, 4])


def small(*head, inside=False):
    inputs = keras.Input((12, 16, 3))
    x = layers.Conv2D(6, 3, padding="same", activation="relu", name="conv")(inputs)
    y = layers.Conv2D(6, 1, name="branch")(x)
    total = layers.Add(name="sum")([x, y])
    features = keras.Model(inputs, total, name="features") if inside else None
    x = layers.ReLU(name="maps")(features(inputs) if inside else total)
    x = layers.GlobalAveragePooling2D()(x)
    for layer in head or [layers.Dense(5)]:
        x = layer(x)
    model = keras.Model(inputs, x)
    harness.randomize(model)
    return model


def by_hand(model, classes=CLASSES, places=12 * 16):
    """The rectified sum of the maps, weighted by the columns of the last kernel."""
    dense = next(layer for layer in model.layers[::-1] if isinstance(layer, layers.Dense))
    maps = harness.numpy(keras.Model(model.input, model.get_layer("maps").output)(IMAGES))
    weights = harness.numpy(dense.kernel)[:, classes].T[:, None, None] / places
    return np.maximum((maps * weights).sum(-1), 0)


@pytest.mark.backend
@pytest.mark.parametrize(
    "head",
    [
        [],
        [lambda: layers.Dense(5, activation="softmax")],
        [lambda: layers.Dense(5), lambda: layers.Softmax()],
        [lambda: layers.Dense(5, use_bias=False), lambda: layers.Activation("softmax")],
    ],
)
def test_by_hand(head):
    model = small(*(make() for make in head))
    got, want = grad_cam(model, IMAGES, CLASSES), by_hand(model)
    assert got.shape == (3, 12, 16)
    assert want.max() > 0
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * want.max())


def test_the_predicted_class_is_the_default():
    model = small()
    predicted = harness.numpy(model(IMAGES)).argmax(1)
    np.testing.assert_array_equal(grad_cam(model, IMAGES), grad_cam(model, IMAGES, predicted))


def test_a_layer_of_a_model_in_the_model():
    """A map that is rectified before the pooling: where it is negative, the gradient is 0."""
    model = small(inside=True)
    maps = harness.numpy(model.get_layer("features")(IMAGES))
    kernel = harness.numpy(model.layers[-1].kernel)[:, CLASSES].T[:, None, None] / (12 * 16)
    weights = ((maps > 0) * kernel).mean((1, 2), keepdims=True)
    want = np.maximum((maps * weights).sum(-1), 0)
    for layer in ("features", "features/sum", "sum"):
        got = grad_cam(model, IMAGES, CLASSES, layer=layer)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * want.max())


def test_beside_the_way_of_the_others():
    """The map of a branch: the gradient of what is added to it, at fixed other tensors."""
    model = small()
    branch = harness.numpy(keras.Model(model.input, model.get_layer("branch").output)(IMAGES))
    total = harness.numpy(keras.Model(model.input, model.get_layer("maps").output)(IMAGES))
    kernel = harness.numpy(model.layers[-1].kernel)[:, CLASSES].T[:, None, None] / (12 * 16)
    weights = ((total > 0) * kernel).mean((1, 2), keepdims=True)
    want = np.maximum((branch * weights).sum(-1), 0)
    got = grad_cam(model, IMAGES, CLASSES, layer="branch")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * want.max())


@pytest.mark.backend
def test_stacks_and_units_have_equal_maps():
    options = {"input_shape": (16, 16, 3), "width_factor": 0.5}
    model = kp.models.resnet_cifar(20, **options)
    harness.randomize(model)
    x = harness.images(2, 16, 16, 3)
    maps = grad_cam(model, x, [1, 2])
    features = keras.Model(model.input, model.get_layer("head_activation").output)(x)
    weights = harness.numpy(model.get_layer("head_classifier").kernel)[:, [1, 2]].T[:, None, None]
    small_maps = np.maximum((harness.numpy(features) * weights / 16).sum(-1, keepdims=True), 0)
    want = ops.image.resize(small_maps, (16, 16), data_format="channels_last")
    np.testing.assert_allclose(maps, harness.numpy(want)[..., 0], rtol=1e-3, atol=1e-4)
    stacked = kp.models.stack(model)
    for layer in (None, "stage2_unit3"):
        own, other = (grad_cam(each, x, [1, 2], layer=layer) for each in (model, stacked))
        np.testing.assert_allclose(other, own, rtol=1e-3, atol=1e-4 * own.max())


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        (small, {"classes": [1, 2]}, "a label for each example"),
        (small, {"classes": [1, 2, 5]}, "0 to 4"),
        (small, {"layer": "mapss"}, "which it does not have"),
        (lambda: small(layers.Dense(5, name="top")), {"layer": "top"}, "must be a map"),
        (lambda: kp.models.resnet_cifar(8, input_shape=(12, 16, 3)), {"layer": "conv_1"}, "stage3"),
        (lambda: keras.Sequential([keras.Input((12, 16, 3)), layers.Conv2D(2, 1)]), {}, "classes"),
        (
            lambda: keras.Sequential([keras.Input((12, 16, 3)), layers.Flatten(), layers.Dense(5)]),
            {},
            "Name a layer",
        ),
    ],
)
def test_what_it_refuses(model, arguments, words):
    assert words in harness.error_of(lambda: grad_cam(model(), IMAGES, **arguments))
