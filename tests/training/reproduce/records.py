"""Results of runs, written by hand."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from training.reproduce import results
from training.reproduce.results import Record
from training.reproduce.rows import TRIALS


def record(
    trial: str,
    seed: int,
    error: float | None,
    loss: float = 0.5,
    errors: Sequence[float | None] = (),
    seconds: float = 600.0,
    together: int = 1,
    device: str = "NVIDIA H200",
    dtype: str = "float32",
    signals: Mapping[str, float | None] | None = None,
) -> Record:
    """Return the record of a run.

    Args:
        trial, seed: Trial and seed of the run.
        error: Final test error in percent. None: the run diverged.
        loss: Final training loss.
        errors: Test errors, 10 iterations apart. Default: only the final one.
        seconds, together: Time of the run, and number of runs that shared the device.
        device, dtype: Device and precision.
        signals: See `Record`.
    """
    errors = list(errors) or [error]
    points = len(errors)
    curves = dict.fromkeys(("train_error", "test_error"), errors)
    losses = [None if value is None else loss for value in errors]
    curves |= dict.fromkeys(("train_loss", "test_loss"), losses)
    final = {name: None if error is None else curve[-1] for name, curve in curves.items()}
    iterations = {"iteration": [10 * (i + 1) for i in range(points)]}
    versions = {"versions": {"keras": "3.15.1", "jax": "0.10.0"}}
    return Record(
        trial,
        seed,
        json.loads(json.dumps(dataclasses.asdict(TRIALS[trial].config(seed, dtype=dtype)))),
        {"name": TRIALS[trial].dataset, "hash": "d", "train": 50_000, "test": 10_000},
        {"commit": "0123abc", "modified": False},
        [2.3, 2.25],
        {"name": device, "cpu": "Xeon", "backend": "jax"} | versions,
        curves | iterations | {"seconds": [seconds] * points, "learning_rate": [0.1] * points},
        final,
        {"seconds": seconds, "images_per_second": 2000.0, "together": together},
        1_727_962,
        10 * points if error is None else None,
        signals=signals or {},
    )


def write(folder: Path, trial: str, errors, losses: Sequence[float] = (), **options) -> None:
    """Write a file for each of the errors, with the seeds 0, 1, ..."""
    losses = losses or [0.5] * len(errors)
    for seed, (error, loss) in enumerate(zip(errors, losses, strict=True)):
        results.write(folder, record(trial, seed, error, loss, **options))
