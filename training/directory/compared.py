"""What a comparison reads from run directories, and its columns."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..cli.terminal import duration
from ..config import Config, differences, options
from ..errors import UserError, reading
from . import histories, measurements, runs


@dataclasses.dataclass(frozen=True)
class Compared:
    """What a comparison needs from a run directory.

    Args:
        path: The run directory.
        name: Unique name.
        config: Configuration of the run.
        described: Content of its config.json.
        history: Columns of its history.csv; none before the end of its first epoch.
        test_error: Error in percent on its own test set; None if it was not measured.
        finished: Whether the run is finished.
        diverged: Whether its loss became infinite or NaN.
    """

    path: Path
    name: str
    config: Config
    described: Mapping[str, Any]
    history: histories.Columns
    test_error: float | None
    finished: bool
    diverged: bool

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
    "epochs": lambda run: len(run.history.get("loss", ())),
    "iterations": lambda run: (last := run.figure("iteration", _last)) and int(last),
    "finished": lambda run: "diverged" if run.diverged else run.finished,
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
    "finished": ("finished", lambda value: {True: "yes", False: "no"}.get(value, value)),
    "best_validation_error": ("best epoch's {split} error %", "{:.2f}".format),
    "last_validation_error": ("last epoch's {split} error %", "{:.2f}".format),
    "test_error": ("test error %", "{:.2f}".format),
    "seconds": ("time", duration),
    "images_per_second": ("images/s", "{:,.0f}".format),
}


def read_runs(directories: Sequence[Path]) -> list[Compared]:
    """Return the runs in these directories, each once.

    Raises:
        UserError: for a directory without a run, a damaged file, and a run that is named,
            has not diverged and has not finished an epoch.
    """
    paths = list({path.resolve(): path for path in _of_folders(directories)}.values())
    names = [path.resolve().name for path in paths]
    found = [
        _read(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]
    for run in found:
        if run.path in directories and not run.history and not run.diverged:
            raise UserError(f"{run.path} has no history yet: its first epoch has not ended.")
    return found


def _of_folders(directories: Sequence[Path]) -> Iterator[Path]:
    """Yield the run directories, and the runs in folders of several."""
    for path in directories:
        several = [] if (path / "config.json").is_file() else runs.several(path)
        yield from [run for run in several if (run / "config.json").is_file()] or [path]


def _read(path: Path, name: str) -> Compared:
    described = runs.read_config(path)
    config = runs.config_of(path / "config.json", described)
    history = histories.read(path / "history.csv")
    test_error = _test_error(path, described)
    finished = (path / "model.keras").is_file()
    diverged = runs.diverged_at(path) is not None
    return Compared(path, name, config, described, history, test_error, finished, diverged)


def _test_error(path: Path, described: Mapping[str, Any]) -> float | None:
    """Return the error on the run's own test images, if it was measured."""
    metrics = measurements.of_run(path, described, path / "model.keras")
    if metrics is None:
        return None
    with reading(f"{path / 'metrics.json'} is damaged"):
        return 100 * float(metrics["error"])


def differing(compared: Sequence[Compared]) -> dict[str, Callable[[Compared], Any]]:
    """Return functions that read an option of a run, for the options in which the runs
    differ, and for their distribution, backend and training images (the start of their
    hash) if these differ. Options have their
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
        "images": lambda run: str(run.described.get("hashes", {}).get("train"))[:8],
    }
    return {name: functools.partial(option, name) for name in names} | {
        name: value for name, value in others.items() if len(set(map(value, compared))) > 1
    }


def option(name: str, run: Compared) -> Any:
    """Return the value of an option, by its name on the command line without dashes."""
    return options(run.config)[name]


def cell(name: str, value: Any) -> str:
    """Return a value of a column as it is printed."""
    if value is None:
        return "-"
    if isinstance(value, tuple):  # of an option with several values
        return " ".join(map(str, value)) or "none"
    return SHOWN[name][1](value) if name in SHOWN else str(value)
