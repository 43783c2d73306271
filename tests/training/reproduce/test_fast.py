"""`keras-preact reproduce fast`: runs of one recipe with their measurements, and the
table of them.
"""

import json

import pytest

from training.cli import UserError
from training.reproduce import fast
from training.reproduce.report import report


def record(seed, accuracy, dtype="float32", seconds=600.0):
    views = {
        name: {"accuracy": accuracy + more, "loss": 0.3, "calibration_error": 0.02}
        for name, more in (("one", 0.0), ("flip_shift", 0.01))
    }
    return {
        "format": 1,
        "seed": seed,
        "config": {"seed": seed, "model": {"dtype": dtype}, "schedule": {"length": 8}},
        "device": {"name": "CPU", "cpu": "CPU of a test", "backend": "tensorflow"},
        "seconds": seconds,
        "images_per_second": 100.0 + seed,
        "curves": {"epoch": [0.0, 1.0], "accuracy": [0.5, accuracy], "loss": [1.5, 0.3]},
        "views": views,
    }


def test_table_by_hand(tmp_path):
    found = [record(seed, accuracy) for seed, accuracy in enumerate((0.93, 0.94, 0.935))]
    (tmp_path / fast.RECIPE).mkdir()
    for each in (*found, record(7, 0.91, "mixed_bfloat16", seconds=61.0)):
        path = tmp_path / fast.RECIPE / f"seed-{each['seed']}.json"
        path.write_text(json.dumps(each))
    lines = fast.table(fast.read(tmp_path)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    cpu = "CPU of a test (tensorflow)"
    float32 = ["3", "10 min 0 s", "101", "93.50 % +- 0.50", "94.50 % +- 0.50", "2.00 % +- 0.00"]
    bfloat16 = ["1", "1 min 1 s", "107", "91.00 %", "92.00 %", "2.00 %"]
    assert cells[2:] == [[cpu, "float32", *float32], [cpu, "mixed_bfloat16", *bfloat16]]
    report(tmp_path)
    assert lines[2] in (tmp_path / "README.md").read_text()
    for text, message in ((json.dumps(each | {"format": 99}), "a format"), ("{", "holds no run")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            fast.read(tmp_path)
