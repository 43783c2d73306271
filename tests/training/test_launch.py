"""The launch recipes: SLURM's script with its programs replaced, the manifests, and
real processes started by Ray.
"""

import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import yaml

from keras_preact.distribution import environment
from tests.keras_preact.distribution.processes import addresses
from tests.training.commands import ROOT, TINY, finish, run_train, start
from training import histories, train

LAUNCH = ROOT / "training" / "launch"
VARIABLES = (environment.ADDRESSES, environment.PROCESSES, environment.PROCESS)
PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
PIPES |= {"text": True}


def configuration(monkeypatch, arguments: list[str]):
    """Return the configuration of a command line, for whose options there must be a
    meaning.
    """
    configs = []
    monkeypatch.setattr(train, "train", lambda config, recipe: configs.append(config))
    train.main(arguments)
    [config] = configs
    return config


def job(monkeypatch, variables: dict[str, str]) -> environment.Job | None:
    """Return what the library makes of a process's environment."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        if name in variables:
            monkeypatch.setenv(name, variables[name])
    return environment.job()


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)


def words(path: Path) -> list[str]:
    return path.read_text().split("\0")[:-1]


# The environment and the arguments of each process, and the status it shall end with.
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
        program(programs / name, text)
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
    ("variables", "addresses"),
    [
        ({}, ["node3:61441", "node7:61441"]),
        (
            {"SLURM_JOB_NODELIST": "node3", "SLURM_NTASKS_PER_NODE": "2"},
            ["node3:61441", "node3:61442"],
        ),
        ({"SLURM_JOB_ID": "3999"}, ["node3:65439", "node7:65439"]),
    ],
)
def test_slurm_tells_each_process_its_place(slurm, monkeypatch, variables, addresses):
    process, seen = slurm("digits", "--output", "/shared/a run", **variables)
    assert finish(process) == (0, "", "")
    for i in range(2):
        found = dict(line.split("=", 1) for line in words(seen / f"env{i}"))
        assert job(monkeypatch, found) == environment.Job(tuple(addresses), 2, i)
        assert found["KERAS_BACKEND"] == "jax"
        # JAX's own detection, which would take one GPU of those that the process sees, needs it
        assert "SLURM_LOCALID" not in found
        module, command, *arguments = words(seen / f"arguments{i}")[1:]
        assert (module, command) == ("training", "train")
        config = configuration(monkeypatch, arguments)
        assert (config.distribution, config.resume, config.output) == (
            "multi_worker",
            True,
            Path("/shared/a run"),
        )
    assert not (seen / "env2").exists()
    assert not (seen / "scontrol").exists()


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [(0, 0, False), (2, 0, False), (75, 0, True), (75, 99, True), (134, 9, True), (134, 10, False)],
)
def test_slurm_requeues_what_can_go_on(slurm, status, restarts, requeued):
    process, seen = slurm("digits", STATUS=str(status), SLURM_RESTART_COUNT=str(restarts))
    assert finish(process) == (status, "", "")
    assert (seen / "scontrol").exists() == requeued
    if requeued:
        assert (seen / "scontrol").read_text() == "requeue 4001\n"


def test_slurm_script_waits_for_the_processes_when_it_is_signalled_too(slurm):
    process, seen = slurm("digits", STATUS="75", HOLD="1")
    while not all((seen / f"arguments{i}").exists() for i in range(2)):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None
    (seen / "go").touch()
    assert finish(process)[0] == 75
    assert (seen / "scontrol").read_text() == "requeue 4001\n"


def test_slurm_options():
    text = (LAUNCH / "slurm.sbatch").read_text()
    options = re.findall(r"^#SBATCH --([^\s=]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert len(options) == text.count("\n#SBATCH")
    # no options behind the first command: sbatch does not read them
    assert "#SBATCH" not in text.split("\nset -u\n")[1]
    assert (
        dict(options).items()
        >= {"requeue": "", "signal": "TERM@120", "distribution": "block"}.items()
    )


def manifests() -> dict[str, dict]:
    """Return the manifests by kind."""
    texts = [(LAUNCH / f"{name}.yaml").read_text() for name in ("jobset", "kubeflow")]
    documents = [document for text in texts for document in yaml.safe_load_all(text)]
    return {document["kind"]: document for document in documents}


def job_sets() -> dict[str, dict]:
    """Return both specifications of a JobSet."""
    found = manifests()
    return {
        "JobSet": found["JobSet"]["spec"],
        "TrainingRuntime": found["TrainingRuntime"]["spec"]["template"]["spec"],
    }


def action(job_set: dict, status: int | None, condition: str | None = None) -> str:
    """Return what JobSet does when a pod fails, from the rules of both, with the
    messages that Kubernetes writes.
    """
    [replicated] = job_set["replicatedJobs"]
    job = replicated["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    assert job["backoffLimit"] == 0
    for i, rule in enumerate(job["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        if (
            codes
            and codes["containerName"] == container["name"]
            and codes["operator"] == "In"
            and status in codes["values"]
        ):
            message = f"Container train for pod ns/name failed with exit code {status} matching"
            message += f" FailJob rule at index {i}"
        elif any(entry == {"type": condition, "status": "True"} for entry in conditions):
            message = f"Pod ns/name has condition {condition} matching FailJob rule at index {i}"
        else:
            continue
        reason = "PodFailurePolicy"
        break
    for rule in job_set["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"] and any(
            re.search(p, message) for p in rule["onJobFailureMessagePatterns"]
        ):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize("kind", ["JobSet", "TrainingRuntime"])
def test_kubernetes_restarts_what_can_go_on(kind):
    job_set = job_sets()[kind]
    assert action(job_set, 2) == "FailJobSet"
    assert action(job_set, 75) == "RestartJobSetAndIgnoreMaxRestarts"
    assert action(job_set, 137, "DisruptionTarget") == "RestartJobSetAndIgnoreMaxRestarts"
    for status in (1, 27, 134, 137, 139):
        assert action(job_set, status) == "RestartJobSet"
    assert job_set["failurePolicy"]["maxRestarts"] == 10
    # recreated pods must not meet those before them in the run directory
    assert job_set["failurePolicy"]["restartStrategy"] == "BlockingRecreate"


@pytest.mark.parametrize("kind", ["JobSet", "TrainingRuntime"])
def test_kubernetes_pods_share_the_run_directory(kind, monkeypatch):
    [replicated] = job_sets()[kind]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # which podFailurePolicy asks for
    assert pod["terminationGracePeriodSeconds"] == 120
    [container] = pod["containers"]
    [volume], [mount] = pod["volumes"], container["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert "persistentVolumeClaim" in volume
    arguments = container.get("args") or manifests()["TrainJob"]["spec"]["trainer"]["args"]
    config = configuration(monkeypatch, arguments)
    assert config.output.is_relative_to(mount["mountPath"])
    assert config.data.dir.is_relative_to(mount["mountPath"])


def test_jobset_environment(monkeypatch):
    manifest = manifests()["JobSet"]
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    [replicated] = manifest["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    spec = replicated["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    entries = {entry["name"]: entry for entry in container["env"]}
    index = entries.pop(environment.PROCESS)["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    values = {name: entry["value"] for name, entry in entries.items()}

    processes = spec["completions"]
    assert spec["parallelism"] == processes
    assert spec["completionMode"] == "Indexed"
    # JobSet's names of pods: JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN, the subdomain the JobSet's
    # name
    assert manifest["spec"]["network"] == {"enableDNSHostnames": True}
    name = manifest["metadata"]["name"]
    [port] = container["ports"]
    addresses = [
        f"{name}-{replicated['name']}-0-{i}.{name}:{port['containerPort']}"
        for i in range(processes)
    ]
    for i in range(processes):
        found = job(monkeypatch, values | {environment.PROCESS: str(i)})
        assert found == environment.Job(tuple(addresses), processes, i)

    assert container["command"] == ["keras-preact", "train"]
    config = configuration(monkeypatch, container["args"])
    assert (config.distribution, config.resume) == ("multi_worker", True)


def test_kubeflow_environment(tmp_path, monkeypatch):
    runtime, train_job = manifests()["TrainingRuntime"], manifests()["TrainJob"]
    assert runtime["apiVersion"] == train_job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert train_job["spec"]["runtimeRef"] == {
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    # what Trainer looks for: the policy, the label, the names
    assert runtime["spec"]["mlPolicy"]["jax"] == {}
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    [container] = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert replicated["name"] == container["name"] == "node"

    program(tmp_path / "keras-preact", PYTHON)
    trainer = train_job["spec"]["trainer"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    given |= {
        "JAX_COORDINATOR_ADDRESS": "preact-node-0-0.preact:29500",
        "JAX_NUM_PROCESSES": str(trainer["numNodes"]),
    }
    given |= {"JAX_PROCESS_ID": "1", "SLURM_PROCID": "1", "SEEN": str(tmp_path)}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([*container["command"], *trainer["args"]], env=given | path, check=True)

    found = dict(line.split("=", 1) for line in words(tmp_path / "env1"))
    assert found["KERAS_BACKEND"] == "jax"
    assert job(monkeypatch, found) == environment.Job(("preact-node-0-0.preact:29500",), 2, 1)
    command, *arguments = words(tmp_path / "arguments1")
    assert command == "train"
    config = configuration(monkeypatch, arguments)
    assert (config.distribution, config.resume) == ("multi_worker", True)


needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or keras.backend.backend() != "torch",
    reason="needs Ray (pip install 'ray[train]') and torch, whose processes miss a dead peer first",
)

#: A Ray of its own, on this machine alone, for several command lines. Every call in a worker leaves
#: a line with its recipe; one process is killed, once, behind its first checkpoint.
DRIVER = """
import json, os, signal, sys, threading, time, traceback
from pathlib import Path

import ray

from training.launch import ray_train

folder, run = map(Path, sys.argv[1:3])
in_worker = ray_train.train_in_worker


def killed_once(config):
    def kill():
        while len(list(run.glob("checkpoints/state-*.npz"))) < 2:
            time.sleep(0.002)
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    with (folder / "calls").open("a") as file:
        file.write(config["argv"][0] + "\\n")
    second = os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] == "1"
    if second and not (folder / "killed").exists():
        threading.Thread(target=kill, daemon=True).start()
    return in_worker(config)


ray_train.train_in_worker = killed_once
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=str(folder))
statuses = []
for arguments in map(json.loads, sys.argv[3:]):
    try:
        ray_train.main(arguments)
        statuses.append(0)
    except SystemExit as ended:
        statuses.append(ended.code)
    except Exception:
        traceback.print_exc()
        statuses.append(None)
ray.shutdown()
(folder / "statuses").write_text(json.dumps(statuses))
"""

#: Two epochs, a part of the second missing.
OPTIONS = (*TINY, "--schedule.length", "30", "--checkpoint.every", "10", "--health", "0")


@dataclasses.dataclass
class ByRay:
    """What a mistake and a training leave, one behind the other, in one Ray.

    Args:
        statuses: Of both.
        calls: The recipe of every call in a worker.
        killed: Whether a worker was killed.
        runs: The run directories of both.
        said: What all processes wrote to stdout, and with stderr.
    """

    statuses: list[int | None]
    calls: list[str]
    killed: bool
    runs: tuple[Path, Path]
    said: tuple[str, str]


@pytest.fixture(scope="module")
def by_ray(tmp_path_factory):
    """Both, by DRIVER; what is left of Ray is removed."""
    runs = mistaken, run = [tmp_path_factory.mktemp("ray") / name for name in ("mistaken", "run")]
    # nothing but what the tests look at: no process that waits for work of another environment
    switches = ("USAGE_STATS_ENABLED", "TRAIN_METRICS_ENABLED", "prestart_worker_first_driver")
    switches += ("ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",)
    quiet = {f"RAY_{name}": "0" for name in switches}
    unset = ("RAY_", "KERAS_DISTRIBUTION")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    variables = quiet | {"KERAS_BACKEND": keras.backend.backend()}
    variables |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    mistake = ["--workers", "1", "--output", str(mistaken), "--", "digit", *TINY]
    training = ["--output", str(run), "--", "digits", *OPTIONS]
    # short: the names of sockets have no room for more
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        arguments = [name, str(run), json.dumps(mistake), json.dumps(training)]
        command = [sys.executable, "-c", DRIVER, *arguments]
        driver = subprocess.Popen(command, cwd=name, env=kept | variables, **PIPES)
        status, out, err = finish(driver, timeout=400)
        assert status == 0, err
        statuses = json.loads((folder / "statuses").read_text())
        calls = (folder / "calls").read_text().split()
        return ByRay(statuses, calls, (folder / "killed").exists(), tuple(runs), (out, out + err))


def all_weights(path: Path) -> np.ndarray:
    return np.concatenate(
        [np.ravel(weight) for weight in keras.saving.load_model(path, compile=False).get_weights()]
    )


@needs_ray
@pytest.mark.soak
def test_ray_trains_one_model_and_goes_on_when_a_process_is_killed(tmp_path, by_ray):
    out, everything = by_ray.said
    assert by_ray.statuses[1] == 0, everything
    assert by_ray.killed
    assert by_ray.calls.count("digits") == 4  # in two processes, twice
    assert out.count(", 2 devices)") == 2, out
    assert out.count("Resuming after iteration 10.") == 1, out

    # Each has half of every batch: one model's losses and weights are those of a single process.
    # Those of two models, which see no more than their half, are several times as far off as is
    # allowed.
    run, alone = by_ray.runs[1], run_train(tmp_path / "alone", *OPTIONS)
    ours, theirs = (histories.read(path / "history.csv")["loss"] for path in (run, alone))
    np.testing.assert_allclose(ours, theirs, rtol=5e-3)
    ours, theirs = (all_weights(path / "model.keras") for path in (run, alone))
    assert np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(theirs)
    assert {path.name for path in run.iterdir()} == {path.name for path in alone.iterdir()}


@needs_ray
@pytest.mark.soak
def test_ray_does_not_repeat_a_mistake(by_ray):
    _, everything = by_ray.said
    assert by_ray.statuses[0] == 2, everything
    assert "Unknown recipe: 'digit'" in everything
    assert by_ray.calls.count("digit") == 1
    assert not by_ray.runs[0].exists()


#: Trains; with a first argument of 1, the process gets SIGTERM while it computes step 6.
PREEMPTED = """
import signal, sys
from training import fit, signals, train

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
    where = addresses(2)
    started = []
    for i in range(2):
        values = (where, "2", str(i))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in zip(VARIABLES, values, strict=True):
                patch.setenv(name, value)
            first = str(int(preempted and i == 1))
            command = (first, "digits", *OPTIONS, "--distribution", "multi_worker", *arguments)
            started.append(start("-c", PREEMPTED, *command, cwd=folder))
    try:
        return [finish(process) for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.mark.soak
def test_a_signal_to_one_process_ends_all_after_the_same_step(tmp_path):
    for ended in together(tmp_path, False, "--output", "whole"):
        assert ended[0] == 0, ended
    ends = together(tmp_path, True, "--output", "run")
    assert [ended[0] for ended in ends] == [75, 75], ends
    assert "Stopped by SIGTERM after iteration 7 of 30; the checkpoint is saved." in ends[0][1]
    assert "Stopp" not in ends[1][1]
    assert max((tmp_path / "run" / "checkpoints").glob("state-*")).name.startswith(
        "state-000000007"
    )
    ends = together(tmp_path, False, "--output", "run", "--resume")
    assert [ended[0] for ended in ends] == [0, 0], ends
    assert "Resuming after iteration 7." in ends[0][1]
    run, whole = (all_weights(tmp_path / name / "model.keras") for name in ("run", "whole"))
    np.testing.assert_array_equal(run, whole)
