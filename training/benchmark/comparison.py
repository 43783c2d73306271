"""A benchmark from its question to its report: it measures every candidate in its own
process, in turn, and prints a table of medians and ratios.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .. import children, disk
from ..errors import UserError, check_positive, lookup
from . import candidates, report, rounds
from .candidates import Candidate
from .questions import Question

_ORDER = (
    "The processes of a round run one after another; a ratio compares figures of the same round."
)


def run(question: Question) -> None:
    """Measure, print the table and write the file. If it is interrupted, it prints and writes
    what it has measured.

    Raises:
        UserError: for options that do not fit; nothing is measured then.
    """
    _check(question)
    rows = candidates.expand(question.models, question.backends)
    baselines = baselines_of(rows, question.baseline)
    started = report.now()

    outcomes: list[rounds.Outcome] = []
    try:
        for outcome in rounds.run(question, rows):
            outcomes.append(outcome)
    except (KeyboardInterrupt, SystemExit):
        if outcomes:
            _report(question, rows, baselines, started, outcomes)
        raise
    _report(question, rows, baselines, started, outcomes)


def _report(
    question: Question,
    rows: Sequence[Candidate],
    baselines: Mapping[str, str],
    started: str,
    outcomes: Sequence[rounds.Outcome],
) -> None:
    """Print the table and write the file."""
    summary = report.summarize(rounds.figures_of(outcomes, question.rounds), baselines)
    results = {outcome.label: outcome.result for outcome in outcomes if outcome.result}
    content: dict[str, Any] = {
        "command": question.command,
        "settings": {k: v for k, v in dataclasses.asdict(question).items() if k != "output"},
        "about": question.about,
        "order": _ORDER,
        "started": started,
        "candidates": {
            row.label: dataclasses.asdict(row)
            | {"baseline": baselines[row.label]}
            | {
                key: results.get(row.label, {}).get(key)
                for key in ("device", "jit_compile", "parameters", "versions")
            }
            for row in rows
        },
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
        "summary": summary,
    }
    report.show(
        _heading(question, content["candidates"].values()),
        question.columns,
        baselines,
        content,
        question.output,
        remarks(summary, outcomes),
    )


def _check(question: Question) -> None:
    if not question.models or not question.backends:
        raise UserError("Give at least one of --models and --backends.")
    numbers = ("rounds", "steps", "warmup", "batch", "image_size")
    check_positive(**{name: getattr(question, name) for name in numbers})
    children.check_limit(question.limit)
    disk.make_place(question.output, "--output")


def baselines_of(rows: Sequence[Candidate], baseline: str | None) -> dict[str, str]:
    """Map the label of each candidate to the label of its baseline."""
    labels = {row.label: row for row in rows}
    if baseline is None:
        first: dict[str, str] = {}
        for row in rows:
            first.setdefault(row.backend, row.label)
        return {row.label: first[row.backend] for row in rows}
    backend, slash, network = baseline.rpartition("/")
    baselines = {row.label: f"{backend if slash else row.backend}/{network}" for row in rows}
    if not set(baselines.values()) <= labels.keys():
        lookup(labels, baseline, "--baseline")  # raises an error that names the candidates
    return baselines


def remarks(
    summary: Mapping[str, Mapping], outcomes: Sequence[rounds.Outcome]
) -> dict[str, tuple[str, str]]:
    """Return whether each candidate was compiled, and why it has no figures."""
    words = {True: "yes", False: "no"}
    cells = {label: ("-", "") for label in summary}
    for outcome in outcomes:
        jit, _ = cells[outcome.label]
        if outcome.result:
            cells[outcome.label] = (words[outcome.result["jit_compile"]], "")
        else:
            when = f" in round {outcome.round}" if summary[outcome.label] else ""
            cells[outcome.label] = (jit, f"{outcome.problem}{when}")
    return cells


def _heading(question: Question, rows: Collection[Mapping[str, Any]]) -> str:
    devices = sorted({row["device"] for row in rows if row["device"]})
    mode = f", {question.mode}" if hasattr(question, "mode") else ""
    default = " by default" if any("dtype" in row["options"] for row in rows) else ""
    return (
        f"{question.command}{mode}: batch {question.batch}, {question.dtype}{default}, "
        f"{question.rounds} round{'s' * (question.rounds > 1)}, on "
        f"{' and '.join(devices) or 'nothing'}"
    )
