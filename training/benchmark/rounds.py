"""Runs the children: every candidate once a round, one after another, each in a process of its own with a limit."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..cli import UserError
from .candidates import Candidate
from .child import Job

_ROOT = Path(__file__).parents[2]

#: A child's exit status when it was stopped at its limit, as `timeout` has it.
_STOPPED = 124


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a child came to.

    Args:
        round: From 1.
        label: Of its candidate.
        seconds: The life of the process, with its imports.
        result: What it measured, None where it did not end well.
        problem: Why not, such as `over 300 s`.
    """

    round: int
    label: str
    seconds: float
    result: dict | None = None
    problem: str | None = None


def run(
    jobs: Sequence[tuple[Candidate, Job]], rounds: int, limit: float, progress: Callable[[Outcome], None]
) -> list[Outcome]:
    """Measure A B C, A B C, ... in order; a candidate that fails or is stopped is left out of later rounds.

    Raises:
        UserError: if a child says that what it was given is wrong.
    """
    outcomes: list[Outcome] = []
    given_up: set[str] = set()
    for number in range(1, rounds + 1):
        for candidate, job in jobs:
            if candidate.label in given_up:
                continue
            start = time.perf_counter()
            status, out, err = _child(candidate.backend, job, limit)
            seconds = time.perf_counter() - start
            if status == 2:
                raise UserError(f"{candidate.label}: {_last_line(err).removeprefix('error: ')}")
            if status == 0:
                outcome = Outcome(number, candidate.label, seconds, result=json.loads(out.splitlines()[-1]))
            else:
                given_up.add(candidate.label)
                outcome = Outcome(number, candidate.label, seconds, problem=_problem(status, err, limit))
            outcomes.append(outcome)
            progress(outcome)
    return outcomes


def _child(backend: str, job: Job, limit: float) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr of a child; it and what it started are killed at the limit."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.child", json.dumps(dataclasses.asdict(job))],
        env=os.environ | {"KERAS_BACKEND": backend, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _kill(process)
        return _STOPPED, "", ""
    except BaseException:
        _kill(process)
        raise
    return process.returncode, out, err


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _problem(status: int, err: str, limit: float) -> str:
    if status == _STOPPED:
        return f"over {limit:g} s"
    if status < 0:
        name = signal.Signals(-status).name
        return f"ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
    return f"failed: {_last_line(err)}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"
