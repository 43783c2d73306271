"""A run of a row is an ordinary run, and its result agrees with the run directory."""

import dataclasses
import json

import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness
from tests.training.calls import run_evaluate
from training.config import Config, Data, Model, Optimizer, Schedule
from training.data import load
from training.directory import histories
from training.errors import UserError
from training.reproduce import results, rows, run, trials


def recipe(rate: float = 0.1) -> Config:
    return Config(
        data=Data("digits"),
        optimizer=Optimizer(learning_rate=rate),
        schedule=Schedule("steps", drops=(6,), length=12, unit="iterations"),
        batch_size=16,
    )


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a function that trains a tiny trial, measured three times, and returns its
    records.
    """
    recipes = {"tiny": recipe, "diverging": lambda: recipe(1e30)}
    model = Model("digits_resnet8_preact", arrangement="full_preactivation")
    monkeypatch.setattr(trials, "RECIPES", recipes)
    for name in recipes:
        trial = trials.Trial(f"digits/{name}", name, model, measurements=3)
        monkeypatch.setitem(rows.TRIALS, trial.name, trial)

    def train(name: str, seed: int, **options):
        folders = {"output": tmp_path / "results", "work": tmp_path / "runs"}
        run.train(f"digits/{name}", seed, run.Options(**folders, **options))
        return results.read(tmp_path / "results")

    return train


def test_the_result_is_that_of_the_run(job, tmp_path):
    [record] = job("tiny", 3)
    folder = tmp_path / "runs/digits/tiny/seed-3"
    history = histories.read(folder / "history.csv")
    assert record.curves["iteration"] == [4, 8, 12]
    np.testing.assert_allclose(record.curves["train_loss"], history["loss"], rtol=1e-6)
    errors = 100 * (1 - history["val_accuracy"])
    np.testing.assert_allclose(record.curves["test_error"], errors, rtol=1e-6)
    np.testing.assert_allclose(record.curves["learning_rate"], [0.1, 0.01, 0.01], rtol=1e-6)
    assert record.final == {name: record.curves[name][-1] for name in results.MEASURED}
    assert (record.seed, record.views, record.diverged_at) == (3, {}, None)
    digits = {"name": "digits", "train": 1437, "test": 360, "hash": load(Data("digits")).hash}
    assert record.data == digits
    assert str(tmp_path) not in str(record)
    assert len(record.first_losses) == 12
    first = record.curves["train_loss"][0]
    assert np.mean(record.first_losses[:4]) == pytest.approx(first, rel=1e-5)

    # a result that is lost is written again, and a second seed must be of the same kind
    results.path(tmp_path / "results", record.trial, 3).unlink()
    assert job("tiny", 3) == [record]
    with pytest.raises(UserError, match=r"Seeds 3 and 4 differ in --model\.precision"):
        job("tiny", 4, precision="mixed_bfloat16")
    assert not (tmp_path / "runs/digits/tiny/seed-4").exists()


def test_a_run_that_is_measured_at_its_end(job, tmp_path, monkeypatch):
    """It is measured with the views of the trial; the test images are not used before."""
    trial = dataclasses.replace(
        rows.TRIALS["digits/tiny"], measurements=0, views=("one", "flip"), signals=True
    )
    monkeypatch.setitem(rows.TRIALS, trial.name, trial)
    [record] = job("tiny", 0)
    folder = tmp_path / "runs/digits/tiny/seed-0"
    assert "val_loss" not in histories.read(folder / "history.csv")
    run_evaluate(folder, "--views", "flip", "--output", tmp_path / "again")
    metrics = json.loads((tmp_path / "again/metrics-flip.json").read_text())
    assert record.views["flip"] == {
        name: pytest.approx(metrics[name], rel=1e-6)
        for name in ("images", "accuracy", "loss", "calibration_error")
    }
    one = record.views["one"]
    assert record.error == pytest.approx(100 * (1 - one["accuracy"]), rel=1e-6)
    assert record.final["test_loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert record.curves["test_error"] == [record.error]
    assert record.curves["iteration"] == [12]
    assert (record.signals["forward"], record.signals["backward"]) == (1, 1)
    assert -1 < record.signals["cosine"] < 1


@pytest.mark.parametrize(
    ("shortcut", "gains"),
    [
        ("constant_scaling", [0.5**3] * 2),  # three units in the first stage
        ("conv1x1", [None, None]),
        ("none", [0.0, 0.0]),
    ],
)
def test_signals_of_networks(shortcut, gains):
    network = kp.models.resnet_cifar(
        20, width_factor=0.25, input_shape=(8, 8, 1), shortcut=shortcut
    )
    images = harness.images(run.SAMPLE, 8, 8, 1)
    signals = run.signals_of(network, images)
    assert [signals["forward"], signals["backward"]] == gains
    assert (signals["cosine"] is None) == (shortcut == "none")


def test_a_run_that_diverges(job):
    [record] = job("diverging", 0)
    assert record.diverged_at is not None
    assert record.error is None
    assert set(record.final.values()) == {None}
    assert 0 < len(record.first_losses) < record.diverged_at + 1
