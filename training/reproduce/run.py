"""Train the runs of a trial in a process of its own, which gets its job as JSON.

A run is an ordinary run directory, below the job's `work`. Its result is written when it
ends.
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import cli


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process does.

    Args:
        trial: Name of the trial.
        seeds: Seeds of its runs, one after another.
        results: Folder of finished runs.
        work: Folder of run directories.
        data: Data directory, if it is not the default.
        dtype: Keras dtype policy. None: mixed_bfloat16 on an accelerator, float32 on a
            CPU.
        together: Steps per execution, at most. None: `rows.TOGETHER` on an accelerator,
            1 on a CPU and on torch.
        smoke: Whether to train a few steps only.
        processes: Runs at the same time.
    """

    trial: str
    seeds: Sequence[int]
    results: str
    work: str
    data: str | None = None
    dtype: str | None = None
    together: int | None = None
    smoke: bool = False
    processes: int = 1


def work(job: Job) -> None:
    """Train the runs of a job.

    Raises:
        UserError: for a run that differs from the row's other runs, or from the run in
            its directory.
    """
    for seed in job.seeds:
        train(job, seed)


def train(job: Job, seed: int) -> None:
    """Train a run to its end, or resume it, and write its result."""
    import keras

    from .. import backends
    from ..callbacks import Diverged
    from ..train import started
    from . import results, rows

    on_cpu = backends.device() == "CPU"
    one_step = on_cpu or keras.backend.backend() == "torch"
    trial = rows.TRIALS[job.trial]
    config = trial.config(
        seed,
        dtype=job.dtype or ("float32" if on_cpu else "mixed_bfloat16"),
        together=job.together or (1 if one_step else rows.TOGETHER),
        on_device=not on_cpu,
        data=None if job.data is None else Path(job.data),
        smoke=job.smoke,
    )
    folder, run = Path(job.results), Path(job.work) / trial.name / f"seed-{seed}"
    run.parent.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(config, output=run, resume=True)
    with started(config, trial.name) as trainer:
        images = trainer.experiment.data
        data = {
            "name": images.name,
            "hash": images.hash,
            "train": images.train.size,
            "test": images.test.size,
        }
        for file in sorted((folder / trial.name).glob("seed-*.json")):
            results.check_same(results.read_one(file), config, data)
        log = run.with_suffix(".log")
        print(f"{trial.name}, seed {seed}: training, see {log}", flush=True)
        diverged_at = None
        try:
            with log.open("a", buffering=1) as stream, contextlib.redirect_stdout(stream):
                trainer.run()
        except Diverged as diverged:
            diverged_at = diverged.step // trainer.experiment.plan.parts + 1
    record = results.of_run(run, seed, data, job.processes, diverged_at)
    error = "diverged" if record.error is None else f"test error {record.error:.2f} %"
    print(
        f"{trial.name}, seed {seed}: {error}. Written: {results.write(folder, record)}", flush=True
    )


if __name__ == "__main__":
    cli.guard(lambda: work(Job(**json.loads(sys.argv[1]))))
