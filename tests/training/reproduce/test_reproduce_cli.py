"""`keras-preact reproduce`: which runs it trains, how it runs and stops processes."""

import dataclasses
import json
import os
import re
import signal
from pathlib import Path

import keras
import pytest

from tests.own_modules import working_in
from tests.training import calls
from tests.training.reproduce.records import record
from training import children, imports
from training.config import Data, from_json
from training.errors import UserError
from training.reproduce import __main__ as main
from training.reproduce import results, rows
from training.reproduce.run import Options

TRIAL = "digits/resnet110-original"


class Child:
    """Replaces a training process. It exits with `status`. If it has the number of a signal,
    it first sends the signal to its parent, and runs until it gets it back. With `peers`,
    it does so only when all of them run.
    """

    def __init__(self, status: int, number: int | None = None, peers: tuple = ()):
        self.status, self.number, self.peers = status, number, peers
        self.runs = self.sent = self.signalled = False

    def poll(self) -> int | None:
        self.runs = True
        if not all(peer.runs for peer in self.peers):
            return None
        if self.number is not None and not any(peer.sent for peer in (self, *self.peers)):
            self.sent = True
            os.kill(os.getpid(), self.number)
        return self.status if self.signalled or self.number is None else None

    def send_signal(self, number: int) -> None:
        assert number == self.number
        assert not self.signalled  # each signal arrives once
        self.signalled = True


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that trains rows of the small tables. It takes the children to
    start, in their order, and records their jobs and backends in `started`.
    """
    monkeypatch.chdir(tmp_path)

    def train(*processes, options=""):
        waiting = iter(processes)

        def start(module, jobs, backend, *, variables):
            [job] = jobs
            assert module == "training.reproduce.run"
            assert variables.keys() == {"XLA_PYTHON_CLIENT_MEM_FRACTION"}
            train.started.append((json.loads(job), backend))
            return next(waiting)

        monkeypatch.setattr(children, "start", start)
        main.main(["digits", *calls.words(options)])

    train.started = []
    return train


def started(train) -> list:
    return [(trial, seed) for (trial, seed, *_), _ in train.started]


def test_only_missing_runs_are_trained(train, tmp_path, capsys):
    """The original ResNet-110 is in both of the small tables."""
    done = results.path(tmp_path / "results", TRIAL, 1)
    done.parent.mkdir(parents=True)
    done.touch()
    train(
        Child(0),
        Child(0),
        options="--rows resnet110-original --seeds 3 --steps-per-execution 7 --precision float32",
    )
    assert started(train) == [(TRIAL, 0), (TRIAL, 2)]
    (_, _, options, table), backend = train.started[0]
    options = from_json(Options, options)
    assert (options.output, options.steps_per_execution, options.precision) == (
        Path("results"),
        7,
        "float32",
    )
    assert (backend, table) == (keras.backend.backend(), None)
    assert "2 of 3 runs are missing." in capsys.readouterr().out


def test_a_run_that_fails_does_not_stop_the_others(train, capsys):
    words = "--rows resnet110-original --seeds 2"
    error = calls.error_of(capsys, lambda: train(Child(2), Child(0), options=words))
    assert "1 of 2 runs failed: digits/resnet110-original, seed 0." in error
    assert started(train) == [(TRIAL, 0), (TRIAL, 1)]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_is_passed_on_and_nothing_more_is_started(number, status, train, capsys):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit) as ended:
        train(Child(status, number), options="--rows resnet110-original --seeds 2")
    assert ended.value.code == status
    assert "The same command resumes the runs." in capsys.readouterr().out
    assert started(train) == [(TRIAL, 0)]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def pair(*arguments) -> list[Child]:
    """Return two children that end only when both run."""
    two = [Child(*arguments) for _ in range(2)]
    for child in two:
        child.peers = tuple(two)
    return two


def test_runs_train_at_the_same_time(train):
    words = "--rows resnet110-original --seeds 4 --parallel 2"
    train(*pair(0), *pair(0), options=words)
    assert started(train) == [(TRIAL, seed) for seed in range(4)]


def test_all_runs_receive_a_signal(train):
    words = "--rows resnet110-original --seeds 4 --parallel 2"
    with pytest.raises(SystemExit) as ended:
        train(*pair(75, signal.SIGTERM), options=words)
    assert ended.value.code == 75
    assert started(train) == [(TRIAL, 0), (TRIAL, 1)]


@pytest.mark.process
@pytest.mark.parametrize(
    ("table", "trial"),
    [
        ("digits", TRIAL),
        # on 60,000 random images, which takes a minute
        pytest.param("first-paper", "cifar10/resnet20-original", marks=pytest.mark.soak),
    ],
)
def test_a_real_run(table, trial, tmp_path):
    """In processes of its own; the notes of TensorFlow are left out of both."""
    row = trial.partition("/")[2]
    words = f"reproduce {table} --rows {row} --seeds 1 --smoke"
    process = calls.start("-m", "training", *words.split(), cwd=tmp_path)
    status, out, err = calls.finish(process)
    assert status == 0, err
    assert not re.search(imports.NOTES, err)
    (record,) = results.read(tmp_path / "runs/reproduce/smoke/results")
    assert (record.trial, record.seed) == (trial, 0)
    assert f"seed 0: test error {record.error:.2f} %. Written: " in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("table1 --rows resnet111", "Unknown row: 'resnet111'. Choose one of: resnet110-original"),
        ("digits --seeds 0", "--seeds must be positive. Received: 0"),
        ("digits --steps-per-execution -1", "--steps-per-execution must be positive. Received: -1"),
        ("digits --parallel 0", "--parallel must be positive. Received: 0"),
        ("digits --data-dir images", "--data-dir is for rows on other data than digits"),
        ("depth --limit nan", "--limit must be positive, at most"),
        ("depth --seed -1", "--seed must be from 0 to 4294967295"),
        ("table9", "'table9'"),
        ("--seeds 1 table1", "Name a command first: keras-preact reproduce COMMAND"),
        ("report --output nowhere", "must be the folder of finished runs. nowhere does not exist"),
    ],
)
def test_mistakes(options, message, capsys):
    assert message in calls.error_of(capsys, main.main, calls.words(options))


def test_a_report_of_no_runs_replaces_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("mine")
    message = "--output must be the folder of finished runs. . has none"
    assert message in calls.error_of(capsys, main.main, calls.words("report --output ."))
    assert Path("README.md").read_text() == "mine"


OWN = """
from training.config import Config, Data, Model, Schedule
from training.reproduce.rows import Row, Table, Trial


def epochs():
    schedule = Schedule("cosine", length=3, warmup=0.1)
    return Config(data=Data("npz", "mine.npz", holdout=0.1), schedule=schedule)


def table(name="mine/a", recipe="own_tables:epochs"):
    return Table("Mine", (Row("a", Trial(name, recipe, Model("digits_resnet8_preact"))),))


TABLE, WRONG_NAME, WRONG_RECIPE = table(), table("a"), table(recipe="smal")
EMPTY = Table("Mine", ())
"""


@pytest.fixture
def own(tmp_path):
    with working_in(tmp_path, own_tables=OWN):
        yield tmp_path


def test_a_table_of_a_person(own, monkeypatch, capsys):
    """Its children get its name, and it is printed when they have ended."""
    jobs = []

    def statuses(module, arguments, *_):
        jobs.extend(map(json.loads, arguments))
        for trial, seed, *_ in jobs:
            write_of(trial, seed)
        return [0] * len(arguments)

    def write_of(trial, seed):
        made = record(TRIAL, seed, 4.0 + seed)
        results.write(own / "results", dataclasses.replace(made, trial=trial))

    monkeypatch.setattr(children, "statuses", statuses)
    main.main(["own_tables:TABLE", "--seeds", "2"])
    found = [(trial, seed, table) for trial, seed, _, table in jobs]
    assert found == [("mine/a", seed, "own_tables:TABLE") for seed in (0, 1)]
    printed = capsys.readouterr().out
    assert "| a | 4.50 (4.00 to 5.00) | 2 |" in " ".join(printed.split())


def test_a_recipe_of_a_person_keeps_its_data(own):
    """The test images are measured after each epoch, and none is held out."""
    [trial] = rows.trials(rows.table("own_tables:TABLE")).values()
    for smoke in (False, True):
        config = trial.config(3, steps_per_execution=100, on_device=True, smoke=smoke)
        data = dataclasses.replace(config.data, dir=str(config.data.dir))
        assert data == Data("npz", "mine.npz", watch_test=True)
        assert (config.seed, config.steps_per_execution) == (3, 8 if smoke else 1)
    assert trial.config(3).steps_per_epoch == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TABLES", "has no attribute 'TABLES'"),
        ("EMPTY", "must be a Table with rows"),
        ("epochs", "must be a Table with rows. Received: <function epochs"),
        ("WRONG_NAME", "must be FOLDER/NAME, such as mine/wide. Received: 'a'"),
        ("WRONG_RECIPE", "Did you mean 'small'"),
    ],
)
def test_tables_that_are_none(name, message, own, capsys):
    assert message in calls.error_of(capsys, main.main, [f"own_tables:{name}"])
    assert not (own / "runs").exists()


def test_rows_are_chosen_by_label_name_or_part():
    def names(*chosen):
        return [trial.name for trial in main.chosen(["table1"], chosen)]

    assert names() == [row.trial.name for row in rows.TABLES["table1"].rows]
    original = ["cifar10/resnet110-original"]
    assert names("resnet110-original") == original  # and no longer names that begin with it
    assert names("ResNet-110, identity (1, 1)") == original
    assert len(names("gating")) == 5
    with pytest.raises(UserError, match="Unknown row: 'resnet164-original'"):
        main.chosen(["table1"], ["gating", "resnet164-original"])
