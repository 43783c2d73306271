"""What a person sees of a run while it trains: a bar, one line per epoch, and
TensorBoard.
"""

import collections
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TextIO

import keras
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from keras_preact.health.outputs import TensorBoard

from .terminal import duration

#: Least seconds between two drawings of the bar.
REDRAW = 0.2
#: Seconds of training that the images/s of the bar are averaged over.
WINDOW = 5.0
#: Beginning of the names of held-out figures in Keras' logs.
HELD_OUT = "val_"


class Progress(keras.callbacks.Callback):
    """Shows the progress of training, in `model.fit(..., verbose=0)`.

    Every epoch writes one line. On a terminal a bar below them shows the epoch, the
    share of the run that is done, the time left, loss and accuracy (means of the epoch
    so far), the latest held-out figures, and the images/s of the last seconds. What
    other code prints meanwhile appears above the bar.

    TensorBoard gets the same figures every `interval` updates (`batch_loss`, ...) and
    every epoch (`epoch_loss`, ...), under the names that Keras' own callback uses.

    Images/s are those of training: the time from the end of one execution of the train
    step to the end of the next, input included. The first execution of a fit, which
    compiles, does not count. Neither does the time between the last execution of an
    epoch and the next epoch, for validation and checkpoints.

    The model is not touched, and `fit` has already brought the logs to the host.

    Args:
        iterations: Updates of the whole run.
        steps_per_epoch: Updates in an epoch.
        batch_size: Images in an update.
        done: Updates that a process before this one did.
        parts: Steps of `fit` in an update, with gradient accumulation.
        held_out: Name of the images that the figures `val_...` are measured on.
        tensorboard: Folder for train/ and validation/; None for no files.
        learning_rate: Number of updates done to the learning rate of the next one.
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
        steps_per_epoch: int,
        batch_size: int,
        *,
        done: int = 0,
        parts: int = 1,
        held_out: str = "held-out",
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
        self.held_out = held_out
        self.learning_rate = learning_rate
        self.interval = interval
        self.figures: dict[str, float] = {}
        self._stream = stream or sys.stdout
        self._clock = clock
        self._boards = (
            {}
            if tensorboard is None
            else {name: TensorBoard(tensorboard / name) for name in _FOLDERS}
        )
        self._steps = done * parts
        self._spent = 0.0  # seconds before those that run now
        self._began: float | None = None
        self._last: float | None = None  # end of the last execution, or beginning of the epoch
        self._epoch = 0
        self._logs: Mapping[str, float] = {}
        self._held_out_logs: Mapping[str, float] = {}
        self._doing = ""  # instead of training
        self._trained = (0.0, 0.0)  # images and seconds
        self._epoch_start = self._recorded = self._trained
        self._recent: collections.deque[tuple[float, float]] = collections.deque()
        self._pauses: list[float] = []
        self._drawn = -math.inf
        self._live = self._bar()

    @property
    def updates(self) -> int:
        """Updates of the run so far."""
        return self._steps // self.parts

    @property
    def seconds(self) -> float:
        """Seconds of training so far, over all processes of the run."""
        return self._spent + (0.0 if self._began is None else self._clock() - self._began)

    def state(self) -> dict[str, float]:
        """Return the argument of `restore` in the process that resumes the run."""
        return {"seconds": self.seconds}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue the clock of another process."""
        self._spent = float(state["seconds"])
        self._began = None if self._began is None else self._clock()

    def report(self, message: str) -> None:
        """Write a line of its own, above the bar."""
        if self._live is None:
            print(message, file=self._stream, flush=True)
        else:
            self._live.console.print(Text(message))

    def close(self) -> None:
        """Remove the bar and close TensorBoard's files. `fit` does not call
        `on_train_end` after an exception.
        """
        self._spent, self._began = self.seconds, None
        if self._live is not None:
            self._live.stop()
        for board in self._boards.values():
            board.close()

    def on_train_begin(self, logs=None):
        self._began = self._clock()
        self._last = None
        if self._live is not None:
            self._live.start()

    def on_train_end(self, logs=None):
        self.close()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._logs = {}
        self._epoch_start = self._trained
        self._doing = "compiling the first step" if self._last is None else ""
        self._last = None if self._last is None else self._clock()
        self._redraw()

    def on_train_batch_begin(self, batch, logs=None):
        self._first = batch

    def on_train_batch_end(self, batch, logs=None):
        now = self._clock()
        steps = batch - self._first + 1
        before = self.updates
        self._steps += steps
        if self._last is not None:
            images, seconds = self._trained
            images += steps * self.batch_size / self.parts
            self._trained = (images, seconds + now - self._last)
        self._last = now
        self._logs = logs or {}
        if self._boards and self.updates // self.interval > before // self.interval:
            self._record("batch", self.updates, self._logs, self._since(self._recorded))
            self._recorded = self._trained
        self._doing = ""
        if now - self._drawn >= REDRAW:
            self._redraw()

    def on_test_begin(self, logs=None):
        self._doing = f"measuring the {self.held_out} images"
        self._redraw()

    def on_epoch_end(self, epoch, logs=None):
        logs = logs or {}
        if self._last is not None:
            self._pauses.append(self._clock() - self._last)
        rate = self._since(self._epoch_start)
        self.figures = {"learning_rate": self._rate(), "images_per_second": rate}
        self.figures["seconds"] = self.seconds
        self._record("epoch", epoch, logs, rate)
        self._held_out_logs = {
            name: value for name, value in logs.items() if name.startswith(HELD_OUT)
        }
        on_the_bar = self._live is not None
        pieces = [self._metrics(logs), *([] if on_the_bar else [_images(rate), self._left()])]
        self.report(f"Epoch {self._of(epoch)}: {_joined(pieces)}")

    def _bar(self) -> Live | None:
        """Return the bar, or None if the stream is no terminal that can show one."""
        console = Console(file=self._stream, highlight=False)
        if not self._stream.isatty() or console.is_dumb_terminal:
            return None
        return Live(
            get_renderable=self._picture, console=console, auto_refresh=False, transient=True
        )

    def _redraw(self) -> None:
        self._drawn = self._clock()
        self._recent.append(self._trained)
        while self._trained[1] - self._recent[0][1] > WINDOW and len(self._recent) > 2:
            self._recent.popleft()
        if self._live is not None:
            self._live.refresh()

    def _picture(self) -> Group:
        row = Table.grid(expand=True, padding=(0, 1))
        bar = ProgressBar(total=self.iterations, completed=self.updates)
        percent = f"{100 * self.updates / self.iterations:.1f} %"
        row.add_row(f"Epoch {self._of(self._epoch)}", bar, _joined([percent, self._left()], ", "))
        row.columns[0].no_wrap = row.columns[2].no_wrap = True
        row.columns[1].ratio = 1
        rate = self._since(self._recent[0] if self._recent else self._trained)
        pieces = [self._metrics({**self._logs, **self._held_out_logs}), _images(rate)]
        return Group(row, Text(self._doing or _joined(pieces)))

    def _metrics(self, logs: Mapping[str, float]) -> str:
        """Return the metrics in words: the loss first, then the others by name, then
        the held-out ones.
        """
        groups: dict[bool, list[str]] = {False: [], True: []}
        for name in sorted(logs, key=lambda name: (name.removeprefix(HELD_OUT) != "loss", name)):
            words = name.removeprefix(HELD_OUT).replace("_", " ")
            groups[name.startswith(HELD_OUT)].append(f"{words} {_figure(logs[name])}")
        trained, held_out = (", ".join(group) for group in groups.values())
        return _joined([trained, f"{self.held_out} {held_out}" if held_out else ""])

    def _of(self, epoch: int) -> str:
        return f"{epoch + 1}/{math.ceil(self.iterations / self.steps_per_epoch)}"

    def _rate(self) -> float:
        """Return the learning rate of the last update."""
        return float(self.learning_rate(max(0, self.updates - 1)))

    def _since(self, before: tuple[float, float]) -> float:
        """Return the images/s since `before`, in images and seconds; NaN if nothing was
        measured.
        """
        images, seconds = (now - then for now, then in zip(self._trained, before, strict=True))
        return images / seconds if seconds > 0 else math.nan

    def _left(self) -> str:
        """Return in words how long the run still takes, its validations included, if
        that is known.
        """
        left = self.iterations - self.updates
        rate = self._since((0.0, 0.0))
        if left <= 0 or not rate > 0:
            return ""
        pause = sum(self._pauses) / max(1, len(self._pauses))
        epochs = math.ceil(left / self.steps_per_epoch)
        return f"{duration(left * self.batch_size / rate + epochs * pause)} left"

    def _record(self, when: str, step: int, logs: Mapping[str, float], rate: float) -> None:
        if not self._boards:
            return
        scalars: dict[str, dict[str, float]] = {folder: {} for folder in _FOLDERS}
        for name, value in logs.items():
            folder = _FOLDERS[name.startswith(HELD_OUT)]
            scalars[folder][f"{when}_{name.removeprefix(HELD_OUT)}"] = value
        scalars["train"][f"{when}_learning_rate"] = self._rate()
        if rate == rate:
            scalars["train"][f"{when}_images_per_second"] = rate
        for folder, values in scalars.items():
            if values:
                self._boards[folder].write(step, values)


#: Names that Keras' callback uses.
_FOLDERS = ("train", "validation")


def _joined(pieces: Iterable[str], between: str = "; ") -> str:
    return between.join(filter(None, pieces))


def _figure(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"


def _images(rate: float) -> str:
    if not rate > 0:
        return ""
    return f"{rate:,.0f} images/s" if rate >= 10 else f"{rate:.2g} images/s"
