"""How long does a train step take, or inference?"""

import dataclasses
import statistics
from typing import ClassVar, Literal

from .question import Benchmark
from .report import Column
from .subjects import Subject, seconds_of

STEP = Column("step_seconds", "step ms", 1e3, 1)


@dataclasses.dataclass(frozen=True)
class Step(Benchmark):
    """Time of a train step, or of inference, and images per second."""

    mode: Literal["train", "inference"] = "train"
    """What a step does."""

    command: ClassVar = "step"
    about: ClassVar = "step = median of the timed steps, on a batch that is already on the device."
    columns: ClassVar = (STEP, Column("images_per_second", "images/s", digits=1))

    def measure(self, subject: Subject) -> dict:
        step = subject.train_step if self.mode == "train" else subject.inference_step
        steps = seconds_of(step, self.warmup, self.steps)
        seconds = statistics.median(steps)
        return {
            "step_seconds": seconds,
            "images_per_second": self.batch / seconds,
            "all_steps": steps,
        }
