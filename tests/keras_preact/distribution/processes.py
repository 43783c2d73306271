"""Starts the processes of a test, with virtual devices and free ports, and collects
what they found.
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras

TASKS = Path(__file__).with_name("tasks.py")
ROOT = Path(__file__).parents[3]
OURS = ("KERAS_DISTRIBUTION_", "TF_CONFIG", "RANK", "WORLD_SIZE", "MASTER_")
PATIENCE = 300.0
#: What processes say that another program has stopped: it took a port that was free a moment
#: ago, or the cores for longer than TensorFlow waits for a sign of life.
DISTURBED = (
    *("address already in use", "failed to bind", "could not bind", "eaddrinuse"),
    "heartbeat timeout",
)


def environment(devices: int, addresses: str, count: int, process: int) -> dict[str, str]:
    """That of this process without launchers' variables, and with Keras' own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    virtual = f"--xla_force_host_platform_device_count={devices}"
    job = {"JOB_ADDRESSES": addresses, "NUM_PROCESSES": str(count), "PROCESS_ID": str(process)}
    return (
        kept
        | {f"KERAS_DISTRIBUTION_{name}": value for name, value in job.items() if count > 1}
        | {
            "KERAS_BACKEND": keras.backend.backend(),
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": f"{kept.get('XLA_FLAGS', '')} {virtual}",
            "CUDA_VISIBLE_DEVICES": "-1",
            "JAX_PLATFORMS": "cpu",
        }
    )


def addresses(count: int) -> str:
    """`host:port` of free ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)


def attempt(case: str, devices: int, files: list[Path]) -> str:
    """Run a process for each file of results; return what those that failed have said."""
    where = addresses(len(files))
    with contextlib.ExitStack() as stack:
        running = []
        for i, file in enumerate(files):
            errors = stack.enter_context(file.with_suffix(".errors").open("w"))
            running.append(
                subprocess.Popen(
                    [sys.executable, TASKS, case, file],
                    env=environment(devices, where, len(files), i),
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                )
            )
        end = time.monotonic() + PATIENCE
        while any(process.poll() is None for process in running) and time.monotonic() < end:
            if any(process.returncode for process in running):
                break  # the others would wait for it
            time.sleep(0.05)
        for process in running:
            process.kill()
            process.wait()
    failed = [
        file.with_suffix(".errors")
        for file, process in zip(files, running, strict=True)
        if process.returncode
    ]
    return "\n".join(file.read_text() or "killed" for file in failed)


@functools.cache
def _run(tasks: str, devices: int, count: int) -> list[dict[str, list]] | str:
    case = json.dumps({"devices": devices, "tasks": json.loads(tasks)})
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(count)]
        errors = attempt(case, devices, files)
        if any(words in errors.lower() for words in DISTURBED):
            errors = attempt(case, devices, files)
        return errors or [json.loads(file.read_text()) for file in files]


def run(tasks: str, devices: int, count: int) -> list[dict[str, list]]:
    """Return the results of `count` processes for `tasks`, the ones of each kind in JSON.
    They run once.
    """
    found = _run(tasks, devices, count)
    assert not isinstance(found, str), found[-5000:]
    return found
