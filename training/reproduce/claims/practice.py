"""Claims about healthy training and about the speed of parts."""

import functools
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..profiles import first_images, standardised
from .finding import Finding, conditional, decided
from .signals import network
from .trained import FAIL

if TYPE_CHECKING:
    import keras

    from keras_preact.health import HealthRecord

#: Share of the figures of a healthy run that a healthy range has to contain.
MOST = 0.75

#: Seeds of the networks that are trained. One network can be on either side of a limit by chance.
SEEDS = range(5)


class Run(NamedTuple):
    """A run that ends well: the network, the accuracies on training and test images, the
    test images with their labels, and the records.
    """

    model: "keras.Model"
    accuracies: tuple[float, float]
    test: tuple[np.ndarray, np.ndarray]
    records: list["HealthRecord"]
    names: list[str]


@functools.cache
def run(seed: int, iterations: int = 700) -> Run:
    """Train ResNet-20 with a quarter of the channels on 1,437 digits with the recipe of the
    small tables.
    """
    import keras

    import keras_preact as kp

    from ...data.readers import Arrays

    images, labels, data = first_images("digits", 10_000)
    assert isinstance(data.test, Arrays)
    test = standardised(data, data.test)
    model = network(20, seed=seed)
    drops = (iterations // 2, 3 * iterations // 4)
    rate = kp.schedules.step_schedule(0.1, drops, warmup_steps=iterations // 20)
    model.compile(
        kp.optimizers.CoupledSGD(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    health = kp.TrainingHealth(interval=25, sample=images[:64], report=lambda message: None)
    epochs = round(iterations * 32 / len(images))
    model.fit(images, labels, batch_size=32, epochs=epochs, verbose=0, callbacks=[health])
    trained, tested = (
        model.evaluate(*each, verbose=0, return_dict=True)["accuracy"]
        for each in ((images, labels), test)
    )
    return Run(model, (trained, tested), test, health.history, health.weights)


def _runs() -> list[Run]:
    return [run(seed) for seed in SEEDS]


def _accuracies() -> np.ndarray:
    """Return the accuracies on training and test images, `(runs, 2)`."""
    return np.array([each.accuracies for each in _runs()])


def _figures(figure: str) -> np.ndarray:
    """Return a figure of every record of the runs: of the network, of each kernel, or of
    each weight layer's input.
    """
    values = []
    for found in _runs():
        kernels = [i for i, name in enumerate(found.names) if name.endswith("kernel")]
        for record in found.records:
            value = np.atleast_1d(getattr(record, figure))
            values.append(value[kernels] if len(value) == len(found.names) else value)
    return np.concatenate(values)


def healthy(figure: str, low: float, high: float) -> Finding:
    """A figure of healthy training is in this range. It holds if three of four of its
    values are, in runs that end well.
    """
    values = _figures(figure)
    inside = float(np.mean((values >= low) & (values <= high)))
    least, middle, most = np.percentile(values, [5, 50, 95]).tolist()
    _, tested = np.median(_accuracies(), axis=0)
    return decided(
        inside >= MOST,
        f"ResNet-20 on digits, {len(SEEDS)} runs with {100 * tested:.1f} % of the test images "
        f"right: {100 * inside:.0f} % of the values are inside; the median is {middle:.2g}, and "
        f"nine of ten are between {least:.2g} and {most:.2g}.",
        inside=inside,
        median=middle,
    )


def gap_is_small(most: float) -> Finding:
    """In healthy training, the accuracies on training and test images differ by less than
    this share. It holds if they do at the end, the median of the runs.
    """
    accuracies = _accuracies()
    trained, tested = np.median(accuracies, axis=0)
    gap = float(np.median(accuracies[:, 0] - accuracies[:, 1]))
    return decided(
        gap < most,
        f"ResNet-20 on digits, median of {len(SEEDS)} runs: {100 * trained:.1f} % of the training "
        f"images and {100 * tested:.1f} % of the test images are right.",
        gap=gap,
    )


def units_can_be_removed() -> Finding:
    """A residual network works without any one of its units. It holds if the test error,
    the median of the runs, stays below 20 % without the branch of each.
    """
    import keras_preact as kp

    lesions = [kp.analysis.lesions(each.model, *each.test) for each in _runs()]
    units = lesions[0].units
    is_first = np.array([unit.endswith("unit1") for unit in units])
    errors = 100 * np.array([each.error for each in lesions])  # (runs, units)
    medians = np.median(errors, axis=0)
    first, others = medians[is_first], medians[~is_first]
    intact = 100 * np.median([each.intact_error for each in lesions])
    return conditional(
        "the unit is not the first one of a stage",
        others.max() < FAIL,
        first.max() < FAIL,
        f"ResNet-20 on digits, medians of {len(SEEDS)} runs, test error {intact:.1f} %: without "
        f"the branch of one of its units, {others.min():.1f} to {others.max():.1f} % "
        f"({errors[:, ~is_first].max():.1f} % at most in one run); if the unit is the first one of "
        f"a stage, {first.min():.1f} to {first.max():.1f} %.",
        errors=dict(zip(units, medians.tolist(), strict=True)),
    )


def rms_is_faster(least: float = 1.10, most: float = 1.15, rounds: int = 9) -> Finding:
    """RMSNorm is 10 to 15 % faster than layer normalisation. It holds if a training step of
    a transformer is, the median of nine pairs of rounds.
    """
    import keras

    import keras_preact as kp

    images = np.random.default_rng(0).normal(size=(64, 32, 32, 3)).astype("float32")
    labels = np.arange(64) % 10
    models: dict[str, Any] = {}
    for kind in ("layer", "rms"):
        keras.utils.set_random_seed(0)
        model = kp.models.transformer(6, width=128, normalization=kind)
        model.compile(
            kp.optimizers.CoupledSGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.train_on_batch(images, labels)
        models[kind] = model
    ratios = []
    for _ in range(rounds):
        seconds = {}
        for kind, model in models.items():
            start = time.perf_counter()
            for _ in range(5):
                model.train_on_batch(images, labels)
            seconds[kind] = time.perf_counter() - start
        ratios.append(seconds["layer"] / seconds["rms"])
    ratio = statistics.median(ratios)
    return decided(
        least <= ratio <= most,
        f"A step of a transformer (6 layers, 64 tokens, 128 features, batch 64): {ratio:.2f} times "
        f"as fast; {min(ratios):.2f} to {max(ratios):.2f} in {rounds} rounds.",
        ratio=ratio,
    )
