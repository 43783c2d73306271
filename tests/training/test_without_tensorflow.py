"""The benchmark where TensorFlow, its data sets, scikit-learn and Matplotlib are not
installed, in real processes.
"""

import json
import sys

import keras
import pytest

from tests.training.absent import TENSORFLOW, run_without
from tests.training.commands import words
from training import backends

BACKEND = keras.backend.backend()


@pytest.mark.backend
@pytest.mark.soak
@pytest.mark.skipif(BACKEND == "tensorflow", reason="is about the other backends")
def test_benchmark(tmp_path):
    """The benchmark, with a process for each candidate."""
    options = words(
        f"-m training benchmark step --models dense_resnet6:depth=4 --backends {BACKEND}",
        "--batch 2 --steps 1 --warmup 1 --rounds 1 --output step.json",
    )
    done = run_without(TENSORFLOW, *options, cwd=tmp_path, backend=BACKEND)
    assert done.returncode == 0, done.stderr
    described = json.loads((tmp_path / "step.json").read_text())
    [outcome] = described["outcomes"]
    assert outcome["problem"] is None
    assert outcome["result"]["figures"]["step_seconds"] > 0
    assert [row["device"] for row in described["candidates"].values()] == [backends.device()]


@pytest.mark.parametrize(
    ("backend", "hidden"), [("jax", [([], "GPU")]), ("torch", [([], "GPU")]), ("tensorflow", [])]
)
def test_installed_tensorflow_leaves_the_accelerator_to_others(backend, hidden, monkeypatch):
    import tensorflow as tf

    told = []
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *arguments: told.append(arguments))
    backends.keep_accelerator_for_backend(backend)
    assert told == hidden


def test_broken_tensorflow_is_no_missing_one(monkeypatch, tmp_path):
    """What is installed and cannot be imported is told: it might have taken the memory."""
    (tmp_path / "tensorflow.py").write_text("raise ImportError('no symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    with pytest.raises(ImportError, match="no symbol"):
        backends.keep_accelerator_for_backend("jax")
