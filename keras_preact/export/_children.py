"""Python processes that do a part of an export, and what their failures mean."""

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import keras


class ExportError(RuntimeError):
    """An export failed, or gave another result than the model; nothing of it was left
    behind.
    """


#: What the system says, through whatever library, when there is no room for a file.
_NO_ROOM = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def no_room(message: object) -> str | None:
    """Return the system's words in a message about a full disk, None for another
    message.
    """
    return next((words for words in _NO_ROOM if words in str(message)), None)


@contextlib.contextmanager
def naming(place: Path) -> Iterator[None]:
    """Turn an error about a full disk, whatever raises it, into one that names `place`."""
    try:
        yield
    except OSError as error:
        words = no_room(error)
        if words is None:
            raise
        message = (
            f"There is no room for the export in {place} ({words}); nothing of it was left behind"
        )
        raise OSError(error.errno or errno.ENOSPC, message) from error


def hand_over(
    model: keras.Model, module: str, arguments: Sequence[str], folder: Path, doing: str
) -> None:
    """Run a module with Keras on TensorFlow, which is given a model in a file: `python
    -m MODULE FILE *ARGUMENTS *MODULES`.

    Args:
        model: Its layers may be those of other modules than Keras' own: MODULES names
            these, to be imported first.
        module: Its name.
        arguments: Its own.
        folder: The file is there for a while.
        doing: As in `run`.
    """
    file = folder / "scores.keras"
    model.save(file)
    modules = {type(layer).__module__ for layer in model._flatten_layers()} - {"__main__"}
    known = sorted(module for module in modules if module.split(".")[0] != "keras")
    run(
        ["-m", module, str(file), *arguments, *known],
        doing,
        " Layers of your own must be registered (keras.saving.register_keras_serializable) by a "
        "module that can be imported, and run on TensorFlow.",
    )
    file.unlink()


def run(arguments: Sequence[str], doing: str, hint: str = "") -> None:
    """Run Python with `arguments`, on the CPU and without a word on the terminal.

    Raises:
        OSError: if the disk is full.
        ExportError: if it fails; the message holds `doing` and the last lines that it
            wrote.
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
    status = (
        f"exit status {done.returncode}"
        if done.returncode > 0
        else f"ended by signal {-done.returncode}"
    )
    raise ExportError(
        "\n".join(
            [f"{doing} failed ({status}).{hint} Its last lines:", *(f"  {line}" for line in last)]
        )
    )
