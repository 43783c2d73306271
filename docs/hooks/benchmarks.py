"""The tables of docs/benchmarks.md. benchmarks.csv lists the rows; the numbers come from
training/benchmark/measured/.
"""

import csv
import json
import re
from pathlib import Path
from typing import NamedTuple

from training.cli.terminal import markdown

#: Columns of the comparisons, and of the other figures.
FAST = "times as fast"
RATIOS = ["measured", "compared with", FAST, "bar", "least to most", "device", "file"]
VALUES = ["measured", "median", "least to most", "device", "file"]
#: Length of a bar for 1: as fast as the baseline.
ONE = 6

MEASURED = Path(__file__).parents[2] / "training/benchmark/measured"


class Row(NamedTuple):
    """A figure in a file, or its ratio to the baseline that `over` names."""

    what: str
    file: str
    candidate: str
    figure: str
    over: str | None = None
    digits: int = 2


def _tables() -> dict[str, list[Row]]:
    tables: dict[str, list[Row]] = {}
    with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            heading, over, digits = row.pop("heading"), row.pop("over"), int(row.pop("digits"))
            tables.setdefault(heading, []).append(Row(**row, over=over or None, digits=digits))
    return tables


NAMES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}
#: Heading to its rows.
TABLES = _tables()


def read(file: str) -> dict:
    return json.loads((MEASURED / f"{file}.json").read_text())


def threads(machine: dict) -> str:
    """Return the cores that a file records, and the limit on threads."""
    limit = "limit not recorded"
    if "environment" in machine:
        limits = [f"`{k}={v}`" for k, v in machine["environment"].items() if "THREADS" in k]
        limit = ", ".join(limits) or "no limit"
    cores = machine["usable_cores"]
    return f"{cores} core{'s' * (cores != 1)}, {limit}"


def cpu(machine: dict) -> str:
    """Return the processor that a file records, and whether it has AMX."""
    name = re.sub(r"\((R|TM)\)| Processor", "", machine["cpu"].partition(",")[0]).strip()
    return f"{name} with AMX" if "amx_bf16" in machine.get("flags", ()) else name


def is_lower_better(row: Row) -> bool:
    """Whether a figure is a time or memory."""
    return row.figure.endswith(("seconds", "bytes"))


def cells(row: Row) -> list[str]:
    """Return a row of a table. A ratio is above 1 if what was measured is better than the
    baseline: faster, or smaller in memory. That of times and of bytes is turned over.
    """
    content = read(row.file)
    statistics, machine = content["summary"][row.candidate][row.figure], content["machine"]
    device = content.get("candidates", {}).get(row.candidate, {}).get("device", "CPU")
    rounds = statistics["rounds"]
    if row.over and not row.figure.startswith("over_"):  # that one is a ratio already
        statistics = statistics["ratio"]
    median, least, most = (statistics[key] for key in ("median", "min", "max"))
    if row.over and is_lower_better(row):
        median, least, most = 1 / median, 1 / most, 1 / least
    shown = [f"{value:,.{row.digits}f}" for value in (median, least, most)]
    spread = f"{shown[1]} to {shown[2]}, {rounds} rounds" if rounds > 1 else "one round"
    of_cpu = f"{cpu(machine)}, " if device == "CPU" else f"{device}, "
    where = [of_cpu + threads(machine), f"`{row.file}`"]
    if not row.over:
        return [row.what, shown[0], spread, *where]
    return [row.what, row.over, shown[0], f"`{bar(median)}`", spread, *where]


def bar(ratio: float) -> str:
    """Return a bar of text with a line at 1, cut off at 3.

    Example:

    >>> bar(0.5), bar(1.5), bar(4.0)
    ('███░░░│', '██████│███', '██████│████████████▶')
    """
    filled = max(round(ONE * ratio), 1)
    below = min(filled, ONE)
    above = min(filled - below, 2 * ONE)
    cut = "▶" if filled > 3 * ONE else ""
    return f"{'█' * below}{'░' * (ONE - below)}│{'█' * above}{cut}"


def benchmarks() -> str:
    """The tables, and what their files do not record."""
    parts = []
    for heading, rows in TABLES.items():
        parts.append(f"### {heading}")
        for head, chosen in (
            (RATIOS, [row for row in rows if row.over]),
            (VALUES, [row for row in rows if not row.over]),
        ):
            if chosen:
                if all(row.figure.endswith("bytes") for row in chosen):
                    head = ["times as small" if name == FAST else name for name in head]
                parts.append(markdown([head, *map(cells, chosen)]))
    files = sorted({row.file for rows in TABLES.values() for row in rows})
    silent = ", ".join(f"`{file}`" for file in files if "flags" not in read(file)["machine"])
    notes = [
        "The files are in `training/benchmark/measured/`. A median of one or two rounds shows no "
        "spread to rely on."
    ]
    notes += [f"These files do not record the CPU's instruction sets: {silent}."] if silent else []
    return "\n\n".join([*parts, " ".join(notes)])


def very_deep() -> str:
    """The time, memory and losses of the runs of ten thousand layers."""
    lines = []
    for file in ("very_deep_preact_jax", "very_deep_vanilla_tensorflow"):
        run = read(file)
        settings = run["settings"]
        remat = f"`--remat {settings['remat']}`, " if settings["remat"] else ""
        lines.append(
            f"- `{run['name']}`, {run['parameters']:,} trainable parameters "
            f"({NAMES[run['backend']]}, {remat}batch {settings['batch']}, {run['cpu']}; threads "
            f"not recorded): {run['step_seconds']:.1f} s per step, "
            f"{run['peak_resident_bytes'] / 1e9:.1f} GB of memory, loss {run['losses'][0]:.2f} to "
            f"{run['losses'][-1]:.2f} in {len(run['losses'])} steps on one batch. File: `{file}`."
        )
    return "\n".join(lines)


def engines(faster: str, slower: str) -> str:
    """The images per second of `PRECISION/ENGINE` divided by those of another, as a range
    over batch sizes.
    """
    summary = read("exports_resnet50")["summary"]

    def speed(export: str, batch: int) -> float:
        name = f"imagenet_resnet50_preact/{export}/batch={batch}"
        return summary[name]["images_per_second"]["median"]

    ratios = sorted(speed(faster, batch) / speed(slower, batch) for batch in (1, 8, 32))
    words = [f"{ratio:.1f}" for ratio in (ratios[0], ratios[-1])]
    return " to ".join(dict.fromkeys(words))
