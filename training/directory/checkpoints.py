"""Exact checkpoints: a resumed run ends as if it had never been interrupted. Damaged
files are skipped.
"""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np

from keras_preact.atomic import sync

from ..disk import short_hash
from ..errors import UserError, is_lasting
from .variables import GROUPS, Tensors, not_finite, read, write

_NAME = re.compile(r"state-(\d{9,})-([0-9a-f]{16})\.npz")
#: Entry of a file with `progress` and the description of the tensors, as JSON.
_DESCRIPTION = "description"


class Saved:
    """A checkpoint whose content is complete.

    Args:
        path: The file.

    Attributes:
        progress: JSON value that was saved with the tensors.

    Raises:
        ValueError, OSError, KeyError: for a file that `Checkpoints` did not write.
    """

    def __init__(self, path: Path):
        self.path = path
        with self._opened() as file:
            described = json.loads(file[_DESCRIPTION].tobytes())
        self.progress: dict = described["progress"]
        self._groups: dict[str, list[dict]] = described["groups"]

    def _opened(self):
        return np.load(self.path, allow_pickle=False)

    @property
    def step(self) -> int:
        return self.progress["step"]

    def restore(self, model: keras.Model) -> None:
        """Assign the saved values to the variables of the model and of its optimizer,
        if it has one.

        Raises:
            UserError: if the model's variables differ in number, name, shape or dtype;
                nothing is assigned then.
        """
        compiled = getattr(model, "optimizer", None) is not None
        self._restore(model, ("model", "optimizer") if compiled else ("model",))

    def restore_metrics(self, model: keras.Model) -> None:
        """Assign the saved values to the metrics. Call it in the middle of an epoch: Keras
        resets the metrics when an epoch begins.

        Args:
            model: Compiled model with built metrics.

        Raises:
            UserError: as in `restore`.
        """
        self._restore(model, ("metrics",))

    def _restore(self, model: keras.Model, groups: tuple[str, ...]) -> None:
        current: dict[str, list[Tensors]] = {group: GROUPS[group](model) for group in groups}
        for group in groups:
            self._check(group, [tensors.description for tensors in current[group]])
        with self._opened() as file:
            for group in groups:
                for i, tensors in enumerate(current[group]):
                    parts = self._groups[group][i]["parts"]
                    write(tensors, [file[key] for key in _keys(group, i, parts)])

    def _check(self, group: str, current: list[dict]) -> None:
        saved = self._groups[group]
        for variable, entry in zip(current, saved, strict=False):
            for key, value in variable.items():
                if value != entry[key] and key != "path":
                    raise UserError(
                        f"{self.path} does not fit the {group}: {variable['path']} has {key} "
                        f"{value} here, and {entry['path']} has {entry[key]} in the file."
                    )
        if len(current) != len(saved):
            if len(current) > len(saved):
                difference = f"it lacks {current[len(saved)]['path']}"
            else:
                difference = f"it has {saved[len(current)]['path']}, which is unknown here"
            raise UserError(
                f"{self.path} does not fit the {group}: {difference}. "
                f"Received: {len(saved)} variables in the file, {len(current)} here"
            )


class Checkpoints:
    """The files state-STEP-HASH.npz in a folder.

    A file is written under a temporary name, hashed, flushed to the disk and renamed;
    then older ones are removed. After a crash there is either no file of that name, or
    one with another hash, which is skipped.

    Args:
        folder: Folder of the files.
        keep: Number of checkpoints to keep.
        write: Whether this process writes. If several processes train one model, one of
            them writes, and all call `save`.
    """

    def __init__(self, folder: Path, keep: int = 3, write: bool = True):
        self.folder = folder
        self.keep = keep
        self.write = write
        self._broken: set[Path] = set()

    def _files(self) -> list[Path]:
        """Return the files, the newest first."""
        paths = [path for path in self.folder.glob("state-*.npz") if _NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: (_step(path), path.stat().st_mtime_ns), reverse=True)

    def newest(self, warn: Callable[[str], object]) -> Saved | None:
        """Return the newest complete checkpoint, or None. Call `warn` for each newer one
        that is damaged.
        """
        for path in self._files():
            try:
                with path.open("rb") as file:
                    if short_hash(file) != _NAME.fullmatch(path.name)[2]:  # type: ignore[index]
                        raise ValueError("its content does not match the hash in its name")
                return Saved(path)
            except (OSError, ValueError, KeyError) as error:
                if not is_lasting(error):  # the file may be intact
                    raise
                self._broken.add(path)
                warn(f"{path} is damaged, so an older checkpoint is used: {error}.")
        return None

    def save(self, model: keras.Model, progress: dict) -> Path | None:
        """Write a checkpoint of all variables of the model, its optimizer and its
        metrics.

        Args:
            model: Compiled and built model.
            progress: JSON value to save with them; its `step` counts the steps.

        Returns:
            The file; None in a process that does not write, and for weights that are
            not finite: after a divergence the files stay as they are.

        Raises:
            UserError: if the file cannot be written, such as on a full disk. Older
                files stay.
        """
        if not_finite(model) is not None:
            return None
        tensors: dict[str, np.ndarray] = {}
        groups: dict[str, list[dict]] = {}
        for group, variables in GROUPS.items():
            groups[group] = []
            for i, variable in enumerate(variables(model)):
                parts = read(variable)
                groups[group].append(variable.description | {"parts": len(parts)})
                tensors |= dict(zip(_keys(group, i, len(parts)), parts, strict=True))
        if not self.write:
            return None
        described = json.dumps({"progress": progress, "groups": groups}).encode()
        tensors[_DESCRIPTION] = np.frombuffer(described, np.uint8)
        path = self._write(progress["step"], tensors)
        self._remove_old(path)
        return path

    def _write(self, step: int, arrays: dict[str, np.ndarray]) -> Path:
        temporary = self.folder / f".state-{step:09d}.npz"
        try:
            with temporary.open("w+b") as file:
                np.savez(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                path = self.folder / f"state-{step:09d}-{short_hash(file)}.npz"
            temporary.replace(path)
            sync(self.folder)
        except OSError as error:  # the error of a full disk does not name the file
            if not is_lasting(error):
                raise
            raise UserError(
                f"Cannot write a checkpoint to {self.folder}: {error}. Older checkpoints are "
                "intact."
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def _remove_old(self, newest: Path) -> None:
        others = [path for path in self._files() if path != newest and path not in self._broken]
        same = [path for path in others if _step(path) == _step(newest)]
        older = [path for path in others if _step(path) < _step(newest)]
        for path in [*same, *older[self.keep - 1 :], *(self._broken - {newest})]:
            path.unlink(missing_ok=True)
        self._broken.clear()

    def clean(self) -> None:
        """Remove temporary files of processes that were killed."""
        for path in self.folder.glob(".*") if self.write else ():
            if path.suffix in (".npz", ".keras"):
                path.unlink(missing_ok=True)


def _step(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])  # type: ignore[index]


def _keys(group: str, i: int, parts: int) -> list[str]:
    return [f"{group}/{i:06d}" if part == 0 else f"{group}/{i:06d}/{part}" for part in range(parts)]


class Saver(keras.callbacks.Callback):
    """Saves a checkpoint regularly, between two steps or after an epoch, and after the
    last epoch. Other steps cost nothing.

    The last one is saved here and not after `fit`, which ends by replacing the weights by
    their averages if there are any.

    Place it after all callbacks with a state in `progress`, and after callbacks that
    write files at the end of an epoch.

    Args:
        checkpoints: Checkpoints of the run.
        minutes: Least minutes between two checkpoints. Processes do not share a clock:
            use `every` for a model that is split over them, since all of them have to
            save.
        every: Steps between two checkpoints, whatever the time; 0 to go by time alone.
        progress: Returns what is saved with the model; called for each checkpoint.
        clock: Returns seconds.

    Attributes:
        saved_step: `step` of the newest checkpoint of this process, 0 before the first.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        minutes: float,
        every: int,
        progress: Callable[[], dict],
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self.checkpoints = checkpoints
        self.minutes = minutes
        self.every = every
        self.progress = progress
        self.clock = clock
        self.saved_step = 0

    def on_train_begin(self, logs=None):
        self.checkpoints.clean()
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._time = self.clock()

    def on_train_batch_begin(self, batch, logs=None):
        # not at the end of the step before: after the last step of an epoch, the epoch is not over
        self._save_if_due()
        self._first = batch

    def on_train_batch_end(self, batch, logs=None):
        self._steps += batch - self._first + 1

    def on_epoch_end(self, epoch, logs=None):
        if self.model.stop_training or epoch + 1 == self.params["epochs"]:
            self.save_now()
        else:
            self._save_if_due()

    def _save_if_due(self) -> None:
        if self.every:
            due = self._steps >= self.every
        else:
            due = self.clock() - self._time >= 60 * self.minutes
        if due and self._steps:
            self.save_now()

    def save_now(self) -> Path | None:
        """Save a checkpoint of the model as it is."""
        model = self.model  # on JAX this brings the model's variables up to date
        progress = self.progress()
        path = self.checkpoints.save(model, progress)
        if path is not None or not self.checkpoints.write:
            self.saved_step = progress["step"]
        self._begin()
        return path


class Best(keras.callbacks.Callback):
    """Writes best.keras after every epoch whose `monitor` is the best so far.

    Args:
        folder: Folder of the file.
        monitor: Name of a metric in the logs of an epoch.
        higher_is_better: Whether the highest value is the best.
        save: Writes the model to a path, completely or not at all. If several processes
            train one model, all of them have this callback.
    """

    def __init__(
        self,
        folder: Path,
        monitor: str,
        higher_is_better: bool,
        save: Callable[[Path], object],
    ):
        super().__init__()
        self.save = save
        self.folder = folder
        self.monitor = monitor
        self.sign = 1 if higher_is_better else -1
        self.best = -float("inf")

    def state(self) -> dict:
        return {"best": self.best}

    def restore(self, state: dict) -> None:
        self.best = state["best"]

    def on_epoch_end(self, epoch, logs=None):
        score = self.sign * logs[self.monitor]
        if score > self.best:
            self.best = float(score)
            self.save(self.folder / "best.keras")
