"""Decisions by backend: whether a step is compiled."""

import keras
import pytest

import keras_preact as kp
from keras_preact.backend import devices
from training import backends


@pytest.mark.backend
@pytest.mark.parametrize(("choice", "expected"), [("on", True), ("off", False), ("auto", None)])
def test_compilation(choice, expected, monkeypatch):
    network, other = kp.create_model("digits_resnet8_preact"), keras.Sequential()
    for is_slower in (False, True):
        monkeypatch.setattr(devices, "xla_is_slower", lambda is_slower=is_slower: is_slower)
        automatic = False if is_slower else "auto"
        assert backends.jit_compile(choice, network) == ("auto" if expected is None else expected)
        assert backends.jit_compile(choice, other) == (automatic if expected is None else expected)
