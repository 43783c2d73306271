"""What a step of a trial takes: images a second and seconds to compile, for stacks and
single units, for runs at a time.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from .. import cli, runs, terminal
from . import results, workers

#: Networks of CIFAR-10, by the name of their trial.
NETWORKS = tuple(
    f"resnet{depth}-{name}"
    for depth, name in ((20, "original"), *((d, "full_preactivation") for d in (110, 164, 1001)))
)
HEADINGS = (
    "network",
    "units",
    "runs at a time",
    "compile s",
    "ms a step",
    "images/s, all runs",
    "64k steps",
)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a child measures: a trial of CIFAR-10 on random images.

    Args:
        trial: Its name.
        stacked: Whether its equal units are one layer.
        dtype, together: As in `run.Settings`.
        executions: How many are timed, behind the two first.
    """

    trial: str
    stacked: bool
    dtype: str | None
    together: int | None
    executions: int


def speed(
    networks: tuple[str, ...] = NETWORKS,
    units: tuple[Literal["stacked", "single"], ...] = ("stacked", "single"),
    processes: tuple[int, ...] = (1,),
    dtype: Literal["auto", "float32", "mixed_bfloat16"] = "auto",
    together: int | None = None,
    executions: int = 3,
    limit: float = 300,
    backend: Literal["auto", "jax", "tensorflow", "torch"] = "auto",
    output: Path | None = None,
) -> None:
    """What a step takes: images a second and compile time, on random images of
    CIFAR-10's shape, which stay on the device.

    Args:
        networks: Trials of CIFAR-10 by name.
        units: stacked (equal units in one layer) and single.
        processes: Runs at a time on the device, each a process.
        dtype: auto: mixed_bfloat16 on an accelerator, float32 on a CPU.
        together: Steps that are computed at a time, without the host. None: up to 100
            on an accelerator, 1 on a CPU.
        executions: How often as many steps are timed; their median counts.
        limit: Seconds after which a measurement is given up.
        backend: auto: KERAS_BACKEND, or JAX where it is installed.
        output: A JSON file.
    """
    from .trials import TRIALS

    unknown = [name for name in networks if f"cifar10/{name}" not in TRIALS]
    if unknown:
        known = ", ".join(name.partition("/")[2] for name in TRIALS if name.startswith("cifar10/"))
        raise cli.UserError(f"--networks: there is no trial {unknown[0]!r}. There is: {known}")
    if min(*processes, executions, 1) < 1 or not limit > 0:
        raise cli.UserError(
            f"--processes, --executions and --limit must be positive. Received: {processes}, "
            f"{executions}, {limit}"
        )
    rows: list[Sequence[str]] = [HEADINGS]
    measured: list[dict[str, Any]] = []
    for name in networks:
        for kind in units:
            for count in processes:
                wanted = Measurement(
                    f"cifar10/{name}",
                    kind == "stacked",
                    None if dtype == "auto" else dtype,
                    together,
                    executions,
                )
                found = _measure(wanted, count, limit, workers.backend(backend))
                measured.append({"network": name, "units": kind, "processes": count, **found})
                rows.append(_row(measured[-1]))
                print("  ".join(rows[-1]), flush=True)
                if output is not None:  # what is there stays if the next one takes too long
                    runs.write_json(output, {"measured": measured})
    print(f"\n{terminal.markdown(rows)}")


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    what = (found["network"], found["units"], str(found["processes"]))
    if "error" in found:
        return (*what, found["error"], "-", "-", "-")
    total = found["images_per_second"]
    run = terminal.duration(64_000 * 1e-3 * found["step_milliseconds"])
    return (
        *what,
        f"{found['compile_seconds']:.1f}",
        f"{found['step_milliseconds']:.2f}",
        f"{total:,.0f}",
        run,
    )


def _measure(wanted: Measurement, count: int, limit: float, backend: str) -> dict[str, Any]:
    """Return the figures of so many children, which are timed while all of them
    compute.
    """
    text = json.dumps(dataclasses.asdict(wanted))
    places = workers.cores(count)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [workers.start("speed", text, place, count, backend, **pipes) for place in places]
    try:
        return _figures(children, time.monotonic() + limit)
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _figures(children: Sequence[subprocess.Popen], until: float) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for timed in (False, True):  # compiled, then timed
        found = []
        for child in children:
            if timed:
                assert child.stdin is not None
                child.stdin.write("go\n")
                child.stdin.flush()
        for child in children:
            try:
                line = workers.read_line(child, until)
            except TimeoutError:
                return {"error": "took too long"}
            if not line:
                return {"error": f"ended with status {child.wait()}"}
            found.append(json.loads(line))
    first = found[0]
    return first | {
        "compile_seconds": max(each["compile_seconds"] for each in found),
        "step_milliseconds": statistics.median(each["step_milliseconds"] for each in found),
        "images_per_second": sum(each["images_per_second"] for each in found),
    }


def child(wanted: Measurement) -> None:
    """Compile, say so on stdout, wait for a line, time, and print the figures."""
    import keras

    from .. import backends
    from .run import Run, Settings
    from .smoke import images
    from .trials import TRIALS

    backends.keep_accelerator_for_backend(keras.backend.backend())
    settings = Settings(
        results.RESULTS, results.RESULTS, dtype=wanted.dtype, together=wanted.together
    )
    run = Run(
        TRIALS[wanted.trial],
        images("cifar10", 2_000),
        settings,
        options={"stacked": wanted.stacked},
    )
    first, second = run.time(2)
    figures: dict[str, Any] = {"compile_seconds": max(0.0, first - second)}
    print(json.dumps(figures), flush=True)
    sys.stdin.readline()
    seconds = statistics.median(run.time(wanted.executions))
    figures |= {
        "step_milliseconds": 1e3 * seconds / run.together,
        "images_per_second": run.together * run.config.batch_size / seconds,
        "batch_size": run.config.batch_size,
        "together": run.together,
        "dtype": run.config.model.dtype,
        **run.machine(),
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    cli.guard(lambda: child(Measurement(**json.loads(sys.argv[1]))))
