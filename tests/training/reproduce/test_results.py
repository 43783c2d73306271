"""Results are files that hold all measurements of a run; other files are refused."""

import dataclasses
import json
import math

import pytest

from tests.training.reproduce.records import record
from training.config import Config, from_json
from training.errors import UserError
from training.reproduce import results

TRIAL, OTHER = "cifar10/resnet110-original", "cifar10/resnet110-full_preactivation"


def parsed(text: str):
    """Parse strict JSON, which has no NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_run_comes_back_as_it_was_written(tmp_path):
    run = record(TRIAL, 3, 6.61, errors=(90.0, 12.5, 6.61))
    path = results.write(tmp_path, run)
    assert path == tmp_path / "cifar10" / "resnet110-original" / "seed-3.json"
    assert results.read(tmp_path) == [run]
    assert parsed(path.read_text()) == dataclasses.asdict(run)
    assert run.error == 6.61


def test_options_keep_all_digits(tmp_path):
    """Else the next seed of a recipe with a rate of 1/3 would be another recipe."""
    config = json.loads(json.dumps(record(TRIAL, 0, 6.5).config))
    config["optimizer"]["learning_rate"] = 1 / 3
    run = dataclasses.replace(record(TRIAL, 0, 20 / 3), config=config)
    (read,) = results.read(results.write(tmp_path, run).parents[2])
    assert read.error == 6.666667
    results.check_same(read, from_json(Config, config), run.data)


def test_numbers_that_are_not_finite_are_null(tmp_path):
    run = record(TRIAL, 0, None, errors=(math.inf, math.nan))
    found = parsed(results.write(tmp_path, run).read_text())
    assert found["curves"]["test_error"] == [None, None]
    (read,) = results.read(tmp_path)
    assert (read.error, read.curves["test_error"], read.diverged_at) == (None, [None, None], 20)


def test_runs_are_read_trial_by_trial(tmp_path):
    for trial, seed in ((TRIAL, 2), (OTHER, 10), (TRIAL, 0), (OTHER, 9)):
        results.write(tmp_path, record(trial, seed, 6.5))
    found = results.groups(results.read(tmp_path))
    seeds = {name: [each.seed for each in runs] for name, runs in found.items()}
    assert seeds == {OTHER: [9, 10], TRIAL: [0, 2]}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((each, "is not the result of a run") for each in (b"{", b"[]", b"\xff", b'{"trial": 1}')),
        (b'{"format": 3}', "this version reads 2"),
    ],
)
def test_a_damaged_file(damage, message, tmp_path):
    path = results.write(tmp_path, record(TRIAL, 0, 6.5))
    path.write_bytes(damage)
    with pytest.raises(UserError, match=message):
        results.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"name": "cifar10", "hash": "other"}}, "the images"),
        ({"config": record(TRIAL, 1, 6.5, dtype="mixed_bfloat16").config}, "--model.precision"),
    ],
)
def test_the_runs_of_a_row_are_equal(change, message):
    runs = [record(TRIAL, 0, 6.5), record(OTHER, 0, 6.5)]
    runs.append(dataclasses.replace(record(TRIAL, 1, 6.5), **change))
    with pytest.raises(UserError, match=rf"^{TRIAL}: the runs of a row .* differ in {message}\."):
        results.groups(runs)
    results.groups(runs[1:])  # rows may differ from each other
