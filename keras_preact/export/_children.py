"""Python processes that do a part of an export, and what their failures mean."""

import errno
import os
import subprocess
import sys
from collections.abc import Sequence


class ExportError(RuntimeError):
    """An export failed, or gave another result than the model; nothing of it was left behind."""


#: What the system says, through whatever library, when there is no room for a file.
_NO_ROOM = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def no_room(message: object) -> str | None:
    """Return the system's words in a message about a full disk, None for another message."""
    return next((words for words in _NO_ROOM if words in str(message)), None)


def run(arguments: Sequence[str], doing: str, hint: str = "") -> None:
    """Run Python with `arguments`, on the CPU and without a word on the terminal.

    Raises:
        OSError: if the disk is full.
        ExportError: if it fails; the message holds `doing` and the last lines that it wrote.
    """
    environment = os.environ | {
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",  # this process may hold the whole of the GPU's memory
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode == 0:
        return
    words = no_room(done.stdout)
    if words:
        raise OSError(errno.ENOSPC, words)
    last = [line for line in done.stdout.splitlines() if line.strip()][-8:]
    status = f"exit status {done.returncode}" if done.returncode > 0 else f"ended by signal {-done.returncode}"
    raise ExportError("\n".join([f"{doing} failed ({status}).{hint} Its last lines:", *(f"  {line}" for line in last)]))
