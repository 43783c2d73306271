"""What do two processes gain that train together, each on a core of its own?

One process has both cores and trains with whole batches. Two processes have one core each
and half of every batch. They take turns: those that wait take no time. This module, with
its job as JSON, is such a process: for every line on stdin it trains for some steps.
"""

import contextlib
import dataclasses
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from .. import backends, children
from ..cli import UserError, lookup
from . import report

ABOUT = (
    "step = mean of the timed steps of model.fit, with the recipe's data and network. one: a "
    "process on two cores. Others: two processes that train together by --distribution "
    "multi_worker, with one core each and the same batch."
)
#: Columns of the table.
COLUMNS = (
    report.Column("steps_per_second", "steps/s", digits=1),
    report.Column("cpu_seconds", "CPU ms", 1e3, 1),
)
#: What the environment of a process says of the others; see `keras_preact.distribution`.
_LAUNCHER = "KERAS_DISTRIBUTION_"


@dataclasses.dataclass(frozen=True)
class TwoProcesses:
    """Steps per second of two processes with one core each, over those of one process
    with both.
    """

    backends: tuple[Literal["tensorflow", "jax", "torch"], ...] = ("tensorflow", "jax", "torch")
    """Backends, one after another."""
    recipe: str = "digits"
    """Recipe: data, network and batch."""
    batch_norms: tuple[Literal["synchronized", "per_replica"], ...] = (
        "synchronized",
        "per_replica",
    )
    """Kinds of batch normalisation."""
    rounds: int = 5
    """Number of rounds. Every candidate is measured once per round."""
    warmup: int = 10
    """Steps before the timed ones."""
    steps: int = 60
    """Timed steps per round."""
    output: Path | None = None
    """Write settings, versions and every figure to this JSON file."""


def run(options: TwoProcesses) -> dict:
    """Measure, print the table, write the file and return its content.

    Raises:
        UserError: for options that do not fit, a process that failed, or a system with
            less than two cores that a process can be bound to.
    """
    from ..recipes import RECIPES

    report.check(options, "rounds", "warmup", "steps")
    lookup(RECIPES, options.recipe, "recipe")
    cores = sorted(os.sched_getaffinity(0))[-2:] if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise UserError("This takes two cores that a process can be bound to, on Linux.")
    rounds: list[dict] = [{} for _ in range(options.rounds)]
    baselines: dict[str, str] = {}
    versions: dict[str, dict] = {}
    for backend in options.backends:
        with contextlib.ExitStack() as stack:
            groups = {f"{backend}/one": _group(stack, options, backend, [cores])}
            for kind in options.batch_norms:
                each = [[core] for core in cores]
                groups[f"{backend}/{kind}"] = _group(stack, options, backend, each, kind)
            baselines |= dict.fromkeys(groups, f"{backend}/one")
            for processes in groups.values():
                _train(processes)  # compiles
            for figures in rounds:
                for label, processes in groups.items():
                    answers = _train(processes)
                    seconds = max(answer["seconds"] for answer in answers)
                    figures[label] = {
                        "steps_per_second": 1 / seconds,
                        "cpu_seconds": sum(answer["cpu_seconds"] for answer in answers),
                    }
                    versions[backend] = answers[0]["versions"]
    summary = report.summarize(rounds, baselines)
    heading = f"processes: {options.recipe}, {options.rounds} rounds, two cores of {backends.cpu()}"
    text = "\n".join([heading, ABOUT, "", report.table(COLUMNS, summary, baselines)])
    order = "The candidates take turns; a ratio is of two figures of the same round."
    machine = {"cpu": backends.cpu(), "usable_cores": 2, "system": platform.platform()}
    described = report.described("processes", options, ABOUT, order, machine)
    found = described | {"versions": versions, "rounds": rounds, "summary": summary}
    return report.publish(found, text, options.output)


@dataclasses.dataclass(frozen=True)
class _Process:
    """A process that waits for its turn, and where its messages go."""

    child: subprocess.Popen
    messages: Any


def _group(
    stack: contextlib.ExitStack,
    options: TwoProcesses,
    backend: str,
    cores: list[list[int]],
    batch_norm: str = "synchronized",
) -> list[_Process]:
    """Start a process for each of some lists of cores, which train together."""
    job = {"recipe": options.recipe, "batch_norm": batch_norm, "together": len(cores) > 1}
    job |= {"warmup": options.warmup, "steps": options.steps}
    addresses = _addresses(len(cores))
    group = []
    for number, own in enumerate(cores):
        place = {"JOB_ADDRESSES": addresses, "NUM_PROCESSES": len(cores), "PROCESS_ID": number}
        variables = {f"{_LAUNCHER}{name}": str(value) for name, value in place.items()}
        messages = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        child = children.start(
            __spec__.name if __spec__ else __name__,
            json.dumps(job),
            backend,
            own,
            variables if len(cores) > 1 else {},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            bufsize=1,
        )
        group.append(_Process(child, messages))
        stack.callback(_end, child)
    return group


def _end(child: subprocess.Popen) -> None:
    child.kill()
    child.communicate()


def _addresses(count: int) -> str:
    """Return `host:port` of free ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)


def _train(processes: list[_Process]) -> list[dict]:
    """Let the processes train for some steps, and return what each measured."""
    for process in processes:
        with contextlib.suppress(BrokenPipeError):
            print("train", file=process.child.stdin)
    lines = [process.child.stdout.readline() for process in processes if process.child.stdout]
    for process, line in zip(processes, lines, strict=True):
        if not line:
            process.messages.seek(0)
            raise UserError(f"A process failed: {children.last_line(process.messages.read())}")
    return [json.loads(line) for line in lines]


def _answers(job: dict) -> Iterator[dict]:
    """Yield what this process measured, for every line on stdin."""
    import keras

    import keras_preact as kp

    from ..fit import AGREE
    from ..recipes import RECIPES
    from ..run import Run
    from ..signals import Stop

    backends.keep_accelerator_for_backend(keras.backend.backend())
    kind: Literal["multi_worker", "none"] = "multi_worker" if job["together"] else "none"
    versions = backends.versions("keras", "numpy", keras.backend.backend())
    with kp.distribution.start(kind, batch_norm=job["batch_norm"]) as distribution:
        config = RECIPES[job["recipe"]]()
        keras.utils.set_random_seed(config.seed)
        run = Run(
            dataclasses.replace(config, distribution=kind, batch_norm=job["batch_norm"]),
            job["recipe"],
            distribution,
        )
        # asks the other processes, as in a run
        stop = Stop(highest=distribution.highest, every=AGREE if job["together"] else 1)
        for _ in sys.stdin:
            seconds, cpu_seconds = _steps(run, stop, job["warmup"], job["steps"])
            yield {"seconds": seconds, "cpu_seconds": cpu_seconds, "versions": versions}


def _steps(run, stop, warmup: int, steps: int) -> tuple[float, float]:
    """Return the mean seconds of the timed steps, and those of the CPU."""
    import keras

    times = {}

    def note(batch: int, logs: dict) -> None:
        if batch + 1 in (warmup, warmup + steps):
            float(logs["loss"])  # once the loss is here, the step is done
            times[batch + 1] = time.perf_counter(), time.process_time()

    clock = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    run.model.fit(
        run.distribution.training_data(run.training_data()),
        steps_per_epoch=warmup + steps,
        shuffle=False,
        verbose=0,
        callbacks=[stop, clock],
    )
    (start, start_cpu), (end, end_cpu) = times[warmup], times[warmup + steps]
    return (end - start) / steps, (end_cpu - start_cpu) / steps


def main(argv: list[str]) -> None:
    stdout = os.dup(1)
    os.dup2(2, 1)  # what libraries print
    for answer in _answers(json.loads(argv[0])):
        os.write(stdout, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1:])
