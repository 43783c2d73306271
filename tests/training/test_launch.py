"""The launch recipes: SLURM's script with its programs replaced, and real processes."""

import importlib.util
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_preact.distribution import environment
from tests.keras_preact.distribution.processes import addresses
from tests.training.calls import (
    ROOT,
    TINY,
    assert_same_weights,
    finish,
    run_train,
    start,
    weights,
)
from training.directory import histories

LAUNCH = ROOT / "training" / "launch"
VARIABLES = (environment.ADDRESSES, environment.PROCESSES, environment.PROCESS)
PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}


def job(monkeypatch, variables: dict[str, str]) -> environment.Job | None:
    """Return the library's job for the environment of a process."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        if name in variables:
            monkeypatch.setenv(name, variables[name])
    return environment.job()


def words(path: Path) -> list[str]:
    return path.read_text().split("\0")[:-1]


# Writes the environment and the arguments of each process, and exits with STATUS.
PYTHON = """
env -0 > "$SEEN/env$SLURM_PROCID"
printf '%s\\0' "$@" > "$SEEN/arguments$SLURM_PROCID"
[ "${HOLD:-}" ] && until [ -e "$SEEN/go" ]; do sleep 0.05; done
exit "${STATUS:-0}"
"""
# Starts --ntasks processes at once, and ends with the highest status, as srun does.
SRUN = """
while [[ $1 == --* ]]; do
  echo "$1" >> "$SEEN/srun"
  [[ $1 == --ntasks=* ]] && tasks=${1#--ntasks=}
  shift
done
for ((i = 0; i < tasks; i++)); do
  SLURM_PROCID=$i SLURM_LOCALID=$((i % SLURM_NTASKS_PER_NODE)) "$@" &
  pids[i]=$!
done
highest=0
for pid in "${pids[@]}"; do
  wait "$pid"
  status=$?
  ((status > highest)) && highest=$status
done
exit "$highest"
"""
SCONTROL = """
case "$1 $2" in
  "show hostnames") printf '%s\\n' ${3/,/ } ;;
  *) echo "$*" >> "$SEEN/scontrol" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path):
    """Return a function that starts the script with SLURM's programs and variables in
    two processes.
    """
    programs, seen = tmp_path / "bin", tmp_path / "seen"
    programs.mkdir()
    seen.mkdir()
    for name, text in {"trainer": PYTHON, "srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}")
        (programs / name).chmod(0o755)
    allocation = {
        "SLURM_JOB_ID": "4001",
        "SLURM_JOB_NODELIST": "node3,node7",
        "SLURM_NTASKS_PER_NODE": "1",
    }

    def start(*arguments: str, **variables: str) -> tuple[subprocess.Popen, Path]:
        path = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": "trainer", "SEEN": str(seen)}
        unset = {*VARIABLES, "KERAS_BACKEND"}
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        command = ["bash", LAUNCH / "slurm.sbatch", *arguments]
        return subprocess.Popen(command, env=kept | path | allocation | variables, **PIPES), seen

    return start


@pytest.mark.parametrize(
    ("nodes", "tasks", "addresses"),
    [
        ("node3,node7", "1", ("node3:61441", "node7:61441")),
        ("node3", "2", ("node3:61441", "node3:61442")),
    ],
)
def test_slurm_tells_each_process_its_place(slurm, monkeypatch, received, nodes, tasks, addresses):
    variables = {"SLURM_JOB_NODELIST": nodes, "SLURM_NTASKS_PER_NODE": tasks}
    process, seen = slurm("digits", "--output", "/shared/a run", **variables)
    assert finish(process)[0] == 0
    for i in range(2):
        found = dict(line.split("=", 1) for line in words(seen / f"env{i}"))
        assert job(monkeypatch, found) == environment.Job(addresses, 2, i)
        assert found["KERAS_BACKEND"] == "jax"
        # JAX's own detection needs it, and would use one of the GPUs that the process sees
        assert "SLURM_LOCALID" not in found
        config = received(*words(seen / f"arguments{i}")[3:])
        assert (config.distribution, config.resume) == ("multi_worker", True)
        assert config.output == Path("/shared/a run")
    assert not (seen / "env2").exists()


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [(2, 0, False), (75, 99, True), (134, 9, True), (134, 10, False)],
)
def test_slurm_requeues_runs_that_can_resume(slurm, status, restarts, requeued):
    process, seen = slurm("digits", STATUS=str(status), SLURM_RESTART_COUNT=str(restarts))
    assert finish(process)[0] == status
    assert (seen / "scontrol").exists() == requeued
    if requeued:
        assert (seen / "scontrol").read_text() == "requeue 4001\n"


def test_slurm_script_waits_for_the_processes_when_it_is_signalled_too(slurm):
    process, seen = slurm("digits", STATUS="75", HOLD="1")
    while not all((seen / f"arguments{i}").exists() for i in range(2)):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    (seen / "go").touch()
    assert finish(process)[0] == 75
    assert (seen / "scontrol").read_text() == "requeue 4001\n"


needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or keras.backend.backend() != "torch",
    reason="needs Ray (pip install 'ray[train]') and torch, whose processes miss a dead peer first",
)

#: Starts its own Ray on this machine.
DRIVER = """
import sys
import ray
from training.launch import ray_train
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=sys.argv[1])
ray_train.main(sys.argv[2:])
"""

#: Two epochs; the second is not complete.
OPTIONS = (*TINY, "--schedule.length", "30", "--checkpoint.every", "10", "--health", "0")


@needs_ray
@pytest.mark.backend
@pytest.mark.soak
def test_ray_trains_one_model(tmp_path):
    """Each process has half of every batch. Losses and weights equal those of one process."""
    run, alone = tmp_path / "run", run_train(tmp_path / "alone", *OPTIONS)
    # short: the names of sockets have no room for more
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as name:
        arguments = (name, "--output", run, "--", "digits", *OPTIONS)
        status, out, err = finish(start("-c", DRIVER, *arguments, cwd=tmp_path), timeout=280)
        assert status == 0, err
    assert ", 2 devices)" in out
    ours, theirs = (histories.read(path / "history.csv")["loss"] for path in (run, alone))
    np.testing.assert_allclose(ours, theirs, rtol=5e-3)
    ours, theirs = (
        np.concatenate([np.ravel(each) for each in weights(path / "model.keras").values()])
        for path in (run, alone)
    )
    assert np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(theirs)


#: Trains; with a first argument of 1, the process gets SIGTERM while it computes step 6.
PREEMPTED = """
import signal, sys
from training.commands import train
from training.run import fit, signals

class Stop(signals.Stop):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 6:
            signal.raise_signal(signal.SIGTERM)

if sys.argv[1] == "1":
    fit.Stop = Stop
train.main(sys.argv[2:])
"""


def together(folder: Path, preempted: bool, *arguments: str) -> list[tuple[int, str, str]]:
    """Train in two processes; the second may get SIGTERM. Return how both ended."""
    where, started = addresses(2), []
    for i in range(2):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in zip(VARIABLES, (where, "2", str(i)), strict=True):
                patch.setenv(name, value)
            first = str(int(preempted and i == 1))
            command = (first, "digits", *OPTIONS, "--distribution", "multi_worker", *arguments)
            started.append(start("-c", PREEMPTED, *command, cwd=folder))
    try:
        return [finish(process) for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.mark.backend
@pytest.mark.soak
def test_a_signal_to_one_process_ends_all_after_the_same_step(tmp_path):
    for ended in together(tmp_path, False, "--output", "whole"):
        assert ended[0] == 0, ended
    ends = together(tmp_path, True, "--output", "run")
    assert [ended[0] for ended in ends] == [75, 75], ends
    assert "Stopped by SIGTERM after iteration 7 of 30; the checkpoint is saved." in ends[0][1]
    assert "Stopp" not in ends[1][1]
    ends = together(tmp_path, False, "--output", "run", "--resume")
    assert [ended[0] for ended in ends] == [0, 0], ends
    assert "Resuming after iteration 7." in ends[0][1]
    assert_same_weights(*(tmp_path / name / "model.keras" for name in ("run", "whole")))
