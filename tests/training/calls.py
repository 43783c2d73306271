"""Commands of training/, called in this process or started as processes, and options of
runs that take seconds.
"""

import csv
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from training.commands import train
from training.commands.evaluate import __main__ as evaluate
from training.directory import models, runs

ROOT = Path(__file__).parents[2]


def words(*texts: str) -> list[str]:
    """Return the words of command lines."""
    return [word for text in texts for word in text.split()]


#: Options for a network of 4,934 parameters and 5 iterations. An epoch has 22 iterations.
TINY = words(
    "--model.name digits_resnet8_preact --model.width-factor 0.25 --data.holdout 0",
    "--schedule.unit iterations --schedule.length 5 --schedule.warmup 0",
)
#: Options of the fixture `run`.
RUN = words(
    "--schedule.length 30 --schedule.kind steps --schedule.drops 20 --schedule.warmup 4",
    "--optimizer.nesterov --optimizer.learning-rate 0.05 --seed 3",
)
#: Options of the fixture `everything`; an update is two steps.
EVERYTHING = words(
    "--data.mixup 0.2 --data.cutmix 1 --data.rand-augment 2 9 --data.holdout 200 --seed 4",
    "--optimizer.label-smoothing 0.1 --optimizer.ema 0.8 --model.dropout 0.1",
    "--model.stochastic-depth 0.2 --model.squeeze-excitation 2 --accumulate 2",
    "--schedule.length 12 --steps-per-epoch 5 --health 5",
    "--checkpoint.every 2 --checkpoint.keep 99",
)


def run_train(output: Path, *options: str) -> Path:
    """Train a tiny network on digits in this process; return the run directory."""
    train.main(["digits", *TINY, *words(*options), "--output", str(output)])
    return output


def run_evaluate(*arguments: object) -> None:
    evaluate.main(list(map(str, arguments)))


def error_of(capsys, command, *arguments) -> str:
    """Call `command`, which must end with status 2 and one line on stderr; return that
    line.
    """
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command(*arguments)
    assert ended.value.code == 2
    return one_error(capsys.readouterr().err)


def one_error(stderr: str) -> str:
    assert stderr.startswith("error: ")
    assert stderr.endswith("\n")
    assert stderr.count("\n") == 1
    return stderr


def files(folder: Path) -> list[str]:
    """Return the files of a folder, without the lock of a run."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != runs.LOCK)
    return sorted(str(path.relative_to(folder)) for path in found)


def csv_rows(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def weights(network: keras.Model | Path) -> dict[str, np.ndarray]:
    """Return the weights of a network, or of a .keras file, by their paths."""
    model = models.load(network) if isinstance(network, Path) else network
    return {each.path: np.array(keras.ops.convert_to_numpy(each.value)) for each in model.weights}


def assert_same_weights(one: keras.Model | Path, other: keras.Model | Path) -> None:
    """Check that the weights of two networks are equal to the last bit."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        np.testing.assert_array_equal(ours[path], value, err_msg=path)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the scalars of TensorBoard's event files in `folder`: tag to steps and
    values.
    """
    import tensorflow as tf
    from tensorflow.core.util import event_pb2

    found: dict[str, list[tuple[int, float]]] = {}
    files = [str(path) for path in folder.iterdir()]
    for record in tf.data.TFRecordDataset(files).as_numpy_iterator():
        event = event_pb2.Event.FromString(record)
        for value in event.summary.value:
            read = event.step, float(tf.make_ndarray(value.tensor))
            found.setdefault(value.tag, []).append(read)
    return found


def start(*arguments: object, cwd: Path, **variables: str) -> subprocess.Popen:
    """Start `python ARGUMENTS` with this process's backend, these environment variables, and
    without TensorFlow's log level, as a user does.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}
    environment |= {
        "KERAS_BACKEND": keras.backend.backend(),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        **variables,
    }
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=environment, text=True, **pipes
    )


def finish(process: subprocess.Popen, timeout: float = 300) -> tuple[int, str, str]:
    """Return the exit status of a started process, its stdout, and its stderr if it is a
    pipe. Kill the process if it hangs.
    """
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err or ""
