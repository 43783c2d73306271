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
from training.benchmark import __main__ as benchmark

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()
other_backends = pytest.mark.skipif(BACKEND == "tensorflow", reason="is about the other backends")

#: Measures everything in one process, writes what it has measured, and does what the benchmark's
#: command does.
EVERYTHING = f"""
import importlib, json, sys
from pathlib import Path
from training import backends
from training.benchmark import __main__ as benchmark, child
from training.benchmark.candidates import Candidate

for package in {TENSORFLOW!r}:
    try:
        __import__(package)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{{package}} is installed")
candidate = Candidate({BACKEND!r}, "dense_resnet6", {{"depth": 4}})
measured = {{}}
for name, row in benchmark.COMMANDS.items():
    if row.run == "comparison":
        module, _, kind = row.options.partition(":")
        question = getattr(importlib.import_module(f"training.benchmark.{{module}}"), kind)
        settings = {{"interval": 2}} if name == "health" else {{}}
        measured[name] = child.measure(question(batch=2, steps=2, warmup=1, **settings), candidate)
found = [measured, backends.device(), backends.jit_compile("auto")]
Path("measured.json").write_text(json.dumps(found))
benchmark.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a process without TensorFlow has left what it measured, with a network of
    one unit.
    """
    folder = tmp_path_factory.mktemp("measured")
    options = words(
        f"--models dense_resnet6:depth=4 --backends {BACKEND} --batch 2 --steps 1 --warmup 1",
        "--rounds 1 --output step.json",
    )
    done = run_without(TENSORFLOW, "-c", EVERYTHING, "step", *options, cwd=folder, backend=BACKEND)
    assert done.returncode == 0, done.stderr
    return folder


@other_backends
def test_benchmark(folder):
    """A process for each candidate, of the benchmark's own."""
    described = json.loads((folder / "step.json").read_text())
    [outcome] = described["outcomes"]
    assert outcome["problem"] is None
    assert outcome["result"]["figures"]["step_seconds"] > 0
    assert [row["device"] for row in described["candidates"].values()] == [backends.device()]


@other_backends
def test_every_measurement(folder):
    measured, device, jit_compile = json.loads((folder / "measured.json").read_text())
    networks = {name for name, row in benchmark.COMMANDS.items() if row.run == "comparison"}
    assert measured.keys() == networks
    assert {result["device"] for result in measured.values()} == {device} == {backends.device()}
    assert all(result["figures"] for result in measured.values())
    assert jit_compile == "auto"


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
