"""Compare runs: `keras-preact compare`."""

import functools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from .. import cli, disk
from ..cli.terminal import aligned
from ..config import option_names
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
) -> None:
    """Print a table of runs: the options in which they differ, accuracy, time.

    Runs that differ only in the seed are one row: the median of their errors, in brackets
    the least and the most, and a rank test against the first row.

    Args:
        directories: Run directories, and folders of `keras-preact train --seeds`.
        by: Group the runs by this option alone, such as model.arrangement.
        output: Folder for comparison.csv (a row per run), groups.csv (a row per group) and
            comparison.png, the learning curves. If not given: print only.
    """
    if not directories:
        raise UserError(f"Name at least one run: {command('compare', 'runs/A', 'runs/B')}")
    if by is not None and by.removeprefix("--") not in option_names():
        raise UserError(f"Unknown option: {by!r}. {nearest(by, option_names())}")
    compared = read_runs(directories)
    options = differing(compared)
    others = {name: value for name, value in options.items() if name != "seed"}
    alike = {"model": WHAT["model"], **others}
    if by is not None:
        by = by.removeprefix("--")
        alike = others = {by: functools.partial(option, by)}
    groups = grouped(compared, alike)
    columns = {**WHAT, **options, **RESULTS}
    if by is None and len(groups) == len(compared):
        cells = [[cell(name, of(run)) for name, of in columns.items()] for run in compared]
        _print(_headings(columns, compared), cells)
        groups = []
    else:
        _print_groups(groups, {**WHAT, **others, **RESULTS}, compared)
    if output is None:
        return
    disk.make(output)
    rows = [{name: value(run) for name, value in columns.items()} for run in compared]
    if groups:
        group_of = {run.name: group.name for group in groups for run in group.runs}
        rows = [{"group": group_of[row["run"]], **row} for row in rows]
        shared = {**WHAT, **others, **RESULTS}
        histories.write(output / "groups.csv", list(rows_of(groups, shared)))
    histories.write(output / "comparison.csv", rows)
    with disk.replacing(output / "comparison.png") as path:
        from ..directory import curves

        histories_of = {run.name: run.history for run in compared}
        curves.draw(histories_of, path, "", _split(compared))
    names = ["comparison.csv", *(["groups.csv"] if groups else []), "comparison.png"]
    print(f"\nWrote {', '.join(str(output / name) for name in names)}")


def _split(compared: Sequence[Compared]) -> str:
    """Return on which images the runs were measured after each epoch."""
    return " or ".join(
        sorted({"held-out" if run.config.data.holdout else "test" for run in compared})
    )


def _headings(columns: Iterable[str], compared: Sequence[Compared]) -> list[str]:
    split = _split(compared)
    return [SHOWN[name][0].format(split=split) if name in SHOWN else name for name in columns]


def _print(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    print(aligned([headings, *cells], shutil.get_terminal_size((120, 24)).columns))


def _print_groups(
    groups: Sequence[Group],
    columns: Mapping[str, Callable[[Compared], Any]],
    compared: Sequence[Compared],
) -> None:
    """Print a row per group, and what its numbers mean."""
    headings = _headings(columns, compared)
    cells = [[group.shown(name, of) for name, of in columns.items()] for group in groups]
    notes = ["Errors: the median of the finished runs, in brackets the least and the most."]
    if len(groups) > 1:
        figure = tested(groups)
        headings.append("against the first")
        tests = [against(group, groups[0], figure) for group in groups]
        for row, test in zip(cells, tests, strict=True):
            row.append("-" if test is None else words(*test))
        notes.append(about_tests(groups, tests, figure, _headings([figure or ""], compared)[0]))
    _print(headings, cells)
    print("\n" + "\n".join(notes))


def main(argv: Sequence[str]) -> None:
    cli.main("compare", compare, argv)
