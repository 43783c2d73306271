"""Compare runs: `keras-preact compare`."""

import csv
import dataclasses
import functools
import io
import json
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from . import cli, histories, runs
from .config import Config, differences, from_json
from .terminal import aligned, duration, markdown


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory, as far as a comparison goes.

    Args:
        name: Unlike those of the other runs.
        config: Its configuration.
        described: What else its config.json holds.
        history: The columns of its history.csv.
        test_error: In percent, where it was evaluated on its own data.
        finished: Whether it came to its end.
    """

    name: str
    config: Config
    described: Mapping[str, Any]
    history: histories.Columns
    test_error: float | None
    finished: bool

    @property
    def validation_errors(self) -> np.ndarray:
        """The errors after each epoch, in percent, where they were measured."""
        errors = histories.errors(self.history, "val_")
        return np.zeros(0) if errors is None else errors[np.isfinite(errors)]

    @property
    def epochs(self) -> int:
        return len(self.history["loss"])

    @property
    def iterations(self) -> int | None:
        """Those that are done; None in a history that does not say."""
        return (
            int(self.history["iteration"][-1])
            if histories.measured(self.history, "iteration")
            else None
        )

    def figure(self, name: str, of: Callable[[np.ndarray], Any]) -> float | None:
        """Return what `of` makes of the numbers in a column of the history, None where
        there are none.
        """
        return (
            float(of(_finite(self.history[name])))
            if histories.measured(self.history, name)
            else None
        )


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the tables.

    Args:
        name: In the CSV file.
        heading: In the others.
        value: Of a run; None where it has none.
        text: From the value to what tables for people show.
    """

    name: str
    heading: str
    value: Callable[[Run], Any]
    text: Callable[[Any], str] = str


def _percent(value: float) -> str:
    return f"{value:.2f}"


def _last(values: np.ndarray) -> Any:
    return values[-1]


#: Above the table of groups.
SUMMARY = "Runs that differ only in their seed: median (least to largest) of the finished ones."

_NAME = Column("run", "run", lambda run: run.name)
_WHAT = (
    Column("model", "model", lambda run: run.config.model.name),
    Column(
        "parameters",
        "parameters",
        lambda run: run.described.get("trainable_parameters"),
        lambda count: f"{count:,}",
    ),
    Column("recipe", "recipe", lambda run: run.described.get("recipe")),
)
_DONE = (
    Column("epochs", "epochs", lambda run: run.epochs),
    Column("iterations", "iterations", lambda run: run.iterations, lambda count: f"{count:,}"),
    Column(
        "finished",
        "finished",
        lambda run: run.finished,
        lambda finished: "yes" if finished else "no",
    ),
)
_REACHED = (
    Column(
        "best_validation_error",
        "best held-out error %",
        lambda run: _of(run.validation_errors, min),
        _percent,
    ),
    Column(
        "last_validation_error",
        "last held-out error %",
        lambda run: _of(run.validation_errors, _last),
        _percent,
    ),
    Column("test_error", "test error %", lambda run: run.test_error, _percent),
    Column("seconds", "time", lambda run: run.figure("seconds", _last), duration),
    Column(
        "images_per_second",
        "images/s",
        lambda run: run.figure("images_per_second", np.median),
        lambda n: f"{n:,.0f}",
    ),
)


def _of(values: np.ndarray, choice: Callable[[np.ndarray], Any]) -> float | None:
    return float(choice(values)) if values.size else None


def compare(
    directories: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(one or more)"),
    ],
    /,
    output: Path | None = None,
) -> None:
    """Print a table of runs: options, accuracy, time. Runs that differ only in their
    seed are also summarised.

    Args:
        directories: Run directories.
        output: Folder for comparison.csv, comparison.md and comparison.png. If not
            given: print only.
    """
    if not directories:
        raise cli.UserError(f"Name at least one run: {cli.command('compare')} runs/A runs/B")
    found = read_runs(directories)
    options = [_option(name) for name in differing(found)]
    columns = [_NAME, *_WHAT, *options, *_DONE, *_REACHED]
    table = [[_cell(column, column.value(run)) for column in columns] for run in found]
    tables = [[[column.heading for column in columns], *table]]
    groups = together(found)
    if len(groups) < len(found):
        tables.append(summary(groups, options))
    width = shutil.get_terminal_size((120, 24)).columns
    print(f"\n\n{SUMMARY}\n".join(aligned(rows, width) for rows in tables))
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [
            [column.name for column in columns],
            *([column.value(run) for column in columns] for run in found),
        ]
    )
    with runs.replacing(output / "comparison.csv") as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")
    with runs.replacing(output / "comparison.md") as temporary:
        temporary.write_text(
            f"\n\n{SUMMARY}\n\n".join(map(markdown, tables)) + "\n", encoding="utf-8"
        )
    measured_on = {_measured_on(run.config) for run in found if run.validation_errors.size}
    with runs.replacing(output / "comparison.png") as temporary:
        from . import curves

        split = measured_on.pop() if len(measured_on) == 1 else "held-out or test"
        curves.draw_runs({run.name: run.history for run in found}, temporary, "", split)
    print(
        "\nWrote "
        + ", ".join(str(output / f"comparison.{suffix}") for suffix in ("csv", "md", "png"))
    )


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Return the runs in these directories, each once.

    Raises:
        UserError: for a directory that holds no run, one that has not come to the end
            of an epoch, a damaged file.
    """
    paths = list({path.resolve(): path for path in directories}.values())
    names = [path.resolve().name for path in paths]
    return [
        _read(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


def _read(path: Path, name: str) -> Run:
    described = runs.read_config(path)
    try:
        config = from_json(Config, described["config"])
    except (AttributeError, TypeError, ValueError) as error:
        raise cli.UserError(
            f"{path / 'config.json'} is damaged or of another version: {error}"
        ) from error
    history = histories.read(path / "history.csv")
    if not history:
        raise cli.UserError(f"{path} has no history yet: its first epoch has not ended.")
    return Run(
        name,
        config,
        described,
        history,
        _test_error(path / "metrics.json", config),
        (path / "model.keras").is_file(),
    )


def _test_error(path: Path, config: Config) -> float | None:
    """Return the error on the test set of the run's own data, if it was measured."""
    if not path.is_file():
        return None
    try:
        metrics = json.loads(path.read_text())
        return 100 * float(metrics["error"]) if metrics["data"] == config.data.name else None
    except (KeyError, TypeError, ValueError) as error:
        raise cli.UserError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _measured_on(config: Config) -> str:
    return "held-out" if config.data.holdout else "test"


#: What runs are also told apart by: heading to value.
_MORE: Mapping[str, Callable[[Run], Any]] = {
    "distribution": lambda run: run.config.distribution,
    "backend": lambda run: run.described.get("versions", {}).get("backend"),
}


def differing(found: Sequence[Run]) -> list[str]:
    """Return the options in which the runs differ, as the command line names them,
    without their dashes, and backends.
    """
    names = dict.fromkeys(
        name for run in found for name in differences(found[0].config, run.config)
    )
    more = [name for name, value in _MORE.items() if len({value(run) for run in found}) > 1]
    return [name.removeprefix("--") for name in names if name != "--model.name"] + more


def _option(name: str) -> Column:
    path = name.replace("-", "_").split(".")
    value = _MORE.get(name, lambda run: functools.reduce(getattr, path, run.config))
    return Column(name, name, value)


def together(found: Sequence[Run]) -> list[list[Run]]:
    """Return the runs in groups of those that differ in nothing but their seed."""
    groups: list[list[Run]] = []
    for run in found:
        group = next((group for group in groups if _same(group[0], run)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return groups


def _same(one: Run, other: Run) -> bool:
    more = all(value(one) == value(other) for value in _MORE.values())
    return more and set(differences(one.config, other.config)) <= {"--seed"}


def summary(groups: Sequence[Sequence[Run]], options: Sequence[Column]) -> list[list[str]]:
    """Return the table of groups: for each figure the median of the finished runs, with
    the least and the largest.
    """
    what = [_WHAT[0], *(option for option in options if option.name != "seed")]
    headings = [*(column.heading for column in what), "n", *(column.heading for column in _REACHED)]
    rows = []
    for group in groups:
        finished = [run for run in group if run.finished]
        count = f"{len(finished)}" + (
            f" ({len(group) - len(finished)} not finished)" if len(finished) < len(group) else ""
        )
        figures = [_middle(column, [column.value(run) for run in finished]) for column in _REACHED]
        rows.append([*(_cell(column, column.value(group[0])) for column in what), count, *figures])
    return [headings, *rows]


def _middle(column: Column, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return _cell(column, known[0] if known else None)
    median, *ends = map(column.text, (statistics.median(known), min(known), max(known)))
    return median if len(set(ends)) == 1 else f"{median} ({' to '.join(ends)})"


def _cell(column: Column, value: Any) -> str:
    return "-" if value is None else column.text(value)


def main(argv: Sequence[str]) -> None:
    cli.main("compare", compare, argv)
