"""Starts the processes of a test, with virtual devices and free ports, and collects
what they found.
"""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import keras

TASKS = Path(__file__).with_name("tasks.py")
ROOT = Path(__file__).parents[3]
OURS = ("KERAS_DISTRIBUTION_", "TF_CONFIG", "RANK", "WORLD_SIZE", "MASTER_")


def environment(devices: int = 1) -> dict[str, str]:
    """That of this process without launchers' variables."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    count = f"--xla_force_host_platform_device_count={devices}"
    return kept | {
        "KERAS_BACKEND": keras.backend.backend(),
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"{kept.get('XLA_FLAGS', '')} {count}",
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_PLATFORMS": "cpu",
    }


def addresses(count: int) -> str:
    """`host:port` of free ports."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    found = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)
    for each in sockets:
        each.close()
    return found


def keras_variables(count: int) -> list[dict[str, str]]:
    """What Keras' variables are in each of `count` processes."""
    where = addresses(count)
    names = [
        f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
    ]
    return [dict(zip(names, (where, str(count), str(i)), strict=True)) for i in range(count)]


def run(
    kind: str, tasks: list, devices: int = 1, variables: list[dict[str, str]] | None = None
) -> list[list]:
    """Return the results of each process, of which there is one for each of
    `variables`.
    """
    case = json.dumps({"kind": kind, "devices": devices, "tasks": tasks})
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(len(variables or [{}]))]
        running = [
            subprocess.Popen(
                [sys.executable, TASKS, case, file],
                env=environment(devices) | own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for file, own in zip(files, variables or [{}], strict=True)
        ]
        try:
            ends = [process.communicate(timeout=600) for process in running]
        finally:
            for process in running:
                process.kill()
        for process, (_, errors) in zip(running, ends, strict=True):
            assert process.returncode == 0, errors[-5000:]
        return [json.loads(file.read_text()) for file in files]


@functools.cache
def _once(kind: str, tasks: str, devices: int, count: int) -> list[list] | str:
    try:
        return run(kind, json.loads(tasks), devices, keras_variables(count) if count > 1 else None)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return str(error)


def once(kind: str, tasks: str, devices: int, count: int) -> list[list]:
    """`run` for `tasks` as JSON, by `count` processes that Keras' variables bring
    together; once in a test run.
    """
    found = _once(kind, tasks, devices, count)
    assert not isinstance(found, str), found
    return found
