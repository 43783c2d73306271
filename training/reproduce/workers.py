"""Train trials in processes of their own, some at a time: when one ends, its memory and
what it compiled are free.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import children
from ..cli import UserError
from ..signals import PREEMPTED
from .run import Job


def backend(choice: str) -> str:
    """Return the backend that a choice means; auto: that of the environment, or JAX if
    it is installed.
    """
    if choice != "auto":
        return choice
    return os.environ.get("KERAS_BACKEND") or (
        "jax" if importlib.util.find_spec("jax") else "tensorflow"
    )


def cores(processes: int) -> list[list[int]]:
    """Return the cores of each process; empty lists if there are too few to share."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if processes == 1 or processes > len(usable):
        return [[] for _ in range(processes)]
    return [usable[i::processes] for i in range(processes)]


class Workers:
    """The processes that train, and how they are stopped.

    SIGINT and SIGTERM are passed on to them, and they get SIGTERM at the deadline. Each
    saves a checkpoint and ends.

    Args:
        processes: Processes at the same time.
        keras_backend: Their backend.
        minutes: Minutes until the deadline. None: no deadline.
    """

    def __init__(self, processes: int, keras_backend: str, minutes: float | None = None):
        self.processes = processes
        self.backend = keras_backend
        self.until = None if minutes is None else time.monotonic() + 60 * minutes
        self._free = cores(processes)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen] = set()
        self._signal: int | None = None

    def train(self, jobs: Sequence[Job]) -> None:
        """Do the jobs. One that fails does not stop the others.

        Raises:
            UserError: if jobs failed; their messages are on stderr.
            KeyboardInterrupt: after SIGINT, when all have saved their state.
            SystemExit: with status 75 after SIGTERM.
        """
        with self._passing_on(), ThreadPoolExecutor(self.processes) as pool:
            statuses = list(pool.map(self._do, jobs))
        if self._signal == signal.SIGTERM:
            sys.exit(PREEMPTED)
        if self._signal is not None:
            raise KeyboardInterrupt
        failed = [
            job.trial
            for job, status in zip(jobs, statuses, strict=True)
            if status not in (0, PREEMPTED)
        ]
        if failed:
            raise UserError(
                f"{len(failed)} of {len(jobs)} trials failed: {', '.join(failed)}. Their messages "
                "are above."
            )

    def _do(self, job: Job) -> int:
        """Return the exit status of a job: 75 if it was stopped, or not begun."""
        with self._lock:
            if self._signal is not None or self._left() == 0:
                return PREEMPTED
            mine = self._free.pop()
            process = children.start(
                f"{__package__}.run",
                json.dumps(dataclasses.asdict(job)),
                self.backend,
                mine,
                {
                    "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / self.processes:.3f}",
                    # the runs of a trial compile the same functions
                    "JAX_COMPILATION_CACHE_DIR": str(Path(job.work) / "compiled"),
                },
            )
            self._running.add(process)
        try:
            status = process.wait(self._left())
        except subprocess.TimeoutExpired:
            process.terminate()
            status = process.wait()
        with self._lock:
            self._running.discard(process)
            self._free.append(mine)
        # a process that was stopped before it could set its handlers ends by the signal
        return PREEMPTED if status == -signal.SIGTERM else status

    def _left(self) -> float | None:
        return None if self.until is None else max(0.0, self.until - time.monotonic())

    @contextlib.contextmanager
    def _passing_on(self) -> Iterator[None]:
        def pass_on(number: int, _frame) -> None:
            self._signal = number
            for process in list(self._running):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
