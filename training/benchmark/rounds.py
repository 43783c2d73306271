"""Measures every candidate once per round, one after another, each in a process of its
own with a time limit.
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from .. import children
from ..errors import UserError
from .candidates import Candidate
from .questions import Question


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one measurement in its own process.

    Args:
        round: Number of the round, from 1.
        label: Label of the candidate.
        seconds: Duration of the process, with its imports.
        result: What it measured; None if it failed.
        problem: Why it failed, such as `over 300 s`.
    """

    round: int
    label: str
    seconds: float
    result: dict | None = None
    problem: str | None = None


def run(question: Question, candidates: Sequence[Candidate]) -> Iterator[Outcome]:
    """Measure A B C, A B C, ... in order, and report each on stderr. A candidate that
    fails or is stopped is left out of later rounds.

    Raises:
        UserError: if a process reports a mistake in the user's options.
    """
    with contextlib.ExitStack() as stack:
        measure = _residents(question, candidates, stack) if question.stays else _child
        yield from _rounds(question, candidates, measure)


#: Measures a candidate; returns exit status, stdout and stderr of its process.
_Measure = Callable[[Question, Candidate], tuple[int, str, str]]


def _rounds(
    question: Question, candidates: Sequence[Candidate], measure: _Measure
) -> Iterator[Outcome]:
    dropped: set[str] = set()
    for number in range(1, question.rounds + 1):
        for candidate in candidates:
            if candidate.label in dropped:
                continue
            start = time.perf_counter()
            status, out, err = measure(question, candidate)
            seconds = time.perf_counter() - start
            if status == 2:
                raise UserError(f"{candidate.label}: {children.last_line(err)}")
            if status == 0:
                outcome = {"result": json.loads(out.splitlines()[-1])}
            else:
                dropped.add(candidate.label)
                outcome = {"problem": children.problem(status, err, question.limit)}
            measured = Outcome(number, candidate.label, seconds, **outcome)
            message = measured.problem or f"{seconds:.0f} s"
            print(f"round {number}: {candidate.label}: {message}", file=sys.stderr, flush=True)
            yield measured


def _child(question: Question, candidate: Candidate) -> tuple[int, str, str]:
    job = _job(question, candidate)
    return children.run(f"{__package__}.child", job, candidate.backend, question.limit)


def _residents(
    question: Question, candidates: Sequence[Candidate], stack: contextlib.ExitStack
) -> _Measure:
    """Start a process for each candidate that stays until `stack` closes, and wait until all
    have compiled. Return what asks one of them for its figures.
    """
    # JAX would take three quarters of a GPU's memory for its first process
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    processes = {}
    for candidate in candidates:
        job = _job(question, candidate)
        processes[candidate.label] = process = children.Resident(
            f"{__package__}.child", job, candidate.backend, question.limit, variables
        )
        stack.callback(process.close)
    failed = {}
    for label, process in processes.items():
        status, out, err = process.answer()
        if status:
            failed[label] = (status, out, err)
        print(f"{label}: {'failed' if status else 'ready'}", file=sys.stderr, flush=True)

    def measure(question: Question, candidate: Candidate) -> tuple[int, str, str]:
        if candidate.label in failed:
            return failed[candidate.label]
        process = processes[candidate.label]
        process.ask()
        return process.answer()

    return measure


def _job(question: Question, candidate: Candidate) -> str:
    return json.dumps(
        {
            "question": question.command,
            "options": dataclasses.asdict(question) | {"output": None},
            "candidate": dataclasses.asdict(candidate),
        }
    )


def figures_of(outcomes: Sequence[Outcome], rounds: int) -> list[dict[str, dict[str, float]]]:
    """Return for each round: label to the figures that are single numbers."""
    table: list[dict[str, dict[str, float]]] = [{} for _ in range(rounds)]
    for outcome in outcomes:
        if outcome.result is not None:
            figures = outcome.result["figures"]
            table[outcome.round - 1][outcome.label] = {
                key: value for key, value in figures.items() if not isinstance(value, list)
            }
    return table
