"""What a check of an audit is: a function of what was measured, the limits of its figure, and words."""

import dataclasses
import math
from collections.abc import Callable

from keras_preact.analysis.audit.measure import Gradients, Measures
from keras_preact.analysis.audit.report import Finding, Status
from keras_preact.analysis.audit.structure import Network


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything that was measured on a network."""

    network: Network
    inference: Measures
    training: Measures
    gradients: Gradients


@dataclasses.dataclass(frozen=True)
class Limits:
    """Ranges of a figure: outside of `healthy` a check warns, outside of `bearable` it fails."""

    healthy: tuple[float, float]
    bearable: tuple[float, float]

    def status(self, value: float) -> Status:
        if not math.isfinite(value) or not self.bearable[0] <= value <= self.bearable[1]:
            return Status.FAIL
        return Status.PASS if self.healthy[0] <= value <= self.healthy[1] else Status.WARN

    def distance(self, value: float) -> float:
        """Return how far a value is from the middle of the healthy range, as the logarithm of a factor; for sorting."""
        if not math.isfinite(value) or value <= 0:
            return 0.0 if value == self.healthy[0] else float("inf")
        low, high = (max(limit, 1e-12) for limit in self.healthy)
        return abs(math.log(value / math.sqrt(low * high)))

    def worst(self, values: dict[str, float]) -> tuple[Status, float, tuple[str, ...]]:
        """Return the worst status and value, and the names of what is not healthy, the worst first."""
        names = sorted(values, key=lambda name: self.distance(values[name]), reverse=True)
        unhealthy = tuple(name for name in names if self.status(values[name]) != Status.PASS)
        return self.status(values[names[0]]), values[names[0]], unhealthy


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a check found."""

    status: Status
    figure: float
    locations: tuple[str, ...]
    detail: str


@dataclasses.dataclass(frozen=True)
class Check:
    """A row of `CHECKS`.

    Args:
        name: Its name.
        run: The function.
        unit: What its figure is.
        limits: Of the figure.
        meaning, advice, source: As in `Finding`.
    """

    name: str
    run: Callable[[Evidence, Limits], Outcome]
    unit: str
    limits: Limits
    meaning: str
    advice: str
    source: str

    def finding(self, evidence: Evidence) -> Finding:
        found = self.run(evidence, self.limits)
        return Finding(
            self.name,
            found.status,
            float(found.figure),
            self.unit,
            found.locations,
            found.detail,
            self.meaning,
            self.advice,
            self.source,
        )
