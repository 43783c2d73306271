"""From the figures of all rounds to medians, ratios, a table and a file."""

import dataclasses
import datetime
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..cli import UserError
from ..terminal import lines

MIB = 1 / 2**20


@dataclasses.dataclass(frozen=True)
class Column:
    """A figure as a table shows it.

    Args:
        figure: Key of the figure.
        heading: Heading, with the unit.
        scale: Factor from the figure to the unit shown.
        digits: Digits after the point.
    """

    figure: str
    heading: str
    scale: float = 1.0
    digits: int = 2

    @property
    def name(self) -> str:
        """The heading without its unit."""
        return self.heading.rsplit(" ", 1)[0]

    def text(self, entry: Mapping | None) -> str:
        """Return the median of a figure, with the least and the largest value."""
        if entry is None:
            return "-"
        return _range(entry, lambda value: f"{value * self.scale:,.{self.digits}f}")


def check(options: Any, *positive: str) -> None:
    """Check the options that all benchmarks have.

    Args:
        options: Dataclass of options, one of them `output`.
        positive: Names of the numbers that must be positive, if there are such.

    Raises:
        UserError: for one that does not fit.
    """
    for name in positive:
        value = getattr(options, name, None)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} must be positive. Received: {value}")
    if options.output is not None and not options.output.parent.is_dir():
        raise UserError(f"--output: there is no directory {options.output.parent}")


def described(
    command: str, options: Any, about: str, order: str, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the first part of a benchmark's file."""
    return {
        "command": command,
        "settings": dataclasses.asdict(options),
        "about": about,
        "order": order,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine,
    }


def publish(found: dict, text: str, output: Path | None) -> dict:
    """Print a benchmark's table, write what it found to a JSON file if one is named, and
    return that.
    """
    from ..runs import write_json

    print(text)
    if output is not None:
        write_json(output, found)
        print(f"Written: {output}")
    return found


def summarize(
    rounds: Sequence[Mapping[str, Mapping[str, float]]], baselines: Mapping[str, str]
) -> dict[str, dict[str, dict]]:
    """Return the statistics of every candidate's figures.

    Args:
        rounds: For each round, label of a candidate to its figures, if it has some.
        baselines: Label of a candidate to that of its baseline.

    Returns:
        Label to figure to `median`, `min`, `max`, `rounds` and, if both have the figure
        in a round and the baseline's is not 0, `ratio`: `over` (the baseline's label),
        `median`, `min`, `max` of the quotients of figures of the same round.
    """
    summary: dict[str, dict[str, dict]] = {}
    for label, baseline in baselines.items():
        own = [
            (figures[label], figures.get(baseline, {})) for figures in rounds if label in figures
        ]
        summary[label] = {}
        for key in dict.fromkeys(key for figures, _ in own for key in figures):
            pairs = [(figures[key], base.get(key)) for figures, base in own if key in figures]
            entry: dict[str, Any] = _spread([value for value, _ in pairs]) | {"rounds": len(pairs)}
            ratios = [value / base for value, base in pairs if base]
            if ratios:
                entry["ratio"] = {"over": baseline, **_spread(ratios)}
            summary[label][key] = entry
    return summary


def of_pairs(pairs: Sequence[Sequence[float]], one: str, other: str, ratio: str) -> dict:
    """Return the medians of figures that were measured in turn, under the names `one`
    and `other`, and that of the ratios of each pair.
    """
    first, second = zip(*pairs, strict=True)
    return {
        one: statistics.median(first),
        other: statistics.median(second),
        ratio: statistics.median(b / a for a, b in pairs),
        "all_steps": pairs,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _range(entry: Mapping, text: Any) -> str:
    median, low, high = (text(entry[key]) for key in ("median", "min", "max"))
    return median if low == high else f"{median} ({low} to {high})"


def table(
    columns: Sequence[Column],
    summary: Mapping[str, Mapping[str, Mapping]],
    baselines: Mapping[str, str],
    headings: Sequence[str] = (),
    remarks: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """Return a table for a terminal: medians with the least and the largest value.

    Rows are numbered: `1.5 x [1]` is a ratio of 1.5 over the figure of row 1.

    Args:
        columns: The ratio of the first one that a candidate has is shown.
        summary: What `summarize` returns.
        baselines: Label of a candidate to that of its baseline.
        headings: Headings of the last columns.
        remarks: Label to the cells of those columns.
    """
    columns = [
        column
        for column in columns
        if any(column.figure in figures for figures in summary.values())
    ]
    numbers = {label: f"[{n}]" for n, label in enumerate(summary, 1)}
    of = columns[0].name if columns else ""
    rows = [["", "candidate", *(each.heading for each in columns), f"ratio of {of}", *headings]]
    for label, figures in summary.items():
        cells = [column.text(figures.get(column.figure)) for column in columns]
        shown = next((column for column in columns if column.figure in figures), None)
        ratio = figures[shown.figure].get("ratio") if shown else None
        if shown is None or ratio is None:
            text = "-"
        elif baselines[label] == label:
            text = "baseline"
        else:
            text, *ends = _range(ratio, "{:.3g}".format).split(" ", 1)
            text = " ".join([text, "x", numbers[baselines[label]], *ends])
            text += "" if shown is columns[0] else f" of {shown.name}"
        rows.append([numbers[label], label, *cells, text, *remarks.get(label, ())])
    return lines(rows, numbers=(0, *range(2, 2 + len(columns))))
