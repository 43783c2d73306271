"""The result of an audit: findings, printed as a table or as JSON."""

import dataclasses
import enum
import math
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120


class Status(enum.StrEnum):
    """Status of a check, from best to worst."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclasses.dataclass(frozen=True)
class AuditFinding:
    """The result of one check.

    Args:
        check: Name of the check.
        status: Whether it passed, warns or failed.
        figure: The measured number; NaN if there was nothing to measure.
        unit: What the number is.
        locations: Names of units or layers; empty if nothing is wrong.
        detail: What the check found.
        meaning: Why it matters.
        advice: What to do.
        source: Paper and section.
        is_ranked: Whether the locations are worst first; else they are equally bad, in
            the order of the network.
        explained_by: Check whose finding, at least as bad, may explain this one; empty if
            there is none.
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
    is_ranked: bool = True
    explained_by: str = ""


@dataclasses.dataclass(frozen=True)
class Audit:
    """The findings for one model, in the order of the checks.

    Args:
        model: Name of the model.
        arrangement: Arrangement of most units: a name in `kp.ARRANGEMENTS`, in a
            transformer one of `kp.arrangements.TRANSFORMER_ARRANGEMENTS`, None for any
            other order.
        depth: Number of weight layers that are not on shortcuts.
        units: Number of residual units.
        findings: One finding per check.

    `str()` returns a verdict and, for each cause, what to do and what is wrong. `text()`
    also returns the evidence.

    Example:

    >>> texts = ("detail", "meaning", "advice", "source")
    >>> finding = AuditFinding("identity path", Status.FAIL, 0.5, "change", ("unit2",), *texts)
    >>> audit = Audit("net", "full_preactivation", 20, 9, (finding,))
    >>> audit.passed, audit.worst, audit["identity path"].locations
    (False, <Status.FAIL: 'FAIL'>, ('unit2',))
    """

    model: str
    arrangement: str | None
    depth: int
    units: int
    findings: tuple[AuditFinding, ...]

    @property
    def worst(self) -> Status:
        return max((finding.status for finding in self.findings), key=list(Status).index)

    @property
    def passed(self) -> bool:
        """Whether every check passed without a warning."""
        return self.worst == Status.PASS

    def __getitem__(self, check: str) -> AuditFinding:
        """Return the finding of a check by its name."""
        return {finding.check: finding for finding in self.findings}[check]

    def to_dict(self) -> dict:
        """Return a dict for JSON; a figure that is not finite becomes None."""
        content = dataclasses.asdict(self) | {"passed": self.passed, "worst": self.worst}
        for finding in content["findings"]:
            if not math.isfinite(finding["figure"]):
                finding["figure"] = None
        return content

    @property
    def causes(self) -> tuple[AuditFinding, ...]:
        """Findings that did not pass and that no other one explains, worst first."""
        causes = [each for each in self.findings if each.status != Status.PASS]
        ranks = list(Status)
        return tuple(
            sorted(
                (each for each in causes if not each.explained_by),
                key=lambda each: -ranks.index(each.status),
            )
        )

    def __str__(self) -> str:
        return self.text()

    def text(self, evidence: bool = False) -> str:
        """Return the audit for people.

        Args:
            evidence: Also return a table of all checks and, for each check that did not
                pass, where, why it matters and the source.
        """
        order = f"read as {self.arrangement}" if self.arrangement else "no known arrangement"
        network = (
            f"{self.model}: {self.units} residual unit{'s' * (self.units != 1)}, {self.depth} "
            f"weight layers, {order}."
        )
        lines = textwrap.wrap(f"{network} {self.worst}: {self.counts}.", WIDTH)
        for cause in self.causes:
            lines += ["", *_remedy(cause, self.findings)]
        if not evidence:
            return "\n".join(lines)
        lines += ["", f"      {'check':<26}{'value':>9}  {'meaning':<38}  where"]
        for finding in self.findings:
            row = (
                f"{finding.status}  {finding.check:<26}{shown(finding.figure, finding.unit):>9}  "
                f"{finding.unit:<38}  "
            )
            lines.append((row + listed(finding.locations, 1))[:WIDTH].rstrip())
        for finding in self.findings:
            if finding.status != Status.PASS:
                lines += ["", f"{finding.status}  {finding.check}", *_details(finding)]
        return "\n".join(lines)

    @property
    def counts(self) -> str:
        """Numbers of failures and warnings: `"1 of 16 checks fails, 2 warn"`."""
        statuses = [finding.status for finding in self.findings]
        of_all = f" of {len(statuses)} checks"
        words = []
        for status, verb in ((Status.FAIL, "fail"), (Status.WARN, "warn")):
            if number := statuses.count(status):
                words.append(f"{number}{of_all} {verb}{'s' * (number == 1)}")
                of_all = ""
        return ", ".join(words) or f"all{of_all.removeprefix(' of')} pass"


def _remedy(cause: AuditFinding, findings: Sequence[AuditFinding]) -> list[str]:
    """Return the lines about a cause: what to do, what is wrong, and what it explains."""
    found = cause.detail.partition(". ")[0].removesuffix(".")
    paragraphs = [f"Found ({cause.check}): {found}."]
    if explained := [each.check for each in findings if each.explained_by == cause.check]:
        paragraphs.append(f"It may also explain: {', '.join(explained)}.")
    first, *more = textwrap.wrap(cause.advice, WIDTH - 12)
    return [f"{cause.status}  {first}", *_indented(more), *_indented(paragraphs)]


def _details(finding: AuditFinding) -> list[str]:
    """Return the evidence of a check that did not pass."""
    rank = " (worst first)" if finding.is_ranked and len(finding.locations) > 1 else ""
    where = [f"Where{rank}: {listed(finding.locations, 5)}."] if finding.locations else []
    advice = [f"What to do: {finding.advice}"] if finding.explained_by else []
    paragraphs = (
        finding.detail,
        *where,
        *advice,
        f"Why: {finding.meaning}",
        f"Source: {finding.source}.",
    )
    return _indented(paragraphs)


def _indented(paragraphs: Iterable[str]) -> list[str]:
    return [
        " " * 6 + line for paragraph in paragraphs for line in textwrap.wrap(paragraph, WIDTH - 12)
    ]


def shown(figure: float, unit: str) -> str:
    """Return a figure in words: shares in percent, and a dash if nothing was measured."""
    if math.isnan(figure):
        return "-"
    return f"{100 * figure:.3g} %" if "share" in unit.split() else f"{figure:.3g}"


def listed(locations: Sequence[str], shown: int) -> str:
    """Return the first names, and how many more there are: `a, b and 3 more`."""
    more = len(locations) - shown
    *names, last = [*locations[:shown], f"{more} more"] if more > 0 else [*locations] or [""]
    return f"{', '.join(names)} and {last}" if names else last
