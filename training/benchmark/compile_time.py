"""How long does it take to build and compile a network?"""

import dataclasses
import os
import statistics
import tempfile
from typing import ClassVar

from .question import Benchmark, Variant
from .report import Column
from .step_time import STEP
from .subjects import Subject, seconds_of, timed


@dataclasses.dataclass(frozen=True)
class Compile(Benchmark):
    """Time to build a network, to its first train step, and to compile it."""

    batch: int = 2
    """Images per step. Few: the first step also computes, which grows with the batch."""
    variants: tuple[Variant, ...] = ("stacked", "unrolled")
    """Registered models as stacks, single units, stacks in a Python loop, or default."""

    command: ClassVar = "compile"
    about: ClassVar = (
        "compile = first train step, which traces and compiles, minus the median of the later "
        "steps."
    )
    columns: ClassVar = (
        Column("compile_seconds", "compile s"),
        Column("build_seconds", "build s"),
        Column("first_step_seconds", "first step s"),
        STEP,
    )

    def measure(self, subject: Subject) -> dict:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
            # torch.compile would reuse what an earlier round has compiled
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
            first, _ = timed(subject.train_step)
            steps = seconds_of(subject.train_step, 0, self.steps)
        step = statistics.median(steps)
        return {
            "first_step_seconds": first,
            "step_seconds": step,
            "compile_seconds": first - step,
            "all_steps": steps,
        }
