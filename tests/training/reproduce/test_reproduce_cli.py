"""`python -m training.reproduce` in real processes: what it trains, what it leaves out, and how it is stopped."""

import json
import os
import re
import shutil
import signal
import threading

import keras
import pytest

from tests.training import commands
from tests.training.absent import TENSORFLOW, run_without
from tests.training.reproduce import tiny
from training.cli import UserError
from training.reproduce import __main__ as main
from training.reproduce import results, run, trials, workers
from training.reproduce.worker import Job

BACKEND = keras.backend.backend()
# nothing of it depends on the backend: that whose processes are up first
once = pytest.mark.skipif(BACKEND != "torch", reason="nothing of it depends on the backend")

REPRODUCE = ("-m", "training.reproduce")
#: The command line, or a worker of it, with the small trials and a table of them; it starts workers of this file's kind.
PROGRAM = """
import sys
from tests.training.reproduce import tiny
tiny.install()
from training import cli
from training.reproduce import __main__ as main, images, trials, worker, workers
import keras_preact as kp
images.load = lambda name, folder=None: tiny.images()
published = kp.published.results(table="1")[0]
rows = tuple(trials.Row(name, published, trial) for name, trial in trials.TRIALS.items() if "tiny" in name)
trials.TABLES = {"tiny": trials.Table("tiny", rows, small=True)}
command = worker.__name__.rpartition(".")[0]
start = workers.subprocess.Popen

def start_worker(arguments, **options):
    if arguments[1:3] == ["-m", "training.reproduce.worker"]:
        arguments = [sys.executable, sys.argv[0], "worker", arguments[3]]
    return start(arguments, **options)

workers.subprocess.Popen = start_worker
if sys.argv[1] == "worker":
    import json
    job = worker.Job(**json.loads(sys.argv[2]))
    if job.trial == "digits/tiny-dropout" and "FAIL" in __import__("os").environ:
        images.load = lambda name, folder=None: (_ for _ in ()).throw(cli.UserError("no data for this one"))
    cli.guard(lambda: worker.work(job))
else:
    main.main()
"""


@pytest.fixture
def program(tmp_path):
    """A folder to work in, with the command line that knows small trials."""
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def digits(*options: object, cwd, **environment: str) -> tuple[int, str, str]:
    """Run the command with the small trials; return its status and what it wrote."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        return commands.finish(commands.start("program.py", "digits", *options, cwd=cwd))


def last_error(err: str) -> str:
    return [line for line in err.splitlines() if line.startswith("error: ")][-1]


@once
def test_rows_are_made_once(program):
    status, out, err = digits("--rows", "tiny", "tiny-dropout", "--seeds", 1, "--processes", 2, cwd=program)
    assert status == 0, err
    assert [record.cost["together"] for record in results.read(program / "results")] == [2, 2]
    assert out.startswith("2 runs of 2 trials to make; 0 are there already.\n")
    assert out.endswith("2 runs were made, in results.\n")
    files = sorted((program / "results").glob("*/*/*.json"))
    assert [file.parent.name for file in files] == ["tiny", "tiny-dropout"]
    assert not any((program / "runs").rglob("*.npz"))
    before = [file.read_bytes() for file in files]
    status, out, err = digits("--rows", "tiny", "--seeds", 1, cwd=program)
    assert (status, out) == (0, "0 runs of 0 trials to make; 1 are there already.\n0 runs were made, in results.\n")
    assert [file.read_bytes() for file in files] == before


@once
def test_a_row_that_fails_keeps_no_other_from_being_made(program):
    status, _, err = digits("--rows", "tiny-dropout", "tiny", "--seeds", 1, "--processes", 1, cwd=program, FAIL="1")
    assert status == 2
    assert "error: no data for this one" in err
    assert last_error(err).startswith("error: 1 of 2 trials failed: digits/tiny-dropout.")
    assert [record.trial for record in results.read(program / "results")] == ["digits/tiny"]


@once
def test_time_that_is_over_leaves_what_goes_on(program):
    options = ("--rows", "tiny", "tiny-dropout", "--seeds", 1)
    status, out, err = digits(*options, "--device-minutes", 1e-9, cwd=program)
    assert status == 0, err
    assert out.splitlines()[-1] == "0 runs were made, in results. 2 are not finished: the same command goes on with them."


# A signal to the command when its worker has said that it goes on; a run that never ends by itself.
@once
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_is_passed_on(number, expected, program, tmp_path):
    with tiny.installed():
        assert tiny.make(tmp_path / "before", calls=2)(0) is None  # so that a worker says that it goes on from here
        shutil.copytree(tmp_path / "before" / "work", tmp_path / "runs" / "reproduce")
    (program / "program.py").write_text(PROGRAM.replace("tiny.install()", "tiny.STEPS = 1_000_000\ntiny.install()", 1))
    change_length(tmp_path / "runs" / "reproduce", 1_000_000)
    process = commands.start("program.py", "digits", "--rows", "tiny", "--seeds", "1", "--processes", "1", cwd=program)
    stop = threading.Timer(240, process.kill)
    stop.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "going on behind iteration 2" in line:
                break
        process.send_signal(number)
        status, _, err = commands.finish(process)
    finally:
        stop.cancel()
    assert status == expected, err
    assert "Traceback" not in err
    ((_, (step, total)),) = run.unfinished(tmp_path / "runs" / "reproduce").items()
    assert total == 1_000_000
    assert step >= 2


def change_length(work, length: int) -> None:
    """Make of a run's state one of a longer run of the same kind."""
    import hashlib

    import numpy as np

    (path,) = work.rglob("*.npz")
    with np.load(path) as file:
        arrays = dict(file)
    described = json.loads(arrays["description"].tobytes())
    config = described["progress"]["identity"]["config"]
    config["iterations"] = config["schedule"]["length"] = length
    arrays["description"] = np.frombuffer(json.dumps(described).encode(), np.uint8)
    path.unlink()
    np.savez(path, **arrays)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    path.rename(path.with_name(f"state-{described['progress']['step']:09d}-{digest}.npz"))


@once
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("table1", "--rows", "resnet111"), r"--rows: there is no row 'resnet111' in table1\. It has: cifar10/resnet110-.*"),
        (("digits", "--seeds", "0"), r"--seeds and --processes must be positive\. Received: 0 and 2"),
        (("digits", "--processes", "0"), r"--seeds and --processes must be positive\. Received: 5 and 0"),
        (("digits", "--device-minutes", "-1"), r"--device-minutes must be positive\. Received: -1\.0"),
        (("digits", "--together", "0"), r"--together must be positive\. Received: 0"),
        (("table9",), r".*'table9'.*"),
        (("speed", "--networks", "resnet21"), r"--networks: there is no trial 'resnet21'\. There is: .*resnet20-original.*"),
        (("speed", "--executions", "0"), r"--processes, --executions and --limit must be positive\. Received: .*"),
    ],
)
def test_mistakes_are_named(options, message, capsys):
    error = commands.error_of(capsys, main.main, list(options))
    assert re.fullmatch(f"error: {message}\n", error), error


@once
def test_rows_are_chosen_by_label_name_or_part():
    def names(tables, *rows):
        return [trial.name for trial in main.chosen(tables, rows)]

    assert names(["table2"]) == [row.trial.name for row in trials.TABLES["table2"].rows]
    assert names(["table1"], "resnet110-original") == ["cifar10/resnet110-original"]  # not those that begin so
    assert names(["table1"], "cifar10/resnet110-original") == ["cifar10/resnet110-original"]
    assert names(["table1"], "ResNet-110, identity (1, 1)") == ["cifar10/resnet110-original"]
    assert len(names(["table1"], "gating")) == 5
    assert names(["table2"], "resnet164-original", "resnet110-original") == names(["table2"], "original")[:2]
    assert names(["digits1", "digits2"], "resnet110-original") == ["digits/resnet110-original"]  # which is in both
    with pytest.raises(UserError, match="there is no row 'resnet164-original' in table1"):
        main.chosen(["table1"], ["gating", "resnet164-original"])


@once
def test_nothing_is_begun_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(workers, "start", lambda *_, **__: pytest.fail("a worker was started"))
    workers.train([Job("digits/tiny", [0], None, {}, until=1.0)], 1, BACKEND)


@once
def test_cores_are_shared():
    usable = os.sched_getaffinity(0)
    assert workers.cores(1) == [[]]
    assert workers.cores(len(usable) + 1) == [[]] * (len(usable) + 1)
    shares = workers.cores(len(usable))
    assert sorted(core for share in shares for core in share) == sorted(usable)


@once
@pytest.mark.slow
def test_smoke(tmp_path):
    """Every command line as it is, with a network of the tables."""
    options = ("first-paper", "--smoke", "--rows", "resnet20-original", "--seeds", 1)
    status, out, err = commands.finish(commands.start(*REPRODUCE, *options, cwd=tmp_path))
    assert status == 0, err
    assert out.splitlines()[-1].startswith("1 runs were made")
    assert not (tmp_path / "results").exists()
    (record,) = results.read(tmp_path / "runs" / "reproduce" / "smoke" / "results")
    assert (record.trial, record.config["iterations"]) == ("cifar10/resnet20-original", 8)


@pytest.mark.skipif(BACKEND != "jax", reason="a machine with JAX alone")
def test_without_tensorflow(program):
    """The worker is a process of the command: both find no TensorFlow, scikit-learn or matplotlib."""
    options = ("digits", "--smoke", "--rows", "tiny", "--seeds", 1, "--processes", 1)
    done = run_without(TENSORFLOW, program / "program.py", *options, cwd=program, backend="jax")
    assert done.returncode == 0, done.stderr
    (record,) = results.read(program / "runs" / "reproduce" / "smoke" / "results")
    assert record.device["backend"] == "jax"
    for command in ("report", "next"):
        done = run_without(TENSORFLOW, *REPRODUCE, command, "--help", cwd=program, backend="jax")
        assert done.returncode == 0, done.stderr
