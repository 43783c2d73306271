"""A run of a row is an ordinary run; its result says what the run directory says."""

import dataclasses

import keras
import numpy as np
import pytest

from training import histories, runs
from training.cli import UserError
from training.config import Config, Data, Model, Optimizer, Schedule
from training.data import load
from training.reproduce import results, rows, run

pytestmark = pytest.mark.backend

BACKEND = keras.backend.backend()


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
    trials = {
        name: rows.Trial(f"digits/{name}", "digits", name, model, measurements=3)
        for name in recipes
    }
    monkeypatch.setattr(rows, "RECIPES", recipes)
    monkeypatch.setattr(rows, "TRIALS", {trial.name: trial for trial in trials.values()})

    def train(name: str, *seeds: int, **options):
        folders = {"results": str(tmp_path / "results"), "work": str(tmp_path / "runs")}
        run.work(run.Job(f"digits/{name}", seeds, **folders, **options))
        return results.read(tmp_path / "results")

    return train


def test_the_result_is_that_of_the_run(job, tmp_path, capsys):
    [record] = job("tiny", 3, processes=2)
    folder = tmp_path / "runs/digits/tiny/seed-3"
    history = histories.read(folder / "history.csv")
    assert record.curves["iteration"] == [4, 8, 12]
    np.testing.assert_allclose(record.curves["train_loss"], history["loss"], rtol=1e-6)
    errors = 100 * (1 - history["val_accuracy"])
    np.testing.assert_allclose(record.curves["test_error"], errors, rtol=1e-6)
    np.testing.assert_allclose(record.curves["learning_rate"], [0.1, 0.01, 0.01], rtol=1e-6)
    assert record.final == {name: record.curves[name][-1] for name in results.MEASURED}
    assert (record.seed, record.cost["together"], record.diverged_at) == (3, 2, None)
    assert record.data == {
        **{"name": "digits", "train": 1437, "test": 360},
        "hash": load(Data("digits")).hash,
    }
    assert record.code == runs.code()
    assert len(record.first_losses) == 12
    assert np.mean(record.first_losses[:4]) == pytest.approx(
        record.curves["train_loss"][0], rel=1e-5
    )
    assert not (folder / "checkpoints/best.keras").exists()
    said = capsys.readouterr().out
    assert f"digits/tiny, seed 3: test error {record.error:.2f} %. Written: " in said
    assert "Epoch" not in said
    assert "Epoch 3/3" in folder.with_suffix(".log").read_text()

    # a result that is lost is written again, and a second seed must be of the same kind
    results.path(tmp_path / "results", record.trial, 3).unlink()
    assert job("tiny", 3, processes=2) == [record]
    with pytest.raises(UserError, match=r"Seeds 3 and 4 differ in --model\.dtype"):
        job("tiny", 4, dtype="mixed_bfloat16")
    assert not (tmp_path / "runs/digits/tiny/seed-4").exists()


def test_a_run_that_diverges(job):
    [record] = job("diverging", 0)
    assert record.diverged_at in (2, 3, 4, 5)
    assert record.error is None
    assert set(record.final.values()) == {None}
    assert 0 < len(record.first_losses) < record.diverged_at + 1


@pytest.mark.parametrize(("dataset", "name"), [("digits", "digits"), ("cifar100", "fake")])
def test_a_smoke_run(dataset, name):
    trial = dataclasses.replace(rows.TABLES["table1"].rows[0].trial, dataset=dataset)
    config = trial.config(0, smoke=True, together=100, on_device=True)
    assert (config.data.name, config.data.on_device) == (name, name == "digits")
    assert (config.schedule.length, config.steps_per_execution, config.batch_size) == (8, 8, 8)


def test_many_steps_per_execution():
    """As many as divide the run, and an epoch of about a 64th of it."""
    config = rows.TABLES["table1"].rows[0].trial.config(0, together=100, on_device=True)
    assert (config.steps_per_execution, config.steps_per_epoch) == (100, 1000)
    config = rows.TABLES["table4"].rows[0].trial.config(0, together=100)
    assert 156_200 % config.steps_per_execution == 0
    assert config.steps_per_epoch % config.steps_per_execution == 0
    assert config.steps_per_epoch == pytest.approx(156_200 / 64, rel=0.05)
