"""What does `kp.TrainingHealth` cost?"""

import dataclasses
import itertools
import time
from typing import Any, ClassVar

from .question import Benchmark
from .report import Column, of_pairs
from .step_time import STEP
from .subjects import KerasSubject, Subject, keras_only, wait

#: How often a child measures `fit` without the callback and then with it.
PAIRS = 2


@dataclasses.dataclass(frozen=True)
class Health(Benchmark):
    """Time of a step in model.fit, with and without kp.TrainingHealth."""

    steps: int = 200
    """Timed steps per round, without the callback and with it."""
    limit: float = 3600
    """Stop a measurement after this many seconds and drop its candidate."""
    warmup: int = 100
    """Steps before the timed ones: one interval, since the first record compiles."""
    interval: int = 100
    """Steps between two records."""

    command: ClassVar = "health"
    about: ClassVar = (
        "step = mean of the timed steps of model.fit, without kp.TrainingHealth and with it in "
        "turn, in one process."
    )
    columns: ClassVar = (
        STEP,
        Column("watched_step_seconds", "with health ms", 1e3, 1),
        Column("watched_over_plain", "with / without", digits=3),
    )

    def measure(self, subject: Subject) -> dict:
        """Take turns, so that a machine that becomes slower slows both."""
        import keras_preact as kp

        subject = keras_only(subject, "health measures a callback")
        pairs = []
        for _ in range(PAIRS):
            # the images are random numbers, so that there is nothing to report
            health = kp.TrainingHealth(
                self.interval, sample=subject.images, report=lambda message: None
            )
            pairs.append([self._seconds(subject), self._seconds(subject, health)])
        names = ("step_seconds", "watched_step_seconds", "watched_over_plain")
        return of_pairs(pairs, *names)

    def _seconds(self, subject: KerasSubject, *callbacks: Any) -> float:
        """Return the mean seconds of the timed steps of `fit`."""
        import keras

        times = {}

        def note(batch: int, logs: dict) -> None:
            if batch + 1 in (self.warmup, self.warmup + self.steps):
                float(logs["loss"])  # once the loss is here, the step is done
                wait()
                times[batch + 1] = time.perf_counter()

        clock = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        batches = ((subject.images, subject.labels) for _ in itertools.count())
        steps = self.warmup + self.steps
        subject.model.fit(
            batches, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[*callbacks, clock]
        )
        return (times[steps] - times[self.warmup]) / self.steps
