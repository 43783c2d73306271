"""`keras-preact reproduce report`: every published number beside ours, in
results/README.md.
"""

import collections
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from .. import cli, runs
from ..terminal import duration, markdown
from . import depth, pictures, results
from .pictures import Groups
from .results import RESULTS, Record
from .rows import FIGURES, TABLES, Row, Table

#: The paper's "fail": a test error in percent above this.
FAIL = 20.0
#: Test error of a run that diverged, for the comparison of means.
DIVERGED = 100.0
#: Confidence level of "higher" and "lower".
LEVEL = 0.95
NOTHING = "-"

READING = """Published numbers are test errors in percent, medians of 5 runs unless noted. Our \
numbers are from the last iteration, not from the best one: the median of n runs, and in brackets \
the smallest and the largest. A run that diverged counts as larger than every number.

The last column compares a row with the original units and identity shortcuts: its mean is \
*higher* or *lower* if the 95 % interval for the difference (Welch) excludes 0, *open* otherwise. \
A run that diverged counts as an error of 100 %. The pairs of rows below a table are compared in \
the same way; `>` says which row has the higher error. If two rows are equal, the chance that \
they look different is one in 20.

On the same kind of CPU, a run repeats to the bit. Another kind of CPU rounds differently: after \
about ten iterations, the curves of the same seed differ. The time of a run is wall-clock time: it \
includes delays by other work on the machine. If runs trained on a device at the same time, each \
counts with its share of the time. Each file has the run's configuration, code, packages and \
device."""


def report(output: Path = RESULTS) -> None:
    """Write every published number beside ours: README.md and its pictures, from the
    results in a folder.

    Args:
        output: Folder of finished runs.

    Raises:
        UserError: for a file that holds no run, for a row of incompatible runs, and
            without matplotlib. Nothing is written then.
    """
    records = results.read(output)
    groups = results.groups(records)
    signals = depth.read(output)
    output.mkdir(parents=True, exist_ok=True)
    written = []
    with cli.missing_packages():
        text = "\n\n".join(_parts(groups, signals))
        drawings: dict[str, tuple[Callable, tuple]] = {
            name: (pictures.curves, (figure, groups))
            for name, figure in FIGURES.items()
            if pictures.measured(figure, groups)
        }
        if signals:
            drawings["depth"] = depth.figure, (signals,)
        for name, (draw, arguments) in drawings.items():
            with runs.replacing(output / f"{name}.png") as temporary:
                draw(*arguments, temporary)
            written.append(output / f"{name}.png")
    with runs.replacing(output / "README.md") as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    written.append(output / "README.md")
    print(f"{len(records)} runs of {len(groups)} trials. Written: {', '.join(map(str, written))}")


def _parts(groups: Groups, signals: Sequence[dict]) -> list[str]:
    """Return the paragraphs of the page."""
    parts = [
        "# Results",
        f"Our results beside the published numbers. `{cli.command('reproduce')} report` "
        "writes this page from the files in this folder, one per run.",
    ]
    missing = []
    for name, table in TABLES.items():
        if any(groups.get(row.trial.name) for row in table.rows):
            parts += [f"## {table.title}", *_section(name, table, groups)]
        else:
            missing.append(f"- {table.title}")
    if signals:
        title = "Depth before training"
        parts += [f"## {title}", depth.about(signals), depth.table(signals)]
        parts += [f"![{title}](depth.png)"]
    parts += ["## How to read the tables", READING]
    return [*parts, "## Not measured yet", "\n".join(missing)] if missing else parts


def _section(name: str, table: Table, groups: Groups) -> list[str]:
    # the tables on digits have one command
    command = "digits" if name.startswith("digits") else name.replace("_", "-")
    parts = [
        f"`{cli.command('reproduce')} {command}`. {table.about}".strip(),
        table_text(table, groups),
        _made_on([record for row in table.rows for record in groups.get(row.trial.name, ())]),
    ]
    parts += filter(None, [order(table, groups)])
    missing = [row.label for row in table.rows if not groups.get(row.trial.name)]
    parts += [f"Not measured yet: {'; '.join(missing)}."] if missing else []
    remarks = [
        f"{row.label}: {row.published.remark}"
        for row in table.rows
        if groups.get(row.trial.name) and row.published and row.published.remark
    ]
    parts += [f"Published rows: {'; '.join(remarks)}."] if remarks else []
    for picture, figure in FIGURES.items():
        if figure.table == name and pictures.measured(figure, groups):
            parts.append(f"![{figure.title}]({picture}.png)")
    return parts


def table_text(table: Table, groups: Groups) -> str:
    """Return the measured rows of a table of the report as Markdown."""
    rows = [row for row in table.rows if groups.get(row.trial.name)]
    measured = [groups[row.trial.name] for row in rows]
    columns = {"row": [row.label for row in rows]}
    if any(row.published for row in rows):
        heading = ", ".join(filter(None, ["published", table.unlike]))
        columns[heading] = [_published(row) for row in rows]
    if table.short:
        columns["training loss"] = [_final(records, "train_loss", ".3g") for records in measured]
    columns["test error"] = [_final(records, "test_error", ".2f") for records in measured]
    if any("flip_shift" in row.trial.views for row in rows):
        columns["test error, 6 views"] = [_six_views(records) for records in measured]
    columns["n"] = [str(len(records)) for records in measured]
    columns["time per run"] = [
        duration(statistics.median(map(_seconds, records))) for records in measured
    ]
    compared = [against(table, row, groups) for row in rows]
    if set(compared) != {NOTHING}:
        columns["against the original"] = compared
    return markdown([list(columns), *map(list, zip(*columns.values(), strict=True))])


def _published(row: Row) -> str:
    if row.published is None:
        return NOTHING
    if row.published.error is None:
        return f"fail (> {FAIL:g})"
    statistic = row.published.statistic
    return f"{row.published.error:.2f}" + ("" if statistic == "median of 5" else f" ({statistic})")


def spread(values: Sequence[float | None], digits: str) -> str:
    """Return the median of the runs, with the smallest and the largest number. None is
    the number of a run that diverged, which is larger than every other.

    Example:

    >>> spread([6.4, None, 6.2], ".1f"), spread([6.4, None], ".1f"), spread([6.4], ".1f")
    ('6.4 (6.2 to diverged)', 'diverged (6.4 to diverged)', '6.4')
    """
    numbers = list(map(_number, values))
    middle, *ends = (
        format(number, digits) if math.isfinite(number) else "diverged"
        for number in (statistics.median(numbers), min(numbers), max(numbers))
    )
    return middle if ends[0] == ends[1] else f"{middle} ({' to '.join(ends)})"


def _final(records: Sequence[Record], name: str, digits: str) -> str:
    return spread([record.final[name] for record in records], digits)


def _six_views(records: Sequence[Record]) -> str:
    accuracies = [record.views.get("flip_shift", {}).get("accuracy") for record in records]
    return spread([None if share is None else 100 * (1 - share) for share in accuracies], ".2f")


def _seconds(record: Record) -> float:
    """Return the device time of a run: its share of the time, if runs shared the device."""
    return record.cost["seconds"] / record.cost.get("together", 1)


def against(table: Table, row: Row, groups: Groups) -> str:
    """Return how the test errors of a row compare with the errors of its baseline, and
    whether the published errors agree.
    """
    measured, others = (
        [record.error for record in groups.get(name, ())]
        for name in (row.trial.name, row.baseline or "")
    )
    if not measured or not others:
        return NOTHING
    ours = difference(measured, others)
    if not ours:
        return "open"
    words = "higher" if ours > 0 else "lower"
    published = {each.trial.name: each.published for each in table.rows}
    pair = [published.get(name) for name in (row.trial.name, row.baseline or "")]
    errors = [_number(each.error) for each in pair if each is not None]
    if len(errors) < 2:
        return words
    return f"{words}, {'as' if (errors[0] > errors[1]) == (ours > 0) else 'unlike'} published"


def order(table: Table, groups: Groups) -> str:
    """Return how many pairs of rows have the order of their published errors, and which
    have the opposite order. A pair has one network; two published fails have no order.
    An empty string if no pair was measured.
    """
    rows = [
        (row.label, row.published, [record.error for record in groups[row.trial.name]])
        for row in table.rows
        if row.published and groups.get(row.trial.name)
    ]
    lower: list[bool] = []
    signs: list[int] = []
    opposite: dict[str, list[str]] = {}
    for (label, better, errors), (other, worse, others) in itertools.permutations(rows, 2):
        one_network = (better.network, better.dataset) == (worse.network, worse.dataset)
        if not one_network or _number(better.error) >= _number(worse.error):
            continue
        lower.append(_median(errors) < _median(others))
        signs.append(difference(errors, others))
        if signs[-1] > 0:
            opposite.setdefault(label, []).append(other)
    if not signs:
        return ""
    text = (
        f"{sum(lower)} of {len(lower)} pairs of rows have the published order: the row with the "
        "lower published error has the lower median. By the means (Welch), the order is as "
        f"published for {signs.count(-1)} pairs, opposite for {signs.count(1)}, and open for "
        f"{signs.count(0)}."
    )
    items = [f"- {label} > {'; '.join(names)}" for label, names in opposite.items()]
    return "\n".join([text, "", "Opposite:", "", *items] if items else [text])


def _number(error: float | None) -> float:
    """Return the error of a run or of a published row; a fail has the largest."""
    return math.inf if error is None else error


def _median(errors: Sequence[float | None]) -> float:
    return statistics.median(map(_number, errors))


def difference(errors: Sequence[float | None], others: Sequence[float | None]) -> int:
    """Return -1 if the mean of `errors` is significantly lower than the mean of `others`,
    1 if it is significantly higher, else 0.

    The difference is significant if Welch's interval for the difference of the means
    excludes 0, that is, if the p-value of his test is below 1 - `LEVEL`.
    """
    from scipy import stats

    a, b = (
        np.array([DIVERGED if error is None else error for error in each])
        for each in (errors, others)
    )
    if min(len(a), len(b)) < 2 or not (a.std() or b.std()):
        return 0
    a_and_b = (number for each in (a, b) for number in (each.mean(), each.std(ddof=1), len(each)))
    welch = stats.ttest_ind_from_stats(*a_and_b, equal_var=False)
    return int(np.sign(welch.statistic)) if welch.pvalue < 1 - LEVEL else 0


def _made_on(records: Sequence[Record]) -> str:
    """Return how many runs each device made in each precision, and their time."""
    made: Mapping[tuple[str, str], list[float]] = collections.defaultdict(list)
    for record in records:
        name, cpu = record.device["name"], record.device.get("cpu")
        device = f"CPU ({cpu})" if name == "CPU" else name
        made[device, record.config["model"]["dtype"]].append(_seconds(record))
    texts = [
        f"{len(times)} run{'s' * (len(times) > 1)} on {device} in {dtype}, "
        f"{duration(sum(times))} in all"
        for (device, dtype), times in sorted(made.items())
    ]
    return f"Made by: {'; '.join(texts)}."
