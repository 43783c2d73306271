"""A process that trains runs of one trial, started by `workers`; what it is told stands
in JSON on its command line.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .. import cli


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker does.

    Args:
        trial: Name of the trial.
        seeds: Of its runs, one after another.
        data: Folder with the data, if it is not where it is looked for.
        settings: Fields of `run.Settings`, paths as text.
        until: Time, in seconds since the epoch, at which to stop and save; None: at the
            end.
    """

    trial: str
    seeds: Sequence[int]
    data: str | None
    settings: dict
    until: float | None = None


def work(job: Job) -> None:
    """Train the runs.

    Raises:
        UserError: as `Run`; those before it are written.
    """
    import keras

    from .. import backends
    from .images import load
    from .run import Run, Settings
    from .smoke import images as smoke_images
    from .trials import TRIALS

    backends.keep_accelerator_for_backend(keras.backend.backend())
    paths = {key: Path(job.settings[key]) for key in ("results", "work")}
    settings = Settings(**job.settings | paths)
    trial = TRIALS[job.trial]
    if keras.backend.backend() == "jax" and backends.device() != "CPU":
        import jax

        jax.config.update("jax_compilation_cache_dir", str((settings.work / "compiled").absolute()))
    data = None if job.data is None else Path(job.data)
    images = smoke_images(trial.dataset) if settings.smoke else load(trial.dataset, data)
    run = Run(
        trial,
        images,
        settings,
        out_of_time=lambda: job.until is not None and time.time() >= job.until,
        say=lambda message: print(message, flush=True),
    )
    for seed in job.seeds:
        if run(seed) is None:
            return


if __name__ == "__main__":
    cli.guard(lambda: work(Job(**json.loads(sys.argv[1]))))
