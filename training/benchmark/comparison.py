"""Benchmarks of networks: every candidate in a process of its own, in turn, and a table
of medians and ratios.
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence

from .. import backends, cli
from . import candidates, report, rounds
from .candidates import Candidate
from .question import Benchmark

#: Environment variables that set threads and devices.
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_NUM_INTRAOP_THREADS",
    "XLA_FLAGS",
    "CUDA_VISIBLE_DEVICES",
)


def run(options: Benchmark) -> dict:
    """Measure, print the table, write the file and return its content.

    Raises:
        UserError: for options that do not fit; nothing is measured then.
    """
    _check(options)
    rows = candidates.expand(options.models, options.backends, options.variants_options())
    baselines = baselines_of(rows, options.baseline)
    described = report.described(
        options.command,
        options,
        options.about,
        "The children of a round run one after another; a ratio is of two figures of the same "
        "round.",
        backends.machine(ENVIRONMENT),
    )
    outcomes = rounds.run(options, rows, _progress)
    summary = report.summarize(rounds.figures_of(outcomes, options.rounds), baselines)
    results = {outcome.label: outcome.result for outcome in outcomes if outcome.result}
    described["candidates"] = {
        row.label: dataclasses.asdict(row)
        | {"baseline": baselines[row.label]}
        | {
            key: results.get(row.label, {}).get(key)
            for key in ("device", "jit_compile", "parameters", "versions")
        }
        for row in rows
    }
    described["outcomes"] = [dataclasses.asdict(outcome) for outcome in outcomes]
    table = report.table(
        options.columns, summary, baselines, ("jit", ""), remarks(summary, outcomes)
    )
    text = f"{_heading(options, described, baselines)}\n{table}"
    return report.publish(described | {"summary": summary}, text, options.output)


def _progress(outcome: rounds.Outcome) -> None:
    found = outcome.problem or f"{outcome.seconds:.0f} s"
    print(f"round {outcome.round}: {outcome.label}: {found}", file=sys.stderr, flush=True)


def baselines_of(rows: Sequence[Candidate], baseline: str | None) -> dict[str, str]:
    """Return label to label of the baseline."""
    labels = {row.label: row for row in rows}
    if baseline is None:
        first: dict[str, str] = {}
        for row in rows:
            first.setdefault(row.backend, row.label)
        return {row.label: first[row.backend] for row in rows}
    backend, slash, network = baseline.rpartition("/")
    with contextlib.suppress(cli.UserError):  # what cannot be parsed is none of the candidates
        network = candidates.write(*candidates.parse(network))
    over = {row.label: f"{backend if slash else row.backend}/{network}" for row in rows}
    if set(over.values()) <= labels.keys():
        return over
    raise cli.UserError(
        f"--baseline is none of the candidates. {cli.nearest(baseline, labels)} Received: "
        f"{baseline!r}"
    )


def _check(options: Benchmark) -> None:
    if not options.models or not options.backends or not options.variants:
        raise cli.UserError("Give at least one of --models, --backends and --variants.")
    report.check(options, "rounds", "steps", "warmup", "batch", "image_size", "interval")
    if not 0 < options.limit < math.inf:
        raise cli.UserError(
            f"--limit must be a positive number of seconds. Received: {options.limit}"
        )


def remarks(
    summary: Mapping[str, Mapping], outcomes: Sequence[rounds.Outcome]
) -> dict[str, tuple[str, str]]:
    """Return whether each candidate was compiled, and why it has no figures."""
    words = {True: "yes", False: "no"}
    found = {label: ("-", "") for label in summary}
    for outcome in outcomes:
        jit, _ = found[outcome.label]
        if outcome.result:
            found[outcome.label] = (words[outcome.result["jit_compile"]], "")
        else:
            when = f" in round {outcome.round}" if summary[outcome.label] else ""
            found[outcome.label] = (jit, f"{outcome.problem}{when}")
    return found


def _heading(options: Benchmark, described: dict, baselines: dict[str, str]) -> str:
    devices = sorted({row["device"] for row in described["candidates"].values() if row["device"]})
    over = dict.fromkeys(baselines.values())
    mode = f", {options.mode}" if hasattr(options, "mode") else ""
    rows = described["candidates"].values()
    own = " if not given" if any("dtype" in row["options"] for row in rows) else ""
    lines = [
        f"{options.command}{mode}: batch {options.batch}, {options.dtype}{own}, {options.rounds} "
        f"round{'s' * (options.rounds > 1)}, on {' and '.join(devices) or 'nothing'} "
        f"({described['machine']['cpu']})",
        described["about"],
        described["order"],
        f"Figures: median (least to most) of the rounds. Ratios: over {', '.join(over)}.",
    ]
    return "\n".join(["", *lines, ""])
