"""`python -m training.reproduce report`: every published number beside ours, in results/README.md."""

import collections
from collections.abc import Sequence
from pathlib import Path

from .. import cli, runs
from ..terminal import duration
from . import depth, pictures, results, statistics
from .results import RESULTS, SEEDS, Record
from .rows import FAIL, GOAL, Groups, Measured, device, difference, measured_rows, seconds, table_text
from .trials import FIGURES, TABLES, TRIALS, Table

#: So many pairs of rows are named, the others counted.
NAMED = 6


def report(output: Path = RESULTS) -> None:
    """Write every published number beside ours: README.md and its pictures, from the results in a folder.

    Args:
        output: Folder with the results.

    Raises:
        UserError: for a file that holds no run, runs in one row that do not belong together, and without matplotlib. Nothing
            is written then.
    """
    records = results.read(output)
    groups = results.groups(records)
    measured = depth.read(output)
    small = {name: table for name, table in TABLES.items() if table.small and measured_rows(table, groups)}
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
        if measured:
            picture("depth", depth.figure, measured)
        text = "\n\n".join(_parts(records, groups, measured))
    output.mkdir(parents=True, exist_ok=True)
    with runs.replacing(output / "README.md") as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    written.append(output / "README.md")
    print(f"{len(records)} runs of {len(groups)} trials. Written: {', '.join(map(str, written))}")


def _parts(records: Sequence[Record], groups: Groups, measured: Sequence[dict]) -> list[str]:
    """Return the paragraphs of the page."""
    command = cli.command("reproduce")
    parts = [
        "# Reproduction",
        f"Written by `{command} report` from the files in this folder, one a run; nothing is typed by hand.",
        "Published numbers are test errors in percent, medians of 5 runs where nothing else is said. Ours are test errors in "
        "percent on the last iteration of the recipe, not on the best one. mean +- std is over the seeds, and not given where "
        "a run diverged; in a median, a diverged run counts as larger than every number. A time is that of a run "
        "on its device: that of runs side by side is divided by their number.",
        "Two rows differ *clearly* where the 95 % interval for the difference of their means (Welch) excludes 0; where runs "
        "diverged, where all runs of one are below all of the other, and chance would do that in at most 5 % of cases. "
        "Of pairs that do not differ at all, one in 20 is expected to look so.",
    ]
    for name, table in TABLES.items():
        parts += [f"## {table.title}", *_section(name, table, groups)]
    parts += _depth(measured)
    return [*parts, "## Cost", *_cost(records, groups), "## How to fill a row", _how(command)]


def _section(name: str, table: Table, groups: Groups) -> list[str]:
    rows = measured_rows(table, groups)
    parts = [table_text(table, groups)]
    if rows:
        parts.append(
            _lines([goal(rows), *orders(table, rows, "test_error", "test error")] if not table.small else _small(table, rows))
        )
    parts.append(_missing(table, groups))
    remarks = collections.defaultdict(list)
    for row in table.rows:
        remarks[row.published.remark].append(row.label)
    said = [f"{'; '.join(labels)}: {remark}." for remark, labels in remarks.items() if remark]
    parts += ["Of the published rows: " + " ".join(said)] if said else []
    if table.small and rows:
        parts.append(f"![{table.title}]({name}.png)")
    for number, figure in FIGURES.items():
        here = next(where for panel in figure.panels.values() for where, _ in panel) == name
        parts += [f"![{figure.title}]({number}.png)"] if here and pictures.measured(figure, groups) else []
    return parts


def _small(table: Table, rows: Sequence[Measured]) -> list[str]:
    return [
        "Small networks on small images: an order can be the paper's, a number cannot. The paper argues with how easily a "
        "network is optimised, which the training loss shows. Intervals are over seeds: they say nothing of other images.",
        *orders(table, rows, "train_loss", "training loss against the paper's test error"),
        *orders(table, rows, "test_error", "test error"),
    ]


def _lines(texts: Sequence[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def goal(rows: Sequence[Measured]) -> str:
    """Return in words how many of the measured rows are as near to the paper as the goal says, and which are not."""
    off = [f"{own.row.label} ({difference(own)})" for own in rows if not own.reaches]
    texts = [
        f"Goal, a median within {GOAL} points of the paper's, or above {FAIL:g} % where the paper fails: reached by "
        f"{len(rows) - len(off)} of {_number(len(rows), 'measured row')}."
    ]
    texts += [f"Not by {'; '.join(off)}."] if off else []
    few = sum(len(own.records) < SEEDS for own in rows)
    texts += [f"{few} of {len(rows)} {'has' if few == 1 else 'have'} fewer than the paper's {SEEDS} runs."] if few else []
    return " ".join(texts)


def orders(table: Table, rows: Sequence[Measured], name: str, words: str) -> list[str]:
    """Return `order` of the rows that the table compares: those of one network, unless it compares depths."""
    groups: dict[tuple[str, ...], list[Measured]] = {}
    for own in rows:
        published = own.row.published
        groups.setdefault((published.dataset, "" if table.depths else published.network), []).append(own)
    texts = []
    for (dataset, network), group in groups.items():
        of = ", ".join(filter(None, ["CIFAR-100" if dataset == "cifar100" else "", network]))
        texts.append(order(group, name, f"{of}, {words}" if len(groups) > 1 else f"{words[0].upper()}{words[1:]}"))
    return texts


def order(rows: Sequence[Measured], name: str, words: str) -> str:
    """Return in words how far the rows stand in the paper's order.

    Args:
        rows: Of a table, with runs.
        name: Key in `Record.final` of what they are ordered by.
        words: What that is called.
    """
    items = [statistics.Item(own.row.published.row, own.row.published.error, own.values(name)) for own in rows]
    found = statistics.pairs(items)
    if not found:
        return f"{words}: no two rows that the paper orders are measured."
    same, reverse, equal = ([pair for pair in found if pair.medians == sign] for sign in (1, -1, 0))
    clear, against, rest = ([pair for pair in found if pair.clearly == sign] for sign in (1, -1, 0))
    texts = [
        f"{words}: the paper orders {_number(len(found), 'pair')} of measured rows. Our medians have {len(same)} in its "
        f"order, {len(reverse)} the other way round, {len(equal)} equal: "
        f"Kendall's tau is {statistics.kendall(found):+.2f}.",
        f"Clearly in its order: {len(clear)}. Clearly the other way round: {len(against)}{_names(against)}.",
    ]
    if rest:
        counts = sorted({len(own.records) for own in rows})
        each = _number(counts[0], "run") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} runs"
        images = " or ".join(f"{n:,}" for n in sorted({record.data["test"] for own in rows for record in own.records}))
        of = f" and {images} test images" if name == "test_error" else ""
        texts.append(f"Not to be told apart with {each} a row{of}: {len(rest)}.")
    return " ".join(texts)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _names(found: Sequence[statistics.Pair]) -> str:
    named = [f"{pair.second} is below {pair.first}" for pair in found[:NAMED]]
    more = [f"{len(found) - NAMED} more"] if len(found) > NAMED else []
    return f" ({'; '.join(named + more)})" if found else ""


def _missing(table: Table, groups: Groups) -> str:
    labels = [row.label for row in table.rows if not groups.get(row.trial.name)]
    if len(labels) == len(table.rows):
        return "No row has been measured yet" + ("." if table.small else ": [QUEUE.md](QUEUE.md) says what comes next.")
    short = [f"{own.row.label} ({len(own.records)})" for own in measured_rows(table, groups) if len(own.records) < SEEDS]
    texts = [f"Not measured yet: {'; '.join(labels)}."] if labels else []
    texts += [f"Fewer than {SEEDS} runs: {'; '.join(short)}."] if short else []
    return " ".join(texts) or f"All rows are measured, {SEEDS} runs or more each."


def _depth(measured: Sequence[dict]) -> list[str]:
    title = "Depth before training"
    return [f"## {title}", depth.table(measured).strip(), f"![{title}](depth.png)"] if measured else []


def _cost(records: Sequence[Record], groups: Groups) -> list[str]:
    if not records:
        return ["No run has been made yet."]
    tables = {
        table.title: [record for own in measured_rows(table, groups) for record in own.records] for table in TABLES.values()
    }
    texts = [f"{title}: {_time(own)}" for title, own in tables.items() if own]
    texts.append(f"All, each run once though it stands in several tables: {_time(records)}")
    if unknown := sorted(set(groups) - set(TRIALS)):
        texts.append(f"Runs of no row: {', '.join(unknown)}")
    return [_lines(texts), "Made by:", _lines(_made_by(records))]


def _time(records: Sequence[Record]) -> str:
    own: dict[str, list[float]] = {}
    for record in records:
        own.setdefault(device(record), []).append(seconds(record))
    each = [f"{duration(sum(times))} of {name} ({_number(len(times), 'run')})" for name, times in sorted(own.items())]
    return ", ".join(each)


def _made_by(records: Sequence[Record]) -> list[str]:
    """Return what code and packages made the runs."""
    made: collections.Counter[str] = collections.Counter()
    for record in records:
        packages = ", ".join(f"{name} {version}" for name, version in sorted(record.device["versions"].items()))
        commit = f"commit {record.code['commit']}{' with changes' if record.code['modified'] else ''}"
        made[f"{commit}, sources {record.code['fingerprint'][:12]}, backend {record.device['backend']}, {packages}"] += 1
    return [f"{text}: {_number(count, 'run')}" for text, count in sorted(made.items())]


def _how(command: str) -> str:
    return f"""A run is a trial with a seed, and goes on where it was interrupted. What has a result is not made again.

```sh
{command} next                    # the run that is worth most now, with its command
{command} next --minutes 30       # the one that fits into so many minutes of the device
{command} table2 --rows resnet110-full_preactivation --seeds {SEEDS}
{command} plan                    # writes QUEUE.md: all that is missing, in order
{command} report                  # writes this page
```"""
