"""`keras-preact reproduce`: which runs it trains, how it runs and stops processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.training import commands
from training import children
from training.cli import UserError
from training.reproduce import __main__ as main
from training.reproduce import results, rows, workers
from training.reproduce.run import Job

#: A stand-in for a process that trains: it ends with a status, or waits for SIGTERM.
CHILD = """
import json, pathlib, signal, sys, time
job = json.loads(sys.argv[1])
status = {"digits/fails": 2, "digits/works": 0}.get(job["trial"])
if status is None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    pathlib.Path(job["work"]).touch()
    time.sleep(120)
sys.exit(status)
"""


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    monkeypatch.setattr(children, "command", lambda _, job: [sys.executable, "-c", CHILD, job])
    return lambda *names: [
        Job(f"digits/{name}", [0], "results", str(tmp_path / name)) for name in names
    ]


def test_one_that_fails_does_not_stop_the_others(jobs, monkeypatch):
    started = []
    start = children.start
    monkeypatch.setattr(
        children,
        "start",
        lambda module, job, *more: (
            started.append(json.loads(job)["trial"]) or start(module, job, *more)
        ),
    )
    with pytest.raises(UserError, match=r"^1 of 2 trials failed: digits/fails\."):
        workers.Workers(1, "jax").train(jobs("fails", "works"))
    assert started == ["digits/fails", "digits/works"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on(number, jobs, tmp_path):
    waiting = jobs("waits", "waits")

    def send():
        while not (tmp_path / "waits").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(expected) as ended:
        workers.Workers(1, "jax").train(waiting)
    if number == signal.SIGTERM:
        assert ended.value.code == 75


def test_the_deadline(jobs, tmp_path, monkeypatch):
    workers.Workers(1, "jax", 2 / 60).train(jobs("waits", "waits"))
    monkeypatch.setattr(children, "start", lambda *_: pytest.fail("a process was started"))
    workers.Workers(1, "jax", 1e-9).train(jobs("waits"))


def test_cores_are_shared(monkeypatch):
    usable = sorted(os.sched_getaffinity(0))
    assert workers.cores(1) == [[]]
    assert workers.cores(len(usable) + 1) == [[]] * (len(usable) + 1)
    shares = workers.cores(len(usable))
    assert sorted(core for share in shares for core in share) == usable
    show = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['KERAS_BACKEND'])"
    monkeypatch.setattr(children, "command", lambda *_: [sys.executable, "-c", show])
    for cores in ([usable[0]], []):
        process = children.start("m", "", "jax", cores, stdout=subprocess.PIPE, text=True)
        assert process.communicate(timeout=60)[0] == f"{cores or usable} jax\n"
    assert sorted(os.sched_getaffinity(0)) == usable


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
    assert capsys.readouterr().out == (
        "2 runs of 1 trials are missing; 1 exist already.\n"
        "Finished 0 runs in results. 2 are not finished; the same command resumes them.\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "table1 --rows resnet111",
            r"Unknown row 'resnet111' of table1\. Choose from: cifar10/resnet110-.*",
        ),
        ("digits --seeds 0", r"--seeds must be positive\. Received: 0"),
        ("digits --processes 0", r"--processes must be positive\. Received: 0"),
        ("digits --device-minutes -1", r"--device-minutes must be .* Received: -1\.0"),
        ("digits --together 0", r"--together must be positive\. Received: 0"),
        ("table9", r".*'table9'.*"),
    ],
)
def test_mistakes_are_named(options, message, capsys):
    error = commands.error_of(capsys, main.main, commands.words(options))
    assert re.fullmatch(f"error: {message}\n", error), error


def test_rows_are_chosen_by_label_name_or_part():
    def names(tables, *chosen):
        return [trial.name for trial in main.chosen(tables, chosen)]

    assert names(["table2"]) == [row.trial.name for row in rows.TABLES["table2"].rows]
    original = ["cifar10/resnet110-original"]
    assert names(["table1"], "resnet110-original") == original  # and no name that begins so
    assert names(["table1"], "ResNet-110, identity (1, 1)") == original
    assert len(names(["table1"], "gating")) == 5
    assert names(["digits1", "digits2"], "resnet110-original") == ["digits/resnet110-original"]
    with pytest.raises(UserError, match="Unknown row 'resnet164-original' of table1"):
        main.chosen(["table1"], ["gating", "resnet164-original"])


@pytest.mark.soak
def test_smoke(tmp_path):
    """The whole command, two runs at a time."""
    networks = ("resnet20-original", "resnet32-original")
    options = ("first-paper", "--smoke", "--rows", *networks, "--seeds", 1, "--processes", 2)
    process = commands.start("-m", "training.reproduce", *options, cwd=tmp_path)
    status, out, err = commands.finish(process)
    assert status == 0, err
    assert out.splitlines()[-1].startswith("Finished 2 runs in ")
    assert not (tmp_path / "results").exists()
    records = results.read(tmp_path / "runs" / "reproduce" / "smoke" / "results")
    assert [record.trial for record in records] == [f"cifar10/{name}" for name in networks]
    assert [record.curves["iteration"] for record in records] == [[4, 8]] * 2
