"""Benchmarks of networks: every candidate in a process of its own, in turn, and a table
of medians and ratios.
"""

import contextlib
import dataclasses
import datetime
import math
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from keras_preact import _checks

from .. import backends, cli
from . import candidates, report, rounds
from .candidates import Candidate
from .child import Job
from .options import Benchmark, CheckpointCost, Compile, Health, Memory, Optimizer, Step

#: Options to the command that a child knows.
KINDS: Mapping[type[Benchmark], str] = MappingProxyType(
    {
        Compile: "compile",
        Step: "step",
        Memory: "memory",
        Optimizer: "optimizer",
        Health: "health",
        CheckpointCost: "checkpoint",
    }
)


def run(options: Benchmark) -> dict:
    """Measure, print the table, write the file and return its content.

    Raises:
        ValueError: for options that do not fit; nothing is measured then.
    """
    command = KINDS[type(options)]
    _check(options)
    rows = candidates.expand(options.models, options.backends, options.variants_options())
    baselines = baselines_of(rows, options.baseline)
    jobs = [(row, _job(command, row, options)) for row in rows]
    started = datetime.datetime.now(datetime.UTC)

    def progress(outcome: rounds.Outcome) -> None:
        print(
            f"round {outcome.round}: {outcome.label}: "
            f"{outcome.problem or f'{outcome.seconds:.0f} s'}",
            file=sys.stderr,
            flush=True,
        )

    outcomes = rounds.run(jobs, options.rounds, options.limit, progress)
    summary = report.summarize(report.figures_of(outcomes, options.rounds), baselines)
    results = {outcome.label: outcome.result for outcome in outcomes if outcome.result}
    described = {
        "command": command,
        "settings": dataclasses.asdict(options),
        "about": report.ABOUT[command],
        "order": "The children of a round run one after another; a ratio is of two figures of the same round.",
        "started": started.isoformat(timespec="seconds"),
        "machine": backends.machine(_ENVIRONMENT),
        "candidates": {
            row.label: {
                "backend": row.backend,
                "name": row.name,
                "options": dict(row.options),
                "baseline": baselines[row.label],
                **{
                    key: results.get(row.label, {}).get(key)
                    for key in ("device", "jit_compile", "parameters", "versions")
                },
            }
            for row in rows
        },
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
        "summary": summary,
    }
    text = f"{_heading(command, options, described, baselines)}\n{report.table(command, summary, baselines, outcomes)}"
    return report.publish(described, text, options.output)


#: What in the environment sets threads and devices.
_ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_NUM_INTRAOP_THREADS",
    "XLA_FLAGS",
    "CUDA_VISIBLE_DEVICES",
)


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
        f"--baseline is none of the candidates. {_checks.nearest(baseline, labels)} Received: "
        f"{baseline!r}"
    )


def _check(options: Benchmark) -> None:
    if not options.models or not options.backends or not options.variants:
        raise cli.UserError("Give at least one of --models, --backends and --variants.")
    for name in ("rounds", "steps", "warmup", "batch", "image_size", "interval"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            raise cli.UserError(f"--{name.replace('_', '-')} must be positive. Received: {value}")
    if not 0 < options.limit < math.inf:
        raise cli.UserError(
            f"--limit must be a positive number of seconds. Received: {options.limit}"
        )
    if options.output is not None and not options.output.parent.is_dir():
        raise cli.UserError(f"--output: there is no directory {options.output.parent}")


def _job(command: str, row: Candidate, options: Benchmark) -> Job:
    return Job(
        command=command,
        name=row.name,
        options=dict(row.options),
        batch=options.batch,
        image_size=options.image_size,
        dtype=options.dtype,
        jit_compile=options.jit_compile,
        mode=getattr(options, "mode", "train"),
        steps=options.steps,
        warmup=options.warmup,
        **({"interval": options.interval} if isinstance(options, Health) else {}),
    )


def _heading(command: str, options: Benchmark, described: dict, baselines: dict[str, str]) -> str:
    devices = sorted({row["device"] for row in described["candidates"].values() if row["device"]})
    over = dict.fromkeys(baselines.values())
    lines = [
        f"{command}{', ' + options.mode if isinstance(options, Step) else ''}: batch "
        f"{options.batch}, {options.dtype}, {options.rounds} round{'s' * (options.rounds > 1)}, "
        f"on {' and '.join(devices) or 'nothing'} ({described['machine']['cpu']})",
        described["about"],
        described["order"],
        f"Figures: median (least to most) of the rounds. Ratios: over {', '.join(over)}.",
    ]
    return "\n".join(["", *lines, ""])
