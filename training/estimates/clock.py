"""Times the train step as `fit` runs it."""

import statistics
import time
from collections.abc import Callable

import keras

from .page import Timing


class Clock(keras.callbacks.Callback):
    """Times the executions of a fit's train step, their input included.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        super().__init__()
        self.clock = clock

    def on_train_begin(self, logs=None):
        self.times = [self.clock()]

    def on_train_batch_end(self, batch, logs=None):
        float((logs or {})["loss"])  # wait for the results
        self.times.append(self.clock())

    @property
    def timing(self) -> Timing:
        """Time of the first execution, and the median of those after it, at least one."""
        seconds = [end - start for start, end in zip(self.times, self.times[1:], strict=False)]
        return Timing(seconds[0], statistics.median(seconds[1:]))
