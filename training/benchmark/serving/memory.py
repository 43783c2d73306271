"""The question `memory`: does a server's memory grow over many requests?"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import exports
from .cells import Round, label
from .over_http import Requests, Server

if TYPE_CHECKING:
    from .workload import Options

#: Number of looks at the memory.
SAMPLES = 20
_MIB = 2**20


def measure(options: "Options", folder: Path) -> Iterator[Round]:
    """Ask one server after the other many times."""
    model, n = options.models[0], options.usual_concurrency
    step, limit = max(1, options.requests // SAMPLES), options.memory_seconds
    for engine in options.engines:
        with tempfile.TemporaryDirectory() as directory:
            scratch = Path(directory)
            with Server(model, options.precision, engine, "on", folder, scratch) as process:
                process.wait()
                path = exports.path_of(folder, model, options.precision)
                request = Requests(model, path, scratch).tensor
                end = time.monotonic() + limit
                process.ask(request, n, limit / 4, max(1, options.requests // 10))
                resident, answered = [process.resident()], 0
                while answered < options.requests and (left := end - time.monotonic()) > 0:
                    answered += int(process.ask(request, n, left, step)["requests"])
                    resident.append(process.resident())
        name = label("memory", model, engine, concurrency=n)
        figures = {"requests": answered, "resident_bytes": resident}
        yield {name: {"over": name} | growth(resident) | figures}


def growth(resident: Sequence[int]) -> dict[str, float]:
    """Return the growth of memory from the first quarter of the samples to the last,
    medians of each, in MiB and percent.
    """
    quarter = max(1, len(resident) // 4)
    first, last = statistics.median(resident[:quarter]), statistics.median(resident[-quarter:])
    return {
        "growth_mib": (last - first) / _MIB,
        "growth_percent": 100 * (last / first - 1),
        "resident_mib": last / _MIB,
    }
