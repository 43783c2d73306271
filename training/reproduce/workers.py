"""Trains trials in processes of their own, some at a time: what one compiles is gone
when it ends, and so is its memory.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .. import children
from ..cli import UserError
from .worker import Job


def backend(choice: str) -> str:
    """Return the backend that a choice means; auto: that of the environment, else JAX
    where it is installed.
    """
    if choice != "auto":
        return choice
    return os.environ.get("KERAS_BACKEND") or (
        "jax" if importlib.util.find_spec("jax") else "tensorflow"
    )


def cores(processes: int) -> list[list[int]]:
    """Return, for each of so many processes, the cores that it gets; none in particular
    where there are too few.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if processes == 1 or processes > len(usable):
        return [[] for _ in range(processes)]
    return [usable[i::processes] for i in range(processes)]


def train(jobs: Sequence[Job], processes: int, keras_backend: str) -> None:
    """Do the jobs, so many at a time.

    A job that fails does not keep the others from being done. An interruption, or
    SIGTERM, is passed on to the workers, which save their state; then this process ends
    as they do. What a job leaves when its time is over is not begun.

    Raises:
        UserError: if some have failed; their messages are on stderr.
    """
    places = cores(processes)
    free = list(range(processes))
    lock = threading.Lock()
    asked: list[int] = []
    running: set[subprocess.Popen] = set()
    failed: list[str] = []

    def do(job: Job) -> None:
        with lock:
            if asked or (job.until is not None and time.time() >= job.until):
                return
            place = free.pop()
            worker = start(
                "worker",
                json.dumps(dataclasses.asdict(job)),
                places[place],
                processes,
                keras_backend,
            )
            running.add(worker)
        if asked:  # while it was being started
            worker.send_signal(asked[0])
        status = worker.wait()
        with lock:
            running.discard(worker)
            free.append(place)
            if status and not asked:
                failed.append(job.trial)

    with _passed_on(running, asked), ThreadPoolExecutor(processes) as pool:
        list(pool.map(do, jobs))
    if asked:
        from ..signals import PREEMPTED

        if asked[0] == signal.SIGTERM:
            sys.exit(PREEMPTED)
        raise KeyboardInterrupt
    if failed:
        raise UserError(
            f"{len(failed)} of {len(jobs)} trials failed: {', '.join(failed)}. What they said is "
            "above."
        )


def start(
    module: str,
    argument: str,
    cores: Sequence[int],
    processes: int,
    keras_backend: str,
    **options: Any,
) -> subprocess.Popen:
    """Start a module of this package in a process of its own.

    Args:
        module: Its name.
        argument: On its command line.
        cores: Of the processor, that it computes on; none for all.
        processes: How many share the accelerator.
        keras_backend: Its KERAS_BACKEND.
        **options: Of `subprocess.Popen`.
    """
    own = children.environment(keras_backend) | (
        {"OMP_NUM_THREADS": str(len(cores))} if cores else {}
    )
    own.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / processes:.3f}")
    command = children.command(f"{__package__}.{module}", argument)
    with _on(cores):
        # a group of its own: Ctrl-C reaches it through this process alone, once
        return subprocess.Popen(command, env=own, start_new_session=True, **options)


@contextlib.contextmanager
def _on(cores: Sequence[int]) -> Iterator[None]:
    """Put this thread on some cores: what it starts is there before a backend counts
    them.
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def read_line(process: subprocess.Popen, until: float) -> str:
    """Return the next line that a process writes, empty where it has ended.

    Raises:
        TimeoutError: if there is none when the clock is past `until`.
    """
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
    if not ready:
        raise TimeoutError
    return process.stdout.readline()


@contextlib.contextmanager
def _passed_on(running: set[subprocess.Popen], asked: list[int]) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the workers; `asked` holds those that came."""

    def tell(number: int, _frame) -> None:
        asked.append(number)
        for worker in list(running):
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
