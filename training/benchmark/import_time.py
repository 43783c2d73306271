"""How long does `import keras_preact` take, beside `import keras`?"""

import dataclasses
from pathlib import Path
from typing import Literal

from .. import backends, children
from ..cli import UserError
from . import report
from .report import Column

ABOUT = (
    "Seconds from the start of the import to its end, in a new process each: wall = by the "
    "clock, cpu = of all its threads. The files are in the system's cache, the bytecode is "
    "written."
)
BASELINE = "keras"
MODULES = (BASELINE, "keras_preact")
COLUMNS = (Column("wall_seconds", "wall s"), Column("cpu_seconds", "cpu s"))
#: Seconds after which an import is stopped.
LIMIT = 600


@dataclasses.dataclass(frozen=True)
class Import:
    """Seconds that importing this package takes, beside Keras alone."""

    backends: tuple[Literal["tensorflow", "jax", "torch"], ...] = ("tensorflow",)
    """Keras backends."""
    rounds: int = 15
    """Number of rounds, after one that is not measured. Each imports every module."""
    output: Path | None = None
    """Write settings, versions and every figure to this JSON file."""


def run(options: Import) -> dict:
    """Measure, print the table, write the file and return its content.

    Raises:
        UserError: for options that do not fit, and if an import fails.
    """
    if not options.backends:
        raise UserError("Give at least one of --backends.")
    report.check(options, "rounds")
    order = "The modules take turns; a ratio is of two figures of the same round."
    machine = backends.machine(("OMP_NUM_THREADS",))
    described = report.described("import", options, ABOUT, order, machine)
    labels = {
        f"{backend}/{module}": (backend, module)
        for backend in options.backends
        for module in MODULES
    }
    rounds = [
        {label: _measure(*each) for label, each in labels.items()}
        for _ in range(1 + options.rounds)
    ][1:]
    baselines = {label: f"{backend}/{BASELINE}" for label, (backend, _) in labels.items()}
    summary = report.summarize(rounds, baselines)
    heading = [
        f"import: {options.rounds} rounds on {backends.cpu()}",
        ABOUT,
        "Figures: median (least to most) of the rounds. Ratios: over keras on the same backend, "
        "of figures of the same round.",
        "",
    ]
    text = "\n".join([*heading, report.table(COLUMNS, summary, baselines)])
    versions = backends.versions("keras", "numpy", *options.backends)
    found = described | {"versions": versions, "rounds": rounds, "summary": summary}
    return report.publish(found, text, options.output)


def _measure(backend: str, module: str) -> dict[str, float]:
    try:
        return children.result(f"{__package__}.imported", module, backend, LIMIT)
    except RuntimeError as error:
        raise UserError(f"import {module} on {backend}: {error}") from error
