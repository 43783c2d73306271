"""Which findings of an audit have one cause, so that people read it once."""

import dataclasses
from collections.abc import Iterable, Sequence

from keras_preact.analysis.audit.check import Check
from keras_preact.analysis.audit.network import Network
from keras_preact.analysis.audit.report import AuditFinding, Status


def explained(
    checks: Sequence[Check], findings: Sequence[AuditFinding], network: Network
) -> tuple[AuditFinding, ...]:
    """Return the findings of checks, each with the earlier one that may explain it.

    A finding explains another one only if it is at least as bad. One with the same cause
    is about the same units.
    """
    done: dict[str, AuditFinding] = {}
    units = {
        network.graph.steps[i].name: unit.name
        for unit in network.units
        for i in (*unit.shared, *unit.branch, *unit.shortcut_steps)
    }
    for check, finding in zip(checks, findings, strict=True):
        for name in (*check.same_cause_as, *check.follows_from):
            cause = done[done[name].explained_by or name]
            is_near = _are_shared(finding.locations, done[name].locations, units)
            if (
                finding.status != Status.PASS
                and _rank(cause.status) >= _rank(finding.status)
                and (is_near or name in check.follows_from)
            ):
                finding = dataclasses.replace(finding, explained_by=cause.check)
                break
        done[check.name] = finding
    return tuple(done.values())


def _rank(status: Status) -> int:
    return list(Status).index(status)


def _are_shared(ours: Iterable[str], theirs: Iterable[str], units: dict[str, str]) -> bool:
    """Return whether at least half of our units are among theirs: those that change the
    shape are exempt from some checks. `units` has the unit of each layer.
    """
    own, other = ({units.get(name, name) for name in names} for names in (ours, theirs))
    return 2 * len(own & other) >= len(own) > 0
