"""What is decided by backend: who gets the accelerator, whether a step is compiled."""

import keras
import pytest

from training import backends


@pytest.mark.parametrize(
    ("backend", "hidden"), [("jax", [([], "GPU")]), ("torch", [([], "GPU")]), ("tensorflow", [])]
)
def test_tensorflow_leaves_the_accelerator_to_others(backend, hidden, monkeypatch):
    import tensorflow as tf

    told = []
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *arguments: told.append(arguments))
    backends.keep_accelerator_for_backend(backend)
    assert told == hidden


@pytest.mark.backend
@pytest.mark.parametrize(("choice", "expected"), [("on", True), ("off", False), ("auto", None)])
def test_compilation(choice, expected, monkeypatch):
    import tensorflow as tf

    for devices in ([], ["GPU:0"]):
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda _, devices=devices: devices)
        automatic = False if keras.backend.backend() == "tensorflow" and not devices else "auto"
        assert backends.jit_compile(choice) == (automatic if expected is None else expected)
