"""The command line: `keras-preact reproduce COMMAND`."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import children, cli
from ..errors import UserError, check_positive, nearest
from . import results
from .depth import depth
from .results import RESULTS
from .run import Options

if TYPE_CHECKING:
    from .rows import Trial

#: Time between two looks at the processes and the signals.
POLL_SECONDS = 0.1

DESCRIPTION = """Train every row of a table of results, to compare it with its published number.
Each run writes one JSON file. Finished runs are kept, interrupted runs are resumed.
Set KERAS_BACKEND to tensorflow (default), jax or torch.
Tables on CIFAR need its images; the paper's tables also need an accelerator."""


def report(output: Path = RESULTS) -> None:
    """Write results/README.md: published numbers beside measured ones.

    Args:
        output: Folder of finished runs.
    """
    from .report import report

    report(output)


#: Name to the line in the help text and what the command does: train tables, or call a function.
COMMANDS: Mapping[str, tuple[str, tuple[str, ...] | Callable[..., None]]] = {
    "fast": ("CIFAR-10 in minutes: the recipe cifar10_fast.", ("fast",)),
    "first-paper": ("Table 6 of the first paper (arXiv 1512.03385): depth.", ("first_paper",)),
    "preact": ("Full pre-activation at 20 to 56 layers.", ("preact",)),
    "table1": ("Table 1: shortcuts, on CIFAR-10.", ("table1",)),
    "table2": ("Table 2: arrangements, on CIFAR-10.", ("table2",)),
    "table3": ("Table 3: pre-activation against the original.", ("table3",)),
    "table4": ("Table 4: ResNet-1001 with batches of 64.", ("table4",)),
    "eighth1": ("Table 1 with ResNet-56 and an eighth of the schedule.", ("eighth1",)),
    "eighth2": ("Table 2 with ResNet-56 and an eighth of the schedule.", ("eighth2",)),
    "digits": ("Tables 1 and 2 in small, on digits.", ("digits1", "digits2")),
    "deep": ("Networks of 1,001 and 10,001 layers, on digits.", ("deep",)),
    "plain": ("1,000 and 10,000 layers without shortcuts, on digits.", ("plain",)),
    "depth": ("Signals and gradients before training, 20 to 10,001 layers.", depth),
    "report": ("Write results/README.md: published numbers beside measured ones.", report),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments and do what they say."""
    lines = {name: about for name, (about, _) in COMMANDS.items()}
    cli.choose("reproduce", DESCRIPTION, lines, _start, argv)


def _start(command: str, argv: Sequence[str]) -> None:
    about, what = COMMANDS[command]
    if callable(what):
        cli.parse(f"reproduce {command}", what, argv)
    else:
        train(cli.parse(f"reproduce {command}", Options, argv, about), what)


def train(options: Options, tables: Sequence[str]) -> None:
    """Train the missing runs of the rows. Each has its own process, so that its memory is
    free when it ends.

    Raises:
        UserError: if runs failed; the others were trained.
        KeyboardInterrupt: after SIGINT, when the run has saved its state.
        SystemExit: with status 75 after SIGTERM.
    """
    check_positive(
        seeds=options.seeds,
        steps_per_execution=options.steps_per_execution,
        parallel=options.parallel,
    )
    if options.smoke:
        smoke = options.work / "smoke"
        options = dataclasses.replace(options, output=smoke / "results", work=smoke / "runs")
    trials = chosen(tables, options.rows)
    if options.smoke:  # only now: the options are right
        shutil.rmtree(smoke, ignore_errors=True)
    runs = [(trial.name, seed) for trial in trials for seed in range(options.seeds)]
    missing = [run for run in runs if not results.path(options.output, *run).exists()]
    print(f"{len(missing)} of {len(runs)} runs are missing.", flush=True)
    failed = [
        f"{trial}, seed {seed}"
        for (trial, seed), status in zip(missing, _statuses(missing, options), strict=True)
        if status
    ]
    if failed:
        raise UserError(
            f"{len(failed)} of {len(missing)} runs failed: {'; '.join(failed)}. Their messages are "
            "above."
        )
    print(f"Finished: {len(missing)} of {len(runs)} runs. Results: {options.output}")


def chosen(tables: Sequence[str], names: Sequence[str]) -> "list[Trial]":
    """Return the trials of rows of some tables, each once. Without `names`: all rows. A
    name that is no row's label or trial chooses all rows with labels or trials that
    contain it.

    Raises:
        UserError: for an unknown row.
    """
    from .rows import TABLES

    rows = [row for table in tables for row in TABLES[table].rows]
    wanted = {row.trial.name for row in rows if not names}
    for name in names:
        matches = [
            row.trial.name
            for row in rows
            if name in (row.label, row.trial.name, row.trial.name.partition("/")[2])
        ] or [row.trial.name for row in rows if name in row.label or name in row.trial.name]
        if not matches:
            known = dict.fromkeys(row.trial.name.partition("/")[2] for row in rows)
            raise UserError(f"Unknown row: {name!r}. {nearest(name, known)}")
        wanted.update(matches)
    trials = {row.trial.name: row.trial for row in rows if row.trial.name in wanted}
    return list(trials.values())


def _statuses(runs: Sequence[tuple[str, int]], options: Options) -> list[int]:
    """Train every run, a trial and its seed, in a process of its own, `options.parallel` of
    them at a time, and return their exit statuses. The processes receive SIGINT and
    SIGTERM too; when they have saved their states, this process stops as well.
    """
    from ..run.signals import PREEMPTED

    variables = {
        # the runs of a trial compile the same functions
        "JAX_COMPILATION_CACHE_DIR": str(options.work.absolute() / "compiled"),
        # JAX takes so much of the device's memory at once
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / options.parallel:.2f}",
    }
    waiting, running = list(runs), dict[tuple[str, int], subprocess.Popen]()
    statuses: dict[tuple[str, int], int] = {}
    with _noting_signals() as received:
        passed_on = 0
        while running or (waiting and not received):
            while waiting and not received and len(running) < options.parallel:
                run = waiting.pop(0)
                running[run] = children.start(
                    f"{__package__}.run",
                    json.dumps((*run, dataclasses.asdict(options)), default=str),
                    os.environ.get("KERAS_BACKEND", "tensorflow"),
                    variables=variables,
                )
            for number in received[passed_on:]:
                for process in running.values():
                    process.send_signal(number)
                passed_on += 1
            ended = {run: status for run in running if (status := running[run].poll()) is not None}
            for run in ended:
                del running[run]
            statuses |= ended
            if not ended:
                time.sleep(POLL_SECONDS)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if signal.SIGTERM in received:
        sys.exit(PREEMPTED)
    return [statuses[run] for run in runs]


@contextlib.contextmanager
def _noting_signals() -> Iterator[list[int]]:
    """Yield the list of the SIGINTs and SIGTERMs received so far, which end nothing."""
    received: list[int] = []

    def note(number: int, _frame) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
