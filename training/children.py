"""Processes of their own: a module of this package that is told what to do in JSON, and
answers in JSON on its stdout.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import cli

#: Exit status of a child that was stopped at its limit, as `timeout` has it.
STOPPED = 124

_ROOT = Path(__file__).parents[1]


def command(module: str, argument: str) -> list[str]:
    """Return the command line of a module, such as `training.benchmark.child`."""
    return [sys.executable, "-m", module, argument]


def environment(keras_backend: str) -> dict[str, str]:
    """Return the environment in which a child finds these sources, and its backend."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"KERAS_BACKEND": keras_backend, "PYTHONPATH": path}


def start(
    module: str,
    argument: str,
    keras_backend: str,
    cores: Sequence[int] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> subprocess.Popen:
    """Start a module in a process of its own.

    Args:
        module: See `command`.
        argument: Its argument.
        keras_backend: Its KERAS_BACKEND.
        cores: Processor cores that it computes on. Default: all.
        variables: Environment variables that it gets unless they are set.
        **options: Options of `subprocess.Popen`.
    """
    own = dict(variables) | environment(keras_backend)
    if cores:
        own["OMP_NUM_THREADS"] = str(len(cores))
    with _on(cores):
        # a group of its own: Ctrl-C reaches it through this process alone
        return subprocess.Popen(
            command(module, argument), env=own, start_new_session=True, **options
        )


@contextlib.contextmanager
def _on(cores: Sequence[int]) -> Iterator[None]:
    """Put this thread on some cores: a child inherits them before its backend counts
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


def run(module: str, argument: str, keras_backend: str, limit: float) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr of a child; it and what it started are
    killed after `limit` seconds.
    """
    process = start(
        module,
        argument,
        keras_backend,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _kill(process)
        return STOPPED, "", ""
    except BaseException:
        _kill(process)
        raise
    return process.returncode, out, err


def result(module: str, argument: str, keras_backend: str, limit: float) -> dict:
    """Return the answer of a child.

    Raises:
        RuntimeError: if it has none; the message says why.
    """
    status, out, err = run(module, argument, keras_backend, limit)
    if status:
        raise RuntimeError(problem(status, err, limit))
    return json.loads(out.splitlines()[-1])


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def problem(status: int, err: str, limit: float) -> str:
    """Return in words why a child has no answer: what `run` returned of it, and the
    limit that it had.
    """
    if status == STOPPED:
        return f"over {limit:g} s"
    if status < 0:
        name = signal.Signals(-status).name
        return f"ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
    return f"failed: {last_line(err)}"


def last_line(text: str) -> str:
    """Return why a child failed, by its last line that is not empty: at most 300
    characters, without `error: `.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ")[:300] if lines else "no message"


def answer(of: Callable[[], dict]) -> None:
    """Write what `of` returns to stdout; what libraries print meanwhile goes to stderr.
    Errors end as in `cli.guard`.
    """

    def run() -> None:
        stdout = os.dup(1)
        os.dup2(2, 1)
        os.write(stdout, (json.dumps(of()) + "\n").encode())

    cli.guard(run)
