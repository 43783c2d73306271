"""A check of the audit: a function of the measurements, limits for its figure, and
texts.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

from keras_preact.analysis.audit.network import Network
from keras_preact.analysis.audit.report import AuditFinding, Status, shown


@dataclasses.dataclass(frozen=True)
class Limits:
    """Ranges of a figure. A check warns outside `healthy`, fails outside `bearable`."""

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

    def worst_first(self, values: Mapping[str, float]) -> list[str]:
        return sorted(values, key=lambda name: self.distance(values[name]), reverse=True)

    def unhealthy(self, values: Mapping[str, float], names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if self.status(values[name]) != Status.PASS)


@dataclasses.dataclass(frozen=True)
class Check:
    """A row of `CHECKS`.

    Args:
        name: Name of the check.
        run: Function from this check and a network to a finding.
        unit: What the figure is.
        limits: Limits of the figure.
        meaning, advice, source: Texts of the `AuditFinding`.
        same_cause_as: Names of earlier checks that find the same cause, in the same units.
        follows_from: Names of earlier checks whose finding may have this one as a
            consequence, in any unit.
    """

    name: str
    run: Callable[["Check", Network], AuditFinding]
    unit: str
    limits: Limits
    meaning: str
    advice: str
    source: str
    same_cause_as: tuple[str, ...] = ()
    follows_from: tuple[str, ...] = ()

    @property
    def healthy(self) -> str:
        """The healthy range in words."""
        low, high = (shown(limit, self.unit) for limit in self.limits.healthy)
        return f"healthy: {low} to {high}" if self.limits.healthy[0] else f"healthy: up to {high}"

    def finding(
        self,
        status: Status,
        figure: float,
        locations: Iterable[str],
        detail: str,
        advice: str = "",
        is_ranked: bool = True,
    ) -> AuditFinding:
        """Return a finding of this check.

        Args:
            status, figure, locations, detail, is_ranked: See `AuditFinding`.
            advice: What to do, if it is more exact than the check's advice.
        """
        return AuditFinding(
            check=self.name,
            status=status,
            figure=float(figure),
            unit=self.unit,
            locations=tuple(dict.fromkeys(locations)),
            detail=detail,
            meaning=self.meaning,
            advice=advice or self.advice,
            source=self.source,
            is_ranked=is_ranked,
        )

    def passed(self, detail: str, figure: float = 0.0) -> AuditFinding:
        return self.finding(Status.PASS, figure, (), detail)


def largest_first(values: Mapping[str, float]) -> list[str]:
    """Return the names in descending order of their values."""
    return sorted(values, key=lambda name: values[name], reverse=True)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 unit`, `2 units`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
