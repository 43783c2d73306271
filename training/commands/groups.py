"""Runs that are one row of a comparison, and the rank test between rows."""

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..cli.terminal import some
from ..directory.compared import RESULTS, Compared, cell
from ..ranks import LEVEL, least_chance, number, rank_test, spread

#: Columns of which a group has a median and a range, and those of which it has a median.
ERRORS = ("best_validation_error", "last_validation_error", "test_error")
MEDIANS = ("seconds", "images_per_second")
#: Least number of runs that ended in each of two groups for a rank test.
TESTED = 3


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that are one row: they differ only in the seed, or in all but one option."""

    runs: Sequence[Compared]

    @property
    def name(self) -> str:
        """Name of the folder that `train --seeds` or `sweep` made for the runs, or their own
        names.
        """
        [folder, *others] = {run.path.resolve().parent for run in self.runs}
        are_seeds = all(re.fullmatch(r"seed-\d+", run.path.resolve().name) for run in self.runs)
        if len(self.runs) > 1 and are_seeds and not others:
            of_sweep = folder.parent.name.startswith("depth-")
            return f"{folder.parent.name}/{folder.name}" if of_sweep else folder.name
        return some([run.name for run in self.runs], most=2)

    @property
    def finished(self) -> list[Compared]:
        """The finished runs."""
        return [run for run in self.runs if run.finished]

    @property
    def ended(self) -> list[Compared]:
        """The runs that finished or diverged."""
        return [run for run in self.runs if run.finished or run.diverged]

    def errors(self, column: str) -> list[float | None]:
        """Return the errors of the runs that ended, None for one that diverged; of all runs
        if none has ended. Those that were not measured are left out.
        """
        found: list[float | None] = []
        for run in self.ended or self.runs:
            error = RESULTS[column](run)
            if run.diverged or error is not None:
                found.append(None if run.diverged else error)
        is_measured = any(error is not None for error in found)
        return found if is_measured or not self.finished else []

    def median(self, column: str) -> float | None:
        """Return the median of a result of the finished runs; of all runs if none is
        finished. None if it was not measured.
        """
        found = [RESULTS[column](run) for run in self.finished or self.runs]
        measured = [value for value in found if value is not None]
        return statistics.median(measured) if measured else None

    def shown(self, column: str, value: Callable[[Compared], Any]) -> str:
        """Return the cell of a column: its value, or the different ones."""
        if column == "run":
            return self.name
        if column == "finished":
            diverged = len(self.ended) - len(self.finished)
            more = f", {diverged} diverged" * (diverged > 0)
            return f"{len(self.finished)} of {len(self.runs)}{more}"
        if column in ERRORS and (errors := self.errors(column)):
            runs = self.ended or self.runs
            of = f", {len(errors)} of {len(runs)} runs" * (len(errors) < len(runs))
            return spread(errors, ".2f") + of
        if column in MEDIANS:
            return cell(column, self.median(column))
        return some(list(dict.fromkeys(cell(column, value(run)) for run in self.runs)), most=3)

    def exact(self, column: str, value: Callable[[Compared], Any]) -> dict[str, Any]:
        """Return the cells of a column in groups.csv, which are empty for an error of a run
        that diverged.
        """
        if column in ERRORS:
            errors = list(map(number, self.errors(column)))
            parts: dict[str, Callable] = {"median": statistics.median, "least": min, "most": max}
            found = {part: of(errors) if errors else math.inf for part, of in parts.items()}
            return {
                f"{column}_{part}": error if math.isfinite(error) else None
                for part, error in found.items()
            }
        if column == "finished":
            finished = len(self.finished)
            return {column: finished, "diverged": len(self.ended) - finished}
        if column in MEDIANS:
            return {column: self.median(column)}
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


def tested(groups: Sequence[Group]) -> str | None:
    """Return the error of the rank test: on the test images if all finished runs have it,
    else after the last epoch; None if some runs have neither, or other images.
    """
    finished = [run for group in groups for run in group.finished]
    ended = [run for group in groups for run in group.ended]
    for column in ("test_error", "last_validation_error"):
        images = {_images(run, column) for run in ended}
        if len(images) < 2 and all(RESULTS[column](run) is not None for run in finished):
            return column
    return None


def _images(run: Compared, column: str) -> tuple:
    """Return which images an error is measured on. Older runs do not know their hash."""
    data = run.config.data
    is_test = column == "test_error" or not data.holdout
    split, held_out = ("test", None) if is_test else ("holdout", data.holdout)
    return data.name, split, run.described.get("hashes", {}).get(split, held_out)


def against(group: Group, first: Group, figure: str | None) -> tuple[int, float] | None:
    """Return sign and p-value of the rank test, None for the first group itself and for
    groups with too few runs.
    """
    if group is first or figure is None or min(map(_count, (group, first))) < TESTED:
        return None
    return rank_test(group.errors(figure), first.errors(figure))


def _count(group: Group) -> int:
    return len(group.ended)


def words(sign: int, chance: float) -> str:
    """Return the cell of a rank test."""
    word = ("higher" if sign > 0 else "lower") if chance < LEVEL else "not clear"
    return f"{word} (p = {chance:.2g})"


def about_tests(
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
        return (
            f"Against the first: not tested; a rank test needs {TESTED} runs per row that finished "
            "or diverged."
        )
    least = {pair: least_chance(*pair) for pair in sizes}
    limits = [
        f"{one} against {other} runs cannot reach less than p = {chance:.2g}"
        + ", so they are never clear" * (chance >= LEVEL)
        for (one, other), chance in least.items()
    ]
    return (
        f"Against the first: {heading}, by the rank test of Mann and Whitney, two-sided; not "
        f"clear: p is {LEVEL:g} or more. {'; '.join(limits)}."
    )


def rows_of(
    groups: Sequence[Group], columns: Mapping[str, Callable[[Compared], Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of groups.csv."""
    figure = tested(groups)
    for group in groups:
        row: dict[str, Any] = {}
        for name, value in columns.items():
            row |= group.exact(name, value)
        del row["run"]
        test = against(group, groups[0], figure)
        yield {
            "group": group.name,
            "runs": len(group.runs),
            **row,
            "tested": figure if test else None,
            "p_against_the_first": test[1] if test else None,
        }
