"""Run a part of an export in another Python process, and explain its failures."""

import contextlib
import errno
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Seconds after which a process is stopped. The slowest one, for 10,000 layers, takes minutes.
LIMIT = 3600


class ExportError(RuntimeError):
    """An export failed, or its outputs differ from the model's. Nothing was written."""


#: The system's messages about a full disk. Libraries quote them in their own errors.
_NO_ROOM = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def no_room(message: object) -> str | None:
    """Return the system's words if a message is about a full disk, else None."""
    return next((words for words in _NO_ROOM if words in str(message)), None)


@contextlib.contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Turn an error about a full disk into one that names `folder`."""
    try:
        yield
    except OSError as error:
        words = no_room(error)
        if words is None:
            raise
        message = f"There is no room for the export in {folder} ({words}); nothing was kept"
        raise OSError(error.errno or errno.ENOSPC, message) from error


def require(modules: Sequence[str], what: str, extra: str) -> None:
    """Raise an ImportError if a package that a process will need is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(f"{what} needs {', '.join(missing)}: pip install 'keras-preact[{extra}]'")


def run(arguments: Sequence[str], doing: str, hint: str = "") -> None:
    """Run Python with `arguments`, on the CPU and without output.

    Raises:
        OSError: if the disk is full.
        ExportError: if the process fails, or takes longer than `LIMIT`. The message holds
            `doing`, `hint` and the last lines of the output.
    """
    environment = os.environ | {
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",  # this process may hold all of the GPU's memory
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired as late:
        status, printed = f"stopped after {LIMIT:,} s", late.stdout or b""
    else:
        if done.returncode == 0:
            return
        status, printed = f"exit status {done.returncode}", done.stdout
        if done.returncode < 0:
            status = f"stopped by signal {-done.returncode}"
    output = printed.decode(errors="replace")
    words = no_room(output)
    if words:
        raise OSError(errno.ENOSPC, words)
    last = [line for line in output.splitlines() if line.strip()][-8:]
    raise ExportError(
        "\n".join(
            [f"{doing} failed ({status}).{hint} Its last lines:", *(f"  {line}" for line in last)]
        )
    )
