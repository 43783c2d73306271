"""A run that is stopped anywhere goes on as if it had never been, and every run stands
for itself.
"""

import dataclasses
import functools
import json
import math
import re
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.training import commands
from tests.training.reproduce import tiny
from training import plans
from training.cli import UserError
from training.reproduce import fingerprints, results
from training.reproduce.run import Run, unfinished

BACKEND = keras.backend.backend()


@pytest.fixture(autouse=True)
def installed():
    with tiny.installed():
        yield


@functools.cache
def compiled(number: int, together: int) -> Run:
    return tiny.make(Path(), tiny.DROPOUT, together=together)


def again(number: int, folder: Path, calls: float = math.inf, together: int = 1) -> Run:
    """Return one of two runs with dropout that are compiled once.

    Of two that take turns, neither holds what the other one has just done: what goes on
    does so from the files alone. What they did before must not count.
    """
    run = compiled(number % 2, together)
    run.settings = dataclasses.replace(
        run.settings, results=folder / "results", work=folder / "work"
    )
    run.out_of_time = tiny.Calls(calls)
    return run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run with dropout, seed 1, from beginning to end, what it
    returned, and what its training left.
    """
    folder = tmp_path_factory.mktemp("uninterrupted")
    with tiny.installed():
        run = again(0, folder)
        assert run.model is None  # nothing is left in it
        return folder, run(1), tiny.values(run)


def assert_same_run(ours: results.Record, theirs: results.Record) -> None:
    """Check all that must not depend on where a run was stopped."""
    for name in ("iteration", "learning_rate", "test_loss", "test_error"):
        assert ours.curves[name] == theirs.curves[name]
    for name in ("train_loss", "train_error"):  # means over parts of a leg
        np.testing.assert_allclose(ours.curves[name], theirs.curves[name], rtol=2e-6)
    for name, value in theirs.final.items():
        assert ours.final[name] == pytest.approx(value, rel=2e-6)
    results.check_same(ours, theirs)
    assert (ours.trial, ours.seed, ours.parameters) == (
        theirs.trial,
        theirs.seed,
        theirs.parameters,
    )


# With a call at the beginning, behind each execution and behind each leg: before the first step,
# within a leg, at the end of one (noticed by the step, which is measured then), and between two
# (noticed behind the measurement).
@pytest.mark.parametrize(
    ("together", "visits"), [(1, [(0, 0), (2, 2), (2, 4), (5, 8)]), (2, [(1, 2), (2, 4)])]
)
def test_a_run_goes_on_where_it_was_stopped(together, visits, uninterrupted, tmp_path):
    if together > 1 and BACKEND == "torch":
        pytest.skip("torch computes step by step")
    _, whole, expected = uninterrupted
    seconds = []
    for i, (calls, step) in enumerate(visits):
        assert again(i, tmp_path, calls, together)(1) is None
        assert unfinished(tmp_path / "work") == {(tiny.DROPOUT.name, 1): (step, tiny.STEPS)}
        (saved,) = (tmp_path / "work" / tiny.DROPOUT.name / "seed-1").iterdir()
        with np.load(saved) as file:
            seconds.append(json.loads(file["description"].tobytes())["progress"]["seconds"])
    assert seconds == sorted(seconds)
    run = again(len(visits), tmp_path, together=together)
    record, values = run(1), tiny.values(run)
    assert record.cost["visits"] == len(visits) + 1
    assert record.cost["seconds"] > seconds[-1]
    assert record.curves["seconds"] == sorted(record.curves["seconds"])
    assert record.cost["images_per_second"] > 0
    if together > 1:  # what is compiled otherwise may differ in the last bits
        other = again(len(visits) + 1, tmp_path / "other", together=together)
        np.testing.assert_allclose(
            whole.curves["train_loss"], record.curves["train_loss"], rtol=1e-3
        )
        whole, expected = other(1), tiny.values(other)
    assert_same_run(record, whole)
    tiny.assert_identical(values, expected)
    assert unfinished(tmp_path / "work") == {}
    assert not any((tmp_path / "work" / tiny.DROPOUT.name).iterdir())
    # what was returned is what was written
    (read,) = results.read(tmp_path / "results")
    np.testing.assert_allclose(read.curves["train_loss"], record.curves["train_loss"], rtol=1e-6)


def test_the_curve(uninterrupted):
    folder, record, _ = uninterrupted
    curves = record.curves
    assert curves["iteration"] == [4, 8, 12]
    # the rates of the last step of every leg: 0.01 for 3 iterations, 0.1 up to 6, 0.01 up to 10,
    # then 0.001
    np.testing.assert_allclose(curves["learning_rate"], [0.1, 0.01, 0.001], rtol=1e-6)
    assert {len(values) for values in curves.values()} == {3}
    assert record.final == {name: curves[name][-1] for name in record.final}
    assert record.cost["visits"] == 1
    assert record.diverged_at is None
    for error in curves["test_error"]:  # of eight images
        assert error / 12.5 == pytest.approx(round(error / 12.5))
    for error in curves["train_error"]:  # of four steps of four
        assert error / 6.25 == pytest.approx(round(error / 6.25), abs=1e-4)
    assert record.config["schedule"]["length"] == tiny.STEPS
    assert record.data["fingerprint"] == tiny.images().fingerprint
    (read,) = results.read(folder / "results")
    assert (read.trial, read.seed, read.parameters) == (tiny.DROPOUT.name, 1, record.parameters)


# A process that SIGTERM reaches twice: when its clock is looked at for the third time, in a step
# within a leg; and, once more from the beginning, in the last measurement: the next seed must not
# be begun.
STOPPED = """
import dataclasses, os, pathlib, signal, sys
from tests.training.reproduce import tiny
from training import cli

tiny.install()
folder = pathlib.Path(sys.argv[1])
run = tiny.make(folder / "stepped", tiny.DROPOUT)
late = tiny.Calls(2)
run.out_of_time = lambda: late() and os.kill(os.getpid(), signal.SIGTERM)

def both_seeds():
    for seed in (1, 2):
        cli.guard(lambda: run(seed))

try:
    both_seeds()
except SystemExit as ended:
    print("stepped:", ended.code)

places = {name: folder / "measured" / name for name in ("results", "work")}
run.settings, run.out_of_time = dataclasses.replace(run.settings, **places), lambda: False
measure, calls = run.measure, iter(range(9))

def measure_and_signal(count=None):
    if next(calls) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return measure(count)

run.measure = measure_and_signal
both_seeds()
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a process that was stopped, what it wrote, and its status."""
    folder = tmp_path_factory.mktemp("stopped")
    status, out, err = commands.finish(commands.start("-c", STOPPED, folder, cwd=commands.ROOT))
    # TensorFlow has notes with other errors than ours
    assert re.findall(r"^(?:Traceback|error:).*", err, re.M) == [], err
    return folder, out, status


@pytest.mark.parametrize(("where", "step"), [("stepped", 2), ("measured", 12)])
def test_sigterm_saves_the_state_for_another_process(where, step, stopped, uninterrupted):
    _, whole, expected = uninterrupted
    folder, out, status = stopped
    assert status == 75
    assert out == "stepped: 75\n"
    assert unfinished(folder / where / "work") == {(tiny.DROPOUT.name, 1): (step, tiny.STEPS)}
    run = again(0, folder / where)
    record = run(1)
    assert record.cost["visits"] == 2
    assert_same_run(record, whole)
    tiny.assert_identical(tiny.values(run), expected)


def test_runs_in_one_process_know_nothing_of_each_other(uninterrupted, tmp_path):
    _, whole, expected = uninterrupted
    run = again(1, tmp_path)
    first = run(0)
    after_first = tiny.values(run)
    assert_same_run(run(1), whole)
    tiny.assert_identical(tiny.values(run), expected)
    assert first.curves["test_loss"] != whole.curves["test_loss"]
    # once more: what the optimizer is reset to has stayed as it was
    assert_same_run(run(0), first)
    tiny.assert_identical(tiny.values(run), after_first)
    assert [record.seed for record in results.read(tmp_path / "results")] == [0, 1]


def test_a_run_that_diverges_is_a_result(tmp_path):
    run = tiny.make(tmp_path, tiny.DIVERGING)
    record = run(0)
    assert 1 < record.diverged_at < tiny.STEPS
    assert set(record.final.values()) == {None}
    assert record.error is None
    assert record.curves["iteration"][-1] == record.diverged_at
    assert not math.isfinite(record.curves["train_loss"][-1])
    # valid JSON, with null for what is no number
    (file,) = (tmp_path / "results").glob("*/*/*.json")
    text = file.read_text()
    assert json.loads(text, parse_constant=pytest.fail)["curves"]["train_loss"][-1] is None
    assert results.read_one(file).error is None
    assert unfinished(tmp_path / "work") == {}
    # the next seed begins with finite weights
    again = run(0)
    assert again.diverged_at == record.diverged_at


@pytest.fixture
def changes(monkeypatch):
    """Functions that change what a run is made by."""
    code = fingerprints.code() | {"fingerprint": "0" * 64}
    recipe = dataclasses.replace(tiny.recipe(), batch_size=3)
    return {
        "code": lambda: monkeypatch.setattr(fingerprints, "code", lambda: code),
        "recipe": lambda: monkeypatch.setattr(
            "training.reproduce.trials.RECIPES", {"tiny": lambda: recipe}
        ),
        "data": lambda: None,
    }


def contents(folder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The state of a run that was stopped before its first step."""
    folder = tmp_path_factory.mktemp("begun")
    with tiny.installed():
        assert tiny.make(folder, calls=0)(1) is None
    return folder


@pytest.mark.parametrize("what", ["code", "recipe", "data"])
def test_a_row_takes_no_runs_of_two_kinds(what, uninterrupted, begun, changes, tmp_path):
    shutil.copytree(uninterrupted[0] / "results", tmp_path / "results")
    shutil.copytree(begun / "work", tmp_path / "work")
    before = contents(tmp_path)
    changes[what]()
    other = tiny.images(seed=1) if what == "data" else tiny.images()
    with pytest.raises(UserError, match=f"{tiny.DROPOUT.name}: runs of different {what} "):
        tiny.make(tmp_path, tiny.DROPOUT, data=other)(2)
    with pytest.raises(UserError, match=f"seed-1 holds a run of other {what}: "):
        tiny.make(tmp_path, data=other)(1)
    assert contents(tmp_path) == before


def test_another_commit_of_the_same_sources_may_go_on(begun, monkeypatch, tmp_path):
    shutil.copytree(begun / "work", tmp_path / "work")
    code = fingerprints.code() | {"commit": "another", "modified": True}
    monkeypatch.setattr(fingerprints, "code", lambda: code)
    assert tiny.make(tmp_path, calls=0)(1) is None


def test_executions_must_reach_the_end(tmp_path):
    if BACKEND == "torch":
        pytest.skip("torch computes step by step")
    assert tiny.make(tmp_path, calls=2)(0) is None  # two steps
    with pytest.raises(UserError, match=r"of 2 iterations, .* 3 at a time .*--together 1"):
        tiny.make(tmp_path, together=3)(0)
    assert unfinished(tmp_path / "work") == {(tiny.PLAIN.name, 0): (2, tiny.STEPS)}


def test_a_damaged_state_is_no_state(begun, tmp_path):
    shutil.copytree(begun / "work", tmp_path / "work")
    (file,) = (tmp_path / "work").rglob("*.npz")
    file.write_bytes(file.read_bytes()[:-1])
    assert unfinished(tmp_path / "work") == {}
    told = []
    run = tiny.make(tmp_path, calls=0)
    run.say = told.append
    assert run(1) is None
    assert any("is damaged, so an older checkpoint is used" in message for message in told)


def test_legs_of_the_papers_recipes():
    """The recipes' runs are measured 64 times or so, and at whole executions."""
    for trial, points in (
        ("cifar10/resnet110-original", 64),
        ("cifar10/resnet1001-full_preactivation-batch64", 66),
    ):
        from training.reproduce import run, trials

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(run, "LEGS", 64)
            made = run.Run(
                trials.TRIALS[trial],
                _sized(50_000),
                run.Settings(None, None, "mixed_bfloat16", together=100),
            )
        assert made.together == 100
        assert not made.leg_length % 100
        assert math.ceil(made.plan.iterations / made.leg_length) == points
        rate = plans.rate_at(plans.learning_rate(made.config, made.plan))
        drops = {64_000: (32_000, 48_000), 156_200: (81 * 781, 122 * 781)}[made.plan.iterations]
        assert [round(rate(step), 6) for step in (0, 399, 400)] == [0.01, 0.01, 0.1]
        for drop, before, after in zip(drops, (0.1, 0.01), (0.01, 0.001), strict=True):
            assert (round(rate(drop - 1), 6), round(rate(drop), 6)) == (before, after)


def _sized(count: int):
    return dataclasses.replace(tiny.images(), train_x=np.zeros((count, 1, 1, 1), "uint8"))
