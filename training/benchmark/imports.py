"""Measures what `import keras_preact` takes beside `import keras`: every import in a
process of its own.

A child is `python -c` with `_CHILD` and the name of a module; its result is one line of
JSON on stdout.
"""

import dataclasses
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from .. import backends, children
from ..cli import UserError
from . import report

ABOUT = (
    "Seconds from the start of the import to its end, in a new process each: wall = by the "
    "clock, cpu = of all its threads. The files are in the system's cache, the bytecode is "
    "written."
)
_FIGURES = ("wall_seconds", "cpu_seconds")
_BASELINE = "keras"
_MODULES = (_BASELINE, "keras_preact")
_CHILD = """
import importlib, json, sys, time
wall, cpu = time.perf_counter(), time.process_time()
importlib.import_module(sys.argv[1])
print(json.dumps({"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}))
"""


@dataclasses.dataclass(frozen=True)
class Import:
    """Seconds that importing this package takes, beside Keras alone."""

    backends: tuple[Literal["tensorflow", "jax", "torch"], ...] = ("tensorflow",)
    """Keras' backends."""
    rounds: int = 15
    """How often each is imported, in turn, behind one import that is not measured."""
    output: Path | None = None
    """A JSON file for settings, versions, every figure and the summary."""


def run(options: Import) -> dict:
    """Measure what `options` say, print the table, write the file and return what it
    holds.

    Raises:
        UserError: for options that do not fit, or where an import fails.
    """
    _check(options)
    started = datetime.datetime.now(datetime.UTC)
    labels = {
        f"{backend}/{module}": (backend, module)
        for backend in options.backends
        for module in _MODULES
    }
    for child in labels.values():
        _measure(*child)
    rounds = [
        {label: _measure(*child) for label, child in labels.items()} for _ in range(options.rounds)
    ]
    summary = report.summarize(
        rounds, {label: f"{backend}/{_BASELINE}" for label, (backend, _) in labels.items()}
    )
    packages = ("keras", "numpy", *options.backends)
    described = {
        "command": "import",
        "settings": dataclasses.asdict(options),
        "about": ABOUT,
        "order": "The modules take turns; a ratio is of two figures of the same round.",
        "started": started.isoformat(timespec="seconds"),
        "machine": backends.machine(("OMP_NUM_THREADS",)),
        "versions": backends.versions(*packages),
        "rounds": rounds,
        "summary": summary,
    }
    return report.publish(described, table(summary, options), options.output)


def table(summary: Mapping[str, Mapping[str, Mapping]], options: Import) -> str:
    """Return the medians as a text for a terminal, with the least and the most behind
    them.
    """
    lines = [
        f"import: {options.rounds} rounds on {backends.cpu()}",
        ABOUT,
        "Figures: median (least to most) of the rounds. Ratios: over keras on the same backend, "
        "of figures of the same round.",
        "",
    ]
    head = "  ".join(f"{heading:>22}  {'ratio':<24}" for heading in ("wall s", "cpu s"))
    lines.append(f"{'module':<26}  {head}".rstrip())
    for label, figures in summary.items():
        cells = []
        for figure in _FIGURES:
            text = "{median:.2f} ({min:.2f} to {max:.2f})".format(**figures[figure])
            is_baseline = label.endswith(f"/{_BASELINE}")
            ratio = (
                ""
                if is_baseline
                else "{median:.3f} ({min:.3f} to {max:.3f})".format(**figures[figure]["ratio"])
            )
            cells.append(f"{text:>22}  {ratio:<24}")
        lines.append(f"{label:<26}  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def _check(options: Import) -> None:
    if not options.backends:
        raise UserError("Give at least one of --backends.")
    if options.rounds < 1:
        raise UserError(f"--rounds must be positive. Received: {options.rounds}")
    if options.output is not None and not options.output.parent.is_dir():
        raise UserError(f"--output: there is no directory {options.output.parent}")


def _measure(backend: str, module: str) -> dict[str, float]:
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, module],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"KERAS_BACKEND": backend},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise UserError(f"import {module} fails on {backend}: {children.last_line(child.stderr)}")
    return json.loads(child.stdout.splitlines()[-1])
