"""Train one run of a trial, in a process of its own that gets its job as JSON.

A run is an ordinary run directory, below the job's `work`. Its result is written when it
ends.
"""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

from .. import cli


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process does.

    Args:
        trial: Name of the trial.
        seed: Seed of the run.
        results: Folder of the results.
        work: Folder of the run directories.
        data: Data directory. None: the default.
        dtype: Keras dtype policy. None: mixed_bfloat16 on an accelerator, float32 on a
            CPU.
        together: Steps per execution, at most. None: `rows.TOGETHER` on an accelerator,
            1 on a CPU and on torch.
        smoke: Whether to train a few steps only.
    """

    trial: str
    seed: int
    results: str
    work: str
    data: str | None = None
    dtype: str | None = None
    together: int | None = None
    smoke: bool = False


def train(job: Job) -> None:
    """Train a run to its end, or resume it, and write its result.

    Raises:
        UserError: for a run that differs from the row's other runs, or from the run in
            its directory.
    """
    import keras

    from .. import backends, fit
    from ..callbacks import Diverged
    from ..evaluate import evaluate
    from ..train import started
    from . import results, rows

    on_cpu = backends.device() == "CPU"
    one_step = on_cpu or keras.backend.backend() == "torch"
    trial = rows.TRIALS[job.trial]
    config = trial.config(
        job.seed,
        dtype=job.dtype or ("float32" if on_cpu else "mixed_bfloat16"),
        together=job.together or (1 if one_step else rows.TOGETHER),
        on_device=not on_cpu,
        data=None if job.data is None else Path(job.data),
        smoke=job.smoke,
    )
    folder, run = Path(job.results), Path(job.work) / trial.name / f"seed-{job.seed}"
    run.parent.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(config, output=run, resume=True)
    log = run.with_suffix(".log")
    name = f"{trial.name}, seed {job.seed}"
    with started(config, trial.name) as running:
        images = running.data
        data = {
            "name": images.name,
            "hash": images.hash,
            "train": images.train.size,
            "test": images.test.size,
        }
        for file in sorted((folder / trial.name).glob("seed-*.json")):
            results.check_same(results.read_one(file), config, data)
        print(f"{name}: training, see {log}", flush=True)
        diverged_at: int | None = None
        views: dict[str, dict[str, float]] = {}
        with log.open("a", buffering=1) as stream, contextlib.redirect_stdout(stream):
            try:
                fit.train(running)
            except Diverged as diverged:
                diverged_at = diverged.step // running.plan.parts + 1
            for view in trial.views if diverged_at is None else ():
                output = run / "views" / view
                evaluate(run, output=output, views=view)
                metrics = json.loads((output / "metrics.json").read_text())
                views[view] = {key: metrics[key] for key in results.VIEWED}
    record = results.of_run(run, trial.name, data, diverged_at=diverged_at, views=views)
    error = "diverged" if record.error is None else f"test error {record.error:.2f} %"
    print(f"{name}: {error}. Written: {results.write(folder, record)}", flush=True)


if __name__ == "__main__":
    cli.guard(lambda: train(Job(**json.loads(sys.argv[1]))))
