"""The run directory: config.json, history.csv, health.csv, tensorboard/, checkpoints/, model.keras, metrics.json."""

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import keras

from training.cli import UserError
from training.config import Data


def new_directory(output: Path | None, recipe: str) -> Path:
    """Return the directory for a new run, which is not made yet; raise a UserError where it holds something already."""
    run = output or Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise UserError(f"{run} exists and is not empty. Give another --output, or remove it.")
    return run


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to, and put what is there in its place: `path` is never half-written.

    Raises:
        UserError: if it cannot be written; the message has the reason.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)  # mkstemp makes private files
        temporary.replace(path)
    except OSError as error:  # a full disk's does not name the file
        raise UserError(f"Cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: dict) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, default=str) + "\n")


def read_config(run: Path) -> dict:
    """Return config.json of a run directory."""
    path = run / "config.json"
    if not path.is_file():
        raise UserError(f"{run} is no run directory: it has no config.json.")
    try:
        described = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(described, dict) or "config" not in described:
        raise UserError(f"{run} is no run directory: its config.json was not written by training.train.")
    return described


def model_path(run: Path, checkpoint: str = "final") -> Path:
    """Return the file of a run's model.

    Args:
        run: A run directory.
        checkpoint: `"final"` (model.keras, written at the end), `"best"` or `"last"` (checkpoints/).

    Raises:
        UserError: if it is not there; the message names those that are.
    """
    files = {"final": run / "model.keras"} | {name: run / "checkpoints" / f"{name}.keras" for name in ("best", "last")}
    if files[checkpoint].is_file():
        return files[checkpoint]
    there = [name for name, path in files.items() if path.is_file()]
    hint = f"It has: {', '.join(f'--checkpoint {name}' for name in there)}." if there else "It has no model at all."
    raise UserError(f"The run {run} was not finished: there is no {files[checkpoint]}. {hint}")


def load_model(path: Path) -> keras.Model:
    """Return the model in a .keras file, not compiled.

    Raises:
        UserError: for a file that Keras cannot load.
    """
    import keras_preact  # noqa: F401  (registers the layers that the file names)

    try:
        return keras.saving.load_model(path, compile=False)
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} is damaged, or no model of this package or of Keras' own layers. Keras says: {error}"
        ) from error


def data_of(config: dict) -> Data:
    """Return the data set that a run's configuration, read from JSON, speaks of."""
    options = config["data"]
    return Data(**options | {"dir": options["dir"] and Path(options["dir"])})


class Checkpoints(keras.callbacks.Callback):
    """After every epoch writes checkpoints/last.keras, and best.keras where `monitor` is the best so far.

    Each file is written beside and renamed, so that a crash or a full disk leaves the one before.
    """

    def __init__(self, folder: Path, monitor: str, higher_is_better: bool):
        super().__init__()
        self.folder = folder
        self.monitor = monitor
        self.sign = 1 if higher_is_better else -1
        self.best = -float("inf")

    def on_epoch_end(self, epoch, logs=None):
        last = self.folder / "last.keras"
        with replacing(last) as temporary:
            self.model.save(temporary)
        score = self.sign * logs[self.monitor]
        if score > self.best:
            self.best = score
            with replacing(self.folder / "best.keras") as temporary:
                temporary.write_bytes(last.read_bytes())


class Interruption(keras.callbacks.Callback):
    """A context in which SIGINT ends training with a KeyboardInterrupt behind the current batch, a second one at once.

    Raised wherever it comes, the error would be lost now and then: destructors and native code cannot pass it on, and there
    is much of both in writing a checkpoint.
    """

    def __enter__(self):
        self.requested = False
        before = signal.getsignal(signal.SIGINT)
        # only the main thread may; and who ignores the signal, or has a handler, keeps it
        self.installed = threading.current_thread() is threading.main_thread() and before is signal.default_int_handler
        if self.installed:
            signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *_):
        if self.installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _request(self, *_):
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_train_batch_end(self, batch, logs=None):
        if self.requested:
            raise KeyboardInterrupt

    def on_test_batch_end(self, batch, logs=None):
        self.on_train_batch_end(batch)


class StopAt(keras.callbacks.Callback):
    """Stops training after so many iterations, in the middle of an epoch if need be."""

    def __init__(self, iterations: int):
        super().__init__()
        self.left = iterations

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left <= 0:
            self.model.stop_training = True


class StopOnNaN(keras.callbacks.Callback):
    """Ends training with an error as soon as the loss is not a finite number."""

    def on_epoch_end(self, epoch, logs=None):
        loss = logs["loss"]
        if loss != loss or abs(loss) == float("inf"):
            kept = "The checkpoints hold the epochs before." if epoch else "There is no checkpoint."
            raise UserError(
                f"The loss is {loss} in epoch {epoch + 1}: training diverged. Try a lower --optimizer.learning-rate or a "
                f"longer --schedule.warmup. {kept}"
            )
