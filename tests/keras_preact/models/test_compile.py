"""`compile` chooses for the device that a network is on, not for the one that wrote it."""

import contextlib

import keras
import numpy as np
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
    """PyTorch cannot compile these networks: it says so, and the file keeps the choice."""
    warned = pytest.warns(UserWarning, match="no effect on PyTorch")
    network = kp.create_model("digits_resnet8_preact")
    file = tmp_path / "network.keras"
    with warned if choice and BACKEND == "torch" else contextlib.nullcontext():
        network.compile("sgd", LOSS, jit_compile=choice)
        network.save(file)
        loaded = keras.models.load_model(file)
    for each in (network, loaded):
        assert each.jit_compile == (choice and BACKEND != "torch")
        assert each.get_compile_config()["jit_compile"] == choice
    loss = loaded.train_on_batch(np.zeros((4, 8, 8, 1), "float32"), np.zeros(4, "int32"))
    assert np.isfinite(loss)


def traced_once(model, images, **options) -> None:
    """Check how often TensorFlow traces the train step of a model."""
    traces, step = [], model.train_step

    def counted(data):
        traces.append(data)
        return step(data)

    model.train_step = counted
    model.fit(images, np.zeros(4, "int32"), batch_size=2, epochs=2, verbose=0, **options)
    assert len(traces) == 1


@pytest.mark.skipif(BACKEND != "tensorflow", reason="how often TensorFlow traces")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stacked": True},
        {"steps_per_execution": 2},
        {"jit_compile": True},
        {"dtype": "mixed_float16"},
        {"optimizer": "Muon"},
    ],
    ids=str,
)
def test_tensorflow_traces_a_step_once(options):
    """It does so twice if the trace makes the optimizer's variables."""
    of_compile = {
        key: options[key] for key in options if key in ("jit_compile", "steps_per_execution")
    }
    of_network = {key: options[key] for key in options if key in ("stacked", "dtype")}
    network = kp.create_model("digits_resnet8_preact", **of_network)
    optimizer = getattr(kp.optimizers, options.get("optimizer", "CoupledSGD"))(0.1)
    network.compile(optimizer, LOSS, **of_compile)
    traced_once(network, np.zeros((4, 8, 8, 1), "float32"))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="how often TensorFlow traces")
def test_tensorflow_traces_a_step_of_several_devices_once():
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        network = kp.create_model("digits_resnet8_preact")
        network.compile(kp.optimizers.CoupledSGD(0.1), LOSS)
    traced_once(network, np.zeros((4, 8, 8, 1), "float32"))
    places = {type(each.value) for each in (*network.variables, *network.optimizer.variables)}
    assert len(places) == 1
