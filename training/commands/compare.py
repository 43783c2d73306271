"""Compare runs: `keras-preact compare`."""

import dataclasses
import functools
import re
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from .. import cli, disk
from ..cli.terminal import aligned, duration, some
from ..config import Config, differences, option_names
from ..directory import histories, measurements, runs
from ..errors import UserError, command, nearest, reading
from ..ranks import LEVEL, least_chance, rank_test, spread


@dataclasses.dataclass(frozen=True)
class Compared:
    """What a comparison needs from a run directory.

    Args:
        path: The run directory.
        name: Unique name.
        config: Configuration of the run.
        described: Content of its config.json.
        history: Columns of its history.csv.
        test_error: Error in percent on its own test set; None if it was not measured.
        finished: Whether the run is finished.
    """

    path: Path
    name: str
    config: Config
    described: Mapping[str, Any]
    history: histories.Columns
    test_error: float | None
    finished: bool

    def figure(self, name: str, of: Callable[[np.ndarray], Any]) -> float | None:
        """Apply `of` to the finite numbers in a column of the history. Return None if
        there are none.
        """
        if not histories.measured(self.history, name):
            return None
        values = self.history[name]
        return float(of(values[np.isfinite(values)]))

    def validation_error(self, of: Callable[[np.ndarray], Any]) -> float | None:
        """Apply `of` to the held-out errors in percent, one per epoch."""
        return self.figure("val_accuracy", lambda values: of(100 * (1 - values)))


def _last(values: np.ndarray) -> float:
    return values[-1]


#: Functions that return the value of a run, by column of comparison.csv: the columns before the
#: options, and after them.
WHAT: Mapping[str, Callable[[Compared], Any]] = {
    "run": lambda run: run.name,
    "model": lambda run: run.config.model.name,
    "parameters": lambda run: run.described.get("trainable_parameters"),
    "recipe": lambda run: run.described.get("recipe"),
}
RESULTS: Mapping[str, Callable[[Compared], Any]] = {
    "epochs": lambda run: len(run.history["loss"]),
    "iterations": lambda run: (last := run.figure("iteration", _last)) and int(last),
    "finished": lambda run: run.finished,
    "best_validation_error": lambda run: run.validation_error(min),
    "last_validation_error": lambda run: run.validation_error(_last),
    "test_error": lambda run: run.test_error,
    "seconds": lambda run: run.figure("seconds", _last),
    "images_per_second": lambda run: run.figure("images_per_second", np.median),
}
#: Heading of a printed column, and the function that formats its values, by column. `split` is
#: "held-out", "test" or both.
SHOWN: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "parameters": ("parameters", "{:,.0f}".format),
    "iterations": ("iterations", "{:,.0f}".format),
    "finished": ("finished", lambda value: "yes" if value else "no"),
    "best_validation_error": ("best epoch's {split} error %", "{:.2f}".format),
    "last_validation_error": ("last epoch's {split} error %", "{:.2f}".format),
    "test_error": ("test error %", "{:.2f}".format),
    "seconds": ("time", duration),
    "images_per_second": ("images/s", "{:,.0f}".format),
}
#: Columns of which a group has a median and a range, and those of which it has a median.
ERRORS = ("best_validation_error", "last_validation_error", "test_error")
MEDIANS = ("seconds", "images_per_second")
#: Least number of runs in each of two groups for a rank test.
TESTED = 3


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that are one row: they differ only in the seed, or in all but one option."""

    runs: Sequence[Compared]

    @property
    def name(self) -> str:
        """Name of the folder that `train --seeds` made for the runs, or their own names."""
        [folder, *others] = {run.path.resolve().parent for run in self.runs}
        are_seeds = all(re.fullmatch(r"seed-\d+", run.path.resolve().name) for run in self.runs)
        if len(self.runs) > 1 and are_seeds and not others:
            return folder.name
        return some([run.name for run in self.runs], most=2)

    @property
    def finished(self) -> list[Compared]:
        return [run for run in self.runs if run.finished]

    def values(self, column: str) -> list[Any]:
        """Return the results of the finished runs, without those that were not measured; of
        all runs if none is finished.
        """
        found = [RESULTS[column](run) for run in self.finished or self.runs]
        return [value for value in found if value is not None]

    def shown(self, column: str, value: Callable[[Compared], Any]) -> str:
        """Return the cell of a column: its value, or the different ones."""
        if column == "run":
            return self.name
        if column == "finished":
            return f"{len(self.finished)} of {len(self.runs)}"
        if column in ERRORS and self.values(column):
            values, runs = self.values(column), self.finished or self.runs
            of = f", {len(values)} of {len(runs)} runs" * (len(values) < len(runs))
            return spread(values, ".2f") + of
        if column in MEDIANS and self.values(column):
            return _cell(column, statistics.median(self.values(column)))
        return some(list(dict.fromkeys(_cell(column, value(run)) for run in self.runs)), most=3)

    def exact(self, column: str, value: Callable[[Compared], Any]) -> dict[str, Any]:
        """Return the cells of a column in groups.csv."""
        if column in ERRORS:
            values = self.values(column)
            parts: dict[str, Callable] = {"median": statistics.median, "least": min, "most": max}
            return {
                f"{column}_{part}": of(values) if values else None for part, of in parts.items()
            }
        if column == "finished":
            return {column: len(self.finished)}
        if column in MEDIANS:
            return {column: statistics.median(self.values(column) or [float("nan")])}
        values = list(dict.fromkeys(map(value, self.runs)))
        return {column: values[0] if len(values) == 1 else self.shown(column, value)}


def grouped(
    compared: Sequence[Compared], columns: Mapping[str, Callable[[Compared], Any]]
) -> list[Group]:
    """Return the runs in groups that have the same value in every column."""
    found: dict[tuple, list[Compared]] = {}
    for run in compared:
        found.setdefault(tuple(value(run) for value in columns.values()), []).append(run)
    return [Group(runs) for runs in found.values()]


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
        alike = others = {by: functools.partial(_option, by)}
    groups = grouped(compared, alike)
    columns = {**WHAT, **options, **RESULTS}
    if by is None and len(groups) == len(compared):
        cells = [[_cell(name, of(run)) for name, of in columns.items()] for run in compared]
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
        histories.write(output / "groups.csv", list(_rows_of(groups, shared)))
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
        figure = _tested(groups)
        headings.append("against the first")
        tests = [_against(group, groups[0], figure) for group in groups]
        for row, test in zip(cells, tests, strict=True):
            row.append("-" if test is None else _words(*test))
        notes.append(_about_tests(groups, tests, figure, _headings([figure or ""], compared)[0]))
    _print(headings, cells)
    print("\n" + "\n".join(notes))


def _tested(groups: Sequence[Group]) -> str | None:
    """Return the error of the rank test: on the test images if all finished runs have it,
    else after the last epoch; None if some runs have neither, or other images.
    """
    finished = [run for group in groups for run in group.finished]
    if len({run.config.data.name for run in finished}) > 1:
        return None
    for column in ("test_error", "last_validation_error"):
        holdouts = {run.config.data.holdout for run in finished if column != "test_error"}
        if len(holdouts) < 2 and all(RESULTS[column](run) is not None for run in finished):
            return column
    return None


def _against(group: Group, first: Group, figure: str | None) -> tuple[int, float] | None:
    """Return sign and p-value of the rank test, None for the first group itself and for
    groups with too few runs.
    """
    if group is first or figure is None or min(map(_count, (group, first))) < TESTED:
        return None
    return rank_test(group.values(figure), first.values(figure))


def _count(group: Group) -> int:
    return len(group.finished)


def _words(sign: int, chance: float) -> str:
    word = ("higher" if sign > 0 else "lower") if chance < LEVEL else "open"
    return f"{word} (p = {chance:.2g})"


def _about_tests(
    groups: Sequence[Group], tests: Sequence[object], figure: str | None, heading: str
) -> str:
    """Return what the column of the rank test means, and what so few runs can say."""
    if figure is None:
        return "Against the first: not tested; the runs have no error on the same images."
    sizes = dict.fromkeys(
        (_count(group), _count(groups[0]))
        for group, test in zip(groups, tests, strict=True)
        if test is not None
    )
    if not sizes:
        return f"Against the first: not tested; a rank test needs {TESTED} finished runs per row."
    least = {pair: least_chance(*pair) for pair in sizes}
    limits = [
        f"{one} against {other} runs cannot reach less than p = {chance:.2g}"
        + ", so they stay open" * (chance >= LEVEL)
        for (one, other), chance in least.items()
    ]
    return (
        f"Against the first: {heading}, by the rank test of Mann and Whitney, two-sided; open: p "
        f"is {LEVEL:g} or more. {'; '.join(limits)}."
    )


def _rows_of(
    groups: Sequence[Group], columns: Mapping[str, Callable[[Compared], Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of groups.csv."""
    figure = _tested(groups)
    for group in groups:
        row: dict[str, Any] = {}
        for name, value in columns.items():
            row |= group.exact(name, value)
        del row["run"]
        test = _against(group, groups[0], figure)
        yield {
            "group": group.name,
            "runs": len(group.runs),
            **row,
            "tested": figure if test else None,
            "p_against_the_first": test[1] if test else None,
        }


def read_runs(directories: Sequence[Path]) -> list[Compared]:
    """Return the runs in these directories, each once.

    Raises:
        UserError: for a directory without a run, a run without a finished epoch, and a
            damaged file.
    """
    paths = list({path.resolve(): path for path in _of_seeds(directories)}.values())
    names = [path.resolve().name for path in paths]
    return [
        _read(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


def _of_seeds(directories: Sequence[Path]) -> Iterator[Path]:
    """Yield the directories, and the runs in those that `train --seeds` made."""
    for path in directories:
        seeds = [] if (path / "config.json").is_file() else path.glob("seed-*/history.csv")
        found = sorted((each.parent for each in seeds), key=lambda run: (len(run.name), run.name))
        yield from found or [path]


def _read(path: Path, name: str) -> Compared:
    described = runs.read_config(path)
    config = runs.config_of(path / "config.json", described)
    history = histories.read(path / "history.csv")
    if not history:
        raise UserError(f"{path} has no history yet: its first epoch has not ended.")
    test_error = _test_error(path, described)
    finished = (path / "model.keras").is_file()
    return Compared(path, name, config, described, history, test_error, finished)


def _test_error(path: Path, described: Mapping[str, Any]) -> float | None:
    """Return the error on the run's own test images, if it was measured."""
    metrics = measurements.of_run(path, described, path / "model.keras")
    if metrics is None:
        return None
    with reading(f"{path / 'metrics.json'} is damaged"):
        return 100 * float(metrics["error"])


def differing(compared: Sequence[Compared]) -> dict[str, Callable[[Compared], Any]]:
    """Return functions that read an option of a run, for the options in which the runs
    differ, and for their distribution, backend and training images (the start of their
    hash) if these differ. Options have their
    names on the command line, without dashes.
    """
    names = dict.fromkeys(
        name.removeprefix("--")
        for run in compared
        for name in differences(compared[0].config, run.config)
        if name != "--model.name"
    )
    others: dict[str, Callable[[Compared], Any]] = {
        "distribution": lambda run: run.config.distribution,
        "backend": lambda run: run.described.get("versions", {}).get("backend"),
        "images": lambda run: str(run.described.get("hashes", {}).get("train"))[:8],
    }
    return {name: functools.partial(_option, name) for name in names} | {
        name: value for name, value in others.items() if len(set(map(value, compared))) > 1
    }


def _option(name: str, run: Compared) -> Any:
    return functools.reduce(getattr, name.replace("-", "_").split("."), run.config)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return SHOWN[name][1](value) if name in SHOWN else str(value)


def main(argv: Sequence[str]) -> None:
    cli.main("compare", compare, argv)
