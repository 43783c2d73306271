"""`keras-preact reproduce report`: every published number beside ours, in
results/README.md.
"""

import collections
import math
from collections.abc import Sequence
from pathlib import Path

from .. import cli, runs
from ..terminal import duration
from . import depth, fast, medians, pictures, results
from .cells import (
    FAIL,
    GOAL,
    Groups,
    Measured,
    device,
    difference,
    measured_rows,
    seconds,
    table_text,
)
from .results import RESULTS, SEEDS, Record
from .rows import FIGURES, RECIPES, TABLES, TRIALS, Table

#: Largest number of pairs of rows that are named; the others are counted.
NAMED = 6


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
    measured, quick = depth.read(output), fast.read(output)
    small = {
        name: table
        for name, table in TABLES.items()
        if table.shortened and measured_rows(table, groups)
    }
    paper = {name: figure for name, figure in FIGURES.items() if pictures.measured(figure, groups)}
    written = []

    def picture(name: str, draw, *arguments) -> None:
        output.mkdir(parents=True, exist_ok=True)
        with runs.replacing(output / f"{name}.png") as temporary:
            draw(*arguments, temporary)
        written.append(output / f"{name}.png")

    with cli.missing_packages():
        for name, figure in paper.items():
            picture(name, pictures.curves, figure, groups)
        for name, table in small.items():
            picture(name, pictures.spreads, table, groups)
        if quick:
            picture("fast", fast.figure, quick)
        if measured:
            picture("depth", depth.figure, measured)
        text = "\n\n".join(_parts(records, groups, measured, quick))
    output.mkdir(parents=True, exist_ok=True)
    with runs.replacing(output / "README.md") as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    written.append(output / "README.md")
    print(f"{len(records)} runs of {len(groups)} trials. Written: {', '.join(map(str, written))}")


def _parts(
    records: Sequence[Record], groups: Groups, measured: Sequence[dict], quick: Sequence[dict]
) -> list[str]:
    """Return the paragraphs of the page."""
    command = cli.command("reproduce")
    parts = [
        "# Reproduction",
        f"`{command} report` writes this page from the files in this folder, one per run. It "
        "shows what is measured; the end lists what is missing and how to measure it.",
        *_fast(quick),
    ]
    shown = {name: table for name, table in TABLES.items() if measured_rows(table, groups)}
    for name, table in shown.items():
        parts += [f"## {table.title}", *_section(name, table, groups)]
    parts += [
        *_depth(measured),
        *_unmeasured([table for name, table in TABLES.items() if name not in shown]),
    ]
    parts += ["## How to read the tables", READING] if shown else []
    return [*parts, "## Cost", *_cost(records, groups), "## How to fill a row", _how(command)]


READING = """Published numbers are test errors in percent, medians of 5 runs unless noted. Ours \
are test errors in percent at the last iteration of the recipe, not at the best one. mean +- std \
is over the seeds; a row with a diverged run has none. In a median, a diverged run counts as \
larger than every number. The time of runs that share a device is divided by their number.

Two rows differ *clearly* if the 95 % interval for the difference of their means (Welch) excludes \
0. If runs diverged, all runs of one row must be below all runs of the other, with a chance of at \
most 5 %. Of equal pairs, one in 20 is expected to look different."""


def _unmeasured(tables: Sequence[Table]) -> list[str]:
    """Return one line for each table without a run."""
    if not tables:
        return []
    lines = _lines([f"{table.title}: {_number(len(table.rows), 'row')}" for table in tables])
    return [
        "## Not measured yet",
        lines,
    ]


def _section(name: str, table: Table, groups: Groups) -> list[str]:
    rows = measured_rows(table, groups)
    parts = [*([table.about] if table.about else []), table_text(table, groups)]
    if rows and table.published:
        parts.append(
            _lines(
                [goal(rows), *orders(table, rows, "test_error", "test error")]
                if not table.shortened
                else _shortened(table, rows)
            )
        )
    parts.append(_missing(table, groups))
    remarks = collections.defaultdict(list)
    for row in table.rows if table.published else ():
        remarks[row.published.remark].append(row.label)
    texts = [f"{'; '.join(labels)}: {remark}." for remark, labels in remarks.items() if remark]
    parts += ["Remarks on published rows: " + " ".join(texts)] if texts else []
    if table.shortened and rows:
        parts.append(f"![{table.title}]({name}.png)")
    for number, figure in FIGURES.items():
        here = next(where for panel in figure.panels.values() for where, _ in panel) == name
        parts += (
            [f"![{figure.title}]({number}.png)"]
            if here and pictures.measured(figure, groups)
            else []
        )
    return parts


def _shortened(table: Table, rows: Sequence[Measured]) -> list[str]:
    return [
        f"{table.shortened}: the order can match the paper's, a number cannot. The paper explains "
        "its tables partly by ease of optimisation, which the training loss shows. For "
        "pre-activation it also reports regularisation: on ResNet-110 and ResNet-164 a slightly "
        "higher training loss and a lower test error (Sec. 4.2). Intervals are over seeds; they "
        "do not cover other images.",
        "A run repeats digit by digit on the same kind of CPU. Another kind rounds differently, "
        "and after some ten iterations the curves of one seed part.",
        *_failing(rows),
        *orders(table, rows, "train_loss", "training loss against the paper's test error"),
        *orders(table, rows, "test_error", "test error"),
    ]


def _failing(rows: Sequence[Measured]) -> list[str]:
    """Return why the shortened rows that fail do not contradict a number of the paper."""
    labels = [own.row.label for own in rows if own.fails and own.row.published.error is not None]
    if not labels:
        return []
    ours, paper = (RECIPES[name]().schedule.length for name in (rows[0].row.trial.recipe, "paper"))
    return [
        f"{'; '.join(labels)}: over {FAIL:g} % here, not in the paper. This does not contradict "
        f"the paper: the recipe here has {ours:,.0f} iterations, the paper's has {paper:,.0f}. The "
        f"training loss of these rows is still high or diverged (guessing: {math.log(10):.2f}), "
        "so they show how hard a network is to optimise, not where it ends."
    ]


def _lines(texts: Sequence[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def goal(rows: Sequence[Measured]) -> str:
    """Return in words how many of the measured rows are as near to the paper as the
    goal says, and which are not.
    """
    off = [f"{own.row.label} ({difference(own)})" for own in rows if not own.reaches]
    texts = [
        f"Goal, a median within {GOAL} points of the paper's, or above {FAIL:g} % if the paper's "
        f"fails: reached by {len(rows) - len(off)} of {_number(len(rows), 'measured row')}."
    ]
    texts += [f"Not by {'; '.join(off)}."] if off else []
    few = sum(len(own.records) < SEEDS for own in rows)
    texts += (
        [
            f"{few} of {len(rows)} {'has' if few == 1 else 'have'} fewer than the paper's {SEEDS} "
            "runs."
        ]
        if few
        else []
    )
    return " ".join(texts)


def orders(table: Table, rows: Sequence[Measured], name: str, words: str) -> list[str]:
    """Return `order` for the rows that the table compares: those of one network, unless
    it compares depths.
    """
    groups: dict[tuple[str, ...], list[Measured]] = {}
    for own in rows:
        published = own.row.published
        groups.setdefault(
            (published.dataset, "" if table.depths else published.network), []
        ).append(own)
    texts = []
    for (dataset, network), group in groups.items():
        of = ", ".join(filter(None, ["CIFAR-100" if dataset == "cifar100" else "", network]))
        texts.append(
            order(
                group,
                name,
                f"{of}, {words}" if len(groups) > 1 else f"{words[0].upper()}{words[1:]}",
            )
        )
    return texts


def order(rows: Sequence[Measured], name: str, words: str) -> str:
    """Return in words how far the rows are in the paper's order.

    Args:
        rows: Rows of a table, with runs.
        name: Key in `Record.final` that orders them.
        words: Name of that number in the text.
    """
    items = [
        medians.Item(own.row.published.row, own.row.published.error, own.values(name))
        for own in rows
    ]
    found = medians.pairs(items)
    if not found:
        return f"{words}: no two measured rows are ordered in the paper."
    same, reverse, equal = ([pair for pair in found if pair.medians == sign] for sign in (1, -1, 0))
    clear, against, rest = ([pair for pair in found if pair.clearly == sign] for sign in (1, -1, 0))
    texts = [
        f"{words}: the paper orders {_number(len(found), 'pair')} of measured rows. Our medians "
        f"have {len(same)} in its order, {len(reverse)} reversed, {len(equal)} equal: Kendall's "
        f"tau is {medians.kendall(found):+.2f}.",
        f"Clearly in its order: {len(clear)}. Clearly reversed: {len(against)}{_names(against)}.",
    ]
    if rest:
        counts = sorted({len(own.records) for own in rows})
        each = (
            _number(counts[0], "run") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} runs"
        )
        images = " or ".join(
            f"{n:,}"
            for n in sorted({record.data["test"] for own in rows for record in own.records})
        )
        of = f" and {images} test images" if name == "test_error" else ""
        texts.append(f"Undecided with {each} per row{of}: {len(rest)}.")
    return " ".join(texts)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _names(found: Sequence[medians.Pair]) -> str:
    named = [f"{pair.second} is below {pair.first}" for pair in found[:NAMED]]
    more = [f"{len(found) - NAMED} more"] if len(found) > NAMED else []
    return f" ({'; '.join(named + more)})" if found else ""


def _missing(table: Table, groups: Groups) -> str:
    labels = [row.label for row in table.rows if not groups.get(row.trial.name)]
    short = [
        f"{own.row.label} ({len(own.records)})"
        for own in measured_rows(table, groups)
        if len(own.records) < SEEDS
    ]
    texts = [f"Not measured yet: {'; '.join(labels)}."] if labels else []
    texts += [f"Fewer than {SEEDS} runs: {'; '.join(short)}."] if short else []
    return " ".join(texts) or f"Every row has {SEEDS} runs or more."


def _fast(quick: Sequence[dict]) -> list[str]:
    if not quick:
        return []
    epochs = sorted({record["config"]["schedule"]["length"] for record in quick})
    return [
        "## CIFAR-10 in minutes",
        f"`{cli.command('reproduce')} fast`: a wide, shallow pre-activation network trained for "
        f"{epochs[0]:g} epochs by the recipe `{fast.RECIPE}`. Its settings were chosen on held-out "
        "training images. Accuracies are of the 10,000 test images after the last iteration: the "
        "mean over seeds and its standard deviation. The 6 views of an image are itself, moved by "
        "a pixel in two directions, and the mirror images of these three; their logits are "
        "averaged. Training is the time without the measurement at the end.",
        fast.table(quick),
        "![CIFAR-10 in minutes](fast.png)",
    ]


def _depth(measured: Sequence[dict]) -> list[str]:
    title = "Depth before training"
    return [f"## {title}", depth.table(measured), f"![{title}](depth.png)"] if measured else []


def _cost(records: Sequence[Record], groups: Groups) -> list[str]:
    if not records:
        return ["No runs yet."]
    tables = {
        table.title: [record for own in measured_rows(table, groups) for record in own.records]
        for table in TABLES.values()
    }
    texts = [f"{title}: {_time(own)}" for title, own in tables.items() if own]
    texts.append(f"All, each run counted once: {_time(records)}")
    if unknown := sorted(set(groups) - set(TRIALS)):
        texts.append(f"Runs of no row: {', '.join(unknown)}")
    return [_lines(texts), "Code and packages:", _lines(_made_by(records))]


def _time(records: Sequence[Record]) -> str:
    own: dict[str, list[float]] = {}
    for record in records:
        own.setdefault(device(record), []).append(seconds(record))
    each = [
        f"{duration(sum(times))} of {name} ({_number(len(times), 'run')})"
        for name, times in sorted(own.items())
    ]
    return ", ".join(each)


def _made_by(records: Sequence[Record]) -> list[str]:
    """Return the code and packages of the runs."""
    made: collections.Counter[str] = collections.Counter()
    for record in records:
        packages = ", ".join(
            f"{name} {version}" for name, version in sorted(record.device["versions"].items())
        )
        changes = " with changes" if record.code["modified"] else ""
        made[
            f"commit {record.code['commit']}{changes}, backend {record.device['backend']}, "
            f"{packages}"
        ] += 1
    return [f"{text}: {_number(count, 'run')}" for text, count in sorted(made.items())]


def _how(command: str) -> str:
    return f"""A run is a network with a seed. Interrupted runs are resumed, finished ones are kept.

```sh
{command} table2 --rows resnet110-full_preactivation --seeds {SEEDS}
{command} table2 --device-minutes 30     # stop after 30 minutes; the same command resumes
{command} report                         # write this page
```"""
