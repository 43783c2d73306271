"""Processes that stay for all rounds of a benchmark and take turns."""

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from .. import children
from ..errors import UserError

#: Seconds that a process has for an answer.
PATIENCE = 3600.0


def measure(
    module: str, jobs: Mapping[str, Mapping[str, Any]], rounds: int
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Start a process for each job, one after another, and ask each for its figures in every
    round.

    Args:
        module: Module of the processes. Its first answer has the versions of its packages,
            its later ones have figures.
        jobs: Label to the argument of its process.
        rounds: Number of rounds.

    Returns:
        The versions, and for each round the answers by label.

    Raises:
        UserError: if a process has no answer.
    """
    versions: dict[str, str] = {}
    figures: list[dict[str, Any]] = []
    processes: dict[str, children.Resident] = {}
    with contextlib.ExitStack() as stack:
        for label, job in jobs.items():
            processes[label] = process = children.Resident(
                module, json.dumps(job), "tensorflow", PATIENCE
            )
            stack.callback(process.close)
            versions |= _answer(process, label)
            print(f"{label}: ready", file=sys.stderr, flush=True)
        for number in range(1, rounds + 1):
            figures.append({})
            for label, process in processes.items():
                process.ask()
                figures[-1][label] = _answer(process, label)
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return versions, figures


def _answer(process: children.Resident, label: str) -> dict:
    status, out, err = process.answer()
    if status:
        raise UserError(f"{label}: {children.problem(status, err, PATIENCE)}")
    return json.loads(out)
