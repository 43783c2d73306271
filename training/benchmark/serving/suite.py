"""`keras-preact benchmark serving`: its options, and all its questions in turn."""

import contextlib
import dataclasses
import datetime
import importlib.util
import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ... import backends
from ...cli import UserError
from .. import candidates
from . import direct, exports, memory, over_http, verdict
from .cells import PRECISIONS, Round

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
    "starlette",
    "uvicorn",
    "httptools",
    "orjson",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Export networks with initial weights, and serve them from this machine to itself."""

    models: tuple[str, ...] = ("cifar_resnet20_preact", "imagenet_resnet50_preact")
    """Registered models: NAME[:option=value,...]. The part memory takes the first."""
    parts: tuple[Literal["direct", "server", "memory"], ...] = ("direct", "server", "memory")
    """direct: calls in a process. server: requests over HTTP. memory: growth over many requests."""
    engines: tuple[Literal["tensorflow", "openvino"], ...] = ("tensorflow", "openvino")
    """Engines of the server."""
    batching: tuple[Literal["on", "off"], ...] = ("on", "off")
    """Whether the server computes images of different requests together."""
    concurrency: tuple[int, ...] = (1, 16, 64)
    """Connections at once, each with one request at a time."""
    batches: tuple[int, ...] = (1, 32)
    """Images in a call of the part direct; a request holds one."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the served networks. The part direct has both."""
    rounds: int = 2
    """Number of rounds; in each, everything is measured in turn."""
    seconds: float = 3.0
    """Seconds per measurement."""
    requests: int = 10_000
    """Requests of the part memory, after a tenth as many to warm up."""
    memory_seconds: float = 90.0
    """Longest time of the part memory, per engine."""
    exports: Path | None = None
    """Folder that keeps the exported networks for the next time. None: a temporary one."""
    output: Path | None = None
    """JSON file for settings, versions, figures and the summary, rewritten after every round."""

    def check(self) -> None:
        """Raise a UserError for options that do not fit."""
        for name in ("models", "parts", "engines", "batching", "concurrency", "batches"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise UserError(
                    f"--{name} must be given at least one value, each once. Received: "
                    f"{' '.join(map(str, values))}"
                )
        for model in self.models:
            name, _ = candidates.parse(model)
            if name in candidates.PEERS:
                raise UserError(
                    "--models takes registered models; what is measured beside them is chosen. "
                    f"Received: {model}"
                )
        for name in ("concurrency", "batches", "rounds", "requests", "seconds", "memory_seconds"):
            given = getattr(self, name)
            if not all(
                0 < value < math.inf for value in (given if isinstance(given, tuple) else (given,))
            ):
                raise UserError(f"--{name.replace('_', '-')} must be positive. Received: {given}")
        if "openvino" in self.engines and importlib.util.find_spec("openvino") is None:
            raise UserError(
                "--engines openvino needs OpenVINO: pip install -c constraints/tested.txt -e "
                "'.[openvino]'"
            )
        if self.output is not None and not self.output.parent.is_dir():
            raise UserError(f"--output: there is no directory {self.output.parent}")

    @property
    def usual_concurrency(self) -> int:
        """The concurrency of what is measured at one alone."""
        return sorted(self.concurrency)[len(self.concurrency) // 2]


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
    flags = cpu_flags()
    rounds: dict[str, list[Round]] = {part: [] for part in options.parts}
    started = datetime.datetime.now(datetime.UTC)
    described: dict[str, Any] = {
        "command": "serving",
        "settings": dataclasses.asdict(options),
        "about": verdict.ABOUT,
        "order": "The candidates of a model take turns; a ratio compares figures of one round.",
        "started": started.isoformat(timespec="seconds"),
        "machine": backends.machine(_ENVIRONMENT) | {"flags": flags},
        "versions": backends.versions(*_PACKAGES),
        "rounds": rounds,
    }
    with _folder(options.exports) as folder:
        _say("exporting")
        exports.write(
            options.models, PRECISIONS if "direct" in options.parts else [options.precision], folder
        )
        for part in options.parts:
            _say(part)
            for figures in PARTS[part](options, folder):
                rounds[part].append(figures)
                _say(f"{part}: a round of {len(figures)} candidates")
                summary = verdict.summarize(itertools.chain(*rounds.values()))
                described |= {
                    "summary": summary,
                    "demands": verdict.judge(summary, "amx_bf16" in flags),
                }
                described["seconds"] = round(
                    (datetime.datetime.now(datetime.UTC) - started).total_seconds()
                )
                if options.output is not None:
                    write_json(options.output, described)
    print(_heading(options, described))
    print(verdict.tables(described["summary"], described["demands"]))
    if options.output is not None:
        print(f"\nWritten: {options.output}")
    return described


def cpu_flags() -> list[str]:
    """Return the CPU's flags for matrices and 16 bits, such as amx_bf16; none where the
    system does not tell.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return sorted(
        flag
        for flag in flags
        if flag.startswith("amx_") or flag in ("avx2", "avx512f", "avx512_bf16")
    )


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
