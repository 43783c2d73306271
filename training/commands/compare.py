"""Compare runs: `keras-preact compare`."""

import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from .. import cli, disk
from ..cli.terminal import aligned, duration
from ..config import Config, differences, from_json
from ..directory import histories, measurements, runs
from ..errors import UserError, command, reading


@dataclasses.dataclass(frozen=True)
class Compared:
    """What a comparison needs from a run directory.

    Args:
        name: Unique name.
        config: Configuration of the run.
        described: Content of its config.json.
        history: Columns of its history.csv.
        test_error: Error in percent on its own test set; None if it was not measured.
        finished: Whether the run is finished.
    """

    name: str
    config: Config
    described: Mapping[str, Any]
    history: histories.Columns
    test_error: float | None
    finished: bool

    def figure(self, name: str, of: Callable[[np.ndarray], Any]) -> float | None:
        """Apply `of` to the finite numbers in a column of the history. Return None if
        there are none.
        """
        if not histories.measured(self.history, name):
            return None
        values = self.history[name]
        return float(of(values[np.isfinite(values)]))

    def validation_error(self, of: Callable[[np.ndarray], Any]) -> float | None:
        """Apply `of` to the held-out errors in percent, one per epoch."""
        return self.figure("val_accuracy", lambda values: of(100 * (1 - values)))


def _last(values: np.ndarray) -> float:
    return values[-1]


#: Functions that return the value of a run, by column of comparison.csv: the columns before the
#: options, and after them.
WHAT: Mapping[str, Callable[[Compared], Any]] = {
    "run": lambda run: run.name,
    "model": lambda run: run.config.model.name,
    "parameters": lambda run: run.described.get("trainable_parameters"),
    "recipe": lambda run: run.described.get("recipe"),
}
RESULTS: Mapping[str, Callable[[Compared], Any]] = {
    "epochs": lambda run: len(run.history["loss"]),
    "iterations": lambda run: (last := run.figure("iteration", _last)) and int(last),
    "finished": lambda run: run.finished,
    "best_validation_error": lambda run: run.validation_error(min),
    "last_validation_error": lambda run: run.validation_error(_last),
    "test_error": lambda run: run.test_error,
    "seconds": lambda run: run.figure("seconds", _last),
    "images_per_second": lambda run: run.figure("images_per_second", np.median),
}
#: Heading of a printed column, and the function that formats its values, by column. `split` is
#: "held-out", "test" or both.
SHOWN: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "parameters": ("parameters", "{:,.0f}".format),
    "iterations": ("iterations", "{:,.0f}".format),
    "finished": ("finished", lambda value: "yes" if value else "no"),
    "best_validation_error": ("best epoch's {split} error %", "{:.2f}".format),
    "last_validation_error": ("last epoch's {split} error %", "{:.2f}".format),
    "test_error": ("test error %", "{:.2f}".format),
    "seconds": ("time", duration),
    "images_per_second": ("images/s", "{:,.0f}".format),
}


def compare(
    directories: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(one or more)"),
    ],
    /,
    output: Path | None = None,
) -> None:
    """Print a table of runs: the options in which they differ, accuracy, time.

    Args:
        directories: Run directories.
        output: Folder for comparison.csv and comparison.png, the learning curves. If not
            given: print only.
    """
    if not directories:
        raise UserError(f"Name at least one run: {command('compare', 'runs/A', 'runs/B')}")
    compared = read_runs(directories)
    columns = {**WHAT, **differing(compared), **RESULTS}
    rows = [{name: value(run) for name, value in columns.items()} for run in compared]
    splits = {"held-out" if run.config.data.holdout else "test" for run in compared}
    split = " or ".join(sorted(splits))
    headings = [SHOWN[name][0].format(split=split) if name in SHOWN else name for name in columns]
    cells = [[_cell(*pair) for pair in row.items()] for row in rows]
    print(aligned([headings, *cells], shutil.get_terminal_size((120, 24)).columns))
    if output is None:
        return
    disk.make(output)
    histories.write(output / "comparison.csv", rows)
    with disk.replacing(output / "comparison.png") as path:
        from ..directory import curves

        histories_of = {run.name: run.history for run in compared}
        curves.draw(histories_of, path, "", split)
    print(f"\nWrote {output / 'comparison.csv'}, {output / 'comparison.png'}")


def read_runs(directories: Sequence[Path]) -> list[Compared]:
    """Return the runs in these directories, each once.

    Raises:
        UserError: for a directory without a run, a run without a finished epoch, and a
            damaged file.
    """
    paths = list({path.resolve(): path for path in directories}.values())
    names = [path.resolve().name for path in paths]
    return [
        _read(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


def _read(path: Path, name: str) -> Compared:
    described = runs.read_config(path)
    with reading(f"{path / 'config.json'} is damaged or of another version"):
        config = from_json(Config, described["config"])
    history = histories.read(path / "history.csv")
    if not history:
        raise UserError(f"{path} has no history yet: its first epoch has not ended.")
    test_error = _test_error(path, described)
    finished = (path / "model.keras").is_file()
    return Compared(name, config, described, history, test_error, finished)


def _test_error(path: Path, described: Mapping[str, Any]) -> float | None:
    """Return the error on the run's own test images, if it was measured."""
    metrics = measurements.of_run(path, described, path / "model.keras")
    if metrics is None:
        return None
    with reading(f"{path / 'metrics.json'} is damaged"):
        return 100 * float(metrics["error"])


def differing(compared: Sequence[Compared]) -> dict[str, Callable[[Compared], Any]]:
    """Return functions that read an option of a run, for the options in which the runs
    differ, and for their distribution and backend if these differ. Options have their
    names on the command line, without dashes.
    """
    names = dict.fromkeys(
        name.removeprefix("--")
        for run in compared
        for name in differences(compared[0].config, run.config)
        if name != "--model.name"
    )
    others: dict[str, Callable[[Compared], Any]] = {
        "distribution": lambda run: run.config.distribution,
        "backend": lambda run: run.described.get("versions", {}).get("backend"),
    }
    return {name: functools.partial(_option, name) for name in names} | {
        name: value for name, value in others.items() if len(set(map(value, compared))) > 1
    }


def _option(name: str, run: Compared) -> Any:
    return functools.reduce(getattr, name.replace("-", "_").split("."), run.config)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return SHOWN[name][1](value) if name in SHOWN else str(value)


def main(argv: Sequence[str]) -> None:
    cli.main("compare", compare, argv)
