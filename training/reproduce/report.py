"""`keras-preact reproduce report`: every published number beside ours, in
results/README.md.
"""

import collections
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import disk
from ..cli.terminal import duration, markdown
from ..errors import UserError, command, missing_packages
from ..ranks import difference, median, number, spread
from . import depth, pictures, rates, results
from .pictures import FIGURES, Groups
from .results import RESULTS, Record, Setting, by_setting
from .rows import TABLES, Row, Table

#: What is not a table of rows, by the name of its picture: title, and the module that reads and
#: shows it.
OTHERS: Mapping[str, tuple[str, Any]] = {
    "depth": ("Depth before training", depth),
    "rates": ("Learning rates by depth", rates),
}
#: The paper's "fail": a test error in percent above this.
FAIL = 20.0
NOTHING = "-"

READING = """Published numbers are test errors in percent, medians of 5 runs unless noted. Our \
numbers are from the last iteration, not from the best one: the median of n runs, and in brackets \
the smallest and the largest. A run that diverged counts as larger than every number. Runs on \
different devices, or of different lengths, are different lines.

The last column compares a row with the row that its heading names, on the same device; "the \
original" has original units and identity shortcuts. Its errors are *higher* or *lower* if the \
rank test of Mann and Whitney says so (two-sided, exact, p < 0.05), *open* otherwise. This test \
compares what medians show, and a single run of ten does not decide it. Few runs stay open: it \
takes four against four, or three against five. The pairs of rows below a table are compared in \
the same way; `>` says which row has the higher errors. If two rows are equal, the chance that \
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
        UserError: for a folder that does not exist, for a file that holds no run, for a
            row of incompatible runs, and without matplotlib. Nothing is written then.
    """
    if not output.is_dir():
        raise UserError(f"--output must be the folder of finished runs. {output} does not exist.")
    records = results.read(output)
    groups = results.groups(records)
    others = {name: of.read(output) for name, (_, of) in OTHERS.items()}
    written = []
    with missing_packages():
        text = "\n\n".join(_parts(groups, others))
        drawings: dict[str, tuple[Callable, tuple]] = {
            name: (pictures.curves, (figure, _labels(figure.table), groups))
            for name, figure in FIGURES.items()
            if pictures.measured(figure, groups)
        }
        for name, (_, of) in OTHERS.items():
            if others[name]:
                drawings[name] = of.figure, (others[name],)
        for name, (draw, arguments) in drawings.items():
            with disk.replacing(output / f"{name}.png") as temporary:
                draw(*arguments, temporary)
            written.append(output / f"{name}.png")
    with disk.replacing(output / "README.md") as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    written.append(output / "README.md")
    print(f"{len(records)} runs of {len(groups)} trials. Written: {', '.join(map(str, written))}")


def _labels(table: str) -> dict[str, str]:
    """Return the name of a trial to its label, from this table where it has the trial."""
    tables = [*TABLES.values(), TABLES[table]]
    return {row.trial.name: row.label for each in tables for row in each.rows}


def _parts(groups: Groups, others: Mapping[str, Sequence[dict]]) -> list[str]:
    """Return the paragraphs of the page."""
    parts = [
        "# Results",
        f"Our results beside the published numbers. `{command('reproduce')} report` "
        "writes this page from the files in this folder, one per run.",
    ]
    missing = []
    for name, table in TABLES.items():
        if any(groups.get(row.trial.name) for row in table.rows):
            parts += [f"## {table.title}", *_section(name, table, groups)]
        else:
            missing.append(f"- {table.title}")
    for name, (title, of) in OTHERS.items():
        if records := others[name]:
            parts += [f"## {title}", of.about(records), of.table(records)]
            parts += [f"![{title}]({name}.png)"]
    parts += ["## How to read the tables", READING]
    return [*parts, "## Not measured yet", "\n".join(missing)] if missing else parts


def _section(name: str, table: Table, groups: Groups) -> list[str]:
    # the tables on digits have one command
    argument = "digits" if name.startswith("digits") else name.replace("_", "-")
    parts = [
        f"`{command('reproduce', argument)}`. {table.about}".strip(),
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


class Line(NamedTuple):
    """A line of a table: the runs of a row that may be averaged."""

    label: str
    row: Row
    setting: Setting
    records: Sequence[Record]


def lines_of(table: Table, groups: Groups) -> list[Line]:
    """Return the lines of the measured rows of a table."""
    lines = []
    for row in table.rows:
        found = by_setting(groups.get(row.trial.name, ()))
        devices = collections.Counter(setting.device for setting in found)
        for setting, records in found.items():
            label = row.label
            if len(devices) > 1:
                label += f", on {setting.device}"
            if devices[setting.device] > 1:
                label += f", {setting.iterations:,} iterations"
            lines.append(Line(label, row, setting, records))
    return lines


def table_text(table: Table, groups: Groups) -> str:
    """Return the measured rows of a table of the report as Markdown."""
    lines = lines_of(table, groups)
    rows, measured = [line.row for line in lines], [line.records for line in lines]
    columns = {"row": [line.label for line in lines]}
    if any(row.published for row in rows):
        heading = ", ".join(filter(None, ["published", table.unlike]))
        columns[heading] = [_published(row) for row in rows]
    if table.short:
        columns["training loss"] = [_final(records, "train_loss", ".3g") for records in measured]
    columns["test error"] = [_final(records, "test_error", ".2f") for records in measured]
    if any("flip_shift" in row.trial.views for row in rows):
        columns["test error, 6 views"] = [_six_views(records) for records in measured]
    if any(record.signals for records in measured for record in records):
        columns["composite gain, forward / backward"] = [_gains(records) for records in measured]
        columns["cosine"] = [_signal(records, "cosine", "z.2f") for records in measured]
    columns["n"] = [str(len(records)) for records in measured]
    columns["time per run"] = [_times(records) for records in measured]
    compared = [against(table, line, groups) for line in lines]
    if set(compared) != {NOTHING}:
        columns[f"against {table.baseline}"] = compared
    return markdown([list(columns), *map(list, zip(*columns.values(), strict=True))])


def _published(row: Row) -> str:
    if row.published is None:
        return NOTHING
    if row.published.error is None:
        return f"fail (> {FAIL:g})"
    statistic = row.published.statistic
    return f"{row.published.error:.2f}" + ("" if statistic == "median of 5" else f" ({statistic})")


def _final(records: Sequence[Record], name: str, digits: str) -> str:
    return spread([record.final[name] for record in records], digits)


def _six_views(records: Sequence[Record]) -> str:
    accuracies = [record.views.get("flip_shift", {}).get("accuracy") for record in records]
    return spread([None if share is None else 100 * (1 - share) for share in accuracies], ".2f")


def _signal(records: Sequence[Record], name: str, digits: str) -> str:
    """Return the median of a signal over the runs that have it."""
    values = [record.signals.get(name) for record in records]
    found = [value for value in values if value is not None]
    return f"{statistics.median(found):{digits}}" if found else NOTHING


def _gains(records: Sequence[Record]) -> str:
    gains = [_signal(records, name, ".3g") for name in ("forward", "backward")]
    return NOTHING if gains == [NOTHING] * 2 else " / ".join(gains)


def _seconds(record: Record) -> float:
    """Return the device time of a run: its share of the time, if runs shared the device."""
    return record.cost["seconds"] / record.cost.get("together", 1)


def _times(records: Sequence[Record]) -> str:
    """Return the median time of the runs on each machine."""
    times: dict[str, list[float]] = {}
    for record in records:
        times.setdefault(_machine(record), []).append(_seconds(record))
    medians = {name: duration(statistics.median(each)) for name, each in sorted(times.items())}
    if len(set(medians.values())) == 1:
        return next(iter(medians.values()))
    return "; ".join(f"{text} on {name}" for name, text in medians.items())


def _machine(record: Record) -> str:
    name, cpu = record.device["name"], record.device.get("cpu")
    return f"CPU ({cpu})" if name == "CPU" else name


def against(table: Table, line: Line, groups: Groups) -> str:
    """Return how the test errors of a line compare with the errors of its baseline on the
    same device, and whether the published errors agree.
    """
    row = line.row
    baselines = by_setting(groups.get(row.baseline or "", ()))
    fitting = [records for setting, records in baselines.items() if setting.fits(line.setting)]
    if not fitting:
        return NOTHING
    ours = difference(*([record.error for record in each] for each in (line.records, fitting[0])))
    if not ours:
        return "open"
    words = "higher" if ours > 0 else "lower"
    published = {each.trial.name: each.published for each in table.rows}
    pair = [published.get(name) for name in (row.trial.name, row.baseline or "")]
    errors = [number(each.error) for each in pair if each is not None]
    if len(errors) < 2:
        return words
    return f"{words}, {'as' if (errors[0] > errors[1]) == (ours > 0) else 'unlike'} published"


def order(table: Table, groups: Groups) -> str:
    """Return how many pairs of lines have the order of their published errors, and which
    have the opposite order. A pair has one network and one setting; two published fails
    have no order. An empty string if no pair was measured.
    """
    lower: list[bool] = []
    signs: list[int] = []
    opposite: dict[str, list[str]] = {}
    for one, other in itertools.permutations(lines_of(table, groups), 2):
        better, worse = one.row.published, other.row.published
        if better is None or worse is None or not one.setting.fits(other.setting):
            continue
        one_network = (better.network, better.dataset) == (worse.network, worse.dataset)
        if not one_network or number(better.error) >= number(worse.error):
            continue
        errors, others = ([record.error for record in line.records] for line in (one, other))
        lower.append(median(errors) < median(others))
        signs.append(difference(errors, others))
        if signs[-1] > 0:
            opposite.setdefault(one.label, []).append(other.label)
    if not signs:
        return ""
    text = (
        f"{sum(lower)} of {len(lower)} pairs of rows have the published order: the row with the "
        "lower published error has the lower median. By the rank test, the order is as "
        f"published for {signs.count(-1)} pairs, opposite for {signs.count(1)}, and open for "
        f"{signs.count(0)}."
    )
    items = [f"- {label} > {'; '.join(names)}" for label, names in opposite.items()]
    return "\n".join([text, "", "Opposite:", "", *items] if items else [text])


def _made_on(records: Sequence[Record]) -> str:
    """Return how many runs each device made in each precision, and their time."""
    made: Mapping[tuple[str, str], list[float]] = collections.defaultdict(list)
    for record in records:
        made[_machine(record), record.config["model"]["dtype"]].append(_seconds(record))
    texts = [
        f"{len(times)} run{'s' * (len(times) > 1)} on {device} in {dtype}, "
        f"{duration(sum(times))} in all"
        for (device, dtype), times in sorted(made.items())
    ]
    return f"Made by: {'; '.join(texts)}."
