"""What an audit returns: findings with figures, as a table for a terminal, as JSON, as Markdown."""

import dataclasses
import enum
import math
import textwrap

WIDTH = 120


class Status(enum.StrEnum):
    """How a check ended, from the best to the worst."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        check: Its name.
        status: How it ended.
        figure: The number that was measured; NaN where there was nothing to measure.
        unit: What that number is.
        locations: Names of units or layers, the worst first; none where nothing is wrong.
        detail: What was found, in words.
        meaning: Why it matters.
        advice: What to do about it.
        source: Where that stands.
    """

    check: str
    status: Status
    figure: float
    unit: str
    locations: tuple[str, ...]
    detail: str
    meaning: str
    advice: str
    source: str


@dataclasses.dataclass(frozen=True)
class Audit:
    """The findings of an audit of one model, in the order of the checks.

    Args:
        model: Its name.
        arrangement: The row of `kp.ARRANGEMENTS` that most of its units have; `"post_norm"` and `"pre_norm"` for the orders of
            transformers; None for any other order.
        depth: Its weight layers, those on shortcuts not counted.
        units: Its residual units.
        findings: One a check.

    `str()` is a table and, for every check that did not pass, what was found and what to do.

    Example:

    >>> finding = Finding("identity path", Status.FAIL, 0.5, "relative change", ("unit2",), "", "", "", "Sec. 3")
    >>> audit = Audit("net", "full_preactivation", 20, 9, (finding,))
    >>> audit.passed, audit.worst, audit["identity path"].locations
    (False, <Status.FAIL: 'FAIL'>, ('unit2',))
    """

    model: str
    arrangement: str | None
    depth: int
    units: int
    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Status:
        return max((finding.status for finding in self.findings), key=list(Status).index)

    @property
    def passed(self) -> bool:
        """Whether every check passed, without warnings."""
        return self.worst == Status.PASS

    def __getitem__(self, check: str) -> Finding:
        """Return the finding of the check of that name."""
        by_name = {finding.check: finding for finding in self.findings}
        return by_name[check]

    def to_dict(self) -> dict:
        """Return what JSON can hold; a figure that is not finite becomes None."""
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        for finding in findings:
            finding["status"] = str(finding["status"])
            finding["locations"] = list(finding["locations"])
            finding["figure"] = finding["figure"] if math.isfinite(finding["figure"]) else None
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return own | {"passed": self.passed, "worst": str(self.worst), "findings": findings}

    def to_markdown(self) -> str:
        """Return the table of all checks in Markdown."""
        lines = ["| status | check | figure | | where |", "|---|---|---|---|---|"]
        lines += [
            f"| {each.status} | {each.check} | {each.figure:.3g} | {each.unit} | {_where(each.locations, 3)} |"
            for each in self.findings
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        order = self.arrangement or "an order of its own"
        lines = [f"{self.model}: {self.units} residual units, {self.depth} weight layers, {order}: {self.worst}", ""]
        for each in self.findings:
            row = f"{each.status}  {each.check:<26}{each.figure:>9.3g}  {each.unit:<37} {_where(each.locations, 1)}"
            lines.append(row[:WIDTH].rstrip())
        for each in self.findings:
            if each.status != Status.PASS:
                where = [f"Where: {_where(each.locations, 5)}."] if each.locations else []
                text = [each.detail, *where, each.meaning, f"What to do: {each.advice}", f"Source: {each.source}."]
                lines += ["", f"{each.status}  {each.check}"]
                lines += [wrapped for part in text for wrapped in textwrap.wrap(part, WIDTH - 6, **_INDENTED)]
        return "\n".join(lines)


_INDENTED: dict = {"initial_indent": " " * 6, "subsequent_indent": " " * 6}


def _where(locations: tuple[str, ...], shown: int) -> str:
    more = len(locations) - shown
    return ", ".join(locations[:shown]) + (f" (+{more})" if more > 0 else "")
