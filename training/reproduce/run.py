"""Train one run of a trial. `reproduce` runs this module in a process per run; the
argument is the trial's name, the seed, the options and the table of a person as JSON.

A run is an ordinary run directory in the folder `work`. Its result is written when it
ends.
"""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from .. import backends, cli, disk
from ..config import from_json
from ..directory import runs
from ..errors import command
from ..run import compile_cache
from . import results
from .results import RESULTS, WORK

if TYPE_CHECKING:
    import keras

    from ..run.run import Run

#: Number of images on which signals are measured.
SAMPLE = 64


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of every command that trains."""

    rows: tuple[str, ...] = ()
    """Rows to measure: labels, names of trials, or parts of them. If not given: all rows."""
    seeds: int = 5
    """Number of runs per row, with seeds 0, 1, ... The papers give the median of 5."""
    precision: Literal["auto", "float32", "mixed_bfloat16"] = "auto"
    """Precision of the training. auto: mixed_bfloat16 on an accelerator, else float32."""
    steps_per_execution: int | None = None
    """Iterations per call of the compiled train step. If not given: up to 100 on an accelerator, 1
    on a CPU."""
    parallel: int = 1
    """Number of runs to train at the same time. Small networks leave most of a GPU idle."""
    data_dir: Path | None = None
    """Data directory of TensorFlow Datasets."""
    output: Path = RESULTS
    """Folder of the results, one JSON file per run."""
    work: Path = WORK
    """Folder of the run directories."""
    smoke: bool = False
    """Train eight steps of every row, on random images instead of CIFAR, to check the setup."""


def train(name: str, seed: int, options: Options, table: str | None = None) -> None:
    """Train a run of a trial to its end, or resume it, and write its result.

    Args:
        name: Name of the trial.
        seed: Seed of the run.
        options: Options of the command.
        table: The trial's table if it is one of a person, MODULE:TABLE.

    Raises:
        UserError: for a run that differs from the row's other runs, or from the run in
            its directory.
    """
    compile_cache.use(compile_cache.AUTO)  # before the imports, which read it

    import keras

    from ..commands.evaluate.__main__ import evaluate
    from ..run import phases, started
    from ..run.callbacks import Diverged
    from . import rows, trials

    on_cpu = backends.device() == "CPU"
    one_step = on_cpu or keras.backend.backend() == "torch"
    trial = rows.TRIALS[name] if table is None else rows.trials(rows.table(table))[name]
    config = trial.config(
        seed,
        dtype=options.precision.replace("auto", "float32" if on_cpu else "mixed_bfloat16"),
        steps_per_execution=options.steps_per_execution
        or (1 if one_step else trials.STEPS_PER_EXECUTION),
        on_device=not on_cpu,
        data=options.data_dir,
        smoke=options.smoke,
    )
    folder, run = options.output, options.work / name / f"seed-{seed}"
    disk.make(run.parent)
    config = dataclasses.replace(config, output=run, resume=True)
    log = run.with_suffix(".log")
    what = f"{name}, seed {seed}"
    with started(config, name) as running:
        images = running.data
        data = {
            "name": images.name,
            "hash": images.hash,
            "train": images.train.size,
            "test": images.test.size,
        }
        for file in sorted((folder / name).glob("seed-*.json")):
            results.check_same(results.read_one(file), config, data)
        print(f"{what}: training, see {log}", flush=True)
        diverged_at: int | None = None
        views: dict[str, dict[str, float]] = {}
        with log.open("a", buffering=1) as stream, contextlib.redirect_stdout(stream):
            try:
                phases.train(running, f"the same command, {command('reproduce', '...')}")
            except Diverged:
                diverged_at = runs.diverged_at(run)
            for view in trial.views if diverged_at is None else ():
                output = run / "views" / view
                # whoever named the table trusts it
                measured = evaluate(run, output=output, views=view, trust=True)
                metrics = json.loads(measured.read_text())
                views[view] = {key: metrics[key] for key in results.VIEWED}
        measures = trial.signals and diverged_at is None
        signals = signals_of(running.network, _first_images(running)) if measures else None
    record = results.of_run(
        run,
        name,
        data,
        diverged_at=diverged_at,
        views=views,
        signals=signals,
        together=options.parallel,
    )
    error = "diverged" if record.error is None else f"test error {record.error:.2f} %"
    print(f"{what}: {error}. Written: {results.write(folder, record)}", flush=True)


def _first_images(running: "Run") -> np.ndarray:
    """Return the first training images, as for all committed results. Those of the data
    sets of the tables are not sorted by class.
    """
    from ..data import evaluation_batches

    batches = evaluation_batches(running.data, running.data.train, SAMPLE, running.size)
    return next(batches.as_numpy_iterator())[0]


def signals_of(network: "keras.Model", images: np.ndarray) -> dict[str, float | None]:
    """Measure the signals of a network on images, in inference.

    Returns:
        `forward` and `backward`: the composite gain of the shortcuts from that x_l from
        which it differs most from 1; None for shortcuts that mix channels.
        `cosine`: the median of cos(h(x_l), F(x_l)) over the units; None without shortcuts.
    """
    import keras_preact as kp

    found = kp.analysis.propagation(network, images, training=False)
    cosines = found.residual_cosine[np.isfinite(found.residual_cosine)]
    try:
        gain = kp.analysis.composite_gain(network, images)
    except ValueError:
        gains = dict.fromkeys(("forward", "backward"))
    else:
        gains = {"forward": _farthest(gain.forward), "backward": _farthest(gain.backward)}
    return {**gains, "cosine": float(np.median(cosines)) if len(cosines) else None}


def _farthest(gain: np.ndarray) -> float:
    """Return the gain that differs most from 1."""
    with np.errstate(divide="ignore"):
        return float(gain[np.nanargmax(np.abs(np.log(gain)))])


if __name__ == "__main__":
    trial, seed, options, table = json.loads(sys.argv[1])
    cli.guard(lambda: train(trial, seed, from_json(Options, options), table))
