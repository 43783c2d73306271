"""`keras-preact reproduce report`: every published number beside ours, in
results/README.md.
"""

import collections
from collections.abc import Sequence
from pathlib import Path

from .. import cli, runs
from ..terminal import duration
from . import depth, pictures, results
from .cells import Groups, device, seconds, table_text
from .results import RESULTS, Record
from .rows import FIGURES, TABLES, Table

READING = """Published numbers are test errors in percent, medians of 5 runs unless noted. Ours \
are those after the last iteration, not the best ones: the median of n runs, and the least and the \
largest of them. "mean +- std" and the interval are over runs; the interval of a single run, with \
"(images)", is over test images. A run that diverged counts as larger than every number.

The last column compares a row with the original units and identity shortcuts: its mean is \
*higher* or *lower* if the 95 % interval for the difference (Welch) excludes 0, *open* otherwise. \
If runs diverged, all runs of one row must be below all runs of the other, with a chance of at \
most 5 %. Of equal rows, one in 20 is expected to look different.

A run repeats to the bit on the same kind of CPU. Another kind rounds differently, and after some \
ten iterations the curves of one seed part. The time of a run is that on the clock: it holds what \
else the machine did meanwhile. The images per second are the median over the run's epochs."""


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
    shown = {
        name: table
        for name, table in TABLES.items()
        if any(groups.get(row.trial.name) for row in table.rows)
    }
    written = []

    def picture(name: str, draw, *arguments) -> None:
        output.mkdir(parents=True, exist_ok=True)
        with runs.replacing(output / f"{name}.png") as temporary:
            draw(*arguments, temporary)
        written.append(output / f"{name}.png")

    with cli.missing_packages():
        for name, figure in FIGURES.items():
            if pictures.measured(figure, groups):
                picture(name, pictures.curves, figure, groups)
        for name, table in shown.items():
            if table.short:
                picture(name, pictures.spreads, table, groups)
        if signals:
            picture("depth", depth.figure, signals)
        text = "\n\n".join(_parts(shown, records, groups, signals))
    output.mkdir(parents=True, exist_ok=True)
    with runs.replacing(output / "README.md") as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    written.append(output / "README.md")
    print(f"{len(records)} runs of {len(groups)} trials. Written: {', '.join(map(str, written))}")


def _parts(
    shown: dict[str, Table], records: Sequence[Record], groups: Groups, signals: Sequence[dict]
) -> list[str]:
    """Return the paragraphs of the page."""
    command = cli.command("reproduce")
    parts = [
        "# Results",
        f"What was trained, beside the published numbers. `{command} report` writes this page from "
        "the files in this folder, one per run.",
    ]
    for name, table in shown.items():
        parts += [f"## {table.title}", *_section(name, table, groups)]
    if signals:
        title = "Depth before training"
        parts += [f"## {title}", depth.table(signals), f"![{title}](depth.png)"]
    parts += ["## How to read the tables", READING]
    missing = [table for name, table in TABLES.items() if name not in shown]
    if missing:
        parts += ["## Not measured yet", _lines(table.title for table in missing)]
    return [*parts, "## Cost", *_cost(shown, records, groups)]


def _section(name: str, table: Table, groups: Groups) -> list[str]:
    command = f"`{cli.command('reproduce')} {_command(name)}`"
    parts = [f"{command}. {table.about}".strip(), table_text(table, groups)]
    missing = [row.label for row in table.rows if not groups.get(row.trial.name)]
    parts += [f"Not measured yet: {'; '.join(missing)}."] if missing else []
    remarks = collections.defaultdict(list)
    for row in table.rows if table.published else ():
        if groups.get(row.trial.name) and row.published.remark:
            remarks[row.published.remark].append(row.label)
    texts = [f"{'; '.join(labels)}: {remark}." for remark, labels in remarks.items()]
    parts += ["Remarks on published rows: " + " ".join(texts)] if texts else []
    for picture, figure in FIGURES.items():
        if figure.table == name and pictures.measured(figure, groups):
            parts.append(f"![{figure.title}]({picture}.png)")
    return [*parts, *([f"![{table.title}]({name}.png)"] if table.short else [])]


def _command(table: str) -> str:
    """Return the name of the command that trains a table."""
    return "digits" if table.startswith("digits") else table.replace("_", "-")


def _lines(texts) -> str:
    return "\n".join(f"- {text}" for text in texts)


def _cost(shown: dict[str, Table], records: Sequence[Record], groups: Groups) -> list[str]:
    if not records:
        return ["No runs yet."]
    costs = []
    for table in shown.values():
        own = [record for row in table.rows for record in groups.get(row.trial.name, ())]
        costs.append(f"{table.title}: {_time(own)}")
    costs.append(f"All, each run counted once: {_time(records)}")
    made = collections.Counter(map(_made_by, records))
    by = [f"{text}: {_number(count, 'run')}" for text, count in sorted(made.items())]
    return [_lines(costs), "Code and packages:", _lines(by)]


def _time(records: Sequence[Record]) -> str:
    own: dict[str, list[float]] = {}
    for record in records:
        own.setdefault(device(record), []).append(seconds(record))
    each = [
        f"{duration(sum(times))} of {name} ({_number(len(times), 'run')})"
        for name, times in sorted(own.items())
    ]
    return ", ".join(each)


def _made_by(record: Record) -> str:
    packages = [f"{name} {version}" for name, version in sorted(record.device["versions"].items())]
    changes = " with changes" if record.code["modified"] else ""
    return ", ".join(
        [
            f"commit {record.code['commit']}{changes}",
            f"backend {record.device['backend']}",
            *packages,
        ]
    )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
