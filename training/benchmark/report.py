"""Medians, ratios, a table and a file from the figures of all rounds."""

import dataclasses
import datetime
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import backends, disk
from ..cli.terminal import lines

#: Environment variables that set threads and devices.
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_NUM_INTRAOP_THREADS",
    "XLA_FLAGS",
    "CUDA_VISIBLE_DEVICES",
)


def now() -> str:
    """Return the time for the field `started` of a file."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


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


def summarize(
    rounds: Sequence[Mapping[str, Mapping[str, float]]], baselines: Mapping[str, str]
) -> dict[str, dict[str, dict]]:
    """Return the statistics of every candidate's figures.

    Args:
        rounds: For each round, label of each candidate that has figures to the figures.
        baselines: Label of a candidate to the label of its baseline.

    Returns:
        Label to figure to `median`, `min`, `max`, `rounds` (their number) and `ratio`:
        `over` (the baseline's label), and `median`, `min`, `max` of the quotients of
        figures of the same round. There is no `ratio` if no round has both figures with
        a baseline other than 0.
    """
    summary: dict[str, dict[str, dict]] = {}
    for label, baseline in baselines.items():
        compared = [
            (figures[label], figures.get(baseline, {})) for figures in rounds if label in figures
        ]
        summary[label] = {}
        for key in dict.fromkeys(key for figures, _ in compared for key in figures):
            pairs = [(figures[key], base.get(key)) for figures, base in compared if key in figures]
            entry: dict[str, Any] = _spread([value for value, _ in pairs]) | {"rounds": len(pairs)}
            ratios = [value / base for value, base in pairs if base]
            if ratios:
                entry["ratio"] = {"over": baseline, **_spread(ratios)}
            summary[label][key] = entry
    return summary


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _range(entry: Mapping, text: Any) -> str:
    median, low, high = (text(entry[key]) for key in ("median", "min", "max"))
    return median if low == high else f"{median} ({low} to {high})"


def table(
    columns: Sequence[Column],
    summary: Mapping[str, Mapping[str, Mapping]],
    baselines: Mapping[str, str],
    remarks: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return a table for a terminal: medians with the least and the largest value.

    Rows are numbered: `1.5 x [1]` is a ratio of 1.5 over the figure of row 1.

    Args:
        columns: Columns. The table shows the ratio of the first one that a candidate has.
        summary: What `summarize` returns.
        baselines: Label of a candidate to the label of its baseline.
        remarks: Label to the cells of the last two columns: whether it is compiled, and why
            it has no figures. None: there are no such columns.
    """
    columns = [
        column
        for column in columns
        if any(column.figure in figures for figures in summary.values())
    ]
    numbers = {label: f"[{n}]" for n, label in enumerate(summary, 1)}
    first = columns[0].name if columns else ""
    headings = [column.heading for column in columns]
    last = [] if remarks is None else ["jit", ""]
    rows = [["", "candidate", *headings, f"ratio of {first}", *last]]
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
        last = [] if remarks is None else [*remarks[label]]
        rows.append([numbers[label], label, *cells, text, *last])
    return lines(rows, numbers=(0, *range(2, 2 + len(columns))))


def show(
    heading: str,
    columns: Sequence[Column],
    baselines: Mapping[str, str],
    content: dict[str, Any],
    output: Path | None,
    remarks: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Print what was measured as a table, and write it to a file.

    Args:
        heading: First line, without the CPU.
        columns: Columns of the table.
        baselines: Label of a candidate to the label of its baseline.
        content: Content of the file: `about` and `order` say what the figures are, `summary`
            is what `summarize` returns.
        output: Path of the JSON file. None: no file.
        remarks: Cells of the last two columns, see `table`.
    """
    content = content | {"machine": backends.machine(ENVIRONMENT)}
    print(
        f"\n{heading} ({content['machine']['cpu']})\n{content['about']}\n{content['order']}\n"
        "Figures: median (least to most) of the rounds. Ratios: to "
        f"{', '.join(dict.fromkeys(baselines.values()))}.\n"
    )
    print(table(columns, content["summary"], baselines, remarks))
    if output is not None:
        disk.write_json(output, content)
        print(f"Written: {output}")
