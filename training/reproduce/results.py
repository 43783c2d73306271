"""The results of trials: a JSON file a run, never half-written, and never runs of two
kinds in one row.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import runs
from ..cli import UserError

RESULTS = Path("results")
#: Runs of each row, as in the papers, which give the median.
SEEDS = 5
#: Where the state of unfinished runs is.
WORK = Path("runs/reproduce")
FORMAT = 1

#: What has to be equal in all runs of a row: name to what of a record it is.
SAME = {
    "recipe": lambda record: record.config,
    "code": lambda record: record.code["fingerprint"],
    "data": lambda record: record.data["fingerprint"],
}


@dataclasses.dataclass(frozen=True)
class Record:
    """A finished run.

    Args:
        trial: Name of the trial.
        seed: Of weights, order and augmentation.
        config: Network and recipe, as data.
        code: `fingerprint` of the sources that compute, git `commit`, and whether they
            were `modified` since.
        data: `name`, `fingerprint`, and the number of images to `train` and `test`.
        device: `name`, `cpu`, `backend` and `versions`.
        curves: `iteration`, `seconds`, `learning_rate`, `train_loss`, `train_error`,
            `test_loss`, `test_error`, equally long. Errors are in percent; seconds are
            those of the run so far.
        final: The last of `train_loss`, `train_error`, `test_loss`, `test_error`; None
            where training has diverged.
        diverged_at: The iteration by which the loss was no longer finite, if so.
        cost: `seconds` of training and measuring, `compile_seconds` among them,
            `images_per_second` in training once it is compiled, `visits`, how many
            processes had a part in it, and `together`, runs that shared the device.
        parameters: Trainable ones.
    """

    trial: str
    seed: int
    config: Mapping[str, Any]
    code: Mapping[str, Any]
    data: Mapping[str, Any]
    device: Mapping[str, Any]
    curves: Mapping[str, list]
    final: Mapping[str, float | None]
    cost: Mapping[str, Any]
    parameters: int
    diverged_at: int | None = None
    format: int = FORMAT

    @property
    def error(self) -> float | None:
        """Final test error in percent; None where training has diverged."""
        return self.final["test_error"]


def path(folder: Path, trial: str, seed: int) -> Path:
    """Return where the run's file is."""
    return folder / trial / f"seed-{seed}.json"


def write(folder: Path, record: Record) -> Path:
    """Write a run's file, whole or not at all."""
    target = path(folder, record.trial, record.seed)
    target.parent.mkdir(parents=True, exist_ok=True)
    runs.write_json(target, _plain(dataclasses.asdict(record)), indent=None)
    return target


def _plain(value: Any) -> Any:
    """Return `value` as JSON has it: with null for what is no finite number, and
    numbers as short as they are exact enough.
    """
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def read(folder: Path = RESULTS) -> list[Record]:
    """Return all runs below the folder, trial by trial, seed by seed.

    Raises:
        UserError: for a file that holds no run.
    """
    found = [read_one(file) for file in folder.glob("*/*/seed-*.json")]
    return sorted(found, key=lambda record: (record.trial, record.seed))


def read_one(file: Path) -> Record:
    """Return the run in a file.

    Raises:
        UserError: for a file that holds none.
    """
    try:
        value = json.loads(file.read_text())
        if isinstance(value, dict) and value.get("format", FORMAT) != FORMAT:
            raise UserError(f"{file} has format {value['format']}; this version reads {FORMAT}.")
        return Record(**value)
    except UserError:
        raise
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{file} holds no run: {error}") from error


def groups(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the runs of each trial.

    Raises:
        UserError: for a trial with runs of different code, data or recipe: they must
            not be taken together.
    """
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.trial, []).append(record)
    for own in found.values():
        for other in own[1:]:
            check_same(own[0], other)
    return found


def check_same(one: Record, other: Record) -> None:
    """Check that two runs of a trial may stand in one row.

    Raises:
        UserError: if code, data or recipe differ.
    """
    for what, of in SAME.items():
        if _plain(of(one)) != _plain(of(other)):
            made = ", ".join(
                f"seed {record.seed}: "
                f"{str(_commit(record) if what == 'code' else of(record))[:400]}"
                for record in (one, other)
            )
            raise UserError(
                f"{one.trial}: runs of different {what} do not belong in one row ({made}). Go on "
                "with what the first was made by, or remove its results to make them anew."
            )


def _commit(record: Record) -> str:
    changes = " with changes" if record.code["modified"] else ""
    return f"commit {record.code['commit']}{changes}, fingerprint {record.code['fingerprint'][:12]}"
