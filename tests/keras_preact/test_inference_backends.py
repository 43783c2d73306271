"""Keras' backends that only predict, NumPy and OpenVINO, return what the others return."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact.harness import images

SMALL = {"input_shape": (8, 8, 3), "width_factor": 0.25}
NETWORKS = {
    "separate": lambda: kp.models.resnet_cifar(
        8, **SMALL, shortcut="exclusive_gating", squeeze_excitation=2, mean=1.0, std=2.0
    ),
    "stacked": lambda: kp.models.resnet_cifar(14, **SMALL, stacked=True, dropout=0.1),
    "scanned": lambda: kp.models.resnet_cifar(14, **SMALL, stacked=True, execution="scan"),
    "grouped": lambda: kp.models.resnet_imagenet(
        (1, 1), block=kp.blocks.Bottleneck(groups=2), downsampling="blur", **SMALL
    ),
    "transformer": lambda: kp.models.transformer(2, width=16, input_shape=(8, 8, 3), mlp="swiglu"),
}
CHILD = """
import json, sys, numpy as np, keras, keras_preact
assert keras.backend.backend() == sys.argv[2]
found = {}
for name in sys.argv[3:]:
    x, y = np.load(f"{sys.argv[1]}/{name}.npz").values()
    try:
        model = keras.saving.load_model(f"{sys.argv[1]}/{name}.keras", compile=False)
        found[name] = float(np.abs(model.predict(x, verbose=0) - y).max() / np.abs(y).max())
    except Exception as error:
        found[name] = repr(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("networks")
    for name, build in NETWORKS.items():
        model = build()
        x = images(5, *model.input_shape[1:])
        model.save(folder / f"{name}.keras")
        np.savez(folder / f"{name}.npz", x=x, y=model.predict(x, batch_size=5, verbose=0))
    return folder


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("backend", ["numpy", "openvino"])
def test_saved_networks_predict(saved, backend):
    if backend != "numpy":
        pytest.importorskip(backend)
    root = str(Path(__file__).parents[2])
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(saved), backend, *NETWORKS],
        env=os.environ | {"KERAS_BACKEND": backend, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert "There is no scan on" in found.pop("scanned")
    # OpenVINO computes in bfloat16 on CPUs that are fast in it
    allowed = 0.03 if backend == "openvino" else 1e-4
    for name, error in found.items():
        assert isinstance(error, float), (name, error)
        assert error <= allowed, name
