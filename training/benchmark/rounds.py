"""Runs the children: every candidate once a round, one after another, each in a process
of its own with a limit.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence

from .. import children
from ..cli import UserError
from .candidates import Candidate
from .child import Job


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a child came to.

    Args:
        round: From 1.
        label: Of its candidate.
        seconds: The life of the process, with its imports.
        result: What it measured, None where it did not end well.
        problem: Why not, such as `over 300 s`.
    """

    round: int
    label: str
    seconds: float
    result: dict | None = None
    problem: str | None = None


def run(
    jobs: Sequence[tuple[Candidate, Job]],
    rounds: int,
    limit: float,
    progress: Callable[[Outcome], None],
) -> list[Outcome]:
    """Measure A B C, A B C, ... in order; a candidate that fails or is stopped is left
    out of later rounds.

    Raises:
        UserError: if a child says that what it was given is wrong.
    """
    outcomes: list[Outcome] = []
    given_up: set[str] = set()
    for number in range(1, rounds + 1):
        for candidate, job in jobs:
            if candidate.label in given_up:
                continue
            start = time.perf_counter()
            status, out, err = _child(candidate.backend, job, limit)
            seconds = time.perf_counter() - start
            if status == 2:
                raise UserError(f"{candidate.label}: {children.last_line(err)}")
            if status == 0:
                outcome = Outcome(
                    number, candidate.label, seconds, result=json.loads(out.splitlines()[-1])
                )
            else:
                given_up.add(candidate.label)
                outcome = Outcome(
                    number, candidate.label, seconds, problem=children.problem(status, err, limit)
                )
            outcomes.append(outcome)
            progress(outcome)
    return outcomes


def _child(backend: str, job: Job, limit: float) -> tuple[int, str, str]:
    return children.run(f"{__package__}.child", json.dumps(dataclasses.asdict(job)), backend, limit)
