"""`keras-preact reproduce fast`: runs of one recipe with their measurements, and the
table of them.
"""

import json

import pytest
from PIL import Image

from tests.training.commands import TINY
from training.cli import UserError
from training.reproduce import fast
from training.reproduce.report import report


def record(seed, accuracy, dtype="float32", cpu="CPU of a test", seconds=600.0, **config):
    views = {
        name: {"accuracy": accuracy + more, "loss": 0.3, "calibration_error": 0.02}
        for name, more in (("one", 0.0), ("flip_shift", 0.01))
    }
    return {
        "format": 1,
        "seed": seed,
        "config": {"seed": seed, "model": {"dtype": dtype}, "schedule": {"length": 8}} | config,
        "code": {"commit": "c", "modified": False},
        "parameters": 1,
        "device": {"name": "CPU", "cpu": cpu, "backend": "tensorflow", "versions": {}},
        "seconds": seconds,
        "images_per_second": 100.0 + seed,
        "curves": {"epoch": [0.0, 1.0], "accuracy": [0.5, accuracy], "loss": [1.5, 0.3]},
        "views": views,
    }


def write(folder, *records):
    (folder / fast.RECIPE).mkdir(parents=True)
    for each in records:
        path = folder / fast.RECIPE / f"seed-{each['seed']}.json"
        path.write_text(json.dumps(each))


def test_table_by_hand(tmp_path):
    one = [record(seed, accuracy) for seed, accuracy in enumerate((0.93, 0.94, 0.935))]
    write(tmp_path, *one, record(7, 0.91, "mixed_bfloat16", seconds=61.0))
    lines = fast.table(fast.read(tmp_path)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][2:] == [
        *("n", "training", "images/s", "test accuracy", "with 6 views", "calibration error"),
    ]
    cpu = "CPU of a test (tensorflow)"
    float32 = ["3", "10 min 0 s", "101", "93.50 % +- 0.50", "94.50 % +- 0.50", "2.00 % +- 0.00"]
    bfloat16 = ["1", "1 min 1 s", "107", "91.00 %", "92.00 %", "2.00 %"]
    assert cells[2:] == [[cpu, "float32", *float32], [cpu, "mixed_bfloat16", *bfloat16]]
    report(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert page.index("## CIFAR-10 in minutes") < page.index("## Not measured yet")
    assert "8 epochs by the recipe `cifar10_fast`" in page
    assert lines[2] in page
    assert "![CIFAR-10 in minutes](fast.png)" in page
    with Image.open(tmp_path / "fast.png") as image:
        image.verify()


def test_files_of_something_else(tmp_path):
    write(tmp_path, record(0, 0.9) | {"format": 99})
    with pytest.raises(UserError, match="a format that this version does not know"):
        fast.read(tmp_path)
    (tmp_path / fast.RECIPE / "seed-0.json").write_text("{")
    with pytest.raises(UserError, match="holds no run of cifar10_fast"):
        fast.read(tmp_path)


@pytest.mark.soak
def test_runs_are_trained_measured_and_kept(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(fast, "RECIPE", "digits")
    options = tuple(f"{name} {value}" for name, value in zip(TINY[::2], TINY[1::2], strict=True))
    folders = {"output": tmp_path / "results", "work": tmp_path / "runs"}
    fast.fast(1, options, **folders)
    [found] = fast.read(folders["output"])
    run = folders["work"] / "digits" / "seed-0"
    for views, measured in found["views"].items():
        metrics = json.loads((run / "views" / views / "metrics.json").read_text())
        assert metrics["views"] == views
        assert measured == pytest.approx({key: metrics[key] for key in fast.KEPT}, rel=1e-6)
    assert found["config"] == json.loads((run / "config.json").read_text())["config"]
    assert found["views"]["one"]["images"] == 360
    assert found["views"]["one"]["loss"] != found["views"]["flip_shift"]["loss"]
    assert found["seconds"] > 0

    capfd.readouterr()
    fast.fast(1, options, **folders)
    assert capfd.readouterr().out.startswith("seed 0: kept, ")
    with pytest.raises(UserError, match=r"Seeds 0 and 1 differ in --optimizer.momentum"):
        fast.fast(2, (*options, "--optimizer.momentum 0.5"), **folders)
    with pytest.raises(UserError, match=r"`keras-preact train digits --wrong 1 .* status 2"):
        fast.fast(2, ("--wrong 1",), **folders)
    assert fast.read(folders["output"]) == [found]
    with pytest.raises(UserError, match="--seeds must be positive"):
        fast.fast(0)
