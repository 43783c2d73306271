"""Measures the input alone: images a second that one core makes of CIFAR-shaped random
images, pad, crop and flip.

The candidates take turns, A B C, A B C, ..., in a process that is bound to one core. It
gets the options as JSON and answers with one line of JSON.
"""

import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from .. import backends, children
from ..cli import UserError
from . import report

SIZE, PADDING = 32, 4
ABOUT = (
    "Images a second from one core: batches drawn from random uint8 images of 32 x 32 x 3 in "
    "memory, in shuffled order, each padded by 4 pixels, cropped at random and flipped at "
    "random. No network, save for fit: there model.fit takes the stream, with a network of one "
    "small dense layer."
)


@dataclasses.dataclass(frozen=True)
class Input:
    """Images in a second that one core pads, crops and flips: this project's input
    beside plain tf.data.
    """

    candidates: tuple[str, ...] = ("stream", "batches", "fit", "tf_data_map", "tf_data_batches")
    """stream: training.data's; batches: what it makes, without tf.data; fit: the stream in model.fit; tf_data_map: a map over
    single images, to float32; tf_data_batches: a map over whole batches."""
    baseline: str = "tf_data_map"
    """The candidate that ratios are over."""
    rounds: int = 5
    """How often every candidate is measured."""
    seconds: float = 2.0
    """How long at a time."""
    batch: int = 128
    """Images at a time."""
    images: int = 50_000
    """Images to draw from."""
    output: Path | None = None
    """A JSON file for settings, versions, every figure and the summary."""


def run(options: Input) -> dict:
    """Measure what `options` say, print the table, write the file and return what it
    holds.

    Raises:
        UserError: for options that do not fit, or a system where a process cannot be
            bound to a core.
    """
    _check(options)
    started = datetime.datetime.now(datetime.UTC)
    settings = dataclasses.asdict(options) | {
        "output": None if options.output is None else str(options.output)
    }
    child = subprocess.run(
        children.command(f"{__package__}.input", json.dumps(settings)),
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if child.returncode:
        raise UserError(
            f"The measuring process ended with status {child.returncode}; its message stands above."
        )
    found = json.loads(child.stdout.splitlines()[-1])
    summary = report.summarize(found["rounds"], dict.fromkeys(options.candidates, options.baseline))
    described = {
        "command": "input",
        "settings": settings,
        "about": ABOUT,
        "order": "The candidates take turns; a ratio is of two figures of the same round.",
        "started": started.isoformat(timespec="seconds"),
        "machine": {"cpu": backends.cpu(), "usable_cores": 1, "system": platform.platform()},
        **found,
        "summary": summary,
    }
    return report.publish(described, table(summary, options), options.output)


def table(summary: Mapping[str, Mapping[str, Mapping]], options: Input) -> str:
    """Return the medians as a text for a terminal, with the least and the most behind
    them.
    """
    lines = [
        f"input: batch {options.batch}, {options.rounds} rounds, one core of {backends.cpu()}",
        ABOUT,
        f"Figures: median (least to most) of the rounds. Ratios: over {options.baseline}, of "
        "figures of the same round.",
        "",
        f"{'candidate':<16}  {'images/s':>30}  ratio",
    ]
    for label, figures in summary.items():
        rate = figures["images_per_second"]
        figure = f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})"
        ratio = (
            "baseline"
            if label == options.baseline
            else "{median:.3g} ({min:.3g} to {max:.3g})".format(**rate["ratio"])
        )
        lines.append(f"{label:<16}  {figure:>30}  {ratio}")
    return "\n".join(lines)


def _check(options: Input) -> None:
    from keras_preact import _checks

    if not hasattr(os, "sched_setaffinity"):
        raise UserError("This system cannot bind a process to a core; run this on Linux.")
    for name in (*options.candidates, options.baseline):
        _checks.lookup(CANDIDATES, name, "candidate")
    if options.baseline not in options.candidates:
        raise UserError(f"--baseline must be one of the candidates. Received: {options.baseline}")
    for name in ("rounds", "seconds", "batch", "images"):
        if not getattr(options, name) > 0:
            raise UserError(f"--{name} must be positive. Received: {getattr(options, name)}")
    if options.batch > options.images:
        raise UserError(
            f"--batch must be at most --images. Received: {options.batch} > {options.images}"
        )
    if options.output is not None and not options.output.parent.is_dir():
        raise UserError(f"--output: there is no directory {options.output.parent}")


def measure(options: Input) -> dict:
    """Return the figures of every round, measured in this process, which is bound to
    one core from here on.
    """
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # before TensorFlow counts the cores
    import keras

    backends.keep_accelerator_for_backend(keras.backend.backend())
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (options.images, SIZE, SIZE, 3), "uint8")
    labels = random.integers(0, 10, options.images)
    timers = {name: CANDIDATES[name](images, labels, options.batch) for name in options.candidates}
    for timer in timers.values():
        timer(min(1.0, options.seconds))
    rounds = [
        {name: {"images_per_second": timer(options.seconds)} for name, timer in timers.items()}
        for _ in range(options.rounds)
    ]
    versions = backends.versions("tensorflow", "keras", "numpy")
    return {"rounds": rounds, "backend": keras.backend.backend(), "versions": versions}


#: Takes seconds, returns images in a second over that time.
Timer = Callable[[float], float]


def _iterate(batches: Iterator[Any], batch: int) -> Timer:
    def timer(seconds: float) -> float:
        count, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds or not count:
            next(batches)
            count += 1
        return count * batch / passed

    return timer


def _stream(images: np.ndarray, labels: np.ndarray, batch: int):
    from keras_preact.preprocessing import PREPROCESSING

    from .. import data
    from ..data.readers import Arrays

    part = data.Split.of(Arrays(images, labels))
    of = data.ImageData(
        "random", tuple(map(str, range(10))), 3, SIZE, PREPROCESSING["cifar10"], part, part
    )
    return data.training_stream(of, batch, "pad_crop_flip", None, seed=0)


def _time_stream(images: np.ndarray, labels: np.ndarray, batch: int) -> Timer:
    return _iterate(iter(_stream(images, labels, batch).dataset()), batch)


def _time_batches(images: np.ndarray, labels: np.ndarray, batch: int) -> Timer:
    stream = _stream(images, labels, batch)
    rows = np.arange(batch)
    return _iterate((stream.open.batch(step, rows) for step in range(2**62)), batch)


def _time_fit(images: np.ndarray, labels: np.ndarray, batch: int) -> Timer:
    import keras

    stream = _stream(images, labels, batch).dataset()
    model = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            keras.layers.GlobalAveragePooling2D("channels_last"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer="sgd",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )

    class Clock(keras.callbacks.Callback):
        """Counts the batches behind the first, and stops the epoch when the time is
        over.
        """

        def __init__(self, seconds: float):
            super().__init__()
            self.seconds, self.count, self.passed = seconds, 0, 0.0

        def on_train_batch_end(self, number, logs=None):
            now = time.perf_counter()
            if number == 0:
                self.start = now
                return
            self.count, self.passed = number, now - self.start
            if self.passed >= self.seconds:
                self.model.stop_training = True

    def timer(seconds: float) -> float:
        clock = Clock(seconds)
        model.fit(
            stream, steps_per_epoch=2**40, epochs=1, shuffle=False, verbose=0, callbacks=[clock]
        )
        return clock.count * batch / clock.passed

    return timer


def _time_tf_data_map(images: np.ndarray, labels: np.ndarray, batch: int) -> Timer:
    import tensorflow as tf

    def augment(image, label):
        image = tf.pad(tf.cast(image, tf.float32), ((PADDING, PADDING), (PADDING, PADDING), (0, 0)))
        image = tf.image.random_flip_left_right(tf.image.random_crop(image, (SIZE, SIZE, 3)))
        return image, label

    rows = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(10_000).repeat()
    batches = rows.map(augment, num_parallel_calls=tf.data.AUTOTUNE).batch(
        batch, drop_remainder=True
    )
    return _iterate(iter(batches.prefetch(tf.data.AUTOTUNE)), batch)


def _time_tf_data_batches(images: np.ndarray, labels: np.ndarray, batch: int) -> Timer:
    import tensorflow as tf

    sides = (PADDING, PADDING)
    padded, classes = (
        tf.constant(np.pad(images, ((0, 0), sides, sides, (0, 0)))),
        tf.constant(labels),
    )
    line = tf.range(SIZE, dtype=tf.int64)

    def augment(numbers):
        top, left = (
            tf.random.uniform((batch, 1), maxval=2 * PADDING + 1, dtype=tf.int64) for _ in range(2)
        )
        rows, columns = (
            top + line,
            left + tf.where(tf.random.uniform((batch, 1)) < 0.5, line, line[::-1]),
        )
        shape = (batch, SIZE, SIZE)
        places = [numbers[:, None, None], rows[:, :, None], columns[:, None, :]]
        return tf.gather_nd(
            padded, tf.stack([tf.broadcast_to(part, shape) for part in places], -1)
        ), tf.gather(classes, numbers)

    numbers = (
        tf.data.Dataset.range(len(images))
        .shuffle(len(images))
        .repeat()
        .batch(batch, drop_remainder=True)
    )
    return _iterate(
        iter(numbers.map(augment, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)),
        batch,
    )


#: Name to what makes its timer from images, labels and the batch size.
CANDIDATES: Mapping[str, Callable[[np.ndarray, np.ndarray, int], Timer]] = MappingProxyType(
    {
        "stream": _time_stream,
        "batches": _time_batches,
        "fit": _time_fit,
        "tf_data_map": _time_tf_data_map,
        "tf_data_batches": _time_tf_data_batches,
    }
)


if __name__ == "__main__":
    print(json.dumps(measure(Input(**json.loads(sys.argv[1])))))
