"""Fixtures that tests of exports share."""

from pathlib import Path

import keras
import pytest

from keras_preact.export import _check, _children, _graph


@pytest.fixture
def small() -> keras.Sequential:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])


@pytest.fixture
def quick(monkeypatch):
    """Neither write a graph nor convert nor check it."""

    def write(core, plan, path):
        path.mkdir()
        (path / "saved_model.pb").write_bytes(b"graph")

    def convert(arguments, *_):
        Path(arguments[4]).write_bytes(b"file")

    monkeypatch.setattr(_graph, "write", write)
    monkeypatch.setattr(_children, "run", convert)
    monkeypatch.setattr(_check, "compare", lambda *_: {})
