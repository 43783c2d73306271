"""The tables of docs/benchmarks.md. benchmarks.csv lists the rows; the numbers come from
training/benchmark/measured/.
"""

import csv
import json
import re
from pathlib import Path
from typing import NamedTuple

#: Columns of every table.
HEAD = ["measured", "median", "least to most", "rounds", "device", "cores, threads", "file"]

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


def cells(row: Row) -> list[str]:
    content = read(row.file)
    statistics, machine = content["summary"][row.candidate][row.figure], content["machine"]
    device = content.get("candidates", {}).get(row.candidate, {}).get("device", "CPU")
    rounds = statistics["rounds"]
    statistics = statistics["ratio"] if row.over else statistics
    median, least, most = (f"{statistics[key]:,.{row.digits}f}" for key in ("median", "min", "max"))
    return [
        row.what + (f", relative to {row.over}" if row.over else ""),
        median,
        f"{least} to {most}" if rounds > 1 else "one round",
        str(rounds),
        cpu(machine) if device == "CPU" else device,
        threads(machine),
        f"`{row.file}`",
    ]


def benchmarks() -> str:
    """The tables, and what their files do not record."""
    parts = []
    for heading, rows in TABLES.items():
        lines = [HEAD, ["---"] * len(HEAD), *map(cells, rows)]
        parts += [f"### {heading}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    files = sorted({row.file for rows in TABLES.values() for row in rows})
    silent = ", ".join(f"`{file}`" for file in files if "flags" not in read(file)["machine"])
    notes = [
        "The files are in `training/benchmark/measured/`. A median of one or two rounds shows no "
        "spread to rely on. `serving` and `serving_int8` were measured for an earlier version, by "
        "a load test that this one does not have."
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


def engines(precision: str) -> str:
    """The speed of the OpenVINO engine divided by the speed of the TensorFlow engine,
    as a range over batch sizes.
    """
    summary = read("serving")["summary"]

    def speed(engine: str, batch: int) -> float:
        name = f"direct/imagenet_resnet50_preact/{engine}:precision={precision},batch={batch}"
        return summary[name]["images_per_second"]["median"]

    ratios = sorted(speed("openvino", batch) / speed("tensorflow", batch) for batch in (1, 32))
    words = [f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}" for ratio in ratios]
    return " to ".join(dict.fromkeys(words))
