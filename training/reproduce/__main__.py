"""The command line: `python -m training.reproduce COMMAND [--option value ...]`."""

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import tyro

from keras_preact import _checks

from .. import cli
from . import bundle, depth, queue, report, results, speed, trials, workers
from .worker import Job

DESCRIPTION = """Measure the paper's tables: every row is trained as published, and its number stands beside the published one.

A run leaves a JSON file below --output; runs that are there are not made again, one that was stopped goes on where it was.
table1 to table4 and first-paper need the data (CIFAR-10, CIFAR-100) and an accelerator; digits is the same in small, for a
CPU."""


@dataclasses.dataclass(frozen=True)
class Train:
    """What every command that trains takes."""

    rows: tuple[str, ...] = ()
    """Rows: their labels, the names of their trials, or parts of one. None: all of the table."""
    seeds: int = trials.SEEDS
    """Runs of each row: seeds 0, 1, ..."""
    device_minutes: float | None = None
    """When to stop: what is not finished by then is saved, and goes on the next time."""
    processes: int = 1
    """Runs at a time; each computes on its share of the cores."""
    backend: Literal["auto", "jax", "tensorflow", "torch"] = "auto"
    """auto: KERAS_BACKEND, or JAX where it is installed."""
    dtype: Literal["auto", "float32", "mixed_bfloat16"] = "auto"
    """auto: mixed_bfloat16 on an accelerator, float32 on a CPU. Runs of two dtypes do not go into one row."""
    together: int | None = None
    """Steps that are computed at a time, without the host. None: up to 100 on an accelerator, 1 on a CPU."""
    data: Path | None = None
    """Folder of an archive of images, or the data dir of TensorFlow Datasets."""
    output: Path = results.RESULTS
    """Where finished runs are written."""
    work: Path = results.WORK
    """Where unfinished ones are."""
    smoke: bool = False
    """Train eight steps of every row on random images, to see that everything works; nothing goes to --output."""


@dataclasses.dataclass(frozen=True)
class Digits(Train):
    """Tables 1 and 2 in small: networks with a quarter of the channels, images of 8 x 8 pixels, 700 iterations of 32."""

    processes: int = 2
    """Runs at a time; each computes on its share of the cores."""


def chosen(tables: Sequence[str], rows: Sequence[str]) -> list[trials.Trial]:
    """Return the trials of the tables' rows that `rows` name, each once.

    Raises:
        UserError: for a name that is in none.
    """
    all_rows = [row for table in tables for row in trials.TABLES[table].rows]
    for name in rows:
        if not any(_named(row, name) for row in all_rows):
            names = ", ".join(dict.fromkeys(row.trial.name for row in all_rows))
            raise cli.UserError(f"--rows: there is no row {name!r} in {' and '.join(tables)}. It has: {names}")
    wanted = [row.trial for row in all_rows if not rows or any(_named(row, name) for name in rows)]
    return list({trial.name: trial for trial in wanted}.values())


def _named(row: trials.Row, name: str) -> bool:
    exact = name in (row.trial.name, row.trial.name.partition("/")[2], row.label)
    of_another = any(name in (other, other.partition("/")[2]) for other in trials.TRIALS)
    return exact or (not of_another and (name in row.trial.name or name in row.label))


def train(options: Train, tables: Sequence[str]) -> None:
    """Train what is missing of the rows."""
    if options.seeds < 1 or options.processes < 1:
        raise cli.UserError(f"--seeds and --processes must be positive. Received: {options.seeds} and {options.processes}")
    if options.device_minutes is not None and not options.device_minutes > 0:
        raise cli.UserError(f"--device-minutes must be positive. Received: {options.device_minutes}")
    if options.together is not None and options.together < 1:
        raise cli.UserError(f"--together must be positive. Received: {options.together}")
    until = None if options.device_minutes is None else time.time() + 60 * options.device_minutes
    output, work = options.output, options.work
    if options.smoke:
        output, work = (options.work / "smoke" / name for name in ("results", "state"))
        shutil.rmtree(options.work / "smoke", ignore_errors=True)
    settings = {
        "results": str(output.absolute()),
        "work": str(work.absolute()),
        "dtype": None if options.dtype == "auto" else options.dtype,
        "together": options.together,
        "smoke": options.smoke,
        "shared": options.processes,
    }
    jobs, there = [], 0
    for trial in chosen(tables, options.rows):
        seeds = [seed for seed in range(options.seeds) if not results.path(output, trial.name, seed).exists()]
        there += options.seeds - len(seeds)
        if seeds:
            data = None if options.data is None else str(options.data.absolute())
            jobs.append(Job(trial.name, seeds, data, settings, until))
    missing = sum(len(job.seeds) for job in jobs)
    print(f"{missing} runs of {len(jobs)} trials to make; {there} are there already.", flush=True)
    workers.train(jobs, min(options.processes, max(1, len(jobs))), workers.backend(options.backend))
    left = sum(not results.path(output, job.trial, seed).exists() for job in jobs for seed in job.seeds)
    after = f" {left} are not finished: the same command goes on with them." if left else ""
    print(f"{missing - left} runs were made, in {output}.{after}")


def _table(name: str) -> Callable:
    def command(options: tyro.conf.OmitArgPrefixes[Train]) -> None:
        train(options, [name])

    command.__doc__ = trials.TABLES[name].title
    return command


def digits(options: tyro.conf.OmitArgPrefixes[Digits]) -> None:
    """Tables 1 and 2 in small: networks with a quarter of the channels, images of 8 x 8 pixels, 700 iterations of 32."""
    train(options, [name for name, table in trials.TABLES.items() if table.small])


#: Name to function, in the order in which a person meets them.
COMMANDS: Mapping[str, Callable] = {
    **{name.replace("_", "-"): _table(name) for name, table in trials.TABLES.items() if not table.small},
    "digits": digits,
    "depth": depth.depth,
    "report": report.report,
    "next": queue.next_,
    "plan": queue.plan,
    "speed": speed.speed,
    "bundle": bundle.bundle,
    "pack-state": bundle.pack_state,
    "unpack-state": bundle.unpack_state,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it says."""
    argv, verbose = cli.split_verbose(argv)

    def do() -> None:
        if argv and not argv[0].startswith("-"):
            _checks.lookup(COMMANDS, argv[0], "command")
        tyro.extras.subcommand_cli_from_dict(
            dict(COMMANDS), prog=cli.command("reproduce"), description=cli.described(DESCRIPTION), args=argv
        )

    cli.guard(do, verbose)


if __name__ == "__main__":
    main()
