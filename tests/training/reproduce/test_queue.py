"""What comes next: the order of what is missing, times worked out by hand, commands
that select what they say.
"""

import dataclasses
import shlex

import keras
import pytest

from tests.training.reproduce.records import record, write
from training.cli import UserError
from training.reproduce import __main__ as command_line
from training.reproduce import queue
from training.reproduce.priorities import (
    GROUPS,
    Missing,
    costs,
    expected,
    grouped,
    missing,
    next_run,
    size,
)
from training.reproduce.results import SEEDS
from training.reproduce.trials import TABLES, TRIALS

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend"
)

FULL, ORIGINAL = "cifar10/resnet110-full_preactivation", "cifar10/resnet110-original"
H200 = "NVIDIA H200"


def names(items) -> list[tuple[str, int]]:
    return [(item.trial.name, item.seed) for item in items]


def test_every_row_of_the_paper_is_in_one_group():
    found = [trial.name for _, trials in grouped() for trial in trials]
    wanted = {row.trial.name for table in TABLES.values() if not table.small for row in table.rows}
    assert len(found) == len(set(found))
    assert set(found) == wanted
    assert all(trials for _, trials in grouped())


def test_order_of_what_is_missing():
    found = names(missing(set(), {}))
    assert len(found) == SEEDS * len({name for name, _ in found}) == len(set(found))
    assert found[:4] == [(FULL, 0), (ORIGINAL, 0), (FULL, 1), (ORIGINAL, 1)]
    assert {name for name, _ in found[10:25]} == {
        f"cifar10/resnet110-{name}"
        for name in ("bn_after_addition", "relu_before_addition", "relu_only_preactivation")
    }
    assert [seed for _, seed in found[10:25]] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    first = {name: found.index((name, 0)) for name, _ in found}
    in_turn = [
        "cifar10/resnet110-original-none",
        "cifar10/resnet164-original",
        "cifar10/resnet1001-full_preactivation",
        "cifar10/resnet1001-original",
        "cifar10/resnet110-single-original",
        "cifar10/resnet20-original",
        "cifar10/resnet1001-full_preactivation-batch64",
        "cifar100/resnet164-original",
    ]
    assert sorted(in_turn, key=first.__getitem__) == in_turn


def test_what_is_made_is_not_missing():
    made = {(FULL, 0), (FULL, 1), (ORIGINAL, 0), (ORIGINAL, 7), ("digits/resnet110-original", 0)}
    found = names(missing(made, {}))
    assert found[:3] == [(ORIGINAL, 1), (FULL, 2), (ORIGINAL, 2)]
    assert len(found) == len(missing(set(), {})) - 3


def test_what_is_unfinished_comes_first_in_its_group_the_least_left_first():
    other = "cifar10/resnet110-bn_after_addition"
    unfinished = {
        (ORIGINAL, 2): (10_000, 64_000),
        (FULL, 3): (60_000, 64_000),
        (other, 0): (63_999, 64_000),
    }
    unfinished[FULL, 0] = (5, 64_000)
    found = missing({(FULL, 0)}, unfinished)
    assert names(found)[:4] == [(FULL, 3), (ORIGINAL, 2), (ORIGINAL, 0), (FULL, 1)]
    assert names(found)[9] == (
        other,
        0,
    )  # it is of the second group: nine of the first are before it
    assert (found[0].done, found[0].total, found[0].images) == (60_000, 64_000, 4_000 * 128)
    assert (found[2].done, found[2].total) == (0, 64_000)


def test_iterations_of_a_run_in_epochs():
    [item] = [
        item for item in missing(set(), {}) if item.trial.recipe == "batch64" and item.seed == 0
    ]
    assert (item.total, item.images) == (200 * 781, 200 * 781 * 64)


def test_every_command_selects_its_trial():
    for item in missing(set(), {}):
        words = shlex.split(item.command())
        table, chosen = (
            words[words.index("reproduce") + 1 if "reproduce" in words else 3],
            words[words.index("--rows") + 1],
        )
        assert table in command_line.COMMANDS
        assert command_line.chosen([table.replace("-", "_")], [chosen]) == [item.trial]
        assert words[words.index("--seeds") + 1] == str(item.seed + 1)


def test_command():
    item = missing(set(), {})[2]
    assert (
        item.command()
        == "keras-preact reproduce table2 --rows resnet110-full_preactivation --seeds 2"
    )
    assert item.command(12.5).endswith(" --seeds 2 --device-minutes 12.5")


def test_costs():
    records = [
        *(
            record(FULL, seed, 6.4, speed=speed)
            for seed, speed in enumerate([1000.0, 4000.0, 2000.0])
        ),
        record(ORIGINAL, 0, 6.6, speed=1000.0, together=4),  # four of them share the device
        record("cifar10/resnet20-original", 0, 9.0, speed=50.0, device="CPU"),
        record("digits/resnet110-original", 0, 2.0, speed=9e9),  # of small images
        record("cifar10/resnet164-original", 0, None, speed=0.0),  # diverged before it was timed
    ]
    assert costs(records, H200) == pytest.approx({FULL: 1 / 2000, ORIGINAL: 1 / 4000})
    assert costs(records, "CPU") == pytest.approx({"cifar10/resnet20-original": 1 / 50})
    assert costs(records, "NVIDIA H100") == {}


def run(name: str, done: int = 0) -> Missing:
    [item] = [
        item
        for item in missing(set(), {(name, 0): (done, 64_000)} if done else {})
        if names([item]) == [(name, 0)]
    ]
    return item


def test_expected_minutes():
    known = {FULL: 1 / 2048}  # 64,000 iterations of 128 images: 4,000 seconds
    assert expected(run(FULL), known) == pytest.approx(4000 / 60)
    assert expected(run(FULL, 48_000), known) == pytest.approx(1000 / 60)
    assert expected(run("cifar10/resnet20-original"), known) == pytest.approx(4000 / 60 * 20 / 110)
    assert expected(run("cifar10/resnet164-original"), known) == pytest.approx(
        4000 / 60 * 2 * 164 / 110
    )
    assert expected(run(FULL), {}) is None


def test_expected_minutes_are_the_rows_own_else_those_of_the_nearest():
    known = {
        FULL: 1 / 2048,
        "cifar10/resnet20-original": 1.0,
        "cifar10/resnet164-original": 1 / 500,
    }
    assert expected(run(FULL), known) == pytest.approx(4000 / 60)
    seconds = 64_000 * 128 / 500
    assert expected(run("cifar10/resnet1001-original"), known) == pytest.approx(
        seconds / 60 * 1001 / 164
    )
    assert expected(run("cifar10/resnet164-original"), known) == pytest.approx(seconds / 60)
    assert size(TRIALS["cifar10/resnet110-single-original"]) == size(TRIALS[ORIGINAL])


def test_next_run():
    items = missing(set(), {})
    known = {FULL: 1 / 2048}
    assert next_run(None, items, known) == items[0]
    assert next_run(67, items, known) == items[0]
    assert next_run(66, items, known).trial.name == "cifar10/resnet20-original"
    assert next_run(13, items, known).trial.name == "cifar10/resnet20-original"
    assert next_run(5, items, known) == items[0]  # none fits: what is worth most is begun
    assert next_run(5, items, {}) == items[0]
    assert next_run(5, [], known) is None
    part = missing(set(), {("cifar10/resnet110-bn_after_addition", 1): (63_000, 64_000)})
    assert names([next_run(5, part, known)]) == [("cifar10/resnet110-bn_after_addition", 1)]


def test_next(tmp_path, capsys):
    write(tmp_path, FULL, [6.3], speed=2048.0)
    queue.next_(output=tmp_path, work=tmp_path / "work", device=H200)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{ORIGINAL}, seed 0 ({GROUPS[0].title}): about 1 h 6 min of NVIDIA H200.",
        "keras-preact reproduce table2 --rows resnet110-original --seeds 1",
    ]
    queue.next_(5, tmp_path, tmp_path / "work", H200)
    _, fits, command = capsys.readouterr().out.splitlines()
    assert (
        fits == "No missing run fits into 5 minutes. Start this one; the same command resumes it."
    )
    assert command.endswith(" --device-minutes 5")
    queue.next_(5, tmp_path, tmp_path / "work", "NVIDIA H100")
    assert "the time on NVIDIA H100 is not known" in capsys.readouterr().out
    queue.next_(5, tmp_path, tmp_path / "work")
    assert "the time on CPU is not known" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--minutes must be positive\. Received: 0"):
        queue.next_(0, tmp_path, tmp_path / "work")


def test_plan(tmp_path, capsys):
    write(tmp_path, FULL, [6.3, 6.4], speed=2048.0)
    write(tmp_path, "digits/resnet110-original", [2.0], device="CPU")
    queue.plan(tmp_path, tmp_path / "work")
    text = (tmp_path / "QUEUE.md").read_text()
    assert capsys.readouterr().out == f"{text}\nWritten: {tmp_path / 'QUEUE.md'}\n"
    total = len(missing(set(), {}))
    assert f"2 of {total} runs are finished." in text
    lines = text.splitlines()
    assert f"|  | row | seed | time on {H200} | command |" in lines
    command = "`keras-preact reproduce table2 --rows resnet110-original --seeds 1`"
    assert f"| 1 | {ORIGINAL} | 0 | 1 h 6 min | {command} |" in lines
    assert f"| {GROUPS[0].title} | {FULL} | 2 of 5 | - | 3 h 20 min |" in lines
    assert f"{total - 2 - queue.LINES} more follow" in text
    assert "CPU" not in text


def test_plan_of_unfinished_runs_and_none_measured():
    items = missing(set(), {(FULL, 3): (16_000, 64_000)})
    text = queue.page([], items)
    assert (
        f"| 1 | {FULL} | 3 | `keras-preact reproduce table2 --rows resnet110-full_preactivation "
        "--seeds 4` |" in text
    )
    assert f"| {GROUPS[0].title} | {FULL} | 0 of 5 | seed 3: 25% |" in text
    assert "The time of a run is not known" in text


def test_nothing_is_missing(tmp_path, capsys):
    runs = [
        record(trial.name, seed, 6.0)
        for _, trials in grouped()
        for trial in trials
        for seed in range(SEEDS)
    ]
    text = queue.page(runs, missing({(each.trial, each.seed) for each in runs}, {}))
    assert f"{len(runs)} of {len(runs)} runs are finished" in text
    assert "None: every row has 5 runs." in text
    assert f"| {GROUPS[0].title} | {FULL} | 5 of 5 | - | 0 s |" in text


def test_a_run_of_a_further_seed_does_not_count(tmp_path):
    runs = [record(FULL, SEEDS, 6.0), dataclasses.replace(record(FULL, 0, 6.0), seed=0)]
    text = queue.page(runs, missing({(each.trial, each.seed) for each in runs}, {}))
    assert f"| {FULL} | 1 of 5 |" in text
