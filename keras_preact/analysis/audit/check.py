"""A check of the audit: a function of the measurements, limits for its figure, and
texts.
"""

import dataclasses
import math
from collections.abc import Callable

from keras_preact.analysis.audit.measure import Gradients, Measures
from keras_preact.analysis.audit.report import Finding, Status
from keras_preact.analysis.audit.structure import Network


@dataclasses.dataclass(frozen=True)
class Evidence:
    """All measurements of a network."""

    network: Network
    inference: Measures
    training: Measures
    gradients: Gradients


@dataclasses.dataclass(frozen=True)
class Limits:
    """Ranges of a figure: a check warns outside `healthy` and fails outside `bearable`."""

    healthy: tuple[float, float]
    bearable: tuple[float, float]

    def status(self, value: float) -> Status:
        if not math.isfinite(value) or not self.bearable[0] <= value <= self.bearable[1]:
            return Status.FAIL
        return Status.PASS if self.healthy[0] <= value <= self.healthy[1] else Status.WARN

    def distance(self, value: float) -> float:
        """Return the distance of a value from the middle of the healthy range, on a log
        scale.
        """
        if not math.isfinite(value) or value <= 0:
            return 0.0 if value == self.healthy[0] else float("inf")
        low, high = (max(limit, 1e-12) for limit in self.healthy)
        return abs(math.log(value / math.sqrt(low * high)))

    def worst(self, values: dict[str, float]) -> tuple[Status, float, tuple[str, ...]]:
        """Return the worst status, the worst value and the unhealthy names, worst
        first.
        """
        names = sorted(values, key=lambda name: self.distance(values[name]), reverse=True)
        unhealthy = tuple(name for name in names if self.status(values[name]) != Status.PASS)
        return self.status(values[names[0]]), values[names[0]], unhealthy

    def __str__(self) -> str:
        low, high = self.healthy
        return f"healthy: {low:g} to {high:g}" if low else f"healthy: up to {high:g}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 unit`, `2 units`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a check's function: parts of the `Finding`.

    Args:
        advice: What to do, if it is more exact than the check's advice.
    """

    status: Status
    figure: float
    locations: tuple[str, ...]
    detail: str
    advice: str = ""
    is_ranked: bool = True


@dataclasses.dataclass(frozen=True)
class Check:
    """A row of `CHECKS`.

    Args:
        name: Name of the check.
        run: Function from the evidence and the limits to an outcome.
        unit: What the figure is.
        limits: Limits of the figure.
        meaning, advice, source: Texts of the `Finding`.
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
            found.advice or self.advice,
            self.source,
            found.is_ranked,
        )
