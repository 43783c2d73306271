"""kp.applications takes what keras.applications takes, and returns what it returns."""

import inspect
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

NAMES = ["ResNet50V2", "ResNet101V2", "ResNet152V2"]


def outputs(model, images):
    return keras.ops.convert_to_numpy(model(images))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_arguments(name):
    """In the same order, with the same defaults; behind them our options by name."""
    theirs = list(inspect.signature(getattr(keras.applications, name)).parameters.values())
    ours = list(inspect.signature(getattr(kp.applications, name)).parameters.values())
    assert [(own.name, own.kind, own.default) for own in ours[:-1]] == [
        (own.name, own.kind, own.default) for own in theirs
    ]
    assert ours[-1].kind is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize("name", ["preprocess_input", "decode_predictions"])
def test_the_functions_beside_them_are_theirs(name):
    assert getattr(kp.applications, name) is getattr(keras.applications.resnet_v2, name)


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.soak) for name in NAMES[1:])]
)
def test_the_same_shapes_names_and_sizes(name):
    options = {"weights": None, "classes": 11}
    theirs, ours = (
        getattr(keras.applications, name)(**options),
        getattr(kp.applications, name)(**options),
    )
    assert isinstance(ours, kp.models.ResidualNetwork)
    for attribute in ("name", "input_shape", "output_shape"):
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    assert ours.count_params() == theirs.count_params()


@pytest.mark.parametrize("options", [{}, {"pooling": "max"}, {"input_shape": (64, 96, 1)}], ids=str)
def test_the_same_shapes_without_top(options):
    options = {"weights": None, "include_top": False} | options
    theirs, ours = keras.applications.ResNet50V2(**options), kp.applications.ResNet50V2(**options)
    assert (ours.input_shape, ours.output_shape) == (theirs.input_shape, theirs.output_shape)
    assert ours.count_params() == theirs.count_params()


@pytest.mark.soak
def test_weights_from_a_file(tmp_path):
    theirs = keras.applications.ResNet50V2(weights=None, classes=3, input_shape=(64, 64, 3))
    harness.randomize(theirs)
    theirs.save_weights(path := tmp_path / "resnet50v2.weights.h5")
    options = {"classifier_activation": None, "name": "other", "stacked": True}
    ours = kp.applications.ResNet50V2(
        weights=str(path), classes=3, input_shape=(64, 64, 3), **options
    )
    assert ours.name == "other"
    theirs.get_layer("predictions").activation = keras.activations.linear
    images = harness.images(2, 64, 64, 3)
    np.testing.assert_allclose(outputs(ours, images), outputs(theirs, images), atol=1e-4, rtol=1e-4)
    maps = kp.applications.ResNet50V2(False, path, input_shape=(64, 64, 3))
    assert maps.output_shape == (None, 2, 2, 2048)
    with pytest.raises(
        ValueError, match=r"classes=1000 were asked for. Received: .* and 3 classes"
    ):
        kp.applications.ResNet50V2(weights=path)
    with pytest.raises(ValueError, match=r"ResNet101V2 has stages of \(3, 4, 23, 3\) units"):
        kp.applications.ResNet101V2(weights=path, classes=3)


def test_preprocessing_inside_the_network():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3)).astype("float32")
    options = {"weights": None, "include_top": False, "pooling": "avg", "input_shape": (64, 64, 3)}
    outside = kp.applications.ResNet50V2(**options)
    harness.randomize(outside)
    inside = kp.applications.ResNet50V2(**options, mean=127.5, std=127.5)
    inside.set_weights(outside.get_weights())
    expected = outputs(outside, kp.applications.preprocess_input(pixels.copy()))
    np.testing.assert_allclose(outputs(inside, pixels), expected, atol=1e-4, rtol=1e-4)


def test_an_input_tensor():
    """A model from the source of the tensor on, as theirs."""
    inputs = keras.Input((64, 64, 3))
    tensor = keras.layers.Rescaling(2.0)(inputs)
    model = kp.applications.ResNet50V2(
        weights=None, include_top=False, pooling="avg", input_tensor=tensor
    )
    assert model.inputs[0] is inputs
    network = model.get_layer("resnet50v2")
    assert isinstance(network, kp.models.ResidualNetwork)
    images = harness.images(2, 64, 64, 3)
    np.testing.assert_allclose(outputs(model, images), outputs(network, 2 * images), atol=1e-5)
    head = keras.Model(inputs, keras.layers.Dense(2)(model.output))
    assert head.output_shape == (None, 2)


def test_wrong_arguments():
    build = kp.applications.ResNet50V2
    assert "1000 classes" in harness.error_of(lambda: build(classes=10))
    assert "must be a Keras tensor" in harness.error_of(
        lambda: build(weights=None, input_tensor=np.zeros((1, 64, 64, 3)))
    )
    assert "`pooling` must be one of" in harness.error_of(lambda: build(False, None, pooling="sum"))
    with pytest.raises(FileNotFoundError, match="There is no such file"):
        build(weights="image-net")


@pytest.mark.soak
def test_without_network_one_sentence_says_so(tmp_path):
    """In a process of its own: Keras' cache is empty, and every way out leads to a port
    where nothing listens.
    """
    code = "import keras_preact as kp\nkp.applications.ResNet50V2()"
    dead = dict.fromkeys(
        ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9"
    )
    environment = os.environ | dead | {"KERAS_HOME": str(tmp_path), "no_proxy": "", "NO_PROXY": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert (
        "ConnectionError: weights='imagenet' downloads keras.applications' weights of ResNet50V2"
        in done.stderr
    )
