"""Stop a run on Ctrl-C, or on the signal of a machine that is about to stop."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import keras

from ..cli import PREEMPTED


class Stop(keras.callbacks.Callback):
    """A context in which SIGINT and SIGTERM end training after the current step, so
    that it can be resumed.

    During a validation they end it after the epoch. First `save` is called. Then SIGINT
    raises KeyboardInterrupt, and SIGTERM, which a machine sends before it stops, ends
    the process with status `PREEMPTED`, so that launchers start it again. A second
    SIGINT ends it at once. Only these points are safe: destructors and native code,
    which writing a checkpoint uses, cannot pass an error on.

    A handler that was set before stays, and so does an ignored signal. Place this
    callback after all others with a state.

    Args:
        save: Called before training ends.
        report: Called with a message from a separate thread when a signal comes, and
            again if the run has to wait for a validation.
        highest: Returns the highest of the values of all processes that train one
            model: the signal of one of them ends all after the same step.
        every: Steps between two calls of `highest`.
    """

    def __init__(
        self,
        save: Callable[[], object] = lambda: None,
        report: Callable[[str], object] = lambda message: None,
        highest: Callable[[int], int] = lambda value: value,
        every: int = 1,
    ):
        super().__init__()
        self.save = save
        self.requested: signal.Signals | None = None
        self.report = report
        self.highest = highest
        self.every = every
        self._steps = 0

    def __enter__(self):
        self.requested = None
        self._reported = False
        self._replaced: list[signal.Signals] = []
        self._wakeup: tuple[int, int, threading.Thread] | None = None
        # only the main thread may set a handler; an ignored signal or an earlier handler stays
        if threading.current_thread() is threading.main_thread():
            for number, default in _DEFAULT_HANDLERS.items():
                if signal.getsignal(number) is default:
                    signal.signal(number, self._request)
                    self._replaced.append(number)
        if self._replaced:
            # a handler runs only after native code, such as a step; this thread reports at once
            read, write = os.pipe()
            os.set_blocking(write, False)
            before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            thread = threading.Thread(target=self._say_at_once, args=(read,), daemon=True)
            thread.start()
            self._wakeup = before, write, thread
        return self

    def __exit__(self, *_):
        for number in self._replaced:
            signal.signal(number, _DEFAULT_HANDLERS[number])
        if self._wakeup is not None:
            before, write, thread = self._wakeup
            signal.set_wakeup_fd(before)
            os.close(write)
            thread.join()

    def _say_at_once(self, pipe: int) -> None:
        """Report the first signal that comes through a pipe."""
        with open(pipe, "rb", buffering=0) as numbers:
            reported = False
            while number := numbers.read(1):
                if number[0] in self._replaced and not reported:
                    reported = True
                    again = " Press again to stop at once." if number[0] == signal.SIGINT else ""
                    self.report(f"Stopping after this step; checkpoint follows.{again}")

    def _request(self, number: int, _frame) -> None:
        self.requested = signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(number, _DEFAULT_HANDLERS[signal.SIGINT])

    def end_if_requested(self) -> None:
        """Save and stop, if a process that trains this model has received a signal."""
        number = self.highest(self.requested or 0)
        if not number:
            return
        self.requested = signal.Signals(number)
        self.save()
        if self.requested == signal.SIGTERM:
            sys.exit(PREEMPTED)
        raise KeyboardInterrupt

    def on_train_batch_begin(self, batch, logs=None):
        # not at the end of the step before: after the last step of an epoch, the epoch is not over
        self._steps += 1
        if self._steps % self.every == 0:
            self.end_if_requested()

    def on_epoch_end(self, epoch, logs=None):
        self.end_if_requested()

    def on_test_batch_end(self, batch, logs=None):
        if self.requested is not None and not self._reported:
            self._reported = True
            self.report("The step was the last of its epoch: stopping after this validation.")


_DEFAULT_HANDLERS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
