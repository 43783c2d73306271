"""Files for records: CSV and TensorBoard."""

import csv
import errno
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_preact import _optional, atomic
from keras_preact.health.records import HealthRecord
from keras_preact.health.weights import Watched, WeightPlace


class CsvFile:
    """A table that grows by whole lines: a reader never sees an incomplete one.

    Args:
        path: The file. Lines are appended to a file with the same columns.
        columns: Names of the columns.

    Raises:
        ValueError: for a file with other columns, or a missing folder.
    """

    def __init__(self, path: str | os.PathLike, columns: Sequence[str]):
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ValueError(
                f"`csv` must be a file in an existing folder. Received: csv={str(path)!r}"
            )
        self._header = _line(columns)
        if self.path.exists():
            with self.path.open("rb") as file:
                if file.readline() not in (b"", self._header):
                    raise ValueError(
                        "`csv` has other columns than this model: give another file. Received: "
                        f"csv={str(path)!r}"
                    )

    def drop_after(self, step: int) -> None:
        """Drop rows with a later step (the first column) and an incomplete last line. The
        file is replaced as a whole or not at all.
        """
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        kept = [
            line
            for line in lines[1:]
            if line.endswith(b"\n") and int(line.partition(b",")[0]) <= step
        ]
        if len(kept) + 1 < len(lines):
            with atomic.replacing(self.path) as temporary:
                temporary.write_bytes(b"".join([lines[0], *kept]))

    def append(self, values: Iterable[object]) -> None:
        """Append a line; a new file gets the line of the columns first. NaN becomes an
        empty cell.
        """
        line = _line("" if value != value else value for value in values)
        with self.path.open("ab", buffering=0) as file:
            size = file.seek(0, io.SEEK_END)
            line = line if size else self._header + line
            if file.write(line) < len(line):  # a full disk
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def _line(values: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()


def columns(watched: Watched, read: Sequence[WeightPlace]) -> list[str]:
    """Return the columns of a record: the figures of the network, then the figures of
    every weight and weight layer.
    """
    weights = [place.name for place in watched.places]
    inputs = [place.name for place in read]
    return [
        *("step", "epoch", "loss", "gradient_norm", "layer_gradient_ratio", "train_validation_gap"),
        *(
            f"{figure}/{name}"
            for figure in ("gradient_norm", "weight_norm", "update_norm")
            for name in weights
        ),
        *(
            f"{figure}/{name}"
            for figure in ("activation_mean", "activation_std")
            for name in inputs
        ),
    ]


def row(record: HealthRecord) -> list[object]:
    """Return the values of `columns`."""
    arrays = (
        *(record.gradient_norms, record.weight_norms, record.update_norms),
        *(record.activation_means, record.activation_stds),
    )
    numbers = [*record.scalars().values(), record.gap, *np.concatenate(arrays).tolist()]
    return [record.step, record.epoch, *(float(f"{number:.7g}") for number in numbers)]


def summary(record: HealthRecord, watched: Watched) -> dict[str, float]:
    """Return the scalars of a record: figures of the whole network, each unit's gradient
    norm, and the spread of the other figures.
    """
    scalars = {
        f"health/{name}": value for name, value in record.scalars().items() if name != "loss"
    }
    groups = watched.group_norms(record.gradient_norms)
    scalars |= {f"health_gradient_norm/{group}": norm for group, norm in groups.items()}
    spreads = {
        "gradient_weight_ratio": record.gradient_weight_ratios[watched.kernels],
        "update_ratio": record.update_ratios[watched.kernels],
        "activation_mean": record.activation_means,
        "activation_std": record.activation_stds,
    }
    for name, values in spreads.items():
        values = values[~np.isnan(values)]
        if values.size:
            spread = {"min": np.min(values), "median": np.median(values), "max": np.max(values)}
            scalars |= {f"health_{name}/{statistic}": value for statistic, value in spread.items()}
    return {name: float(value) for name, value in scalars.items() if value == value}


class TensorBoard:
    """Scalars in an event file, written through TensorFlow.

    Args:
        folder: Folder of the event file, which is made with the first scalars.

    Raises:
        ImportError: without the package tensorboard, which TensorFlow's summaries need.
    """

    def __init__(self, folder: str | os.PathLike):
        _optional.load("tensorboard")
        self._folder = str(folder)
        self._writer: Any = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars and flush them."""
        import tensorflow as tf

        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._folder)
        with self._writer.as_default():
            for name, value in scalars.items():
                tf.summary.scalar(name, value, step=step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
