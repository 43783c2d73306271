"""The results: one JSON file per run, and the check that the runs of a row belong
together.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import backends, disk
from ..config import Config, differences, from_json
from ..directory import histories, runs
from ..errors import UserError, reading

RESULTS = Path("results")
#: Folder of the run directories.
WORK = Path("runs/reproduce")
FORMAT = 2

#: Column of history.csv to the name of its curve.
CURVES: Mapping[str, str] = {
    "iteration": "iteration",
    "seconds": "seconds",
    "learning_rate": "learning_rate",
    "loss": "train_loss",
    "accuracy": "train_error",
    "val_loss": "test_loss",
    "val_accuracy": "test_error",
}
MEASURED = ("train_loss", "train_error", "test_loss", "test_error")
#: Numbers of metrics.json that are kept.
VIEWED = ("images", "accuracy", "loss", "calibration_error")

#: Options in which the runs of a row may differ.
IGNORED = (
    "--seed",
    "--steps-per-epoch",
    "--steps-per-execution",
    "--jit-compile",
    "--data.dir",
    "--data.on-device",
)


@dataclasses.dataclass(frozen=True)
class Record:
    """A finished run.

    Args:
        trial: Name of the trial.
        seed: Seed of weights, order and augmentation.
        config: Configuration of the run, without the directories of the machine.
        data: Its `name` and `hash`, and the number of images to `train` and `test`.
        code: Git `commit`, and whether the code was `modified` since.
        first_losses: Loss of each of the first executions of the train step; on a CPU,
            each is one step. Empty if it is unknown.
        device: `name`, `cpu`, `backend` and `versions`.
        curves: `iteration`, `seconds`, `learning_rate`, `train_loss`, `train_error`,
            `test_loss`, `test_error`, equally long. Errors are in percent; seconds are
            the time of the run so far.
        final: Last value of each of `MEASURED`; None if training diverged.
        cost: `seconds` of training and measuring, `images_per_second` in training (None
            if it was not measured), and `together`, the number of runs that shared the
            device (not in older files: 1).
        parameters: Number of trainable parameters.
        diverged_at: Iteration at which the loss became infinite or NaN; else None.
        views: Name of the views of the test images to all numbers of `VIEWED`, measured
            at the end of the run. Empty if the test images were measured during the run.
        signals: What `run.signals_of` returns for the trained network, if the trial asks
            for it.
    """

    trial: str
    seed: int
    config: Mapping[str, Any]
    data: Mapping[str, Any]
    code: Mapping[str, Any]
    first_losses: list[float]
    device: Mapping[str, Any]
    curves: Mapping[str, list]
    final: Mapping[str, float | None]
    cost: Mapping[str, Any]
    parameters: int
    diverged_at: int | None = None
    views: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    signals: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    format: int = FORMAT

    @property
    def error(self) -> float | None:
        """Final test error in percent; None if training diverged."""
        return self.final["test_error"]


def of_run(
    run: Path,
    trial: str,
    data: Mapping[str, Any],
    *,
    diverged_at: int | None = None,
    views: Mapping[str, Mapping[str, float]] | None = None,
    signals: Mapping[str, float | None] | None = None,
    together: int = 1,
) -> Record:
    """Return the record of a run directory.

    Args:
        run: The directory of a run that ended or diverged.
        trial, data, diverged_at, views, signals: See `Record`.
        together: Number of runs that share the device.
    """
    described = runs.read_config(run)
    history = histories.read(run / "history.csv")
    points = len(history.get("iteration", ()))
    curves = {
        name: _curve(name, history.get(column, np.full(points, np.nan)))
        for column, name in CURVES.items()
    }
    if views:  # measured once, at the end
        curves["test_loss"][-1] = views["one"]["loss"]
        curves["test_error"][-1] = 100 * (1 - views["one"]["accuracy"])
    speeds = history.get("images_per_second", np.zeros(0))
    return Record(
        trial=trial,
        seed=described["config"]["seed"],
        config=runs.portable(described["config"]),
        data=data,
        code=described["code"],
        first_losses=histories.read_table(run / "first_losses.csv")
        .get("loss", np.zeros(0))
        .tolist(),
        device=backends.described(),
        curves=curves,
        final={name: curves[name][-1] if diverged_at is None else None for name in MEASURED},
        cost={
            "seconds": curves["seconds"][-1] if curves["seconds"] else 0.0,
            "images_per_second": float(np.nanmedian(speeds)) if np.isfinite(speeds).any() else None,
            "together": together,
        },
        parameters=described["trainable_parameters"],
        diverged_at=diverged_at,
        views=views or {},
        signals=signals or {},
    )


def _curve(name: str, values: np.ndarray) -> list:
    if name == "iteration":
        return [int(value) for value in values]
    return (100 * (1 - values) if name.endswith("error") else values).tolist()


def path(folder: Path, trial: str, seed: int) -> Path:
    """Return the path of a run's file."""
    return folder / trial / f"seed-{seed}.json"


def write(folder: Path, record: Record) -> Path:
    """Write a run's file, completely or not at all: null for numbers that are not
    finite, 7 digits of what was measured.
    """
    target = path(folder, record.trial, record.seed)
    disk.make(target.parent)
    disk.write_json(target, disk.plain(record, digits=7, exact=("config",)), indent=None)
    return target


def read(folder: Path = RESULTS) -> list[Record]:
    """Return all runs in the folder, sorted by trial and seed.

    Raises:
        UserError: for a file that is not the result of a run.
    """
    records = [read_one(file) for file in folder.glob("*/*/seed-*.json")]
    return sorted(records, key=lambda record: (record.trial, record.seed))


def read_one(file: Path) -> Record:
    """Return the run in a file.

    Raises:
        UserError: for a file that is not the result of a run.
    """
    with reading(f"{file} is not the result of a run"):
        value = json.loads(file.read_text())
        if value.get("format", FORMAT) != FORMAT:
            raise UserError(f"it has format {value['format']}; this version reads {FORMAT}")
        return Record(**value)


def groups(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the runs of each trial.

    Raises:
        UserError: for runs of one trial that differ in configuration or data.
    """
    runs_of: dict[str, list[Record]] = {}
    for record in records:
        runs_of.setdefault(record.trial, []).append(record)
    for first, *others in runs_of.values():
        for other in others:
            check_same(first, from_json(Config, other.config), other.data)
    return runs_of


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the runs of one number of a table share: the device, and the iterations.

    Args:
        device: `"CPU"`, or the name of an accelerator.
        iterations: Number of iterations of the runs that did not diverge; 0 if all did.
    """

    device: str
    iterations: int

    def fits(self, other: "Setting") -> bool:
        """Whether runs of both can be compared. A run that diverged fits every length."""
        lengths = {self.iterations, other.iterations} - {0}
        return self.device == other.device and len(lengths) < 2


def by_setting(records: Iterable[Record]) -> dict[Setting, list[Record]]:
    """Return the runs of a trial in groups that may be averaged, the largest first. A run
    that diverged ended early: it counts with the other runs on its device.
    """
    found: dict[Setting, list[Record]] = {}
    diverged = []
    for record in records:
        if record.error is None:
            diverged.append(record)
        else:
            setting = Setting(record.device["name"], record.curves["iteration"][-1])
            found.setdefault(setting, []).append(record)
    for record in diverged:
        device = record.device["name"]
        own = [setting for setting in found if setting.device == device]
        setting = max(own, key=lambda each: len(found[each]), default=Setting(device, 0))
        found.setdefault(setting, []).append(record)
    order = sorted(found, key=lambda each: (-len(found[each]), each.device, each.iterations))
    return {setting: found[setting] for setting in order}


def short_device(name: str) -> str:
    """Return the usual name of a device: `H100` for `NVIDIA H100 80GB HBM3`."""
    return re.sub(r"^NVIDIA ([A-Z]+\d+\w*).*", r"\1", name)


def largest(records: Sequence[Record]) -> list[Record]:
    """Return the largest group of runs of a trial that may be averaged."""
    return next(iter(by_setting(records).values()), [])


def check_same(record: Record, config: Config, data: Mapping[str, Any]) -> None:
    """Check that a run belongs in the row of another run.

    Args:
        record: Record of the other run.
        config: Configuration of the run.
        data: Data of the run, as in `Record`.

    Raises:
        UserError: if configuration or data differ.
    """
    different = differences(from_json(Config, record.config), config, IGNORED)
    if data["hash"] != record.data["hash"]:
        different.append("the images")
    if different:
        raise UserError(
            f"{record.trial}: the runs of a row must be equal except for the seed. Seeds "
            f"{record.seed} and {config.seed} differ in {', '.join(different)}. Use the options of "
            f"the first one, or remove the results in {record.trial} and measure them again."
        )
