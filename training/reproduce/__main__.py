"""The command line: `keras-preact reproduce COMMAND`."""

import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import children, cli
from .results import RESULTS, SEEDS, WORK

if TYPE_CHECKING:
    from .rows import Row, Trial
    from .run import Job

DESCRIPTION = """Measure the tables of the results: train every row, beside its published number.
Each run writes one JSON file. Finished runs are kept, interrupted runs are resumed.
Tables on CIFAR need its images; the paper's tables also need an accelerator."""


@dataclasses.dataclass(frozen=True)
class Train:
    """Options of every command that trains."""

    rows: tuple[str, ...] = ()
    """Rows to measure: labels, names of trials, or parts of them. Default: all rows."""
    seeds: int = SEEDS
    """Number of runs per row, with seeds 0, 1, ..."""
    backend: Literal["auto", "jax", "tensorflow", "torch"] = "auto"
    """Keras backend. auto: KERAS_BACKEND, or TensorFlow."""
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
    """Train the missing runs of the rows, one after another, each in a process of its
    own: when one ends, its memory is free.

    Raises:
        UserError: if runs failed; the others were trained.
        KeyboardInterrupt: after SIGINT, when the run has saved its state.
        SystemExit: with status 75 after SIGTERM.
    """
    from . import results
    from .run import Job

    for option in ("seeds", "together"):
        value = getattr(options, option)
        if value is not None and not value > 0:
            raise cli.UserError(f"--{option} must be positive. Received: {value}")
    output, work = options.output, options.work
    if options.smoke:
        output, work = (options.work / "smoke" / name for name in ("results", "runs"))
        shutil.rmtree(options.work / "smoke", ignore_errors=True)
    runs = [
        (trial.name, seed)
        for trial in chosen(tables, options.rows)
        for seed in range(options.seeds)
    ]
    missing = [run for run in runs if not results.path(output, *run).exists()]
    print(f"{len(missing)} of {len(runs)} runs are missing.", flush=True)
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    failed = []
    for trial, seed in missing:
        job = Job(
            trial,
            seed,
            results=str(output),
            work=str(work),
            data=None if options.data is None else str(options.data),
            dtype=None if options.dtype == "auto" else options.dtype,
            together=options.together,
            smoke=options.smoke,
        )
        if _status(job, backend if options.backend == "auto" else options.backend):
            failed.append(f"{trial}, seed {seed}")
    if failed:
        raise cli.UserError(
            f"{len(failed)} of {len(missing)} runs failed: {'; '.join(failed)}. Their messages are "
            "above."
        )
    print(f"Finished {len(missing)} runs. Results: {output}")


def _status(job: "Job", backend: str) -> int:
    """Train in a process of its own, and return its exit status. SIGINT and SIGTERM are
    passed on to it; when it has saved its state, this process ends as well.
    """
    from ..signals import PREEMPTED

    process = children.start(
        f"{__package__}.run",
        json.dumps(dataclasses.asdict(job)),
        backend,
        # the runs of a trial compile the same functions
        variables={"JAX_COMPILATION_CACHE_DIR": str(Path(job.work).absolute() / "compiled")},
    )
    with _passing_on(process) as received:
        status = process.wait()
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if signal.SIGTERM in received:
        sys.exit(PREEMPTED)
    return status


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen) -> Iterator[list[int]]:
    """Give a list of the signals that come meanwhile and are passed on to a process."""
    received: list[int] = []

    def pass_on(number: int, _frame) -> None:
        received.append(number)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _table(*names: str) -> Callable[[Train], None]:
    return lambda options: train(options, names)


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
    "fast": Command("CIFAR-10 in minutes: the recipe cifar10_fast.", run=_table("fast")),
    "first-paper": Command(
        "Table 6 of the first paper (arXiv 1512.03385): depth.", run=_table("first_paper")
    ),
    "preact": Command("Full pre-activation at 20 to 56 layers.", run=_table("preact")),
    "table1": Command("Table 1: shortcuts, on CIFAR-10.", run=_table("table1")),
    "table2": Command("Table 2: arrangements, on CIFAR-10.", run=_table("table2")),
    "table3": Command("Table 3: pre-activation against the original.", run=_table("table3")),
    "table4": Command("Table 4: ResNet-1001 with batches of 64.", run=_table("table4")),
    "eighth1": Command(
        "Table 1 with ResNet-56 and an eighth of the schedule.", run=_table("eighth1")
    ),
    "eighth2": Command(
        "Table 2 with ResNet-56 and an eighth of the schedule.", run=_table("eighth2")
    ),
    "digits": Command("Tables 1 and 2 in small, on digits.", run=_table("digits1", "digits2")),
    "deep": Command("Networks of 1,001 and 10,001 layers, on digits.", run=_table("deep")),
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
