"""`keras-preact reproduce report`: every published number beside ours, in
results/README.md.
"""

import collections
import itertools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras_preact as kp
from keras_preact.analysis.figures import style

from .. import disk
from ..cli.terminal import duration, markdown
from ..errors import UserError, command, missing_packages
from ..ranks import difference, median, number, spread
from . import depth, pictures, rates, results
from .pictures import FIGURES, Groups
from .results import RESULTS, Record, Setting, by_setting, short_device
from .rows import OWN, PAPER, TABLES, Part, Row, Table

#: What is not a table of rows, by the name of its picture: title, and the module that reads and
#: shows it.
OTHERS: Mapping[str, tuple[str, Any]] = {
    "depth": ("Depth before training", depth),
    "rates": ("Learning rates by depth", rates),
}
#: The trial whose runs are a strip of dots, not a curve.
FAST = "cifar10/fast_resnet8"
#: The paper's "fail": a test error in percent above this.
FAIL = 20.0
NOTHING = "-"
UNCLEAR = "not clear"
#: Verdicts that the first table counts.
COUNTED = ("as published", "unlike published", UNCLEAR)

INTRODUCTION = f"""Each published number of the paper, and of Table 6 of the first paper, with \
what was measured here beside it. Then our own experiments. `{command("reproduce")} report` writes \
this page from the files in `results/`, one per run. In a smaller setting, the order of the rows \
can match the paper's, the numbers cannot. The last columns of the first table count the rows \
with such a verdict in at least one setting. [How to read the tables](#how-to-read-the-tables) \
is at the end."""

READING = """Errors are test errors in percent. A published one is the median of 5 runs unless \
noted; "fail" is an error over 20 %. Ours are from the last iteration, not from the best one: the \
median of n runs, and in brackets the smallest and the largest. A run that diverged counts as \
larger than every number. Runs on different devices, or of different lengths, are not mixed.

A row is compared with the row that its section or heading names, measured on the same device. Its \
errors are *higher* or *lower* if the rank test of Mann and Whitney says so (two-sided, exact, \
p < 0.05), *not clear* otherwise. This test compares what medians show, and a single run of ten \
does not decide it. Few runs are never clear: it takes four against four, or three against five. \
Pairs of rows are compared in the same way; `>` says which row has the higher errors. If two rows \
are equally good, one comparison in 20 still says higher or lower.

On the same kind of CPU, a run repeats to the bit. Another kind of CPU rounds differently: after \
about ten iterations, the curves of the same seed differ. The time of a run is wall-clock time, \
the median for each kind of device: it includes delays by other work on the machine. If runs \
trained on a device at the same time, each counts with its share of the time. Each file has the \
run's configuration, code, packages and device."""


def report(output: Path = RESULTS) -> None:
    """Write every published number beside ours: README.md and its pictures, from the
    results in a folder.

    Args:
        output: Folder of finished runs.

    Raises:
        UserError: for a folder that does not exist or has no finished run, for a file that
            holds no run, for a row of incompatible runs, and without matplotlib. Nothing is
            written then.
    """
    if not output.is_dir():
        raise UserError(f"--output must be the folder of finished runs. {output} does not exist.")
    records = results.read(output)
    groups = results.groups(records)
    others = {name: of.read(output) for name, (_, of) in OTHERS.items()}
    if not records and not any(others.values()):
        raise UserError(
            f"--output must be the folder of finished runs. {output} has none, so nothing is "
            "written: a README.md in it may be another one."
        )
    with missing_packages():
        drawings = _drawings(groups, others)
        text = "\n\n".join(_page(groups, others, drawings))
        for name, drawing in drawings.items():
            drawn = style.on_white(style.svg(drawing.draw(*drawing.arguments)))
            with disk.replacing(output / f"{name}.svg") as temporary:
                temporary.write_text(drawn, encoding="utf-8")
    with disk.replacing(output / "README.md") as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    written = ", ".join(
        str(output / name) for name in ("README.md", *map("{}.svg".format, drawings))
    )
    print(f"{len(records)} runs of {len(groups)} trials. Written: {written}")


class Drawing(NamedTuple):
    """A picture, the name of the table that it belongs to, and the function that draws it."""

    title: str
    table: str
    draw: Callable[..., Any]
    arguments: tuple


def _drawings(groups: Groups, others: Mapping[str, Sequence[dict]]) -> dict[str, Drawing]:
    """Return the pictures of what was measured, by name."""
    found = {}
    if runs := groups.get(FAST):
        title = TABLES["fast"].title
        found["fast"] = Drawing(title, "fast", pictures.strip, (title, runs))
    labels = {row.trial.name: row.label for table in TABLES.values() for row in table.rows}
    for figures, available, draw in (
        (FIGURES, groups, pictures.curves),
        (pictures.BY_DEPTH, pictures.at_depths(groups), pictures.by_depth),
    ):
        for name, figure in figures.items():
            if pictures.measured(figure, available):
                own = labels | {row.trial.name: row.label for row in TABLES[figure.table].rows}
                found[name] = Drawing(figure.title, figure.table, draw, (figure, own, groups))
    for name, (title, of) in OTHERS.items():
        if others[name]:
            found[name] = Drawing(title, name, of.figure, (others[name],))
    return found


def _page(
    groups: Groups, others: Mapping[str, Sequence[dict]], drawings: Mapping[str, Drawing]
) -> list[str]:
    """Return the paragraphs of the page."""

    def shown(table: str) -> list[str]:
        found = []
        for name in (name for name, of in drawings.items() if of.table == table):
            title, picture = drawings[name].title, f"![{drawings[name].title}]({name}.svg)"
            found.append(_folded(f"Curves: {title}", picture) if name in FIGURES else picture)
        return found

    sections: dict[str, list[str]] = {}
    for part in PAPER:
        own = [name for names in part.columns.values() for name in names if part.has(name)]
        sections[part.title] = [
            *_paper(part, groups),
            *(each for name in own for each in shown(name)),
        ]
    missing = []
    for name in OWN:
        table = TABLES[name]
        if records := _runs(table, groups):
            about = f"`{_command(name)}`. {table.about}".strip()
            text = [about, table_text(table, groups), f"Runs: {_made_on(records)}."]
            sections[table.title] = [*text, *shown(name)]
        else:
            missing.append(f"- {table.title}: `{_command(name)}`")
    for name, (title, of) in OTHERS.items():
        if found := others[name]:
            numbers = _folded("The numbers", of.table(found))
            sections[title] = [of.about(found), *shown(name), numbers]
    sections["How to read the tables"] = [READING]
    if missing:
        sections["Not measured yet"] = ["\n".join(missing)]
    links = [_link(title) for title in sections if title not in {of.title for of in PAPER}]
    parts = ["# The paper, row by row", INTRODUCTION, _contents(groups)]
    parts += [f"Our own experiments, and notes: {'; '.join(links)}."]
    return parts + [each for title, of in sections.items() for each in (f"## {title}", *of)]


def _folded(summary: str, *paragraphs: str) -> str:
    """Return paragraphs that a reader unfolds, on GitHub and on the site."""
    start = f'<details markdown="1"><summary>{summary}</summary>'
    return "\n\n".join([start, *paragraphs, "</details>"])


def _link(title: str) -> str:
    """Return a link to a section, with the address that GitHub and the site give it."""
    address = re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
    return f"[{title}](#{address})"


def _runs(table: Table, groups: Groups) -> list[Record]:
    return [record for row in table.rows for record in groups.get(row.trial.name, ())]


def _command(name: str) -> str:
    # Tables 1 and 2 on digits have one command, and so have those of 8 and of 20 layers
    name = re.sub(r"(?<=^digits)\d$|_\d$", "", name)
    return command("reproduce", name.replace("_", "-"))


def _contents(groups: Groups) -> str:
    """Return a table with a line for each part of the paper: how many of its rows were
    measured in the paper's setting and in others, and how many of them have which verdict.
    """
    table = [["published", "rows", "measured as in the paper", "in other settings", *COUNTED]]
    for part in PAPER:
        # of each published row, the lines of each column
        found = [
            [
                [line for row in part.beside(result, heading) for line in lines_of(row, groups)]
                for heading in part.columns
            ]
            for result in part.results()
        ]
        verdicts = [
            " ".join(against(line, groups) for lines in columns for line in lines)
            for columns in found
        ]
        counts = [
            len(found),
            sum(bool(first) for first, *_ in found),
            sum(any(others) for _, *others in found),
            *(sum(word in verdict for verdict in verdicts) for word in COUNTED),
        ]
        table.append([_link(part.title), *map(str, counts)])
    return markdown(table)


def _paper(part: Part, groups: Groups) -> list[str]:
    """Return the published rows, each with what was measured beside it, and how each column
    was measured. A column without runs is only named.
    """
    results = part.results()
    shown = [name for name in ("network", "row") if len({getattr(of, name) for of in results}) > 1]
    headings = [
        heading
        for heading in part.columns
        if any(lines_of(row, groups) for of in results for row in part.beside(of, heading))
    ]
    table = [["row", "published", *headings]]
    for result in results:
        names = ["CIFAR-100"] * (result.dataset == "cifar100")
        label = pictures.words(", ".join(names + [getattr(result, name) for name in shown]))
        cells = [_cell(part.beside(result, heading), groups) for heading in headings]
        remark = f"<br>({result.remark})" if result.remark else ""
        table.append([label + remark, _published(result), *cells])
    notes = []
    for heading, tables in part.columns.items():
        for name in filter(part.has, tables):
            records = _runs(TABLES[name], groups)
            made = f"Runs: {_made_on(records)}." if records else "Not measured yet."
            text = [f"- {heading}: `{_command(name)}`.", TABLES[name].about, made]
            notes.append(" ".join(filter(None, [*text, order(TABLES[name], groups)])))
    folded = [_folded("How it was measured", "\n".join(notes))] if notes else []
    return [part.about if headings else f"{part.about} Not measured yet.", markdown(table), *folded]


def _cell(rows: Sequence[Row], groups: Groups) -> str:
    """Return what was measured of rows: errors, runs, device, time and verdict."""
    lines = []
    for line in [each for row in rows for each in lines_of(row, groups)]:
        device = short_device(line.setting.device)
        lines.append(_final(line.records, "test_error", ".2f"))
        runs = f"n = {len(line.records)}, {device}, {_times(line.records)}"
        verdict = against(line, groups)
        mark = "*" if verdict == UNCLEAR else "**"
        lines.append(runs if verdict == NOTHING else f"{runs}: {mark}{verdict}{mark}")
    return "<br>".join(lines) or ("not measured" if rows else NOTHING)


class Line(NamedTuple):
    """A line of a table: the runs of a row that may be averaged."""

    label: str
    row: Row
    setting: Setting
    records: Sequence[Record]


def lines_of(row: Row, groups: Groups) -> list[Line]:
    """Return the lines of a row, one for each device and length of its runs."""
    found = by_setting(groups.get(row.trial.name, ()))
    devices = collections.Counter(setting.device for setting in found)
    lines = []
    for setting, records in found.items():
        label = pictures.named(row.label)
        if len(devices) > 1:
            label += f", on {short_device(setting.device)}"
        if devices[setting.device] > 1:
            label += f", {setting.iterations:,} iterations"
        lines.append(Line(label, row, setting, records))
    return lines


def table_text(table: Table, groups: Groups) -> str:
    """Return the measured rows of a table of the report as Markdown."""
    lines = [line for row in table.rows for line in lines_of(row, groups)]
    rows, measured = [line.row for line in lines], [line.records for line in lines]
    columns = {"row": [line.label for line in lines]}
    if any(row.published for row in rows):
        heading = ", ".join(filter(None, ["published", table.unlike]))
        columns[heading] = [_published(row.published) for row in rows]
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
    compared = [against(line, groups) for line in lines]
    if set(compared) != {NOTHING}:
        columns[f"against {table.baseline}"] = compared
    return markdown([list(columns), *map(list, zip(*columns.values(), strict=True))])


def _published(result: kp.published.Result | None) -> str:
    if result is None:
        return NOTHING
    if result.error is None:
        return f"fail (> {FAIL:g})"
    if result.top5 is not None:
        return f"{result.error:.1f} / {result.top5:.1f}"
    statistic = result.statistic.replace("not stated", "number of runs not stated")
    notes = [] if statistic == kp.published.MEDIAN else [statistic]
    notes += [] if result.mean is None else [f"mean {result.mean:.2f}"]
    return f"{result.error:.2f}" + (f" ({', '.join(notes)})" if notes else "")


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
    """Return the median time of the runs; with several machines, of the fastest to that
    of the slowest.
    """
    times: dict[str, list[float]] = {}
    for record in records:
        times.setdefault(_machine(record), []).append(_seconds(record))
    medians = sorted(statistics.median(each) for each in times.values())
    return " to ".join(dict.fromkeys(duration(seconds) for seconds in (medians[0], medians[-1])))


def _machine(record: Record) -> str:
    name, cpu = record.device["name"], record.device.get("cpu")
    return f"CPU ({cpu})" if name == "CPU" else name


#: Name of a trial to its published result.
PUBLISHED = {
    row.trial.name: row.published
    for table in TABLES.values()
    for row in table.rows
    if row.published
}


def against(line: Line, groups: Groups) -> str:
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
        return UNCLEAR
    words = "higher" if ours > 0 else "lower"
    pair = [PUBLISHED.get(name) for name in (row.trial.name, row.baseline or "")]
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
    lines = [line for row in table.rows for line in lines_of(row, groups)]
    for one, other in itertools.permutations(lines, 2):
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
        f"{sum(lower)} of {len(lower)} pairs of rows have the published order by their medians. By "
        f"the rank test, the order is as published for {signs.count(-1)} pairs, opposite for "
        f"{signs.count(1)}, and not clear for {signs.count(0)}."
    )
    items = [f"{label} > {'; '.join(names)}" for label, names in opposite.items()]
    text += f" Opposite: {'. '.join(items)}." if items else ""
    networks = {line.label.partition(", ")[0] for line in lines}
    return text.replace(f"{networks.pop()}, ", "") if len(networks) == 1 else text


def _made_on(records: Sequence[Record]) -> str:
    """Return how many runs each device made in each precision, and their time."""
    made: Mapping[tuple[str, str], list[float]] = collections.defaultdict(list)
    for record in records:
        made[_machine(record), record.config["model"]["dtype"]].append(_seconds(record))
    texts = [
        f"{len(times)} on {device} in {dtype}, {duration(sum(times))} in all"
        for (device, dtype), times in sorted(made.items())
    ]
    return "; ".join(texts)
