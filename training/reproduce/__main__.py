"""The command line: `keras-preact reproduce COMMAND`."""

import dataclasses
import importlib
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import cli
from .results import RESULTS, SEEDS, WORK

if TYPE_CHECKING:
    from .rows import Row, Trial

DESCRIPTION = """Measure the paper's tables: train every row, beside its published number.
Each run writes one JSON file. Finished runs are kept, interrupted runs are resumed.
table1 to table4 and first-paper need CIFAR and an accelerator; digits needs neither."""


@dataclasses.dataclass(frozen=True)
class Train:
    """Options of every command that trains."""

    rows: tuple[str, ...] = ()
    """Rows to measure: labels, names of trials, or parts of them. Default: all rows."""
    seeds: int = SEEDS
    """Number of runs per row, with seeds 0, 1, ..."""
    device_minutes: float | None = None
    """Stop after this many minutes. The same command resumes unfinished runs."""
    processes: int = 1
    """Runs at the same time. They share the cores."""
    backend: Literal["auto", "jax", "tensorflow", "torch"] = "auto"
    """Keras backend. auto: KERAS_BACKEND, or JAX if it is installed."""
    dtype: Literal["auto", "float32", "mixed_bfloat16"] = "auto"
    """Precision, one per row. auto: mixed_bfloat16 on an accelerator, else float32."""
    together: int | None = None
    """Steps per compiled loop. If not given: up to 100 on an accelerator, 1 on a CPU."""
    data: Path | None = None
    """Data directory of TensorFlow Datasets."""
    output: Path = RESULTS
    """Folder of the results, one JSON file per run."""
    work: Path = WORK
    """Folder of the run directories."""
    smoke: bool = False
    """Train eight steps of every row, on random images instead of CIFAR, to check the setup."""


@dataclasses.dataclass(frozen=True)
class Digits(Train):
    """Options of the tables on digits."""

    processes: int = 2
    """Runs at the same time. They share the cores."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Options of the report."""

    output: Path = RESULTS
    """Folder of finished runs."""


def chosen(tables: Sequence[str], rows: Sequence[str]) -> "list[Trial]":
    """Return the trials of the rows of some tables, each once; of all rows without
    `rows`.

    Raises:
        UserError: for an unknown row.
    """
    from . import rows as published

    all_rows = [row for table in tables for row in published.TABLES[table].rows]
    for name in rows:
        if not any(_named(row, name) for row in all_rows):
            names = ", ".join(dict.fromkeys(row.trial.name for row in all_rows))
            raise cli.UserError(
                f"Unknown row {name!r} of {' and '.join(tables)}. Choose from: {names}"
            )
    wanted = [row.trial for row in all_rows if not rows or any(_named(row, name) for name in rows)]
    return list({trial.name: trial for trial in wanted}.values())


def _named(row: "Row", name: str) -> bool:
    from . import rows as published

    exact = name in (row.trial.name, row.trial.name.partition("/")[2], row.label)
    of_another = any(name in (other, other.partition("/")[2]) for other in published.TRIALS)
    return exact or (not of_another and (name in row.trial.name or name in row.label))


def train(options: Train, tables: Sequence[str]) -> None:
    """Train the missing runs of the rows."""
    from . import results, workers
    from .run import Job

    for option in ("seeds", "processes", "device_minutes", "together"):
        value = getattr(options, option)
        if value is not None and not value > 0:
            raise cli.UserError(f"--{option.replace('_', '-')} must be positive. Received: {value}")
    output, work = options.output, options.work
    if options.smoke:
        output, work = (options.work / "smoke" / name for name in ("results", "runs"))
        shutil.rmtree(options.work / "smoke", ignore_errors=True)
    jobs, there = [], 0
    for trial in chosen(tables, options.rows):
        seeds = [
            seed
            for seed in range(options.seeds)
            if not results.path(output, trial.name, seed).exists()
        ]
        there += options.seeds - len(seeds)
        if seeds:
            job = Job(
                trial.name,
                seeds,
                results=str(output.absolute()),
                work=str(work.absolute()),
                data=None if options.data is None else str(options.data.absolute()),
                dtype=None if options.dtype == "auto" else options.dtype,
                together=options.together,
                smoke=options.smoke,
                processes=options.processes,
            )
            jobs.append(job)
    missing = sum(len(job.seeds) for job in jobs)
    print(f"{missing} runs of {len(jobs)} trials are missing; {there} exist already.", flush=True)
    processes = min(options.processes, max(1, len(jobs)))
    workers.Workers(processes, workers.backend(options.backend), options.device_minutes).train(jobs)
    left = sum(
        not results.path(output, job.trial, seed).exists() for job in jobs for seed in job.seeds
    )
    after = f" {left} are not finished; the same command resumes them." if left else ""
    print(f"Finished {missing - left} runs in {output}.{after}")


def _table(name: str) -> Callable[[Train], None]:
    return lambda options: train(options, [name])


def _digits(options: Digits) -> None:
    from .rows import TABLES

    train(options, [name for name in TABLES if name.startswith("digits")])


def _report(options: Report) -> None:
    from .report import report

    report(options.output)


@dataclasses.dataclass(frozen=True)
class Command:
    """A row of the table.

    Args:
        about: What the command does, in one line.
        place: MODULE:FUNCTION of this package whose parameters are the options; empty
            otherwise.
        options, run: Otherwise, its options and what is called with them.
    """

    about: str
    place: str = ""
    options: type = Train
    run: Callable[[Any], None] = print


#: Name to command, in the order of the help text.
COMMANDS: Mapping[str, Command] = {
    "table1": Command("Table 1: shortcuts, on CIFAR-10.", run=_table("table1")),
    "table2": Command("Table 2: arrangements, on CIFAR-10.", run=_table("table2")),
    "table3": Command("Table 3: pre-activation against the original.", run=_table("table3")),
    "table4": Command("Table 4: ResNet-1001 with batches of 64.", run=_table("table4")),
    "first-paper": Command(
        "Table 6 of the first paper (arXiv 1512.03385): depth.", run=_table("first_paper")
    ),
    "preact": Command("Full pre-activation at 20 to 56 layers.", run=_table("preact")),
    "eighth1": Command(
        "Table 1 with ResNet-56 and an eighth of the schedule.", run=_table("eighth1")
    ),
    "eighth2": Command(
        "Table 2 with ResNet-56 and an eighth of the schedule.", run=_table("eighth2")
    ),
    "digits": Command(
        "Tables 1 and 2 in small, on digits: half an hour on a CPU.",
        options=Digits,
        run=_digits,
    ),
    "deep": Command("Networks of 10,000 layers, on digits: an hour each.", run=_table("deep")),
    "fast": Command("CIFAR-10 in minutes: the recipe cifar10_fast.", "fast:fast"),
    "depth": Command("Signals and gradients before training, 20 to 10,001 layers.", "depth:depth"),
    "report": Command(
        "Write results/README.md: published numbers beside measured ones.",
        options=Report,
        run=_report,
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments and do what they say."""
    argv, verbose = cli.split_verbose(sys.argv[1:] if argv is None else argv)
    cli.guard(lambda: _start(argv), verbose)


def _start(argv: Sequence[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(
            cli.listing(
                "reproduce", DESCRIPTION, {name: row.about for name, row in COMMANDS.items()}
            )
        )
        return
    command = cli.lookup(COMMANDS, argv[0], "command of reproduce")
    name = f"reproduce {argv[0]}"
    if not command.place:
        command.run(cli.parse(name, command.options, argv[1:], command.about))
        return
    module, _, function = command.place.partition(":")
    cli.parse(name, getattr(importlib.import_module(f".{module}", __package__), function), argv[1:])


if __name__ == "__main__":
    main()
