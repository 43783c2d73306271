"""One set of weights, every installed backend: the same output and the same gradients."""

import importlib.util
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.keras_preact import forward_and_gradients, harness


@pytest.mark.slow
def test_backends_agree(tmp_path, pytestconfig):
    here = keras.backend.backend()
    others = [name for name in ("tensorflow", "jax", "torch") if name != here and importlib.util.find_spec(name)]
    if not others:
        pytest.skip(f"no backend installed beside {here}")
    model = forward_and_gradients.network()
    harness.randomize(model)
    np.savez(tmp_path / "weights.npz", **harness.weights(model))
    runs = {
        name: subprocess.Popen(
            [sys.executable, "-m", "tests.keras_preact.forward_and_gradients", "weights.npz", f"{name}.npz"],
            cwd=tmp_path,
            env=os.environ | {"KERAS_BACKEND": name, "PYTHONPATH": str(pytestconfig.rootpath)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in others
    }
    own = forward_and_gradients.results(model)
    for name, run in runs.items():
        output, _ = run.communicate()
        assert run.returncode == 0, output
        other = np.load(tmp_path / f"{name}.npz")
        assert set(other) == set(own)
        for key, value in own.items():
            np.testing.assert_allclose(other[key], value, 1e-4, 1e-4 * np.abs(value).max(), err_msg=f"{name}: {key}")
