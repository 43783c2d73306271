"""The tutorial, followed to its last line: its Python and each of its commands, in a shell
as a reader types them, on images that are made from its own code.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import command_lines
from tests.keras_preact.serving.server_process import run_server

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
#: The recipe chooses this precision on CPUs that are fast in it. Two epochs are enough here.
TRAIN = "--precision mixed_bfloat16 --epochs 2"
PATIENCE = 600


def in_shell(line: str, folder: Path) -> str:
    """Return what a command prints, stderr included; it must succeed."""
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "KERAS_BACKEND": "tensorflow",
    }
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}"
    assert "Traceback" not in done.stdout
    return done.stdout


@pytest.mark.soak
@pytest.mark.process
def test_every_command_works_in_its_order(tmp_path, monkeypatch):
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    with monkeypatch.context() as there:
        there.chdir(tmp_path)
        exec(compile(code, "tutorial", "exec"), {})
    *before, serve, resume, analyze = command_lines.commands(PAGE)
    rehearse, train, *_ = before
    printed = {}
    for line in before:
        is_train = line in (rehearse, train)
        printed[line] = in_shell(f"{line} {TRAIN}" if is_train else line, tmp_path)

    # a row of the page each
    assert "1,293 to train, 144 held out, 360 to test; 10 classes" in printed[rehearse]
    assert "Accuracy: " in printed[train]
    measured = json.loads((tmp_path / "runs/photos/metrics.json").read_text())
    assert measured["images"] == 360
    assert measured["accuracy"] > 0.2  # chance is 0.1
    assert re.findall(r"^  (\d) +\d+\.\d\d %$", printed[before[-2]], re.M)
    for table in ("predictions.csv", "runs/photos/predictions.csv"):
        assert len((tmp_path / table).read_text().splitlines()) == 361

    assert serve == "keras-preact serve saved_models"
    [curl] = re.findall(r"^    (curl .*)$", PAGE, re.M)
    with run_server(tmp_path / "saved_models", tmp_path / "log") as server:
        answer = in_shell(curl.replace(":8501", f":{server.port}"), tmp_path)
    [scores] = json.loads(answer.splitlines()[-1])["results"]
    assert len(scores) == 5

    in_shell(resume, tmp_path)
    in_shell(analyze, tmp_path)
    numbers = json.loads((tmp_path / "runs/photos/analysis/analysis.json").read_text())
    left_out = [name for name, part in numbers.items() if "left_out" in part]
    assert not left_out
    assert numbers["audit"]["findings"]
