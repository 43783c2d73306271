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


@pytest.mark.parametrize(
    ("inside", "output_of", "names"),
    [
        (True, lambda model: model.get_layer("maps").input, ("features", "features/sum", "sum")),
        (False, lambda model: model.get_layer("branch").output, ("branch",)),
    ],
    ids=["model in the model", "branch"],
)
def test_a_layer_before_a_relu(inside, output_of, names):
    """Where the rectified sum is 0, so is the gradient. That of a branch is at fixed other
    tensors.
    """
    model = small(inside=inside)
    outputs = [output_of(model), model.get_layer("maps").output]
    maps, total = map(harness.numpy, keras.Model(model.input, outputs)(IMAGES))
    kernel = harness.numpy(model.layers[-1].kernel)[:, CLASSES].T[:, None, None] / (12 * 16)
    weights = ((total > 0) * kernel).mean((1, 2), keepdims=True)
    want = np.maximum((maps * weights).sum(-1), 0)
    for layer in names:
        got = grad_cam(model, IMAGES, CLASSES, layer=layer)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * want.max())


#: Kind of input to a network that takes it, and the layer that returns its last map.
PLACES = {
    "sequences": (
        lambda: kp.models.resnet_1d(8, input_shape=(16, 2), classes=5, width_factor=0.25),
        "head_activation",
    ),
    "tokens": (
        lambda: kp.models.transformer(
            1, width=8, num_heads=2, input_shape=(6, 5), patch_size=None, classes=5
        ),
        "head_norm",
    ),
    "Conv1D": (lambda: convolutions(layers.Conv1D, layers.GlobalAveragePooling1D, (9, 2)), "maps"),
    "Conv3D": (
        lambda: convolutions(layers.Conv3D, layers.GlobalAveragePooling3D, (6, 4, 8, 2)),
        "maps",
    ),
}


def convolutions(kind, pooling, shape):
    """A network whose map has half of the input's places per axis."""
    inputs = keras.Input(shape)
    x = kind(4, 3, strides=2, padding="same", activation="relu", name="maps")(inputs)
    return keras.Model(inputs, layers.Dense(5, name="head_classifier")(pooling()(x)))


def linear(maps, size):
    """Interpolate maps linearly along each axis, between the centres of their places."""

    def row(values, new):
        places = (np.arange(new) + 0.5) * len(values) / new - 0.5
        return np.interp(places, np.arange(len(values)), values)

    for axis, new in enumerate(size, start=1):
        maps = np.apply_along_axis(row, axis, maps, new)
    return maps


@pytest.mark.backend
@pytest.mark.parametrize("kind", PLACES)
def test_sequences_and_volumes_by_hand(kind):
    make, layer = PLACES[kind]
    model = make()
    harness.randomize(model)
    x = harness.images(3, *model.input_shape[1:])
    maps = harness.numpy(keras.Model(model.input, model.get_layer(layer).output)(x))
    places = range(1, maps.ndim - 1)
    kernel = harness.numpy(model.get_layer("head_classifier").kernel)[:, CLASSES].T
    weights = np.expand_dims(kernel, tuple(places)) / np.prod(maps.shape[1:-1])
    small_maps = np.maximum((maps * weights).sum(-1), 0).reshape(3, *maps.shape[1:][: x.ndim - 2])
    want = linear(small_maps, x.shape[1:-1])
    got = grad_cam(model, x, CLASSES)
    assert got.shape == x.shape[:-1]
    assert want.max() > 0
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * want.max())
    np.testing.assert_array_equal(grad_cam(model, x, CLASSES, layer=layer), got)


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
