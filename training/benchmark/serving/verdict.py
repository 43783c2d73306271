"""Turns the figures of all rounds into medians, ratios, tables and verdicts on demands."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from .. import report
from .cells import Round, label

ABOUT = (
    "direct: calls of the network in the measuring process; loop: the result of "
    "tf.saved_model.load, called with its default signature; tensorflow and openvino: the "
    "server's engines. server: the same beside requests over HTTP to the real server, each with "
    "one image (float32, as a binary tensor; jpeg: a file of 500 x 375), from a client process on "
    "the same cores. client: the same requests to a server that answers at once, the most that "
    "the client can send. memory: the server's memory, from the first to the last quarter of many "
    "requests. The networks have initial weights: their answers mean nothing, and bfloat16 has no "
    "limit on its accuracy here."
)

#: Part to the figures that its table shows: key, heading, digits behind the point.
COLUMNS: Mapping[str, Sequence[tuple[str, str, int]]] = {
    "direct": (
        ("images_per_second", "images/s", 1),
        ("p50_ms", "p50 ms", 1),
        ("p99_ms", "p99 ms", 1),
    ),
    "server": (
        ("requests_per_second", "requests/s", 1),
        ("p50_ms", "p50 ms", 1),
        ("p99_ms", "p99 ms", 1),
        ("over_no_batching", "over no batching", 2),
        ("server_cpu_ms", "server CPU ms", 2),
        ("client_cpu_share", "client CPU", 2),
        ("refused", "refused", 0),
    ),
    "client": (
        ("requests_per_second", "requests/s", 0),
        ("p50_ms", "p50 ms", 2),
        ("p99_ms", "p99 ms", 2),
    ),
    "memory": (
        ("growth_mib", "growth MiB", 1),
        ("growth_percent", "growth %", 2),
        ("resident_mib", "resident MiB", 0),
        ("requests", "requests", 0),
    ),
}


@dataclasses.dataclass(frozen=True)
class Demand:
    """A bound on a figure, or on its ratio.

    Args:
        label: The candidate.
        figure: Key of the figure.
        bound: Its limit.
        at_least: Whether the bound is the smallest value, or the largest.
        ratio: Whether the bound is for the ratio.
        needs_amx: Whether it holds for CPUs with AMX only.
    """

    label: str
    figure: str
    bound: float
    at_least: bool = True
    ratio: bool = False
    needs_amx: bool = False


_RESNET = "imagenet_resnet50_preact"
_CIFAR = "cifar_resnet20_preact"


def _direct(engine: str, batch: int) -> str:
    return label("direct", _RESNET, engine, precision="bfloat16", batch=batch)


DEMANDS: Sequence[Demand] = (
    *(
        Demand(_direct("tensorflow", batch), "images_per_second", 1.2, ratio=True)
        for batch in (1, 32)
    ),
    *(
        Demand(_direct("openvino", batch), "images_per_second", 3.0, ratio=True, needs_amx=True)
        for batch in (1, 32)
    ),
    *(
        Demand(
            label("server", _RESNET, engine, batching="on", concurrency=16), "over_no_batching", 1.0
        )
        for engine in ("tensorflow", "openvino")
    ),
    *(
        Demand(
            label("memory", _CIFAR, engine, concurrency=16), "growth_percent", 2.0, at_least=False
        )
        for engine in ("tensorflow", "openvino")
    ),
)


def summarize(rounds: Iterable[Round]) -> dict[str, dict[str, dict]]:
    """Return the statistics of every candidate's figures, as `report.summarize` does."""
    rounds = list(rounds)
    over = {name: figures["over"] for one in rounds for name, figures in one.items()}
    numbers = [
        {
            name: {key: value for key, value in figures.items() if isinstance(value, int | float)}
            for name, figures in one.items()
        }
        for one in rounds
    ]
    return report.summarize(numbers, over)


def judge(summary: Mapping[str, Mapping[str, Mapping]], amx: bool) -> list[dict]:
    """Return every demand on what was measured, with the median and whether it is met;
    None where the CPU is another one.
    """
    found = []
    for demand in DEMANDS:
        entry = summary.get(demand.label, {}).get(demand.figure)
        if entry is None:
            continue
        value = entry["ratio"]["median"] if demand.ratio else entry["median"]
        met = value >= demand.bound if demand.at_least else value <= demand.bound
        found.append(
            dataclasses.asdict(demand)
            | {"value": value, "met": None if demand.needs_amx and not amx else met}
        )
    return found


def tables(summary: Mapping[str, Mapping[str, Mapping]], demands: Sequence[Mapping]) -> str:
    """Return Markdown: a table of medians, with min and max behind them, for each part,
    and the demands.
    """
    lines: list[str] = []
    for part, columns in COLUMNS.items():
        own = {name: figures for name, figures in summary.items() if name.startswith(f"{part}/")}
        if not own:
            continue
        shown = [
            column for column in columns if any(column[0] in figures for figures in own.values())
        ]
        lines += [
            "",
            _row(part, *(heading for _, heading, _ in shown), "ratio"),
            _row("---", *["---:"] * (len(shown) + 1)),
        ]
        for name, figures in own.items():
            ratio = figures[shown[0][0]].get("ratio", {})
            text = (
                f"{ratio['median']:.2f} of {ratio['over'].partition('/')[2]}"
                if ratio and ratio["over"] != name
                else ""
            )
            cells = (_cell(figures.get(key), digits) for key, _, digits in shown)
            lines.append(_row(f"`{name.partition('/')[2]}`", *cells, text))
    if demands:
        lines += [
            "",
            _row("demand", "bound", "measured", "met"),
            _row("---", "---:", "---:", "---"),
        ]
    for one in demands:
        bound = f"{'at least' if one['at_least'] else 'at most'} {one['bound']:g}"
        met = {True: "yes", False: "no", None: "no AMX here"}[one["met"]]
        figure = one["figure"] + " ratio" * one["ratio"]
        lines.append(_row(f"`{one['label']}` {figure}", bound, f"{one['value']:.2f}", met))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(entry: Mapping | None, digits: int) -> str:
    if entry is None:
        return ""
    median, low, high = (f"{entry[key]:,.{digits}f}" for key in ("median", "min", "max"))
    return median if low == high else f"{median} ({low} to {high})"
