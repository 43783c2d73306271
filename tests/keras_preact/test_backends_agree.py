"""One set of weights, every installed backend: the same output and the same gradients."""

import importlib.util
import itertools
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.keras_preact import forward_and_gradients, harness

pytestmark = pytest.mark.backend

INSTALLED = [name for name in ("tensorflow", "jax", "torch") if importlib.util.find_spec(name)]


@pytest.mark.soak
@pytest.mark.skipif(
    keras.backend.backend() != INSTALLED[0], reason=f"every pair is compared on {INSTALLED[0]}"
)
def test_backends_agree(tmp_path, pytestconfig):
    here, *others = INSTALLED
    if not others:
        pytest.skip(f"no backend installed beside {here}")
    model = forward_and_gradients.network()
    harness.randomize(model)
    np.savez(tmp_path / "weights.npz", **harness.weights(model))
    runs = {
        name: subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.keras_preact.forward_and_gradients",
                "weights.npz",
                f"{name}.npz",
            ],
            cwd=tmp_path,
            env=os.environ | {"KERAS_BACKEND": name, "PYTHONPATH": str(pytestconfig.rootpath)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in others
    }
    found = {here: forward_and_gradients.results(model)}
    for name, run in runs.items():
        output, _ = run.communicate()
        assert run.returncode == 0, output
        found[name] = dict(np.load(tmp_path / f"{name}.npz"))
    for one, other in itertools.combinations(found, 2):
        assert set(found[one]) == set(found[other])
        for key, value in found[one].items():
            atol = 1e-4 * np.abs(value).max()
            np.testing.assert_allclose(
                found[other][key], value, 1e-4, atol, err_msg=f"{one}, {other}: {key}"
            )
