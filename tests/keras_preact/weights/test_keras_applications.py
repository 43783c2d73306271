"""keras.applications' whole ResNetV2, here and back, and their files."""

import h5py
import keras
import numpy as np
import pytest
from keras.src.legacy.saving import legacy_h5_format

import keras_preact as kp
from tests.keras_preact import harness
from tests.keras_preact.weights.keras_nets import applications
from tests.keras_preact.weights.torch_nets import check_same


@pytest.mark.parametrize(
    "name", ["ResNet50V2", pytest.param("ResNet152V2", marks=pytest.mark.soak)]
)
def test_a_whole_network_and_back(name, tmp_path):
    """Equal outputs, and the weights that come back are the same bits; a file of the weights
    alone says which network it is.
    """
    shape, options = (32, 32, 3), {"classifier_activation": None}
    build = getattr(keras.applications, name)
    theirs = build(weights=None, input_shape=shape, classes=3, **options)
    harness.randomize(theirs)
    theirs.save_weights(tmp_path / "model.weights.h5")
    file = tmp_path / "model.weights.h5"
    ours = kp.weights.from_keras_applications(file, input_shape=shape, **options)
    check_same(theirs, ours, shape[:2])
    back = kp.weights.to_keras_applications(ours)
    np.testing.assert_equal(back.get_weights(), theirs.get_weights())
    names = [
        [layer.name.rstrip("_0123456789") for layer in model.layers[2:]] for model in (theirs, back)
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "weights.h5"])
def test_files(tmp_path, name):
    """Of models, and of weights as Keras 2 wrote them, such as the downloads."""
    theirs = applications()
    if name.startswith("weights"):
        with h5py.File(tmp_path / name, "w") as file:
            legacy_h5_format.save_weights_to_hdf5_group(file, theirs)
    else:
        theirs.save(tmp_path / name)
    ours, wanted = map(kp.weights.from_keras_applications, (tmp_path / name, theirs))
    np.testing.assert_equal(ours.get_weights(), wanted.get_weights())


#: What is at a path, as a function that puts it there, and a word of the message.
NO_NETWORKS = {
    "text.h5": (lambda path: path.write_text("weights"), "must be a .keras, .h5"),
    "small.weights.h5": (
        lambda path: applications().save_weights(path),
        "53, 104, 155 conv.* with 25",
    ),
}


@pytest.mark.parametrize("name", NO_NETWORKS)
def test_files_without_a_network(tmp_path, name):
    write, words = NO_NETWORKS[name]
    with pytest.raises(FileNotFoundError, match="There is no such file"):
        kp.weights.from_keras_applications(tmp_path / name)
    write(tmp_path / name)
    with pytest.raises(ValueError, match=words):
        kp.weights.from_keras_applications(tmp_path / name)


def test_models_that_are_none():
    original = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3))
    with pytest.raises(ValueError, match="conv1_bn"):
        kp.weights.from_keras_applications(original)
    inputs = keras.Input((48, 48, 3))
    scaled = applications(shape=None, input_tensor=keras.layers.Rescaling(1 / 255)(inputs))
    with pytest.raises(ValueError, match="Received: a model with rescaling"):
        kp.weights.from_keras_applications(scaled)
