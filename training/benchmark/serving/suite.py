"""`keras-preact benchmark serving`: its options, and all its questions in turn."""

import contextlib
import datetime
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ... import backends
from .. import report
from . import direct, exports, memory, over_http, verdict
from .cells import OF_ENGINE, PRECISIONS, Round
from .workload import Options

#: Environment variables that set threads and devices.
_ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_NUM_INTRAOP_THREADS",
    "MALLOC_ARENA_MAX",
)
_PACKAGES = (
    "tensorflow",
    "keras",
    "numpy",
    "openvino",
    "nncf",
    "starlette",
    "uvicorn",
    "httptools",
    "orjson",
)


PARTS: Mapping[str, Callable[[Options, Path], Iterator[Round]]] = {
    "direct": direct.measure,
    "server": over_http.measure,
    "memory": memory.measure,
}


def run(options: Options) -> dict:
    """Measure, print the tables, write the file and return its content.

    Raises:
        UserError: for options that do not fit, or if a process fails.
    """
    from ...runs import write_json

    options.check()
    rounds: dict[str, list[Round]] = {part: [] for part in options.parts}
    started = time.monotonic()
    order = "The candidates of a model take turns; a ratio compares figures of one round."
    machine = backends.machine(_ENVIRONMENT)
    described = report.described("serving", options, verdict.ABOUT, order, machine)
    described |= {"versions": backends.versions(*_PACKAGES), "rounds": rounds}
    with _folder(options.exports) as folder:
        _say("exporting")
        wanted: set[str] = {options.precision}
        if "direct" in options.parts:
            wanted.update(PRECISIONS, *(OF_ENGINE.get(engine, ()) for engine in options.engines))
        exports.write(options.models, sorted(wanted), folder)
        for part in options.parts:
            _say(part)
            for figures in PARTS[part](options, folder):
                rounds[part].append(figures)
                _say(f"{part}: a round of {len(figures)} candidates")
                summary = verdict.summarize(itertools.chain(*rounds.values()))
                described |= {
                    "summary": summary,
                    "demands": verdict.judge(summary, "amx_bf16" in machine["flags"]),
                }
                described["seconds"] = round(time.monotonic() - started)
                if options.output is not None:
                    write_json(options.output, described)
    tables = verdict.tables(described["summary"], described["demands"])
    return report.publish(described, f"{_heading(options, described)}\n\n{tables}", options.output)


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def _heading(options: Options, described: dict) -> str:
    machine = described["machine"]
    flags = ", ".join(machine["flags"])
    return "\n".join(
        [
            f"serving: {options.rounds} round{'s' * (options.rounds > 1)} of {options.seconds:g} "
            f"s each, {described['seconds']} s in all, on {machine['cpu']} ({flags})",
            described["about"],
            described["order"],
            "Figures: median (least to most) of the rounds.",
        ]
    )
