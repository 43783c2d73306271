"""The command line: `python -m training.benchmark COMMAND [--option value ...]`, with the commands of `COMMANDS`."""

import contextlib
import dataclasses
import datetime
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import tyro

from keras_preact import _checks

from .. import backends, cli
from . import candidates, imports, input, report, rounds
from .candidates import Candidate
from .child import Job

DESCRIPTION = """Measure networks side by side, each in a process of its own: what they take to compile, a step, its memory.

A candidate is NAME[:option=value,...], a registered model with options of its builder such as
cifar_resnet164_preact:stacked=true,remat=3, or a network of another package: {peers}.
timm's has the options channels_last=true and compile=true, for torch.compile. Every candidate runs once a round, one
after another (A B C, A B C, ...). Medians over the rounds are reported with the least and the most, and ratios to the
baseline: the median of the quotients of figures of the same round. Models train with CoupledSGD and cross-entropy from
logits on random numbers.""".format(peers=", ".join(candidates.PEERS))


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What every command takes."""

    models: tuple[str, ...] = ("cifar_resnet164_preact",)
    """Candidates: NAME[:option=value,...]."""
    backends: tuple[Literal["tensorflow", "jax", "torch"], ...] = ("tensorflow",)
    """Keras' backends; a candidate runs on each that it can."""
    variants: tuple[Literal["default", "stacked", "unrolled", "loop"], ...] = ("default",)
    """Every registered model in each of these: stacks of units, single units, stacks written out; default is the library's."""
    baseline: str | None = None
    """What ratios are over: BACKEND/CANDIDATE or, on each backend, CANDIDATE. None: on each backend, its first."""
    rounds: int = 3
    """How often every candidate is measured."""
    steps: int = 10
    """Steps that a child times."""
    warmup: int = 3
    """Steps before them, the first, which compiles, among them (compile and memory: none)."""
    batch: int = 16
    """Images at a time."""
    image_size: int | None = None
    """Height and width. None: the network's own."""
    dtype: Literal["float32", "mixed_bfloat16"] = "float32"
    """Keras' policy; torch's autocast for timm."""
    jit_compile: Literal["auto", "on", "off"] = "auto"
    """As in training.train, for all candidates that do not say it themselves. auto: Keras' choice, but no XLA for TensorFlow
    on a CPU, and no torch.compile for timm."""
    limit: float = 300
    """Seconds after which a child is killed; its candidate is left out of later rounds."""
    output: Path | None = None
    """A JSON file for settings, versions, every figure and the summary."""

    def variants_options(self) -> list[dict]:
        return [dict(candidates.VARIANTS[name]) for name in self.variants]


@dataclasses.dataclass(frozen=True)
class Compile(Benchmark):
    """Seconds to build a network, to its first train step, and of that to compile it."""

    batch: int = 2
    """Images at a time. Few: a first step takes longer than the next for more reasons than compiling, and those grow."""

    variants: tuple[Literal["default", "stacked", "unrolled", "loop"], ...] = ("stacked", "unrolled")
    """Every registered model in each of these: stacks of units, single units, stacks written out; default is the library's."""


@dataclasses.dataclass(frozen=True)
class Step(Benchmark):
    """Seconds of a train step, or of inference, and images in a second."""

    mode: Literal["train", "inference"] = "train"


@dataclasses.dataclass(frozen=True)
class Memory(Benchmark):
    """Memory of a train step, with and without rematerialisation."""

    variants: tuple[Literal["default", "stacked", "unrolled", "loop"], ...] = ("stacked",)
    """As elsewhere; only stacks rematerialise."""
    remat: tuple[str, ...] = ("false", "true")
    """Every registered model with each of these: false, true, or the units of a segment that is computed again."""
    steps: int = 2
    """Steps during which the peak is watched."""

    def variants_options(self) -> list[dict]:
        for value in self.remat:
            if value not in ("true", "false") and not (value.isdecimal() and int(value)):
                raise cli.UserError(f"--remat takes false, true or a number of units. Received: {value}")
        words: dict[str, bool | int] = {"true": True, "false": False}
        remats = [words[value] if value in words else int(value) for value in self.remat]
        return [variant | {"remat": remat} for variant in super().variants_options() for remat in remats]


@dataclasses.dataclass(frozen=True)
class Optimizer(Benchmark):
    """Seconds of the optimiser's update alone: a stack's weights are one variable, those of single units one each."""

    variants: tuple[Literal["default", "stacked", "unrolled", "loop"], ...] = ("stacked", "unrolled")
    """Every registered model in each of these: stacks of units, single units, stacks written out; default is the library's."""


@dataclasses.dataclass(frozen=True)
class Health(Benchmark):
    """Seconds of a step in model.fit, with and without the callback that watches the training's health."""

    steps: int = 200
    """Steps that a child times, without the callback and with it: some intervals."""
    limit: float = 3600
    """Seconds after which a child is killed; its candidate is left out of later rounds."""
    warmup: int = 100
    """Steps before them: an interval, so that the first record, for which a forward pass is compiled, is among them."""
    interval: int = 100
    """Steps between two records."""


@dataclasses.dataclass(frozen=True)
class CheckpointCost(Benchmark):
    """Seconds of writing a checkpoint of training.train and of restoring it."""

    steps: int = 5
    """How often each is done."""


COMMANDS: dict[str, Callable[..., Benchmark | input.Input | imports.Import]] = {
    "compile": Compile,
    "step": Step,
    "memory": Memory,
    "optimizer": Optimizer,
    "health": Health,
    "checkpoint": CheckpointCost,
    "input": input.Input,
    "import": imports.Import,
}


def run(options: Benchmark) -> dict:
    """Measure what `options` say, print the table, write the file and return what it holds.

    Raises:
        ValueError: for options that do not fit; nothing is measured then.
    """
    command = next(name for name, kind in COMMANDS.items() if kind is type(options))
    _check(options)
    rows = candidates.expand(options.models, options.backends, options.variants_options())
    baselines = baselines_of(rows, options.baseline)
    jobs = [(row, _job(command, row, options)) for row in rows]
    started = datetime.datetime.now(datetime.UTC)

    def progress(outcome: rounds.Outcome) -> None:
        print(
            f"round {outcome.round}: {outcome.label}: {outcome.problem or f'{outcome.seconds:.0f} s'}",
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
                **{key: results.get(row.label, {}).get(key) for key in ("device", "jit_compile", "parameters", "versions")},
            }
            for row in rows
        },
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
        "summary": summary,
    }
    text = f"{_heading(command, options, described, baselines)}\n{report.table(command, summary, baselines, outcomes)}"
    return report.publish(described, text, options.output)


#: What in the environment sets threads and devices.
_ENVIRONMENT = ("OMP_NUM_THREADS", "TF_ENABLE_ONEDNN_OPTS", "TF_NUM_INTRAOP_THREADS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")


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
    raise cli.UserError(f"--baseline is none of the candidates. {_checks.nearest(baseline, labels)} Received: {baseline!r}")


def _check(options: Benchmark) -> None:
    if not options.models or not options.backends or not options.variants:
        raise cli.UserError("Give at least one of --models, --backends and --variants.")
    for name in ("rounds", "steps", "warmup", "batch", "image_size", "interval"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            raise cli.UserError(f"--{name.replace('_', '-')} must be positive. Received: {value}")
    if not 0 < options.limit < math.inf:
        raise cli.UserError(f"--limit must be a positive number of seconds. Received: {options.limit}")
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
        f"{command}{', ' + options.mode if isinstance(options, Step) else ''}: batch {options.batch}, {options.dtype}, "
        f"{options.rounds} round{'s' * (options.rounds > 1)}, on {' and '.join(devices) or 'nothing'} "
        f"({described['machine']['cpu']})",
        described["about"],
        described["order"],
        f"Figures: median (least to most) of the rounds. Ratios: over {', '.join(over)}.",
    ]
    return "\n".join(["", *lines, ""])


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and measure."""
    argv, verbose = cli.split_verbose(argv)

    def measure() -> None:
        if argv and not argv[0].startswith("-"):
            _checks.lookup(COMMANDS, argv[0], "command")
        options = tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog=cli.command("benchmark"), description=cli.described(DESCRIPTION), args=argv
        )
        others: dict[type, Callable[..., dict]] = {input.Input: input.run, imports.Import: imports.run}
        others.get(type(options), run)(options)

    cli.guard(measure, verbose)


if __name__ == "__main__":
    main()
