"""`make demo-run`: the whole way from the data to images classified by an exported
model, as a user goes it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_demo(tmp_path):
    environment = os.environ | {"KERAS_BACKEND": keras.backend.backend()}
    arguments = (
        f"VENV={sys.prefix}",
        f"RUNS={tmp_path / 'runs'}",
        f"SAVED_MODELS={tmp_path / 'saved_models'}",
    )
    done = subprocess.run(
        ["make", "--no-print-directory", "demo-run", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    (run,) = (tmp_path / "runs").iterdir()
    described = json.loads((run / "config.json").read_text())
    assert (described["recipe"], described["versions"]["backend"]) == (
        "digits",
        keras.backend.backend(),
    )
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["images"] == 360
    assert metrics["accuracy"] >= 0.98
    assert (run / "confusion_matrix.png").stat().st_size > 1000

    exported = tmp_path / "saved_models" / "digits"
    assert (exported / "1" / "saved_model.pb").is_file()
    card = json.loads((exported / "model_card.json").read_text())
    assert card["classes"] == list("0123456789")
    assert card["version"] == 1

    # a line with the path of each image, and below it the most probable class
    classified = re.findall(
        rf"^{re.escape(str(run))}/samples/\d+_(\d)\.png\n +(\d) ", done.stdout, re.MULTILINE
    )
    assert sorted(label for label, _ in classified) == list("0123456789")
    assert sum(label == guess for label, guess in classified) >= 9

    last = done.stdout.rstrip().split("\n")[-2]
    assert last.startswith("Results: ")
    assert str(run) in last
    assert str(exported) in last
    assert not re.search(r"python -m|Health:|[Ww]arning", done.stdout + done.stderr)
