"""The rows of the report's tables: a published number, our runs, and their cells."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..terminal import duration, markdown
from . import medians
from .results import Record
from .rows import Row, Table

#: The goal: the largest distance of our median from the paper's, in points.
GOAL = 0.3
#: The paper's "fail": a test error in percent above this.
FAIL = 20.0
NOTHING = "-"

Groups = Mapping[str, Sequence[Record]]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row with its runs."""

    row: Row
    records: Sequence[Record]

    def values(self, name: str) -> list[float | None]:
        """Return a number of `Record.final`, run by run; None where it diverged."""
        return [record.final[name] for record in self.records]

    @property
    def errors(self) -> list[float | None]:
        return self.values("test_error")

    @property
    def fails(self) -> bool:
        """Whether the paper would print "fail"."""
        median = medians.median(self.errors)
        return median is None or median > FAIL

    @property
    def delta(self) -> float | None:
        """Our median minus the published number."""
        ours, published = medians.median(self.errors), self.row.published.error
        return None if ours is None or published is None else round(ours - published, 6)

    @property
    def reaches(self) -> bool:
        """Whether the median meets the goal; if the paper's row fails, whether ours
        fails.
        """
        return (
            self.fails
            if self.row.published.error is None
            else self.delta is not None and abs(self.delta) <= GOAL
        )


def device(record: Record) -> str:
    """Return the device of a run: a graphics processor, or the name of the CPU."""
    return (
        record.device["name"] if record.device["name"] != "CPU" else f"CPU ({record.device['cpu']})"
    )


def seconds(record: Record) -> float:
    """Return the device time of a run, without that of runs beside it."""
    return record.cost["seconds"] / record.cost["together"]


def _median(values: Sequence[float | None]) -> str:
    median = medians.median(values)
    return "fail" if median is None else f"{median:.2f}"


def _published(row: Row) -> str:
    published = row.published
    if published.error is None:
        return f"fail (> {FAIL:g})"
    more = [published.statistic] if published.statistic != "median of 5" else []
    more += [f"{published.mean:.2f} +- {published.std:.2f}"] if published.mean is not None else []
    return f"{published.error:.2f}" + (f" ({', '.join(more)})" if more else "")


def _spread(values: Sequence[float | None]) -> str:
    mean, std = medians.mean(values), medians.std(values)
    return NOTHING if mean is None else f"{mean:.2f}" + ("" if std is None else f" +- {std:.2f}")


def _interval(values: Sequence[float | None]) -> str:
    ends = medians.interval(values)
    return NOTHING if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"


def _count(measured: Measured) -> str:
    diverged = measured.errors.count(None)
    return f"{len(measured.records)}" + (f" ({diverged} diverged)" if diverged else "")


def difference(measured: Measured) -> str:
    if measured.row.published.error is None:
        return "fails as well" if measured.fails else "does not fail"
    return "fails" if measured.delta is None else f"{measured.delta:+.2f}"


def _loss(values: Sequence[float | None]) -> str:
    finite = [value for value in values if value is not None]
    median = medians.median(values)
    middle = "fail" if median is None else f"{median:.3g}"
    return middle if len(finite) < 2 else f"{middle} ({min(finite):.3g} to {max(finite):.3g})"


def _by_device(
    of: Callable[[Record], float | None], text: Callable[[float], str]
) -> Callable[[Measured], str]:
    """Return a cell of medians, one per device, in the order of the column of devices."""

    def cell(measured: Measured) -> str:
        own: dict[str, list[float]] = {}
        for record in measured.records:
            value = of(record)
            own.setdefault(device(record), []).extend([] if value is None else [value])
        return "; ".join(
            text(float(np.median(own[name]))) if own[name] else NOTHING for name in sorted(own)
        )

    return cell


def _all(of: Callable[[Record], str]) -> Callable[[Measured], str]:
    return lambda measured: "; ".join(sorted({of(record) for record in measured.records}))


#: Wide columns whose cells are often equal.
COMMON = ("device", "precision")
#: Heading to the function that makes the cell of a row.
Columns = Mapping[str, Callable[[Measured], str]]
_LAST: Columns = {
    "n": _count,
    "time per run": _by_device(seconds, duration),
    "images/s": _by_device(
        lambda record: record.cost["images_per_second"], lambda speed: f"{speed:,.0f}"
    ),
    "device": _all(device),
    "precision": _all(lambda record: record.config["model"]["dtype"]),
}
FULL: Columns = {
    "median": lambda measured: _median(measured.errors),
    "difference": difference,
    "mean +- std": lambda measured: _spread(measured.errors),
    **_LAST,
}
SHORTENED: Columns = {
    "training loss, median": lambda measured: _loss(measured.values("train_loss")),
    "test error, median": lambda measured: _median(measured.errors),
    "mean +- std": lambda measured: _spread(measured.errors),
    "95 % interval": lambda measured: _interval(measured.errors),
    **_LAST,
}

#: Of a table without published numbers.
UNPUBLISHED: Columns = {
    "parameters": _all(lambda record: f"{record.parameters:,}"),
    "iterations": _all(lambda record: f"{record.config['schedule']['length']:,.0f}"),
    **{
        name: SHORTENED[name]
        for name in ("training loss, median", "test error, median", "mean +- std")
    },
    **_LAST,
}


def measured_rows(table: Table, groups: Groups) -> list[Measured]:
    """Return the rows of a table that have runs."""
    return [
        Measured(row, groups[row.trial.name]) for row in table.rows if groups.get(row.trial.name)
    ]


def table_text(table: Table, groups: Groups) -> str:
    """Return a table without empty columns; columns of `COMMON` that are equal in all
    rows become one line.
    """
    measured = {own.row.label: own for own in measured_rows(table, groups)}
    own_columns = SHORTENED if table.shortened else FULL if table.published else UNPUBLISHED
    columns = dict(own_columns) if measured else {}
    common = []
    for name in COMMON if len(measured) > 1 else ():
        cells = {columns[name](own) for own in measured.values()}
        if len(cells) == 1:
            common.append(f"{name}: {cells.pop()}")
            del columns[name]
    heading = [", ".join(filter(None, ["published", table.unlike]))] if table.published else []
    rows = [["row", *heading, *columns]]
    for row in table.rows:
        own = measured.get(row.label)
        rows.append(
            [
                row.label,
                *([_published(row)] if table.published else []),
                *(NOTHING if own is None else cell(own) for cell in columns.values()),
            ]
        )
    return "\n\n".join([markdown(rows), *([f"All rows: {'; '.join(common)}."] if common else [])])
