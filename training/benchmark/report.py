"""From the figures of all rounds to medians, ratios and a table."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rounds import Outcome


@dataclasses.dataclass(frozen=True)
class Column:
    """A figure as a table shows it.

    Args:
        figure: Its key.
        heading: With the unit.
        scale: From the figure to the unit shown.
        digits: Behind the point.
    """

    figure: str
    heading: str
    scale: float = 1.0
    digits: int = 2


_JIT = {True: "yes", False: "no", None: "-"}
_STEP = Column("step_seconds", "step ms", 1e3, 1)
_MIB = 1 / 2**20

#: Command to its columns. The first is the one whose ratio to the baseline is shown.
COLUMNS: Mapping[str, Sequence[Column]] = {
    "compile": (
        Column("compile_seconds", "compile s"),
        Column("build_seconds", "build s"),
        Column("first_step_seconds", "first step s"),
        _STEP,
    ),
    "step": (_STEP, Column("images_per_second", "images/s", digits=1)),
    "memory": (
        Column("xla_temporary_bytes", "XLA MiB", _MIB, 1),
        Column("resident_increase_bytes", "RSS increase MiB", _MIB, 1),
        Column("peak_resident_bytes", "peak RSS MiB", _MIB, 1),
        Column("device_peak_bytes", "GPU peak MiB", _MIB, 1),
    ),
    "optimizer": (
        Column("update_seconds", "update ms", 1e3, 2),
        Column("first_update_seconds", "first s"),
        Column("variables", "variables", digits=0),
    ),
    "health": (
        _STEP,
        Column("watched_step_seconds", "with health ms", 1e3, 1),
        Column("watched_over_plain", "with / without", digits=3),
    ),
    "checkpoint": (
        Column("save_seconds", "save ms", 1e3, 1),
        Column("restore_seconds", "restore ms", 1e3, 1),
        Column("bytes", "MiB", _MIB, 1),
        Column("share_of_time", "share %", 100, 3),
    ),
}

#: Command to what its figures are.
ABOUT: Mapping[str, str] = {
    "compile": "compile = first train step, which traces and compiles, minus the median of the steps behind it.",
    "step": "step = median of the timed steps, on a batch that is on the device already.",
    "memory": (
        "XLA = temporary memory of the compiled step (loss, gradients, new state), by XLA's own "
        "analysis, on JAX. RSS increase = peak of the process's resident memory in its first "
        "steps, minus what was resident before: it holds what tracing and compiling take, save "
        "on JAX, where they come before."
    ),
    "optimizer": "update = median of the optimiser's updates, with gradients that stay the same.",
    "health": "step = mean of the timed steps of model.fit, without kp.TrainingHealth and with it in turn, in one process.",
    "checkpoint": "save = median of writing a checkpoint; share = of the time, with one every 5 minutes.",
}


def summarize(
    rounds: Sequence[Mapping[str, Mapping[str, float]]], baselines: Mapping[str, str]
) -> dict[str, dict[str, dict]]:
    """Return the statistics of every candidate's figures.

    Args:
        rounds: For each round, label of a candidate to its figures; one that has none
            in a round is not in it.
        baselines: Label of a candidate to that of its baseline.

    Returns:
        Label to figure to `median`, `min`, `max`, `rounds` and, where both have the
        figure in a round and the baseline's is not 0, `ratio`: `over` (the baseline's
        label), `median`, `min`, `max` of the quotients of figures of the same round.
    """
    summary: dict[str, dict[str, dict]] = {}
    for label, baseline in baselines.items():
        own = [
            (figures[label], figures.get(baseline, {})) for figures in rounds if label in figures
        ]
        keys = dict.fromkeys(key for figures, _ in own for key in figures)
        summary[label] = {}
        for key in keys:
            pairs = [(figures[key], base.get(key)) for figures, base in own if key in figures]
            entry: dict[str, Any] = _spread([value for value, _ in pairs]) | {"rounds": len(pairs)}
            ratios = [value / base for value, base in pairs if base]
            if ratios:
                entry["ratio"] = {"over": baseline, **_spread(ratios)}
            summary[label][key] = entry
    return summary


def publish(described: dict, text: str, output: Path | None) -> dict:
    """Print a benchmark's table, write what it found to a JSON file where one is named,
    and return that.
    """
    from ..runs import write_json

    print(text)
    if output is not None:
        write_json(output, described)
        print(f"Written: {output}")
    return described


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def figures_of(outcomes: "Sequence[Outcome]", rounds: int) -> list[dict[str, dict[str, float]]]:
    """Return, for each round, label to figures that are single numbers."""
    table: list[dict[str, dict[str, float]]] = [{} for _ in range(rounds)]
    for outcome in outcomes:
        if outcome.result is not None:
            figures = outcome.result["figures"]
            table[outcome.round - 1][outcome.label] = {
                k: v for k, v in figures.items() if not isinstance(v, list)
            }
    return table


def table(
    command: str,
    summary: Mapping[str, Mapping[str, Mapping]],
    baselines: Mapping[str, str],
    outcomes: "Sequence[Outcome]",
) -> str:
    """Return medians as a text for a terminal, with min and max behind them.

    Rows are numbered: `1.5 x [1]` is a ratio of 1.5 over the figure of row 1.
    """
    columns = [
        column
        for column in COLUMNS[command]
        if any(column.figure in figures for figures in summary.values())
    ]
    problems = {outcome.label: outcome.problem for outcome in outcomes if outcome.problem}
    compiled = {
        outcome.label: outcome.result["jit_compile"] for outcome in outcomes if outcome.result
    }
    numbers = {label: f"[{n}]" for n, label in enumerate(summary, 1)}
    of = columns[0].heading.rsplit(" ", 1)[0] if columns else ""
    rows = [["", "candidate", *(column.heading for column in columns), f"ratio of {of}", "jit", ""]]
    for label, figures in summary.items():
        cells = [_cell(figures.get(column.figure), column) for column in columns]
        shown = next((column for column in columns if column.figure in figures), None)
        ratio = figures[shown.figure].get("ratio") if shown else None
        text = "-" if ratio is None else "baseline"
        if shown is not None and ratio is not None and baselines[label] != label:
            median, low, high = (f"{ratio[key]:.3g}" for key in ("median", "min", "max"))
            text = f"{median} x {numbers[baselines[label]]}" + (
                f" ({low} to {high})" if low != high else ""
            )
            if shown is not columns[0]:
                text += f" of {shown.heading.rsplit(' ', 1)[0]}"
        note = problems.get(label, "")
        if note and figures:
            note += f" in round {1 + max(entry['rounds'] for entry in figures.values())}"
        rows.append([numbers[label], label, *cells, text, _JIT[compiled.get(label)], note])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = (1, len(widths) - 3, len(widths) - 2, len(widths) - 1)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _cell(entry: Mapping | None, column: Column) -> str:
    if entry is None:
        return "-"
    median, low, high = (
        f"{entry[key] * column.scale:,.{column.digits}f}" for key in ("median", "min", "max")
    )
    return median if low == high else f"{median} ({low} to {high})"
