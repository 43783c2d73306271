"""Results are files that hold what was measured, all of it, and are refused where they
do not.
"""

import dataclasses
import json
import math

import pytest

from tests.training.reproduce.records import record
from training.cli import UserError
from training.reproduce import results
from training.reproduce.rows import TRIALS

TRIAL, OTHER = "cifar10/resnet110-original", "cifar10/resnet110-full_preactivation"


def parsed(text: str):
    """Return what strict JSON holds, which knows no NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_run_comes_back_as_it_was_written(tmp_path):
    run = record(TRIAL, 3, 6.61, errors=(90.0, 12.5, 6.61))
    path = results.write(tmp_path, run)
    assert path == tmp_path / "cifar10" / "resnet110-original" / "seed-3.json"
    assert results.read(tmp_path) == [run]
    assert parsed(path.read_text()) == dataclasses.asdict(run)
    assert run.error == 6.61
    assert [file.name for file in path.parent.iterdir()] == ["seed-3.json"]  # nothing temporary


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_null(value, tmp_path):
    run = record(TRIAL, 0, None, errors=(90.0, value))
    found = parsed(results.write(tmp_path, run).read_text())
    assert found["curves"]["test_error"] == [90.0, None]
    (read,) = results.read(tmp_path)
    assert (read.error, read.curves["test_error"], read.diverged_at) == (None, [90.0, None], 20)


def test_numbers_are_exact_enough(tmp_path):
    run = record(TRIAL, 0, 6.1, loss=0.12345678901)
    run.curves["iteration"][0] = 123_456_789  # counts are exact
    (read,) = [results.read_one(results.write(tmp_path, run))]
    assert read.final["train_loss"] == pytest.approx(0.12345678901, rel=1e-6)
    assert read.curves["iteration"] == [123_456_789]


def test_runs_are_read_trial_by_trial(tmp_path):
    for trial, seed in ((TRIAL, 2), (OTHER, 10), (TRIAL, 0), (OTHER, 9)):
        results.write(tmp_path, record(trial, seed, 6.5))
    (tmp_path / "depth").mkdir()
    (tmp_path / "depth" / "plain-20.json").write_text("{}")
    found = results.read(tmp_path)
    assert [(each.trial, each.seed) for each in found] == [
        (OTHER, 9),
        (OTHER, 10),
        (TRIAL, 0),
        (TRIAL, 2),
    ]
    assert {name: [each.seed for each in runs] for name, runs in results.groups(found).items()} == {
        OTHER: [9, 10],
        TRIAL: [0, 2],
    }
    assert results.read(tmp_path / "missing") == []


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", "{}", '{"trial": "a"}', "\udcff"])
def test_a_damaged_file(damage, tmp_path):
    path = results.write(tmp_path, record(TRIAL, 0, 6.5))
    path.write_bytes(damage.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=f"{path} is not the result of a run"):
        results.read(tmp_path)


def test_a_file_of_another_format(tmp_path):
    path = results.write(tmp_path, dataclasses.replace(record(TRIAL, 0, 6.5), format=3))
    with pytest.raises(UserError, match="has format 3; this version reads 2"):
        results.read(tmp_path)
    # which may hold what this version does not know
    path.write_text(json.dumps(json.loads(path.read_text()) | {"more": 1}))
    with pytest.raises(UserError, match="has format 3; this version reads 2"):
        results.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"name": "cifar10", "hash": "other"}}, "the images"),
        ({"config": record(TRIAL, 1, 6.5, dtype="mixed_bfloat16").config}, "--model.dtype"),
        ({"config": record(OTHER, 1, 6.5).config}, "--model.arrangement"),
    ],
)
def test_the_runs_of_a_row_are_equal(change, message):
    runs = [
        record(TRIAL, 0, 6.5),
        record(OTHER, 0, 6.5),
        dataclasses.replace(record(TRIAL, 1, 6.5), **change),
    ]
    with pytest.raises(UserError, match=rf"^{TRIAL}: the runs of a row .* differ in {message}\."):
        results.groups(runs)
    results.groups(runs[1:])  # rows may differ from each other


def test_what_may_differ_in_a_row(tmp_path):
    """Another commit, device, number of steps per execution, folder; and JSON has lists
    for tuples.
    """
    one = results.read_one(results.write(tmp_path, record(TRIAL, 0, 6.5)))
    config = TRIALS[TRIAL].config(1, together=100, on_device=True, data=tmp_path)
    results.check_same(one, config, one.data)
