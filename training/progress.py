"""What a person sees of a run while it trains: a line that is rewritten, a line an epoch, and TensorBoard."""

import collections
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import keras

from keras_preact.health.outputs import TensorBoard

from .terminal import Line, duration

#: Seconds between two drawings of the line on a terminal.
REDRAW = 0.2
#: Seconds of training that the images/s on that line are of.
WINDOW = 5.0
#: Words that are shortened where that line does not fit into the terminal.
SHORTER = {"step ": "", "accuracy": "acc", "images/s": "img/s"}
#: What is left out of it where that is not enough, first to last: names of the pieces that `Progress._status` returns.
LEAST_NEEDED = ("step", "rate", "accuracy", "loss", "left")


class Progress(keras.callbacks.Callback):
    """Shows how training goes on, in `model.fit(..., verbose=0)`.

    On a terminal one line is rewritten: epoch, update in the epoch, loss and accuracy (means of the epoch so far), images/s of
    the last seconds, time left of the run. Every epoch leaves a line, on a terminal or not. TensorBoard gets the same figures
    every `interval` updates (`batch_loss`, ...) and every epoch (`epoch_loss`, ...), under the names that Keras' own callback
    gives them.

    Images/s are those of training: the time from the end of one execution of the train step to the end of the next, input
    included. The first execution of a fit, which compiles, counts neither as images nor as time, and what comes between
    the last execution of an epoch and the next epoch, which is validation and checkpoints, does not count either.

    The model is not touched, and the logs are those that `fit` has already brought to the host.

    Args:
        iterations: Updates of the whole run.
        steps_per_epoch: Updates in an epoch.
        batch_size: Images in an update.
        done: Updates done before, by the process that this one goes on from.
        parts: Steps of `fit` in an update, with gradient accumulation.
        tensorboard: Folder for train/ and validation/; None for none.
        learning_rate: Number of updates done to the learning rate of the next one.
        interval: Updates between two records in TensorBoard.
        stream: Where lines go; None for what sys.stdout is now.
        clock: Returns seconds.

    Attributes:
        figures: Of the last epoch that ended: `learning_rate` of its last update, `images_per_second` (nan where nothing was
            measured), `seconds` of training so far.
    """

    def __init__(
        self,
        iterations: int,
        steps_per_epoch: int,
        batch_size: int,
        *,
        done: int = 0,
        parts: int = 1,
        tensorboard: Path | None,
        learning_rate: Callable[[int], float],
        interval: int = 100,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self.iterations = iterations
        self.steps_per_epoch = steps_per_epoch
        self.batch_size = batch_size
        self.parts = parts
        self.learning_rate = learning_rate
        self.interval = interval
        self.figures: dict[str, float] = {}
        self._line = Line(stream or sys.stdout)
        self._clock = clock
        self._boards = {} if tensorboard is None else {name: TensorBoard(tensorboard / name) for name in _FOLDERS}
        self._steps = done * parts
        self._spent = 0.0  # seconds before those that run now
        self._began: float | None = None
        self._last: float | None = None  # when the last execution ended, or the epoch began; None before the first
        self._epoch = 0
        self._logs: Mapping[str, float] = {}
        self._trained = (0.0, 0.0)  # images and seconds
        self._epoch_start = self._recorded = self._trained
        self._recent: collections.deque[tuple[float, float]] = collections.deque()
        self._pauses: list[float] = []
        self._drawn = -math.inf

    @property
    def updates(self) -> int:
        """Updates of the run that are done."""
        return self._steps // self.parts

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resumption included."""
        return self._spent + (0.0 if self._began is None else self._clock() - self._began)

    def state(self) -> dict[str, float]:
        """Return what `restore` of the process that goes on with the run needs."""
        return {"seconds": self.seconds}

    def restore(self, state: Mapping[str, float]) -> None:
        """Count the time from where another process has left it."""
        self._spent = float(state["seconds"])
        self._began = None if self._began is None else self._clock()

    def report(self, message: str) -> None:
        """Write a line of its own, and below it what stood on the terminal."""
        self._line.permanent(message, redraw=True)

    def close(self) -> None:
        """End the line on the terminal and TensorBoard's files. `fit` does not come to it where it ends in an exception."""
        self._spent, self._began = self.seconds, None
        self._line.end()
        for board in self._boards.values():
            board.close()

    def on_train_begin(self, logs=None):
        self._began = self._clock()
        self._last = None

    def on_train_end(self, logs=None):
        self.close()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._logs = {}
        self._epoch_start = self._trained
        if self._last is None:
            self._show("waiting for the first step")
        else:
            self._last = self._clock()

    def on_train_batch_begin(self, batch, logs=None):
        self._first = batch

    def on_train_batch_end(self, batch, logs=None):
        now = self._clock()
        steps = batch - self._first + 1
        before = self.updates
        self._steps += steps
        if self._last is not None:
            images, seconds = self._trained
            self._trained = (images + steps * self.batch_size / self.parts, seconds + now - self._last)
        self._last = now
        self._logs = logs or {}
        if self._boards and self.updates // self.interval > before // self.interval:
            self._record("batch", self.updates, self._logs, self._since(self._recorded))
            self._recorded = self._trained
        if self._line.terminal and now - self._drawn >= REDRAW:
            self._drawn = now
            self._line.draw(self._status(), LEAST_NEEDED, SHORTER)

    def on_test_begin(self, logs=None):
        self._show("validation")

    def on_epoch_end(self, epoch, logs=None):
        logs = logs or {}
        if self._last is not None:
            self._pauses.append(self._clock() - self._last)
        rate, learning_rate, seconds = self._since(self._epoch_start), self._rate(), self.seconds
        self.figures = {"learning_rate": learning_rate, "images_per_second": rate, "seconds": seconds}
        self._record("epoch", epoch, logs, rate)
        pieces = [f"epoch {self._of(epoch)}", *_metrics(logs).values(), f"lr {learning_rate:.3g}", _images(rate)]
        times = ", ".join(filter(None, (duration(seconds), self._left())))
        self._line.permanent("  ".join(filter(None, (*pieces, times))))

    def _show(self, what: str) -> None:
        if self._line.terminal:
            self._line.draw({"epoch": f"epoch {self._of(self._epoch)}", "what": what})

    def _status(self) -> dict[str, str]:
        self._recent.append(self._trained)
        while self._trained[1] - self._recent[0][1] > WINDOW and len(self._recent) > 2:
            self._recent.popleft()
        steps = self._steps_in_epoch()
        step = self.updates - self._epoch * self.steps_per_epoch
        metrics = _metrics(self._logs)
        return {
            "epoch": f"epoch {self._of(self._epoch)}",
            "step": f"step {step}/{steps}",
            "loss": metrics.get("loss", ""),
            "accuracy": metrics.get("accuracy", ""),
            "rate": _images(self._since(self._recent[0])),
            "left": self._left(),
        }

    def _steps_in_epoch(self) -> int:
        """Return the updates of this epoch, of which the last one may have fewer."""
        return max(1, min(self.steps_per_epoch, self.iterations - self._epoch * self.steps_per_epoch))

    def _of(self, epoch: int) -> str:
        return f"{epoch + 1}/{math.ceil(self.iterations / self.steps_per_epoch)}"

    def _rate(self) -> float:
        """Return the learning rate of the last update."""
        return float(self.learning_rate(max(0, self.updates - 1)))

    def _since(self, before: tuple[float, float]) -> float:
        """Return the images/s since there were `before` images and seconds; nan where none were measured."""
        images, seconds = (now - then for now, then in zip(self._trained, before, strict=True))
        return images / seconds if seconds > 0 else math.nan

    def _left(self) -> str:
        """Return how long the run still takes, where that is known: its updates, and what stands between epochs."""
        left = self.iterations - self.updates
        rate = self._since((0.0, 0.0))
        if left <= 0 or not rate > 0:
            return ""
        pause = sum(self._pauses) / max(1, len(self._pauses))
        return f"{duration(left * self.batch_size / rate + math.ceil(left / self.steps_per_epoch) * pause)} left"

    def _record(self, when: str, step: int, logs: Mapping[str, float], rate: float) -> None:
        if not self._boards:
            return
        train = {name: value for name, value in logs.items() if not name.startswith("val_")}
        train["learning_rate"] = self._rate()
        if rate == rate:
            train["images_per_second"] = rate
        validation = {name.removeprefix("val_"): value for name, value in logs.items() if name.startswith("val_")}
        for folder, scalars in zip(_FOLDERS, (train, validation), strict=True):
            if scalars:
                self._boards[folder].write(step, {f"{when}_{name}": value for name, value in scalars.items()})


#: As Keras' callback names them.
_FOLDERS = ("train", "validation")


def _metrics(logs: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics as texts: the loss first, then the others by name, then those of validation alike."""
    names = sorted(logs, key=lambda name: (name.startswith("val_"), name.removeprefix("val_") != "loss", name))
    return {name: f"{name} {_figure(logs[name])}" for name in names}


def _figure(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"


def _images(rate: float) -> str:
    if not rate > 0:
        return ""
    return f"{rate:,.0f} images/s" if rate >= 10 else f"{rate:.2g} images/s"
