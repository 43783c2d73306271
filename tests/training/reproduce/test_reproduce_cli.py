"""`python -m training.reproduce` in real processes: what it trains, what it leaves out,
and how it is stopped.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import keras
import pytest

from tests.training import commands
from tests.training.absent import TENSORFLOW, run_without
from tests.training.reproduce import small_table, tiny
from training import children
from training.cli import UserError
from training.reproduce import __main__ as main
from training.reproduce import results, run, trials, workers
from training.reproduce.worker import Job

BACKEND = keras.backend.backend()
# nothing of it depends on the backend: that whose processes are up first
once = pytest.mark.skipif(BACKEND != "torch", reason="nothing of it depends on the backend")

REPRODUCE = ("-m", "training.reproduce")
#: The command line, or a worker of it, with the small trials and a table of them; it starts workers
#: of this file's kind. Two workers are stand-ins that import nothing: that of the trial named by
#: FAIL, and, with WAIT, one that says which signal came.
PROGRAM = """
import json, os, signal, sys
from training import cli
job = json.loads(sys.argv[2]) if sys.argv[1] == "worker" else None
if job and job["trial"] == os.environ.get("FAIL"):
    cli.guard(lambda: (_ for _ in ()).throw(cli.UserError("no data for this one")))
if job and "WAIT" in os.environ:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    print("going on behind iteration 2", flush=True)
    with open("told", "w") as file:
        file.write(str(signal.sigtimedwait({signal.SIGTERM}, 240).si_signo))
    sys.exit(75)

from tests.training.reproduce import tiny
tiny.install()
from tests.training.reproduce.small_table import tables, worker_command
from training import children
from training.reproduce import __main__ as main, images, trials, worker
images.load = lambda name, folder=None: tiny.images()
trials.TABLES = tables()
children.command = worker_command(sys.argv[0])
if job:
    cli.guard(lambda: worker.work(worker.Job(**job)))
else:
    main.main()
"""


@pytest.fixture
def program(tmp_path):
    """A folder to work in, with the command line that knows small trials."""
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture
def digits(program, monkeypatch, capfd):
    """Return a function that calls the command in this process; its workers are others.
    What all write is returned, too.
    """
    monkeypatch.chdir(program)

    def call(*options: object) -> tuple[int, str, str]:
        capfd.readouterr()
        status = 0
        try:
            main.main(["digits", *map(str, options), "--seeds", "1", "--backend", BACKEND])
        except SystemExit as ended:
            status = ended.code
        return status, *capfd.readouterr()

    with tiny.installed():
        monkeypatch.setattr(trials, "TABLES", small_table.tables())
        monkeypatch.setattr(children, "command", small_table.worker_command("program.py"))
        yield call


def last_error(err: str) -> str:
    return [line for line in err.splitlines() if line.startswith("error: ")][-1]


@once
def test_rows_are_made_once_and_one_that_fails_keeps_no_other_from_being_made(
    program, digits, monkeypatch
):
    monkeypatch.setenv("FAIL", "digits/tiny")  # the first row
    status, out, err = digits("--rows", "tiny", "tiny-dropout", "--processes", 1)
    assert status == 2
    assert "error: no data for this one" in err
    assert last_error(err).startswith("error: 1 of 2 trials failed: digits/tiny.")
    assert out.startswith("2 runs of 2 trials are missing; 0 exist already.\n")
    (file,) = (program / "results").glob("*/*/*.json")
    assert file.parent.name == "tiny-dropout"
    assert [record.trial for record in results.read(program / "results")] == ["digits/tiny-dropout"]
    assert not any((program / "runs").rglob("*.npz"))
    before = file.read_bytes()
    status, out, err = digits("--rows", "tiny-dropout")
    assert (status, out) == (
        0,
        "0 runs of 0 trials are missing; 1 exist already.\nFinished 0 runs in results.\n",
    )
    assert file.read_bytes() == before


@once
def test_time_that_is_over_leaves_what_goes_on(digits):
    status, out, err = digits("--rows", "tiny", "tiny-dropout", "--device-minutes", 1e-9)
    assert status == 0, err
    assert (
        out.splitlines()[-1]
        == "Finished 0 runs in results. 2 are not finished; the same command resumes them."
    )


# A signal to the command when its worker has said that it goes on; a run that never ends by itself.
# What a run does with SIGTERM is tested with the runs.
@once
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_is_passed_on(number, expected, program, tmp_path, monkeypatch):
    if number == signal.SIGTERM:
        monkeypatch.setenv("WAIT", "1")
    else:
        with tiny.installed():
            assert (
                tiny.make(tmp_path / "before", calls=2)(0) is None
            )  # so that a worker says that it goes on from here
        shutil.copytree(tmp_path / "before" / "work", tmp_path / "runs" / "reproduce")
        (program / "program.py").write_text(
            PROGRAM.replace("tiny.install()", "tiny.STEPS = 1_000_000\ntiny.install()", 1)
        )
        change_length(tmp_path / "runs" / "reproduce", 1_000_000)
    process = commands.start(
        "program.py", "digits", "--rows", "tiny", "--seeds", "1", "--processes", "1", cwd=program
    )
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
    if number == signal.SIGTERM:
        assert (tmp_path / "told").read_text() == str(int(number))
        return
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
        (
            ("table1", "--rows", "resnet111"),
            r"Unknown row 'resnet111' of table1\. Choose from: cifar10/resnet110-.*",
        ),
        (
            ("digits", "--seeds", "0"),
            r"--seeds and --processes must be positive\. Received: 0 and 2",
        ),
        (
            ("digits", "--processes", "0"),
            r"--seeds and --processes must be positive\. Received: 5 and 0",
        ),
        (
            ("digits", "--device-minutes", "-1"),
            r"--device-minutes must be positive\. Received: -1\.0",
        ),
        (("digits", "--together", "0"), r"--together must be positive\. Received: 0"),
        (("table9",), r".*'table9'.*"),
        (
            ("speed", "--networks", "resnet21"),
            r"--networks: there is no trial 'resnet21'\. There is: .*resnet20-original.*",
        ),
        (
            ("speed", "--executions", "0"),
            r"--processes, --executions and --limit must be positive\. Received: .*",
        ),
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
    assert names(["table1"], "resnet110-original") == [
        "cifar10/resnet110-original"
    ]  # not those that begin so
    assert names(["table1"], "cifar10/resnet110-original") == ["cifar10/resnet110-original"]
    assert names(["table1"], "ResNet-110, identity (1, 1)") == ["cifar10/resnet110-original"]
    assert len(names(["table1"], "gating")) == 5
    assert (
        names(["table2"], "resnet164-original", "resnet110-original")
        == names(["table2"], "original")[:2]
    )
    assert names(["digits1", "digits2"], "resnet110-original") == [
        "digits/resnet110-original"
    ]  # which is in both
    with pytest.raises(UserError, match="Unknown row 'resnet164-original' of table1"):
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
def test_a_worker_starts_on_its_cores(monkeypatch):
    monkeypatch.setattr(
        children,
        "command",
        lambda *_: [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"],
    )
    usable = os.sched_getaffinity(0)
    for cores in [[core] for core in usable] + [[]]:
        out, _ = workers.start(
            "worker", "", cores, 1, BACKEND, stdout=subprocess.PIPE, text=True
        ).communicate(timeout=60)
        assert out == f"{set(cores) or usable}\n"
        assert os.sched_getaffinity(0) == usable


@once
@pytest.mark.slow
def test_smoke(tmp_path):
    """Every command line as it is, with networks of the tables, two at a time."""
    networks = ("resnet20-original", "resnet32-original")
    options = ("first-paper", "--smoke", "--rows", *networks, "--seeds", 1, "--processes", 2)
    status, out, err = commands.finish(commands.start(*REPRODUCE, *options, cwd=tmp_path))
    assert status == 0, err
    assert out.splitlines()[-1].startswith("Finished 2 runs in ")
    assert not (tmp_path / "results").exists()
    records = results.read(tmp_path / "runs" / "reproduce" / "smoke" / "results")
    assert [(record.trial, record.config["iterations"]) for record in records] == [
        (f"cifar10/{name}", 8) for name in networks
    ]
    assert [record.cost["together"] for record in records] == [2, 2]


#: Behind the command, in its process: the texts of help of those that train nothing.
HELP = """
for command in () if job else ("report", "next"):
    try:
        main.main([command, "--help"])
    except SystemExit as ended:
        print(command, "ended with", ended.code)
"""


@pytest.mark.skipif(BACKEND != "jax", reason="a machine with JAX alone")
def test_without_tensorflow(program):
    """The worker is a process of the command: both find no TensorFlow, scikit-learn or
    matplotlib.
    """
    (program / "program.py").write_text(PROGRAM + HELP)
    options = ("digits", "--smoke", "--rows", "tiny", "--seeds", 1, "--processes", 1)
    done = run_without(TENSORFLOW, program / "program.py", *options, cwd=program, backend="jax")
    assert done.returncode == 0, done.stderr
    (record,) = results.read(program / "runs" / "reproduce" / "smoke" / "results")
    assert record.device["backend"] == "jax"
    assert [line for line in done.stdout.splitlines() if "ended with" in line] == [
        "report ended with 0",
        "next ended with 0",
    ]
