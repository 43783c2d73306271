"""The progress of a run for a person: a bar, one line per epoch, and TensorBoard."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import keras
import rich.progress
from rich.console import Console
from rich.text import Text

from keras_preact.health.outputs import TensorBoard

from ..cli.terminal import duration

#: Prefix of held-out metrics in Keras' logs.
HELD_OUT = "val_"
#: Metrics that are shares, by their names in words.
SHARES = ("accuracy", "top 5")
#: Folders of TensorBoard, with the names in Keras' callback.
FOLDERS = ("train", "validation")


class Bar(rich.progress.Progress):
    """A bar for the run and a line of text, if `stream` is a terminal that can show them."""

    words = ""

    def __init__(self, stream: TextIO):
        console = Console(file=stream, highlight=False)
        super().__init__(
            "Epoch {task.fields[epoch]}",
            rich.progress.BarColumn(None),
            rich.progress.MofNCompleteColumn(),
            "{task.fields[left]}",
            console=console,
            refresh_per_second=5,
            transient=True,
            disable=not stream.isatty() or console.is_dumb_terminal,
            expand=True,
        )

    def get_renderables(self):
        yield from super().get_renderables()
        yield Text(self.words)


class Progress(keras.callbacks.Callback):
    """Shows the progress of training, in `model.fit(..., verbose=0)`.

    Every epoch writes one line. On a terminal a bar below them shows the epoch, the
    updates of the run, the time left, loss and accuracy (means of the epoch so far) and
    images/s. What other code prints meanwhile appears above the bar. Keras' own bar
    shows one epoch, breaks in a narrow terminal, and mixes with what others print.

    TensorBoard gets the same figures every `interval` updates (`batch_loss`, ...) and
    every epoch (`epoch_loss`, ...), under the names that Keras' own callback uses.

    Images/s are measured in training in the epoch so far: the time from the end of one
    execution of the train step to the end of the next, input included. The first
    execution of a fit, which compiles, does not count; neither do validation and
    checkpoints. The time left includes them.

    The callback does not touch the model, and `fit` has already brought the logs to the
    host.

    Args:
        iterations: Updates of the whole run.
        epochs: Epochs of the whole run.
        batch_size: Images in an update.
        done: Steps of `fit` that earlier processes of the run did.
        micro_batches: Steps of `fit` in an update, with gradient accumulation.
        held_out: Name of the images on which the metrics `val_...` are measured.
        tensorboard: Folder for train/ and validation/; None for no files.
        learning_rate: Function from the number of updates done to the learning rate of the
            next one.
        interval: Updates between two records in TensorBoard.
        stream: Where lines go. Default: sys.stdout at the time of the call.
        clock: Returns seconds.

    Attributes:
        figures: Figures of the last epoch: `learning_rate` of its last update,
            `images_per_second` (NaN if not measured), `seconds` of training so far.
    """

    def __init__(
        self,
        iterations: int,
        epochs: int,
        batch_size: int,
        *,
        done: int = 0,
        micro_batches: int = 1,
        held_out: str = "held-out",
        tensorboard: Path | None,
        learning_rate: Callable[[int], float],
        interval: int = 100,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self.iterations = iterations
        self.epochs = epochs
        self.images = batch_size / micro_batches  # per step of fit
        self.micro_batches = micro_batches
        self.held_out = held_out
        self.learning_rate = learning_rate
        self.interval = interval
        self.figures: dict[str, float] = {}
        self._clock = clock
        self._boards = (
            {}
            if tensorboard is None
            else {name: TensorBoard(tensorboard / name) for name in FOLDERS}
        )
        self._bar = Bar(stream or sys.stdout)
        self._task = self._bar.add_task("", total=iterations, epoch="", left="")
        self._steps = done
        self._spent = 0.0  # seconds until the clock started last
        self._began: float | None = None
        self._last: float | None = None  # end of the last execution, or beginning of the epoch
        self._first = (0, 0.0)  # updates and time at the end of the first execution
        self._trained = [0.0, 0.0]  # images and seconds of this epoch

    @property
    def updates(self) -> int:
        """Updates of the run so far."""
        return self._steps // self.micro_batches

    @property
    def seconds(self) -> float:
        """Seconds of training so far, over all processes of the run."""
        return self._spent + (0.0 if self._began is None else self._clock() - self._began)

    def state(self) -> dict[str, float]:
        """Return the argument of `restore` in the process that resumes the run."""
        return {"seconds": self.seconds}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue the clock of an earlier process."""
        self._spent = float(state["seconds"])
        self._began = None if self._began is None else self._clock()

    def report(self, message: str) -> None:
        """Write a separate line above the bar."""
        self._bar.console.print(Text(message), soft_wrap=True)

    def close(self) -> None:
        """Remove the bar and close TensorBoard's files. `fit` does not call
        `on_train_end` after an exception.
        """
        self._spent, self._began = self.seconds, None
        self._bar.stop()
        for board in self._boards.values():
            board.close()

    def on_train_begin(self, logs=None):
        self._began = self._clock()
        self._last = None
        self._bar.start()

    def on_train_end(self, logs=None):
        self.close()

    def on_epoch_begin(self, epoch, logs=None):
        self._trained = [0.0, 0.0]
        compiling = self._last is None
        self._last = None if compiling else self._clock()
        self._epoch = f"{epoch + 1}/{self.epochs}"
        self._show("compiling the first step" if compiling else "")
        if compiling and self._bar.disable:
            self.report("Compiling the first step.")

    def on_train_batch_begin(self, batch, logs=None):
        self._begin = batch

    def on_train_batch_end(self, batch, logs=None):
        now, before, steps = self._clock(), self.updates, batch - self._begin + 1
        self._steps += steps
        if self._last is None:
            self._first = self.updates, now
        else:
            self._trained[0] += steps * self.images
            self._trained[1] += now - self._last
        self._last = now
        if self.updates // self.interval > before // self.interval:
            self._record("batch", self.updates, logs or {})
        if not self._bar.disable:
            self._show(_joined(self._metrics(logs or {}), self._speed()))

    def on_test_begin(self, logs=None):
        self._show(f"measuring the {self.held_out} images")

    def on_epoch_end(self, epoch, logs=None):
        self.figures = {
            "learning_rate": self._rate(),
            "images_per_second": self._images_per_second(),
            "seconds": self.seconds,
        }
        self._record("epoch", epoch, logs or {})
        pace = [self._speed(), self._left()] if self._bar.disable else []  # the bar shows them
        self.report(f"Epoch {self._epoch}: {_joined(self._metrics(logs or {}), *pace)}")
        self._show("")

    def _show(self, words: str) -> None:
        self._bar.words = words
        fields = {"epoch": self._epoch, "left": self._left()}
        self._bar.update(self._task, completed=self.updates, **fields)  # type: ignore[arg-type]

    def _metrics(self, logs: Mapping[str, float]) -> str:
        """Return the metrics in words: the loss first, then the others by name, then
        the held-out ones.
        """
        groups: dict[bool, list[str]] = {False: [], True: []}
        for name in sorted(logs, key=lambda name: (name.removeprefix(HELD_OUT) != "loss", name)):
            words = name.removeprefix(HELD_OUT).replace("_", " ")
            shown = _percent if words in SHARES else _figure
            groups[name.startswith(HELD_OUT)].append(f"{words} {shown(logs[name])}")
        trained, held_out = (", ".join(group) for group in groups.values())
        return _joined(trained, f"{self.held_out} {held_out}" if held_out else "")

    def _rate(self) -> float:
        """Return the learning rate of the last update."""
        return float(self.learning_rate(max(0, self.updates - 1)))

    def _images_per_second(self) -> float:
        images, seconds = self._trained
        return images / seconds if seconds > 0 else math.nan

    def _speed(self) -> str:
        rate = self._images_per_second()
        if not rate > 0:
            return ""
        return f"{rate:,.0f} images/s" if rate >= 10 else f"{rate:.2g} images/s"

    def _left(self) -> str:
        """Return the remaining time of the run in words, or an empty text if it is unknown.
        It assumes the pace since the first execution, with validations and checkpoints.
        """
        updates, first = self._first
        left = self.iterations - self.updates
        if left <= 0 or self._last is None or self.updates == updates:
            return ""
        return f"{duration(left * (self._clock() - first) / (self.updates - updates))} left"

    def _record(self, when: str, step: int, logs: Mapping[str, float]) -> None:
        scalars: dict[str, dict[str, float]] = {folder: {} for folder in FOLDERS}
        for name, value in logs.items():
            folder = FOLDERS[name.startswith(HELD_OUT)]
            scalars[folder][f"{when}_{name.removeprefix(HELD_OUT)}"] = value
        scalars["train"][f"{when}_learning_rate"] = self._rate()
        if (rate := self._images_per_second()) > 0:
            scalars["train"][f"{when}_images_per_second"] = rate
        for folder, board in self._boards.items():
            if scalars[folder]:
                board.write(step, scalars[folder])


def _joined(*pieces: str) -> str:
    return "; ".join(filter(None, pieces))


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _figure(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"
