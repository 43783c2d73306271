"""One set of weights, all three backends: the same output and the same gradients."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.keras_preact import forward_and_gradients, harness


@pytest.mark.process
@pytest.mark.parametrize("name", ["jax", "torch"])
def test_backends_agree(name, tmp_path, pytestconfig):
    pytest.importorskip(name)
    model = forward_and_gradients.network()
    harness.randomize(model)
    np.savez(tmp_path / "weights.npz", **harness.weights(model))
    script = [sys.executable, "-m", "tests.keras_preact.forward_and_gradients"]
    environment = {
        "KERAS_BACKEND": name,
        "PYTHONPATH": str(pytestconfig.rootpath),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiling takes nearly all the time
    }
    run = subprocess.run(
        [*script, "weights.npz", "found.npz"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = np.load(tmp_path / "found.npz")
    expected = forward_and_gradients.results(model)
    assert set(found) == set(expected)
    for key, value in expected.items():
        atol = 1e-4 * np.abs(value).max()
        np.testing.assert_allclose(found[key], value, 1e-4, atol, err_msg=key)
