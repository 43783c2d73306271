"""`compile` chooses for the device that a network is on, not for the one that wrote it."""

import keras
import pytest

import keras_preact as kp
from keras_preact.backend import devices

BACKEND = keras.backend.backend()
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
pytestmark = pytest.mark.backend


@pytest.mark.parametrize("has_gpu", [False, True])
def test_automatic_compilation(has_gpu, tmp_path, monkeypatch):
    if BACKEND == "tensorflow":
        monkeypatch.setattr(devices, "tensorflow_has_gpu", lambda: has_gpu)
    network = kp.create_model("digits_resnet8_preact")
    network.compile("sgd", LOSS)
    plain = keras.Sequential([keras.layers.Dense(1)])
    plain.compile("sgd", LOSS)
    keras_choice = plain.jit_compile
    assert network.jit_compile == (keras_choice and (has_gpu or BACKEND != "tensorflow"))

    # a file may be loaded by another backend, with a choice of its own
    assert network.get_compile_config()["jit_compile"] == "auto"
    network.save(tmp_path / "network.keras")
    monkeypatch.setattr(devices, "xla_is_slower", lambda: False)  # another machine
    loaded = keras.models.load_model(tmp_path / "network.keras")
    assert loaded.jit_compile == keras_choice


@pytest.mark.parametrize("choice", [True, False])
def test_a_choice_is_kept(choice, tmp_path):
    network = kp.create_model("digits_resnet8_preact")
    network.compile("sgd", LOSS, jit_compile=choice)
    network.save(tmp_path / "network.keras")
    for each in (network, keras.models.load_model(tmp_path / "network.keras")):
        assert each.jit_compile == choice
