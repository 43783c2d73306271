"""`keras-preact reproduce`: which runs it trains, how it runs and stops processes."""

import json
import os
import signal
import subprocess
import threading

import pytest

from tests.training import commands
from training import children
from training.cli import UserError
from training.reproduce import __main__ as main
from training.reproduce import results, rows, workers
from training.reproduce.run import Job


class Child:
    """A stand-in for a process that trains: it fails, works, or waits for a signal, which it
    gets at the deadline or sends to this process.
    """

    def __init__(self, name: str, number: int | None = None):
        self.status = {"digits/fails": 2, "digits/works": 0}.get(name)
        self.number, self.told = number, threading.Event()

    def wait(self, timeout: float | None = None) -> int:
        if self.number is not None:
            os.kill(os.getpid(), self.number)
            assert self.told.wait(60)
        if self.status is None:
            raise subprocess.TimeoutExpired("child", timeout)
        return self.status

    def send_signal(self, number: int) -> None:
        self.status = {signal.SIGTERM: 75, signal.SIGINT: 130}[number]
        self.told.set()

    def terminate(self) -> None:
        self.status = -signal.SIGTERM  # before it had a handler


@pytest.fixture
def train(monkeypatch):
    """Return a function that trains and returns what was started."""

    def train(*names, minutes=None, number=None) -> list[str]:
        train.started = []

        def start(module, job, *_):
            train.started.append(json.loads(job)["trial"])
            return Child(train.started[-1], number)

        monkeypatch.setattr(children, "start", start)
        jobs = [Job(f"digits/{name}", [0], "results", "work") for name in names]
        workers.Workers(1, "jax", minutes).train(jobs)
        return train.started

    return train


def test_one_that_fails_does_not_stop_the_others(train):
    with pytest.raises(UserError, match=r"^1 of 2 trials failed: digits/fails\."):
        train("fails", "works")
    assert train.started == ["digits/fails", "digits/works"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_nothing_more_is_started(number, train):
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as ended:
        train("waits", "waits", number=number)
    assert train.started == ["digits/waits"]
    if number == signal.SIGTERM:
        assert ended.value.code == 75


def test_the_deadline(train):
    assert train("waits", minutes=60) == ["digits/waits"]  # it is stopped, which is no failure
    assert train("waits", minutes=0) == []


def test_missing_runs_alone_are_trained(tmp_path, monkeypatch, capsys):
    """Rows of both tables in small; the original ResNet-110 is in both."""
    trial = "digits/resnet110-original"
    done = results.path(tmp_path / "results", trial, 1)
    done.parent.mkdir(parents=True)
    done.touch()
    asked = []
    monkeypatch.setattr(workers.Workers, "train", lambda self, jobs: asked.extend(jobs))
    options = ("--rows", "resnet110-original", "--seeds", "3", "--together", "7")
    monkeypatch.chdir(tmp_path)
    main.main(["digits", *options])
    [job] = asked
    assert (job.trial, job.seeds, job.together, job.processes) == (trial, [0, 2], 7, 2)
    assert (job.results, job.dtype) == (str(tmp_path / "results"), None)
    assert "2 runs of 1 trials are missing; 1 exist already." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("table1 --rows resnet111", "Unknown row 'resnet111' of table1. Choose from"),
        ("digits --seeds 0", "--seeds must be positive. Received: 0"),
        ("digits --device-minutes -1", "Received: -1.0"),
        ("table9", "'table9'"),
    ],
)
def test_mistakes(options, message, capsys):
    assert message in commands.error_of(capsys, main.main, commands.words(options))


def test_rows_are_chosen_by_label_name_or_part():
    def names(*chosen):
        return [trial.name for trial in main.chosen(["table1"], chosen)]

    assert names() == [row.trial.name for row in rows.TABLES["table1"].rows]
    original = ["cifar10/resnet110-original"]
    assert names("resnet110-original") == original  # and no name that begins so
    assert names("ResNet-110, identity (1, 1)") == original
    assert len(names("gating")) == 5
    with pytest.raises(UserError, match="Unknown row 'resnet164-original' of table1"):
        main.chosen(["table1"], ["gating", "resnet164-original"])
