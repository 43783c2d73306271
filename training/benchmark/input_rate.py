"""How many images per second does the input make on one core, beside plain tf.data?

The candidates take turns, A B C, A B C, ..., in a process that is bound to one core: this
module, with the options as JSON.
"""

import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import backends, children
from ..cli import UserError, lookup
from . import report

SIZE, PADDING = 32, 4
#: Seconds after which the measuring process is stopped.
LIMIT = 24 * 3600
ABOUT = (
    "Images per second from one core: batches drawn from random uint8 images of 32 x 32 x 3 in "
    "memory, in shuffled order, each padded by 4 pixels, cropped at random and flipped at "
    "random. There is no network, except for fit: model.fit takes the stream, with a network of "
    "one small dense layer."
)


@dataclasses.dataclass(frozen=True)
class Input:
    """Images per second that one core pads, crops and flips: this project's input beside
    plain tf.data.
    """

    candidates: tuple[str, ...] = ("stream", "batches", "fit", "tf_data_map", "tf_data_batches")
    """stream: training.data's; batches: the same without tf.data; fit: the stream in
    model.fit; tf_data_map: a map over single images; tf_data_batches: over whole batches."""
    baseline: str = "tf_data_map"
    """Divide by this candidate."""
    rounds: int = 5
    """Number of rounds. Every candidate is measured once per round."""
    seconds: float = 2.0
    """Seconds of each measurement."""
    batch: int = 128
    """Images per batch."""
    images: int = 50_000
    """Images to draw from."""
    output: Path | None = None
    """Write settings, versions and every figure to this JSON file."""


def run(options: Input) -> dict:
    """Measure, print the table, write the file and return its content.

    Raises:
        UserError: for options that do not fit, or a system where a process cannot be
            bound to a core.
    """
    _check(options)
    settings = dataclasses.asdict(options) | {"output": None}
    order = "The candidates take turns; a ratio is of two figures of the same round."
    machine = {"cpu": backends.cpu(), "usable_cores": 1, "system": platform.platform()}
    described = report.described("input", options, ABOUT, order, machine)
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    module = f"{__package__}.input_rate"
    try:
        found = children.result(module, json.dumps(settings), backend, LIMIT)
    except RuntimeError as error:
        raise UserError(f"The measuring process {error}") from error
    baselines = dict.fromkeys(options.candidates, options.baseline)
    summary = report.summarize(found["rounds"], baselines)
    heading = [
        f"input: batch {options.batch}, {options.rounds} rounds, one core of {backends.cpu()}",
        ABOUT,
        f"Figures: median (least to most) of the rounds. Ratios: over {options.baseline}, of "
        "figures of the same round.",
        "",
    ]
    column = report.Column("images_per_second", "images/s", digits=0)
    text = "\n".join([*heading, report.table([column], summary, baselines)])
    return report.publish(described | found | {"summary": summary}, text, options.output)


def _check(options: Input) -> None:
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("This system cannot bind a process to a core; run this on Linux.")
    for name in (*options.candidates, options.baseline):
        lookup(CANDIDATES, name, "candidate")
    if options.baseline not in options.candidates:
        raise UserError(f"--baseline must be one of the candidates. Received: {options.baseline}")
    report.check(options, "rounds", "seconds", "batch", "images")
    if options.batch > options.images:
        raise UserError(
            f"--batch must be at most --images. Received: {options.batch} > {options.images}"
        )


def measure(options: Input) -> dict:
    """Return the figures of every round, measured in this process, which stays bound to
    one core.
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


#: Takes seconds, returns images per second over that time.
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

    def timer(seconds: float) -> float:
        times: list[float] = []

        def note(number: int, logs: dict) -> None:
            times.append(time.perf_counter())
            if times[-1] - times[0] >= seconds and number:
                model.stop_training = True

        clock = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        model.fit(
            stream, steps_per_epoch=2**40, epochs=1, shuffle=False, verbose=0, callbacks=[clock]
        )
        # the first batch, which compiles, does not count
        return (len(times) - 1) * batch / (times[-1] - times[0])

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


#: Name to a function of images, labels and the batch size that returns its timer.
CANDIDATES: Mapping[str, Callable[[np.ndarray, np.ndarray, int], Timer]] = {
    "stream": _time_stream,
    "batches": _time_batches,
    "fit": _time_fit,
    "tf_data_map": _time_tf_data_map,
    "tf_data_batches": _time_tf_data_batches,
}


if __name__ == "__main__":
    children.answer(lambda: measure(Input(**json.loads(sys.argv[1]))))
