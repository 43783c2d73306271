"""The command line: `keras-preact reproduce COMMAND`."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import children, cli, disk
from ..errors import UserError, check_positive, nearest
from ..functions import is_own
from . import results
from .claims.check import claims
from .depth import depth
from .rates import rates
from .results import RESULTS
from .run import Options

if TYPE_CHECKING:
    from .trials import Trial

DESCRIPTION = """Train every row of a table of results, to compare it with its published number.
Each run writes one JSON file. Finished runs are kept, interrupted runs are resumed.
Set KERAS_BACKEND to tensorflow (default), jax or torch.
In place of COMMAND, MODULE:TABLE trains the rows of your own table, and prints it.
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
    **{
        f"eighth-{n}": (
            f"Tables 1 and 2 with ResNet-{n} and an eighth of the schedule.",
            (f"eighth_{n}_1", f"eighth_{n}_2"),
        )
        for n in (20, 8)
    },
    "digits": ("Tables 1 and 2 scaled down, on digits.", ("digits1", "digits2")),
    "shortcuts": ("Shortcuts of 2016 to 2026, on digits.", ("shortcuts",)),
    "shortcuts-eighth": (
        "Shortcuts of 2016 to 2026, on CIFAR-10 with ResNet-56.",
        ("shortcuts_eighth",),
    ),
    "advice": ("Activations, dropout, warm-up and batches, on digits.", ("advice",)),
    "deep": ("Networks of 1,001 and 10,001 layers, on digits.", ("deep",)),
    "plain": ("1,000 and 10,000 layers without shortcuts, on digits.", ("plain",)),
    "depth": ("Signals and gradients before training, 20 to 10,001 layers.", depth),
    "rates": ("The best learning rate at 20 to 506 layers, on digits.", rates),
    "claims": ("What texts about the paper claim: a verdict and a number for each.", claims),
    "report": ("Write results/README.md: published numbers beside measured ones.", report),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments and do what they say."""
    words, verbose = cli.split_verbose(sys.argv[1:] if argv is None else argv)
    if words and is_own(words[0]):
        cli.guard(lambda: _train_own(words[0], words[1:]), verbose)
        return
    lines = {name: about for name, (about, _) in COMMANDS.items()}
    cli.choose("reproduce", DESCRIPTION, lines, _start, argv)


def _train_own(name: str, argv: Sequence[str]) -> None:
    """Train the rows of a table of a person, and print it."""
    options = cli.parse(f"reproduce {name}", Options, argv, f"Train the rows of {name}.")
    train(options, [name])
    if not options.smoke:
        from . import report, rows

        groups = results.groups(results.read(options.output))
        print(f"\n{report.table_text(rows.table(name), groups)}")


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
    if options.data_dir is not None and all(trial.dataset == "digits" for trial in trials):
        raise UserError(
            "--data-dir is for rows on other data than digits, which have no folder. Received: "
            f"{options.data_dir}"
        )
    own = tables[0] if is_own(tables[0]) else None
    if options.smoke:  # only now: the options are right
        shutil.rmtree(smoke, ignore_errors=True)
    runs = [(trial.name, seed) for trial in trials for seed in range(options.seeds)]
    missing = [run for run in runs if not results.path(options.output, *run).exists()]
    print(f"{len(missing)} of {len(runs)} runs are missing.", flush=True)
    disk.make(options.output, "--output")
    disk.make(options.work, "--work")
    try:
        statuses = _statuses(missing, options, own)
    except (KeyboardInterrupt, SystemExit):
        print("Stopped. The same command resumes the runs.", flush=True)
        raise
    failed = [
        f"{trial}, seed {seed}"
        for (trial, seed), status in zip(missing, statuses, strict=True)
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
    from .rows import table

    rows = [row for name in tables for row in table(name).rows]
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


def _statuses(runs: Sequence[tuple[str, int]], options: Options, table: str | None) -> list[int]:
    """Train every run, a trial and its seed, in a process of its own, `options.parallel` of
    them at a time, and return their exit statuses.
    """
    # JAX takes so much of the device's memory at once
    variables = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / options.parallel:.2f}"}
    jobs = [json.dumps((*run, dataclasses.asdict(options), table), default=str) for run in runs]
    return children.statuses(f"{__package__}.run", jobs, options.parallel, variables)


if __name__ == "__main__":
    main()
