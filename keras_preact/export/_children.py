"""Run a part of an export in another Python process, and explain its failures."""

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import keras


class ExportError(RuntimeError):
    """An export failed, or its outputs differ from the model's. Nothing was written."""


#: The system's messages about a full disk, whatever library passes them on.
_NO_ROOM = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def no_room(message: object) -> str | None:
    """Return the system's words in a message about a full disk. None: another message."""
    return next((words for words in _NO_ROOM if words in str(message)), None)


@contextlib.contextmanager
def naming(place: Path) -> Iterator[None]:
    """Turn an error about a full disk into one that names `place`."""
    try:
        yield
    except OSError as error:
        words = no_room(error)
        if words is None:
            raise
        message = f"There is no room for the export in {place} ({words}); nothing of it was kept"
        raise OSError(error.errno or errno.ENOSPC, message) from error


def hand_over(
    model: keras.Model, module: str, arguments: Sequence[str], folder: Path, doing: str
) -> None:
    """Run a module with Keras on TensorFlow and give it a model in a file: `python -m
    MODULE FILE *ARGUMENTS *MODULES`.

    Args:
        model: The model. MODULES are the modules of its layers outside Keras, to be
            imported first.
        module: Name of the module.
        arguments: Arguments of the module.
        folder: Folder for the file, which is removed.
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
    """Run Python with `arguments`, on the CPU and without output.

    Raises:
        OSError: if the disk is full.
        ExportError: if it fails. The message holds `doing`, `hint` and the last lines
            of the output.
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
        else f"stopped by signal {-done.returncode}"
    )
    raise ExportError(
        "\n".join(
            [f"{doing} failed ({status}).{hint} Its last lines:", *(f"  {line}" for line in last)]
        )
    )
