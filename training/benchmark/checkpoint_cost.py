"""How long does it take to write and to restore a checkpoint?"""

import dataclasses
import functools
import statistics
import tempfile
from pathlib import Path
from typing import ClassVar

from .question import Benchmark
from .report import MIB, Column
from .subjects import Subject, keras_only, timed


@dataclasses.dataclass(frozen=True)
class CheckpointCost(Benchmark):
    """Time to write a checkpoint of a run and to restore it."""

    steps: int = 5
    """How often each is done per round."""

    command: ClassVar = "checkpoint"
    about: ClassVar = (
        "save = median of writing a checkpoint; share = of the time, with one every 5 minutes."
    )
    columns: ClassVar = (
        Column("save_seconds", "save ms", 1e3, 1),
        Column("restore_seconds", "restore ms", 1e3, 1),
        Column("bytes", "MiB", MIB, 1),
        Column("share_of_time", "share %", 100, 3),
    )

    def measure(self, subject: Subject) -> dict:
        from ..checkpoints import Checkpoints
        from ..config import Checkpoint

        subject = keras_only(subject, "checkpoint measures checkpoints")
        model = subject.model
        subject.train_step()
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder))
            saves = [
                timed(functools.partial(checkpoints.save, model, {"step": step}))
                for step in range(self.steps)
            ]

            def restore() -> None:
                saved = Checkpoints(Path(folder)).newest(print)
                assert saved is not None
                saved.restore(model)

            restoring = [timed(restore)[0] for _ in range(self.steps)]
            path = saves[-1][1]
            size = path.stat().st_size if path else 0
        saving = [seconds for seconds, _ in saves]
        save = statistics.median(saving)
        return {
            "save_seconds": save,
            "restore_seconds": statistics.median(restoring),
            "bytes": size,
            "share_of_time": save / (save + 60 * Checkpoint().minutes),
            "all_saves": saving,
        }
