"""How a run ends on request: Ctrl-C, and the signal of a machine that is taken away."""

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import keras

#: Status of a run that was told to end and can go on with --resume; EX_TEMPFAIL of sysexits.h, "try again later".
PREEMPTED = 75


class Stop(keras.callbacks.Callback):
    """A context in which SIGINT and SIGTERM end training where it can be continued: behind a step, or behind an epoch.

    What was asked for happens when the step is done, in a validation when the epoch is: `save` is called, then SIGINT raises
    KeyboardInterrupt, and SIGTERM, with which machines are taken away, ends the process with status `PREEMPTED`, so that
    launchers start it again. A second SIGINT ends it at once. Raised wherever it comes, the error would be lost now and
    then: destructors and native code cannot pass it on, and there is much of both in writing a checkpoint.

    A handler, or that a signal is ignored, stays. It belongs behind all other callbacks that have a state.

    Args:
        save: Called before training ends.
        tell: Called with a message where the end has to wait for a validation.
    """

    def __init__(self, save: Callable[[], object] = lambda: None, tell: Callable[[str], object] = lambda message: None):
        super().__init__()
        self.save = save
        self.requested: signal.Signals | None = None
        self.tell = tell

    def __enter__(self):
        self.requested = None
        self._told = False
        self._replaced: list[signal.Signals] = []
        # only the main thread may; and who ignores a signal, or has a handler, keeps it
        if threading.current_thread() is threading.main_thread():
            for number, default in _DEFAULT_HANDLERS.items():
                if signal.getsignal(number) is default:
                    signal.signal(number, self._request)
                    self._replaced.append(number)
        return self

    def __exit__(self, *_):
        for number in self._replaced:
            signal.signal(number, _DEFAULT_HANDLERS[number])

    def _request(self, number: int, _frame) -> None:
        self.requested = signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(number, _DEFAULT_HANDLERS[signal.SIGINT])

    def end_if_requested(self) -> None:
        """Save and end, if a signal has come: behind a step that is no step of `fit`."""
        if self.requested is None:
            return
        self.save()
        if self.requested == signal.SIGTERM:
            sys.exit(PREEMPTED)
        raise KeyboardInterrupt

    def on_train_batch_begin(self, batch, logs=None):
        # not at the end of the step before: if it was the last one of an epoch, the epoch is not over there
        self.end_if_requested()

    def on_epoch_end(self, epoch, logs=None):
        self.end_if_requested()

    def on_test_batch_end(self, batch, logs=None):
        if self.requested is not None and not self._told:
            self._told = True
            again = " Once more ends it at once." if self.requested == signal.SIGINT else ""
            self.tell(f"Stopping behind this validation.{again}")


_DEFAULT_HANDLERS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
