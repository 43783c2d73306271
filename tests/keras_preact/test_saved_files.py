"""Files of models that earlier versions saved: they load, with the same weights and
outputs. `saved/recorded.json` holds what the version that saved them computed.
"""

import functools
import json
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

FOLDER = Path(__file__).parent / "saved"
RECORDED = json.loads((FOLDER / "recorded.json").read_text())

pytestmark = pytest.mark.backend


@functools.cache
def loaded(name) -> keras.Model:
    return keras.saving.load_model(FOLDER / f"{name}.keras")


def inputs_of(model) -> np.ndarray:
    shape = (2, *model.input_shape[1:])
    return np.cos(np.arange(np.prod(shape), dtype="float32")).reshape(shape)


@pytest.mark.parametrize("name", RECORDED)
def test_outputs(name):
    model = loaded(name)
    output = harness.numpy(model(inputs_of(model)))
    tolerance = 0.02 if name == "precision" else 1e-4
    np.testing.assert_allclose(output, RECORDED[name]["output"], tolerance, tolerance)


@pytest.mark.parametrize("name", RECORDED)
def test_paths_of_weights(name):
    """Checkpoints and converters find weights by their paths, optimizers by their order."""
    assert [weight.path for weight in loaded(name).weights] == RECORDED[name]["weights"]


@pytest.mark.parametrize("name", RECORDED)
def test_a_new_file_of_the_loaded_model(name, tmp_path):
    model = loaded(name)
    model.save(tmp_path / "copy.keras")
    copy = keras.saving.load_model(tmp_path / "copy.keras")
    assert copy.get_config() == model.get_config()
    x = inputs_of(model)
    np.testing.assert_array_equal(harness.numpy(copy(x)), harness.numpy(model(x)))


def test_all_shortcuts_of_table_1_are_in_the_files():
    config = json.dumps([loaded(name).get_config() for name in ("shortcuts", "shapes")])
    assert all(f'"{kp.SHORTCUTS[name].__name__}"' in config for name in harness.TABLE_1)


def test_the_state_of_an_optimizer():
    sizes = [
        float(np.abs(harness.numpy(variable)).sum())
        for variable in loaded("network").optimizer.variables
    ]
    np.testing.assert_allclose(sizes, RECORDED["network"]["momenta"], 1e-5)


def test_the_seed_of_a_shortcut():
    """It sets the masks in training."""
    unit = loaded("shortcuts").get_layer("dropout")
    copy = kp.ResidualUnit(2, shortcut=kp.shortcuts.Dropout(0.25, seed=3))
    x = np.ones((2, 4, 4, 2), "float32")
    copy(x)
    copy.set_weights(unit.get_weights())
    masked = [harness.numpy(each.trace(x, training=True).shortcut) for each in (unit, copy)]
    np.testing.assert_array_equal(*masked)


def test_a_frozen_unit():
    assert not loaded("shapes").get_layer("projection").trainable_weights
