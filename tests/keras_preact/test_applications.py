"""kp.applications takes what keras.applications takes, and returns what it returns."""

import inspect

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

ResNet50V2 = kp.applications.ResNet50V2


@pytest.mark.parametrize("name", ["ResNet50V2", "ResNet101V2", "ResNet152V2"])
def test_the_same_arguments(name):
    """They have the same order and the same defaults. Our options follow, by name."""
    theirs, ours = (
        [
            (each.name, each.kind, each.default)
            for each in inspect.signature(function).parameters.values()
        ]
        for function in (getattr(keras.applications, name), getattr(kp.applications, name))
    )
    assert ours[:-1] == theirs
    assert ours[-1][1] is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize(
    "options",
    [{"classes": 11}, {"include_top": False, "pooling": "max", "input_shape": (64, 96, 1)}],
    ids=str,
)
def test_the_same_shapes_names_and_sizes(options):
    theirs = keras.applications.ResNet50V2(weights=None, **options)
    ours = ResNet50V2(weights=None, **options)
    assert isinstance(ours, kp.models.ResidualNetwork)
    for attribute in ("name", "input_shape", "output_shape"):
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    assert ours.count_params() == theirs.count_params()


def test_weights_from_a_file(tmp_path):
    theirs = keras.applications.ResNet50V2(weights=None, classes=3, input_shape=(64, 64, 3))
    harness.randomize(theirs)
    theirs.save_weights(path := tmp_path / "resnet50v2.weights.h5")
    options = {"input_shape": (64, 64, 3), "stacked": True}
    ours = ResNet50V2(weights=str(path), classes=3, **options)
    images = harness.images(2, 64, 64, 3)
    harness.close(harness.numpy(ours(images)), harness.numpy(theirs(images)), 1e-4)
    assert "and 3 classes" in harness.error_of(lambda: ResNet50V2(weights=path))


def test_an_input_tensor_and_preprocessing_inside():
    """The model starts at the source of the tensor, as in keras.applications."""
    inputs = keras.Input((64, 64, 3))
    options = {"weights": None, "include_top": False, "pooling": "avg"}
    model = ResNet50V2(
        input_tensor=keras.layers.Rescaling(2.0)(inputs), mean=127.5, std=127.5, **options
    )
    assert model.inputs[0] is inputs
    network = model.get_layer("resnet50v2")
    assert isinstance(network, kp.models.ResidualNetwork)
    plain = ResNet50V2(input_shape=(64, 64, 3), **options)
    plain.set_weights(network.get_weights())
    pixels = np.random.default_rng(0).integers(0, 128, (2, 64, 64, 3)).astype("float32")
    expected = plain(kp.applications.preprocess_input(2 * pixels))
    harness.close(harness.numpy(model(pixels)), harness.numpy(expected), 1e-4)


def test_wrong_arguments():
    for options, word in (
        ({"classes": 10}, "1000 classes"),
        ({"weights": None, "input_tensor": np.zeros((1, 64, 64, 3))}, "must be a Keras tensor"),
        ({"weights": None, "include_top": False, "pooling": "sum"}, "`pooling`"),
    ):
        assert word in harness.error_of(lambda options=options: ResNet50V2(**options))
    with pytest.raises(FileNotFoundError, match="no such file"):
        ResNet50V2(weights="image-net")
