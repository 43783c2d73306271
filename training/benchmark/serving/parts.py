"""The parts of the benchmark: each measures its candidates in turn and gives figures,
round after round.

A round is a dictionary of label to figures; a label is PART/MODEL/WHAT:option=value,...
Beside its numbers every candidate has `over`: the label that its ratios are over.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from . import exports, servers
from .loop import PLAIN, Loop
from .options import Options

PRECISIONS = ("float32", "bfloat16")
#: How often the memory is looked at.
SAMPLES = 20
_MIB = 2**20

Round = dict[str, dict]
#: A network in a loop: model, engine, precision.
Kind = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured once a round, and the label that its ratios are over."""

    label: str
    over: str
    measure: Callable[[], dict]


def label(part: str, model: str, what: str, **options: object) -> str:
    """Return the name of a candidate."""
    return (
        f"{part}/{model}/{what}"
        + ":" * bool(options)
        + ",".join(f"{key}={value}" for key, value in options.items())
    )


def direct(options: Options, folder: Path) -> Iterator[Round]:
    """Call each network in a loop: as TensorFlow loads it, and through the server's
    engines; each in a process of its own.
    """
    for model in options.models:
        kinds: list[Kind] = [
            (model, engine, bits) for engine in (PLAIN, *options.engines) for bits in PRECISIONS
        ]
        peer = exports.peer_of(model)
        if peer is not None:
            kinds.insert(0, (peer, PLAIN, exports.PEER_PRECISION))
        first, *_ = kinds
        with contextlib.ExitStack() as stack:
            loops = {kind: stack.enter_context(_loop(folder, *kind)) for kind in kinds}
            for loop in loops.values():
                loop.wait()
            cells = []
            for batch, (kind, loop) in itertools.product(options.batches, loops.items()):
                name, over = (
                    label("direct", m, e, precision=p, batch=batch) for m, e, p in (kind, first)
                )
                cells.append(
                    Cell(name, over, functools.partial(loop.measure, batch, options.seconds))
                )
            yield from _in_turn(cells, options.rounds)


def server(options: Options, folder: Path) -> Iterator[Round]:
    """Ask real servers over HTTP, one image a request, beside a plain loop over the
    same network and one over its peer's.
    """
    for model in options.models:
        kinds: list[Kind] = [(model, PLAIN, options.precision)]
        peer = exports.peer_of(model)
        if peer is not None:
            kinds.append((peer, PLAIN, exports.PEER_PRECISION))
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            loops = {kind: stack.enter_context(_loop(folder, *kind)) for kind in kinds}
            started = {
                (engine, batching): stack.enter_context(
                    _server(model, options.precision, engine, batching, folder, scratch)
                )
                for engine, batching in itertools.product(options.engines, options.batching)
            }
            for loop in loops.values():
                loop.wait()
            for process in started.values():
                process.wait()
            requests = Requests(model, exports.path_of(folder, model, options.precision), scratch)
            trivial = stack.enter_context(servers.TrivialServer(requests.answer_bytes))
            over = label("server", model, PLAIN, precision=options.precision)
            cells = [
                Cell(
                    label("server", name, PLAIN, precision=bits),
                    over,
                    functools.partial(_as_requests, loop, options),
                )
                for (name, _, bits), loop in loops.items()
            ]
            for n in options.concurrency:
                name = label("client", model, "trivial", concurrency=n)
                cells.append(
                    Cell(
                        name, name, _asking(trivial, requests.tensor, n, min(1.0, options.seconds))
                    )
                )
            for (engine, batching), process in started.items():
                for n in options.concurrency:
                    name = label("server", model, engine, batching=batching, concurrency=n)
                    cells.append(
                        Cell(name, over, _asking(process, requests.tensor, n, options.seconds))
                    )
                if requests.jpeg is not None and batching == options.batching[0]:
                    n = options.usual_concurrency
                    name = label(
                        "server", model, engine, batching=batching, concurrency=n, input="jpeg"
                    )
                    cells.append(
                        Cell(name, over, _asking(process, requests.jpeg, n, options.seconds))
                    )
            for figures in _in_turn(cells, options.rounds):
                yield compare_batching(figures)


def memory(options: Options, folder: Path) -> Iterator[Round]:
    """Ask one server after the other many times, and look at its memory again and
    again.
    """
    model = options.models[0]
    for engine in options.engines:
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            process = stack.enter_context(
                _server(model, options.precision, engine, "on", folder, scratch)
            )
            process.wait()
            requests = Requests(model, exports.path_of(folder, model, options.precision), scratch)
            name = label("memory", model, engine, concurrency=options.usual_concurrency)
            yield {name: {"over": name} | _watch(process, requests.tensor, options)}


PARTS: Mapping[str, Callable[[Options, Path], Iterator[Round]]] = {
    "direct": direct,
    "server": server,
    "memory": memory,
}


def compare_batching(figures: Round) -> Round:
    """Add `over_no_batching` to what was measured with batching and without: the
    quotient of requests in a second.
    """
    found = {}
    for name, one in figures.items():
        without = figures.get(name.replace("batching=on", "batching=off"))
        if "batching=on" in name and without is not None:
            one = one | {
                "over_no_batching": one["requests_per_second"] / without["requests_per_second"]
            }
        found[name] = one
    return found


def growth(resident: Sequence[int]) -> dict[str, float]:
    """Return how much memory grows from the first quarter of the samples to the last,
    medians of each, in MiB and percent.
    """
    quarter = max(1, len(resident) // 4)
    first, last = statistics.median(resident[:quarter]), statistics.median(resident[-quarter:])
    return {
        "growth_mib": (last - first) / _MIB,
        "growth_percent": 100 * (last / first - 1),
        "resident_mib": last / _MIB,
    }


class Requests:
    """The requests for a model, as files in `folder`; `jpeg` is None where it takes no
    files of images.
    """

    def __init__(self, model: str, path: Path, folder: Path):
        signatures = json.loads((path / "assets.extra" / "model_card.json").read_text())[
            "signatures"
        ]
        default = signatures["serving_default"]
        name = exports.name_of(model)
        self.tensor = folder / "tensor"
        self.tensor.write_bytes(
            servers.tensor_request(name, tuple(default["inputs"]["images"]["shape"][1:]))
        )
        self.answer_bytes = 4 * default["outputs"]["probabilities"]["shape"][1]
        self.jpeg: Path | None = None
        if "predict_bytes" in signatures:
            self.jpeg = folder / "jpeg"
            self.jpeg.write_bytes(servers.jpeg_request(name))


def _in_turn(cells: Sequence[Cell], rounds: int) -> Iterator[Round]:
    for _ in range(rounds):
        yield {cell.label: {"over": cell.over} | cell.measure() for cell in cells}


def _loop(folder: Path, model: str, engine: str, precision: str) -> Loop:
    return Loop(exports.path_of(folder, model, precision), engine, precision)


def _server(
    model: str, precision: str, engine: str, batching: str, folder: Path, scratch: Path
) -> servers.Server:
    directory = exports.path_of(folder, model, precision).parents[1]
    options = ("--engine", engine, "--batching" if batching == "on" else "--no-batching")
    return servers.Server(directory, scratch / f"{engine}-{batching}.log", *options)


def _asking(
    process: servers.Server | servers.TrivialServer, request: Path, concurrency: int, seconds: float
):
    return functools.partial(servers.ask, process.port, request, concurrency, seconds)


def _as_requests(loop: Loop, options: Options) -> dict:
    figures = loop.measure(1, options.seconds)
    return {"requests_per_second": figures.pop("images_per_second")} | figures


def _watch(process: servers.Server, request: Path, options: Options) -> dict:
    n, step = options.usual_concurrency, max(1, options.requests // SAMPLES)
    end = time.monotonic() + options.memory_seconds
    servers.ask(
        process.port, request, n, options.memory_seconds / 4, max(1, options.requests // 10)
    )
    resident, asked = [process.resident()], 0
    while asked < options.requests and (left := end - time.monotonic()) > 0:
        asked += int(servers.ask(process.port, request, n, left, step)["requests"])
        resident.append(process.resident())
    return growth(resident) | {"requests": asked, "resident_bytes": resident}
