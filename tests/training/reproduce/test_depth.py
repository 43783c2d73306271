"""Profiles before training: their numbers against figures by hand, the files, the command
and its errors.
"""

import json
import os

import numpy as np

import keras_preact as kp
from tests import layout
from tests.training.calls import error_of, words
from training import cli
from training.reproduce import depth, profiles


def run(*arguments):
    cli.main("reproduce depth", depth.depth, words(*map(str, arguments)))


def signals(x_mean, x_std, gradient_norm, stages):
    """Return a Propagation. `stages` has the number of units of each stage."""
    units = tuple(f"stage{s}_unit{u}" for s, n in enumerate(stages, 1) for u in range(1, n + 1))
    names = "x_norm residual_norm residual_mean residual_std shortcut_norm cut dead "
    names += "residual_cosine residual_parallel output_cosine"
    return kp.analysis.Propagation(
        units=units,
        **dict.fromkeys(words(names), np.zeros(len(units))),
        x_mean=np.array(x_mean),
        x_std=np.array(x_std),
        gradient_norm=np.array(gradient_norm),
        weight_gradients={},
        loss=2.0,
    )


def test_long_profile_is_thinned_but_for_its_ends():
    total = 3 * 1111
    steps = np.arange(total + 1.0)
    record = profiles.profile(signals(0 * steps + 3, 4 + steps, np.exp(-steps / total), [1111] * 3))
    kept = record["profile"]["unit"]
    assert {0, 1, 3333} <= set(kept)
    assert kept == sorted(set(kept))
    assert len(kept) <= profiles.POINTS + 3
    assert max(np.diff(kept)) <= total / profiles.POINTS + 1
    expected = np.hypot(3, 4 + np.array(kept))
    np.testing.assert_allclose(record["profile"]["activation_rms"], expected, rtol=1e-5)
    np.testing.assert_allclose(record["gradient_ratio"], np.exp(1 - 1 / total), rtol=1e-5)


def test_overflows_are_null():
    record = profiles.profile(signals([0, 0, 0], [1, 2, np.nan], [np.inf, np.inf, 1], [2]))
    assert record["growth"] is None
    assert record["gradient_ratio"] is None
    assert record["profile"]["activation_rms"] == [1, 2, None]
    assert record["profile"]["gradient_norm"] == [None, None, 1]
    json.dumps(record, allow_nan=False)


def test_depths_are_measured_once_written_and_shown(tmp_path, capsys, monkeypatch):
    """The test measures in this process; the command starts child processes."""
    monkeypatch.setattr(depth, "measured_apart", lambda settings, _: profiles.measure(settings))
    options = "--layers 11 20 29 --networks original preact_scaled plain --batch 4 --output"
    run("--smoke", options, tmp_path)
    folder = tmp_path / "depth"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    names = [f"{name}-{n}.json" for name in ("original", "preact_scaled") for n in (11, 20)]
    assert sorted(before) == names
    record = json.loads(before["original-20.json"])
    assert record["settings"] == profiles.settings_of("original", 20, batch=4)
    run("--networks original --layers 11 20 --batch 4 --output", tmp_path)
    assert "original-11: kept" in capsys.readouterr().out
    other = "--networks original --layers 11 --batch 4 --seed 1 --output"
    assert "seed 0, not 1" in error_of(capsys, run, other, tmp_path)
    run("--networks plain --layers 1001 --output", tmp_path)
    assert "overflow float32" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    (folder / ".original-20-x1.json").write_text("{")  # a killed process leaves such a file
    records = depth.read(tmp_path)
    assert [record["settings"]["layers"] for record in records] == [11, 20] * 2
    assert "on 4 images of digits, seed 0." in depth.about(records)
    row = depth.table(records).splitlines()[-1]
    assert f"{records[3]['growth']:.3g}" in row
    assert f"{records[3]['gradient_ratio']:.3g}" in row
    layout.check(depth.figure(records))


def test_mistakes(tmp_path, capsys):
    for options, part in (("--layers 100", "are 92 and 101"), ("--batch 1", "at least 2")):
        assert part in error_of(capsys, run, options, "--output", tmp_path)
    assert not os.listdir(tmp_path)
