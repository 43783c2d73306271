"""The options of `keras-preact benchmark serving`."""

import dataclasses
import importlib.util
import math
from pathlib import Path
from typing import Literal

from ...cli import UserError


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
    """Precision of the served networks. The part direct has all."""
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
        from .. import candidates, report  # brings Keras, which a help text must not

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
        report.check(self)

    @property
    def usual_concurrency(self) -> int:
        """The concurrency of what is measured at one alone."""
        return sorted(self.concurrency)[len(self.concurrency) // 2]
