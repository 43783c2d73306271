"""The tables of the report: published numbers beside our runs."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..terminal import duration, markdown
from . import medians
from .results import Record
from .rows import Row, Table

#: The paper's "fail": a test error in percent above this.
FAIL = 20.0
NOTHING = "-"

#: Name of a trial to its runs.
Groups = Mapping[str, Sequence[Record]]


def device(record: Record) -> str:
    """Return the device of a run: a graphics processor, or the name of the CPU."""
    name, cpu = record.device["name"], record.device.get("cpu")
    return f"CPU ({cpu})" if name == "CPU" else name


def seconds(record: Record) -> float:
    """Return the device time of a run, without that of runs beside it."""
    return record.cost["seconds"] / record.cost.get("together", 1)


def _final(records: Sequence[Record], name: str) -> list[float | None]:
    return [record.final[name] for record in records]


def _published(row: Row) -> str:
    published = row.published
    if published.error is None:
        return f"fail (> {FAIL:g})"
    more = [published.statistic] if published.statistic != "median of 5" else []
    more += [f"{published.mean:.2f} +- {published.std:.2f}"] if published.mean is not None else []
    return f"{published.error:.2f}" + (f" ({', '.join(more)})" if more else "")


def _median(name: str, digits: str) -> Callable[[Sequence[Record]], str]:
    """Return a cell: the median of the runs, and the least and most of them."""

    def cell(records: Sequence[Record]) -> str:
        values = _final(records, name)
        finite = [value for value in values if value is not None]
        middle = medians.median(values)
        text = "diverged" if middle is None else format(middle, digits)
        ends = [format(end, digits) for end in (min(finite), max(finite))] if finite else []
        return text if len(finite) < 2 else f"{text} ({ends[0]} to {ends[1]})"

    return cell


def _spread(values: medians.Values, unit: str = "") -> str:
    mean, std = medians.mean_and_std(values)
    if mean is None:
        return NOTHING
    return f"{mean:.2f}{unit}" + ("" if std is None else f" +- {std:.2f}")


def _interval(records: Sequence[Record]) -> str:
    errors = _final(records, "test_error")
    ends = medians.interval(errors)
    if ends is not None:
        return f"{max(ends[0], 0):.2f} to {min(ends[1], 100):.2f}"
    (first, *others), images = errors, records[0].data["test"]
    if others or first is None:
        return NOTHING
    low, high = medians.of_images(first, images)
    return f"{low:.2f} to {high:.2f} (images)"


def _count(records: Sequence[Record]) -> str:
    diverged = _final(records, "test_error").count(None)
    return f"{len(records)}" + (f" ({diverged} diverged)" if diverged else "")


def _view(view: str, key: str) -> Callable[[Sequence[Record]], str]:
    """Return a cell of what was measured with views of the test images, in percent."""

    def cell(records: Sequence[Record]) -> str:
        found = [100 * record.views[view][key] for record in records if view in record.views]
        return _spread(found, " %") if found else NOTHING

    return cell


def _each_device(
    of: Callable[[Record], float | None], text: Callable[[float], str]
) -> Callable[[Sequence[Record]], str]:
    """Return a cell of medians, one per device, in the order of the column of devices."""

    def cell(records: Sequence[Record]) -> str:
        own: dict[str, list[float]] = {}
        for record in records:
            value = of(record)
            own.setdefault(device(record), []).extend([] if value is None else [value])
        return "; ".join(
            text(float(np.median(own[name]))) if own[name] else NOTHING for name in sorted(own)
        )

    return cell


def _all(of: Callable[[Record], str]) -> Callable[[Sequence[Record]], str]:
    return lambda records: "; ".join(sorted({of(record) for record in records}))


#: Heading to the function that makes the cell of a row of its runs. A column without a cell is
#: left out.
COLUMNS: Mapping[str, Callable[[Sequence[Record]], str]] = {
    "training loss": _median("train_loss", ".3g"),
    "test error": _median("test_error", ".2f"),
    "mean +- std": lambda records: (
        _spread(_final(records, "test_error")) if len(records) > 1 else NOTHING
    ),
    "95 % interval": _interval,
    "accuracy, 1 view": _view("one", "accuracy"),
    "accuracy, 6 views": _view("flip_shift", "accuracy"),
    "calibration error": _view("one", "calibration_error"),
    "n": _count,
    "parameters": _all(lambda record: f"{record.parameters:,}"),
    "time per run": _each_device(seconds, duration),
    "images/s": _each_device(
        lambda record: record.cost["images_per_second"], lambda speed: f"{speed:,.0f}"
    ),
    "device": _all(device),
    "precision": _all(lambda record: record.config["model"]["dtype"]),
}
#: Columns that become a line below the table if all rows are equal in them.
COMMON = ("device", "precision")


def _against(table: Table, row: Row, groups: Groups) -> str:
    """Return how the test errors of a row compare with those of its baseline, and
    whether the published ones say the same.
    """
    names = (row.trial.name, row.baseline or "")
    errors, others = (_final(groups.get(name, ()), "test_error") for name in names)
    if not errors or not others:
        return NOTHING
    ours = medians.clear_order(errors, others)
    if not ours:
        return "open"
    words = "higher" if ours > 0 else "lower"
    if not table.published:
        return words
    baseline = next(each for each in table.rows if each.trial.name == row.baseline)
    theirs, original = (
        math.inf if each.published.error is None else each.published.error
        for each in (row, baseline)
    )
    return f"{words}, {'as' if (theirs > original) == (ours > 0) else 'unlike'} published"


def _left_out(table: Table, runs: Sequence[Sequence[Record]]) -> set[str]:
    """Return the columns that say nothing in a table."""
    names = {name for name, cell in COLUMNS.items() if all(cell(own) == NOTHING for own in runs)}
    if not table.short:
        names.add("training loss")
    if table.published:
        names.add("parameters")
    if any(row.trial.views for row in table.rows):
        names |= {"test error", "mean +- std", "95 % interval"}
    return names


def table_text(table: Table, groups: Groups) -> str:
    """Return the measured rows of a table of the report as Markdown."""
    rows = [row for row in table.rows if groups.get(row.trial.name)]
    runs = [groups[row.trial.name] for row in rows]
    left_out = _left_out(table, runs)
    common = []
    for name in COMMON if len(rows) > 1 else ():
        cells = {COLUMNS[name](own) for own in runs}
        if len(cells) == 1:
            common.append(f"{name}: {cells.pop()}")
            left_out.add(name)
    columns = {"row": [row.label for row in rows]}
    if table.published:
        heading = ", ".join(filter(None, ["published", table.unlike]))
        columns[heading] = [_published(row) for row in rows]
    for name, cell in COLUMNS.items():
        if name not in left_out:
            columns[name] = [cell(own) for own in runs]
    compared = [_against(table, row, groups) for row in rows]
    if set(compared) != {NOTHING}:
        columns["against the original"] = compared
    text = markdown([list(columns), *map(list, zip(*columns.values(), strict=True))])
    return "\n\n".join([text, *([f"All rows: {'; '.join(common)}."] if common else [])])
