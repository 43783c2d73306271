"""What a step takes, measured in real processes; no figure is held to anything but its
meaning.
"""

import json

import keras
import pytest

from tests.training import commands
from training.reproduce import __main__ as main

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="nothing of it depends on the backend"
)


@pytest.mark.slow
def test_a_network_in_two_processes(tmp_path):
    options = (
        "--networks",
        "resnet20-original",
        "--units",
        "single",
        "--processes",
        2,
        "--executions",
        1,
        "--together",
        1,
    )
    command = ("-m", "training.reproduce", "speed", *options, "--output", tmp_path / "speed.json")
    status, out, err = commands.finish(commands.start(*command, cwd=tmp_path))
    assert status == 0, err
    (found,) = json.loads((tmp_path / "speed.json").read_text())["measured"]
    assert (found["network"], found["units"], found["processes"]) == (
        "resnet20-original",
        "single",
        2,
    )
    assert (found["batch_size"], found["together"], found["dtype"]) == (128, 1, "float32")
    assert found["compile_seconds"] >= 0
    assert found["images_per_second"] > 0
    assert found["step_milliseconds"] > 0
    assert "resnet20-original" in out


def test_what_takes_too_long_is_said(tmp_path, capsys):
    """The command in this process, its worker in another one."""
    options = (
        "--networks",
        "resnet20-original",
        "--units",
        "stacked",
        "--limit",
        0.01,
        "--output",
        tmp_path / "speed.json",
    )
    main.main(["speed", *map(str, options)])
    (found,) = json.loads((tmp_path / "speed.json").read_text())["measured"]
    assert found["error"] == "took too long"
    assert "took too long" in capsys.readouterr().out
