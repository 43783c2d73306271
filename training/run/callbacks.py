"""Callbacks of a run: its history, its end, its profile, the user's callbacks, and the
resumption within an epoch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from .. import functions
from ..directory import histories, variables
from ..errors import UserError

Figures = Mapping[str, float | int | None]


class Diverged(Exception):
    """The loss of a step was not finite, or the weights after it.

    Args:
        fault: What is not finite, in words.
        step: Step of `fit`, from 0, over all epochs; with several steps per execution the
            last of them.

    Attributes:
        explanation: The likely mistake and the remedy, for a person.
    """

    explanation = ""

    def __init__(self, fault: str, step: int):
        super().__init__(f"In step {step}, {fault}.")
        self.fault = fault
        self.step = step


class Count(keras.callbacks.Callback):
    """Counts the steps of `fit` over all epochs. It is the first callback: others rely
    on it.

    Args:
        per_epoch: Steps of a complete epoch.
        done: Steps of the run before it was resumed.
    """

    def __init__(self, per_epoch: int, done: int = 0):
        super().__init__()
        self.per_epoch = per_epoch
        self.step = done

    def on_epoch_begin(self, epoch, logs=None):
        self._before = epoch * self.per_epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.step = self._before + batch

    def on_train_batch_end(self, batch, logs=None):
        self.step = self._before + batch + 1


class History(keras.callbacks.Callback):
    """Writes history.csv with one line per epoch. The whole file is replaced each time,
    so a reader never sees an incomplete file.

    Args:
        path: The file.
        iterations: Returns the number of iterations so far.
        figures: Returns further figures of an epoch, such as its seconds.
        write: Whether this process writes.
    """

    def __init__(
        self,
        path: Path,
        iterations: Callable[[], int],
        figures: Callable[[], Figures],
        write: bool = True,
    ):
        super().__init__()
        self.path = path
        self.iterations = iterations
        self.figures = figures
        self.write = write
        self.rows: list[dict[str, Any]] = []

    def state(self) -> list[dict[str, Any]]:
        return list(self.rows)

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Restore the lines of a resumed run, and remove later ones from the file."""
        self.rows = list(state)
        if self.rows:
            self._write()
        elif self.write:
            self.path.unlink(missing_ok=True)

    def on_epoch_end(self, epoch, logs=None):
        metrics = {name: float(value) for name, value in sorted((logs or {}).items())}
        self.rows.append(
            {"epoch": epoch, "iteration": self.iterations()} | metrics | dict(self.figures())
        )
        self._write()

    def _write(self) -> None:
        if self.write:
            histories.write(self.path, self.rows)


class FirstLosses(keras.callbacks.Callback):
    """Writes the losses of the first `FIRST` iterations of a run.

    They show whether a change of the code alters what it computes. With several steps
    per execution, each loss is the mean over the steps of one execution.

    Args:
        path: CSV file with one line per execution: its last `step`, and `loss`. A resumed
            run continues the file.
        count: Counter of the steps.
        write: Whether this process writes.
    """

    FIRST = 20

    def __init__(self, path: Path, count: Count, write: bool = True):
        super().__init__()
        self.path = path
        self.count = count
        self.write = write
        columns = histories.read_table(path) if write and count.step else {}
        rows = zip(columns.get("step", ()), columns.get("loss", ()), strict=True)
        self.rows = [{"step": int(step), "loss": loss} for step, loss in rows if step <= count.step]

    def on_train_batch_end(self, batch, logs=None):
        done = self.rows[-1]["step"] if self.rows else 0
        if (
            not self.write
            or done >= self.FIRST
            or self.count.step - done > self.model.steps_per_execution
        ):
            return
        # Keras reports the mean of the epoch so far
        begin = self.count.step - batch - 1
        total = (batch + 1) * float((logs or {})["loss"])
        for row, before in zip(self.rows, [{"step": 0}, *self.rows], strict=False):
            if row["step"] > begin:
                total -= (row["step"] - before["step"]) * row["loss"]
        loss = total / (self.count.step - max(done, begin))
        self.rows.append({"step": self.count.step, "loss": loss})
        histories.write(self.path, self.rows)


class StopAt(keras.callbacks.Callback):
    """Stops training after a number of steps, also in the middle of an epoch."""

    def __init__(self, steps: int, count: Count):
        super().__init__()
        self.steps = steps
        self.count = count

    def on_train_batch_end(self, batch, logs=None):
        if self.count.step >= self.steps:
            self.model.stop_training = True


class StopOnNaN(keras.callbacks.Callback):
    """Raises `Diverged` after the first step whose loss is not finite, and after an epoch
    with weights that are not finite. The loss may not show these: on a CPU, TensorFlow's
    ReLU turns NaN into 0.
    """

    def __init__(self, count: Count):
        super().__init__()
        self.count = count

    def on_train_batch_end(self, batch, logs=None):
        # the mean of the epoch so far: one such loss makes it infinite or NaN
        loss = float((logs or {}).get("loss", 0.0))
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss}", self.count.step - 1)

    def on_epoch_end(self, epoch, logs=None):
        path = variables.not_finite(self.model)
        if path is not None:
            raise Diverged(f"{path} is not finite", self.count.step - 1)


class TorchSeeds(keras.callbacks.Callback):
    """Makes PyTorch's random numbers, such as dropout, a function of seed, step and
    process.

    The other backends keep the state of their generators in variables of the model,
    which are in a checkpoint.
    """

    def __init__(self, seed: int, process: int, count: Count):
        super().__init__()
        self.seed = seed
        self.process = process
        self.count = count

    def on_train_batch_begin(self, batch, logs=None):
        self.before_step(self.count.step)

    def before_step(self, step: int) -> None:
        import torch

        torch.manual_seed(
            int(np.random.SeedSequence((self.seed, step, self.process)).generate_state(1)[0])
        )


class Profile(keras.callbacks.Callback):
    """Records what the steps of `fit` do, with the profiler of the backend.

    Args:
        folder: Folder of the record, for TensorBoard.
        first, last: Numbers of the steps, from 1, over all epochs.
        count: Counter of the steps.
    """

    def __init__(self, folder: Path, first: int, last: int, count: Count):
        super().__init__()
        self.folder = folder
        self.first = first
        self.last = last
        self.count = count
        self._stop: Callable[[], object] | None = None

    def on_train_batch_begin(self, batch, logs=None):
        if self._stop is None and self.first <= self.count.step + 1 <= self.last:
            self._stop = _start_profiler(str(self.folder))

    def on_train_batch_end(self, batch, logs=None):
        if self.count.step >= self.last:
            self.close()

    def close(self) -> None:
        """Write the record."""
        if self._stop is not None:
            self._stop()
        self._stop = None


def _start_profiler(folder: str) -> Callable[[], object]:
    """Start the backend's profiler, and return the function that stops it."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        tf.profiler.experimental.start(folder)
        return tf.profiler.experimental.stop
    if backend == "jax":
        import jax

        jax.profiler.start_trace(folder)
        return jax.profiler.stop_trace
    import torch

    profiler = torch.profiler.profile(
        on_trace_ready=torch.profiler.tensorboard_trace_handler(folder)
    )
    profiler.start()
    return profiler.stop


def find(name: str) -> Callable[[Path], keras.callbacks.Callback]:
    """Return the function that `--callbacks MODULE:FUNCTION` names.

    Raises:
        UserError: if there is no such function.
    """
    return functions.find(name, "callbacks", "my_callbacks:wandb")


def make(names: Sequence[str], folder: Path) -> list[keras.callbacks.Callback]:
    """Call the functions that `--callbacks` names with a run directory, and return their
    callbacks.

    Raises:
        UserError: for a function that returns something else.
    """
    made = {}
    for name in names:
        function = find(name)
        with functions.users_code(name):
            made[name] = function(folder)
    for name, callback in made.items():
        if not isinstance(callback, keras.callbacks.Callback):
            raise UserError(
                f"The function of --callbacks {name} must return a Keras callback. Received: "
                f"{callback!r}"
            )
    return list(made.values())


class Continued(keras.callbacks.CallbackList):
    """The callbacks of a `fit` that resumes in the middle of an epoch: it skips the
    earlier steps of this epoch.

    Keras begins an epoch at its first step. For the first `done` steps of the fit, the
    train function is replaced by one that takes a batch and does nothing with it, and
    callbacks are not called.

    The train function is replaced because `fit` offers no other way: it takes no first
    step, a batch of weight 0 would still decay weights and change statistics, and a
    separate `fit` for the rest of this epoch would end with averages in place of the
    weights.

    Args:
        callbacks: The callbacks, in order.
        done: Number of steps to skip in the first epoch, fewer than the epoch has.
        restore: Called at the beginning of that epoch, after Keras has reset its
            metrics.
        **params: Arguments of `keras.callbacks.CallbackList`.
    """

    def __init__(
        self, callbacks, *, done: int, restore: Callable[[], None], model: keras.Model, **params
    ):
        super().__init__(callbacks, add_history=True, model=model, **params)
        self.done = done
        self.restore = restore

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        if self.done:
            self.restore()
            self._train_function = self.model.train_function
            self.model.train_function = _skip(self.model.steps_per_execution)

    def on_train_batch_begin(self, batch, logs=None):
        if self.done and batch >= self.done:
            self.done = 0
            self.model.train_function = self._train_function
        if not self.done:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        if not self.done:
            super().on_train_batch_end(batch, logs)


def _skip(steps_per_execution: int) -> Callable:
    """Return a train function that does not train."""

    def on_tensorflow(iterator):
        for _ in range(steps_per_execution):
            next(iterator)
        return {}

    def on_jax(state, iterator):
        return on_tensorflow(iterator), state

    def on_torch(data):  # Keras has taken the batches already
        return {}

    take: dict[str, Callable] = {"tensorflow": on_tensorflow, "jax": on_jax, "torch": on_torch}
    return take[keras.backend.backend()]
