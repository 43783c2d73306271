"""Child processes: a module of this package that reads its task in JSON and writes its
answer in JSON to stdout.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import cli
from .errors import UserError

#: Largest time limit in seconds: timers of the system take no more than a few centuries.
LONGEST = 10**9
#: Exit status of a child that was stopped at its time limit, as of the command `timeout`.
STOPPED = 124
#: Time between two looks at the processes and the signals.
POLL_SECONDS = 0.1

_ROOT = Path(__file__).parents[1]


def start(
    module: str,
    arguments: Sequence[str],
    keras_backend: str,
    variables: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> subprocess.Popen:
    """Start a module, such as `training.benchmark.child`, in a process of its own, which
    `kill` ends.

    Args:
        module: Name of the module. It is found from every working directory.
        arguments: Arguments of the module.
        keras_backend: KERAS_BACKEND of the process.
        variables: Environment variables of the process, unless they are set already.
        **options: Options of `subprocess.Popen`.
    """
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    required = {"KERAS_BACKEND": keras_backend, "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=dict(variables) | os.environ | required,
        start_new_session=True,  # only this process passes Ctrl-C on to it
        **options,
    )


def check_limit(limit: float) -> None:
    """Raise a UserError for a time limit, the option --limit, that cannot be kept."""
    if not 0 < limit <= LONGEST:
        raise UserError(f"--limit must be positive, at most {LONGEST:,} seconds. Received: {limit}")


def run(module: str, argument: str, keras_backend: str, limit: float) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr of a child. After `limit` seconds, it and all
    processes that it started are killed.
    """
    process = start(
        module,
        [argument],
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
        kill(process)
        return STOPPED, "", ""
    except BaseException:
        kill(process)
        raise
    return process.returncode, out, err


def statuses(
    module: str,
    arguments: Sequence[str],
    parallel: int = 1,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> list[int]:
    """Start a child for each argument, `parallel` of them at a time, with the stdout and
    the stderr of this process, and return their exit statuses. The children receive SIGINT
    and SIGTERM too; when they have saved their states, this process stops as well.

    Raises:
        KeyboardInterrupt: after SIGINT.
        SystemExit: with status `cli.PREEMPTED` after SIGTERM.
    """
    waiting, running = list(range(len(arguments))), dict[int, subprocess.Popen]()
    ended: dict[int, int] = {}
    with _noting_signals() as received:
        passed_on = 0
        while running or (waiting and not received):
            while waiting and not received and len(running) < parallel:
                number = waiting.pop(0)
                backend = os.environ.get("KERAS_BACKEND", "tensorflow")
                running[number] = start(module, [arguments[number]], backend, variables=variables)
            for received_signal in received[passed_on:]:
                for process in running.values():
                    process.send_signal(received_signal)
                passed_on += 1
            now = {n: status for n in running if (status := running[n].poll()) is not None}
            for number in now:
                del running[number]
            ended |= now
            if not now:
                time.sleep(POLL_SECONDS)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if signal.SIGTERM in received:
        sys.exit(cli.PREEMPTED)
    return [ended[number] for number in range(len(arguments))]


@contextlib.contextmanager
def _noting_signals() -> Iterator[list[int]]:
    """Yield the list of the SIGINTs and SIGTERMs received so far, which end nothing."""
    received: list[int] = []

    def note(number: int, _frame) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Resident:
    """A child that stays: to each line that `ask` sends it, it answers with a line of JSON.
    Its first answer needs no line: it says that the child is ready.

    The arguments are those of `start`; `limit` is the time for each answer in seconds.
    """

    def __init__(
        self,
        module: str,
        argument: str,
        keras_backend: str,
        limit: float,
        variables: Mapping[str, str] = MappingProxyType({}),
    ):
        self.limit = limit
        self._messages = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = start(
            module,
            [argument],
            keras_backend,
            variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            text=True,
            errors="replace",
        )

    def ask(self) -> None:
        """Ask for the next answer. A child that has ended is noticed by `answer`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def answer(self) -> tuple[int, str, str]:
        """Wait for an answer, and return what `run` returns, with status 0 if the child goes
        on. After the limit, it and all processes that it started are killed.
        """
        out = self._process.stdout
        assert out is not None
        if not select.select([out], [], [], self.limit)[0]:
            kill(self._process)
            return STOPPED, "", ""
        line = out.readline()
        if line:
            return 0, line, ""
        status = self._process.wait()
        self._messages.seek(0)
        return status or 1, "", self._messages.read()

    def close(self) -> None:
        """Kill the child and all processes that it started."""
        kill(self._process)
        self._messages.close()


def result(module: str, argument: str, keras_backend: str, limit: float) -> dict:
    """Return the answer of a child.

    Raises:
        RuntimeError: if it has no answer; the message says why.
    """
    status, out, err = run(module, argument, keras_backend, limit)
    if status:
        raise RuntimeError(problem(status, err, limit))
    return json.loads(out.splitlines()[-1])


def kill(process: subprocess.Popen) -> None:
    """End a process that `start` has started, and all that it started itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def problem(status: int, err: str, limit: float) -> str:
    """Return in words why a child has no answer, from the exit status and stderr that
    `run` returned and from its limit.
    """
    if status == STOPPED:
        return f"over {limit:g} s"
    if status < 0:
        name = signal.Signals(-status).name
        return f"ended by {name}" + (", perhaps out of memory" if name == "SIGKILL" else "")
    return f"failed: {last_line(err)}"


def last_line(text: str) -> str:
    """Return why a child failed, by its last line that is not empty: at most 300
    characters, without `error: `.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ")[:300] if lines else "no message"


def answer(of: Callable[[], dict]) -> None:
    """Call `of` and write its answer to stdout. What libraries print meanwhile goes to
    stderr. Errors end the process as in `cli.guard`.
    """
    answer_each(lambda: iter([of()]))


def answer_each(of: Callable[[], Iterator[dict]]) -> None:
    """Write every answer of an iterator to stdout, as soon as it is there. As `answer`."""

    def run() -> None:
        stdout = os.dup(1)
        os.dup2(2, 1)
        for each in of():
            os.write(stdout, (json.dumps(each) + "\n").encode())

    cli.guard(run)
