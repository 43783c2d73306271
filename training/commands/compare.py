"""Compare runs: `keras-preact compare`."""

import functools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from .. import cli, disk
from ..cli.programs import answering
from ..cli.terminal import aligned
from ..config import Config
from ..config import options as options_of
from ..directory import histories
from ..directory.compared import RESULTS, SHOWN, WHAT, Compared, cell, differing, option, read_runs
from ..errors import UserError, command, nearest
from .groups import Group, about_tests, against, grouped, rows_of, tested, words


def compare(
    directories: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(one or more)"),
    ],
    /,
    by: str | None = None,
    output: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Print a table of runs: the options in which they differ, accuracy, time.

    Runs that differ only in the seed are one row: the median of their errors, in brackets
    the smallest and the largest, and a rank test against the first row.

    Args:
        directories: Run directories, and folders of several runs, of `train --seeds` and
            `sweep`.
        by: Group the runs by this option alone, such as model.arrangement.
        output: Folder for comparison.csv (a row per run), groups.csv (a row per group) and
            comparison.png, the learning curves. If not given: print only.
        as_json: Print the rows of comparison.csv and groups.csv as JSON on stdout, and
            nothing else there.
    """
    if not directories:
        raise UserError(f"Name at least one run: {command('compare', 'runs/A', 'runs/B')}")
    if by is not None and by.removeprefix("--") not in (known := options_of(Config())):
        raise UserError(f"Unknown option: {by!r}. {nearest(by, known)}")
    compared = read_runs(directories)
    options = differing(compared)
    others = {name: value for name, value in options.items() if name != "seed"}
    alike = {"model": WHAT["model"], **others}
    if by is not None:
        by = by.removeprefix("--")
        alike = others = {by: functools.partial(option, by)}
    groups = grouped(compared, alike)
    columns, shared = {**WHAT, **options, **RESULTS}, {**WHAT, **others, **RESULTS}
    if by is None and len(groups) == len(compared):
        cells = [[cell(name, of(run)) for name, of in columns.items()] for run in compared]
        text = _table(_headings(columns, compared), cells)
        groups = []
    else:
        text = _table_of_groups(groups, shared, compared)
    rows = [{name: value(run) for name, value in columns.items()} for run in compared]
    if groups:
        group_of = {run.name: group.name for group in groups for run in group.runs}
        rows = [{"group": group_of[row["run"]], **row} for row in rows]
    summaries = list(rows_of(groups, shared))
    with answering(as_json) as answer:
        answer(text, {"runs": rows, "groups": summaries})
        if output is not None:
            written = _write(rows, summaries, compared, output)
            print(f"\nWrote {', '.join(map(str, written))}")


def _write(
    rows: Sequence[Mapping[str, Any]],
    summaries: Sequence[Mapping[str, Any]],
    compared: Sequence[Compared],
    output: Path,
) -> list[Path]:
    """Write the tables and the learning curves. Return the files."""
    from ..directory import curves

    disk.make(output, "--output")
    tables = {"comparison.csv": rows, "groups.csv": summaries}
    written = [output / name for name, table in tables.items() if table]
    for path in written:
        histories.write(path, tables[path.name])
    if histories_of := {run.name: run.history for run in compared if run.history}:
        written.append(output / "comparison.png")
        with disk.replacing(written[-1]) as path:
            curves.draw(histories_of, path, "", _split(compared))
    return written


def _split(compared: Sequence[Compared]) -> str:
    """Return on which images the runs were measured after each epoch."""
    return " or ".join(
        sorted({"held-out" if run.config.data.holdout else "test" for run in compared})
    )


def _headings(columns: Iterable[str], compared: Sequence[Compared]) -> list[str]:
    split = _split(compared)
    return [SHOWN[name][0].format(split=split) if name in SHOWN else name for name in columns]


def _table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    return aligned([headings, *cells], shutil.get_terminal_size((120, 24)).columns)


def _table_of_groups(
    groups: Sequence[Group],
    columns: Mapping[str, Callable[[Compared], Any]],
    compared: Sequence[Compared],
) -> str:
    """Return a row per group, and what its numbers mean."""
    headings = _headings(columns, compared)
    cells = [[group.shown(name, of) for name, of in columns.items()] for group in groups]
    notes = ["Errors: the median of the finished runs, in brackets the smallest and the largest."]
    if any(run.diverged for run in compared):
        notes[0] += " A run that diverged counts too, as the largest error."
    if len(groups) > 1:
        figure = tested(groups)
        headings.append("against the first")
        tests = [against(group, groups[0], figure) for group in groups]
        for row, test in zip(cells, tests, strict=True):
            row.append("-" if test is None else words(*test))
        notes.append(about_tests(groups, tests, figure, _headings([figure or ""], compared)[0]))
    return "\n".join([_table(headings, cells), "", *notes])


def main(argv: Sequence[str]) -> None:
    cli.main("compare", compare, argv)
