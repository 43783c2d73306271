"""Turns the figures of all rounds into medians, ratios, tables and verdicts on demands."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ...terminal import markdown
from .. import report
from ..report import Column
from .cells import Round, label

ABOUT = (
    "direct: calls of the network in the measuring process; loop: the result of "
    "tf.saved_model.load, called with its default signature; tensorflow and openvino: the "
    "server's engines. server: the same beside requests over HTTP to the real server, each with "
    "one image (float32, as a binary tensor; jpeg: a file of 500 x 375; small_jpeg, small_png: "
    "files of the network's size), from a client process on the same cores; batch=32: the engine "
    "alone; CPU over engine: the server's CPU time per answer over the engine's per image there. "
    "client: the same requests to a server that answers at once, the most that the client can "
    "send. memory: the server's memory, from the first to the last quarter of many requests. The "
    "networks have initial weights: their answers mean nothing, and no accuracy is demanded of "
    "bfloat16 and int8 here."
)

_P50, _P99 = Column("p50_ms", "p50 ms", digits=1), Column("p99_ms", "p99 ms", digits=1)
#: Part to the columns of its table.
COLUMNS: Mapping[str, Sequence[Column]] = {
    "direct": (Column("images_per_second", "images/s", digits=1), _P50, _P99),
    "server": (
        Column("requests_per_second", "requests/s", digits=1),
        _P50,
        _P99,
        Column("over_no_batching", "over no batching"),
        Column("cpu_ms", "CPU ms"),
        Column("over_engine", "CPU over engine"),
        Column("client_cpu_share", "client CPU"),
        Column("refused", "refused", digits=0),
    ),
    "client": (
        Column("requests_per_second", "requests/s", digits=0),
        Column("p50_ms", "p50 ms"),
        Column("p99_ms", "p99 ms"),
    ),
    "memory": (
        Column("growth_mib", "growth MiB", digits=1),
        Column("growth_percent", "growth %"),
        Column("resident_mib", "resident MiB", digits=0),
        Column("requests", "requests", digits=0),
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
    """Return Markdown: for each part a table of medians, with the least and the largest
    value, and the demands.
    """
    found = []
    for part, columns in COLUMNS.items():
        own = {name: figures for name, figures in summary.items() if name.startswith(f"{part}/")}
        if not own:
            continue
        shown = [
            each for each in columns if any(each.figure in figures for figures in own.values())
        ]
        rows = [[part, *(each.heading for each in shown), "ratio"]]
        for name, figures in own.items():
            ratio = figures[shown[0].figure].get("ratio", {})
            text = ""
            if ratio and ratio["over"] != name:
                text = f"{ratio['median']:.2f} of {ratio['over'].partition('/')[2]}"
            cells = (each.text(figures.get(each.figure)) for each in shown)
            rows.append([f"`{name.partition('/')[2]}`", *cells, text])
        found.append(markdown(rows))
    rows = [["demand", "bound", "measured", "met"]]
    for one in demands:
        bound = f"{'at least' if one['at_least'] else 'at most'} {one['bound']:g}"
        met = {True: "yes", False: "no", None: "no AMX here"}[one["met"]]
        figure = one["figure"] + " ratio" * one["ratio"]
        rows.append([f"`{one['label']}` {figure}", bound, f"{one['value']:.2f}", met])
    return "\n\n".join([*found, *([markdown(rows)] if demands else [])])
