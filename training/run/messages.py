"""Messages before and after a run."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np

from ..cli.terminal import NAMED, duration, some
from ..directory import histories
from ..directory.checkpoints import Saved
from ..directory.runs import BROKEN
from ..errors import command
from .run import Run

#: If the largest class has so many times the training images of the smallest, a message says so.
IMBALANCE = 3
#: If the last loss is this many times the loss of guessing, the learning rate was too high.
WORSE = 10


def beginning(run: Run, folder: Path, saved: Saved | None) -> str:
    """Describe a run that begins, or that resumes from a checkpoint."""
    config, plan, data = run.config, run.plan, run.data
    replicas = run.distribution.replicas
    epochs = plan.iterations / plan.steps_per_epoch
    whole = f"{plan.epochs:,} epoch{'s' * (plan.epochs > 1)}"
    length = (
        whole if epochs == plan.epochs else f"{plan.iterations:,} iterations ({epochs:.3g} epochs)"
    )
    parts = f" in {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    devices = f", {replicas} devices" if replicas > 1 else ""
    precision = f"; {run.precision}" if run.precision else ""
    trained = "trained parameters" if config.model.freeze else "parameters"
    images = config.data.dir if data.name in ("folder", "npz") else data.name
    lines = [
        f"Training {run.network.name} ({run.parameters:,} {trained}) on {data.train.size:,} images "
        f"of {images} for {length}, batch {config.batch_size}{parts} ({keras.backend.backend()}"
        f"{devices}{precision}).",
        *about_images(run),
        f"Run directory: {folder}",
    ]
    if data.broken:
        lines.append(f"Images that were left out: {folder / BROKEN}")
    if config.model.weights is not None:
        mean, std = (
            " ".join(f"{value:g}" for value in values)
            for values in (data.preprocessing.mean, data.preprocessing.std)
        )
        lines.append(f"Started from {config.model.weights}: pixels have mean {mean} and std {std}.")
    if saved is not None:
        lines.append(f"Resuming after iteration {saved.step // plan.micro_batches:,}.")
    return "\n".join(lines)


def about_images(run: Run) -> list[str]:
    """Return lines about classes and splits: their names and numbers, and what to do if
    classes differ much in size.
    """
    data = run.data
    classes = f"{len(data.classes):,} classes"
    if not data.train.knows_labels:
        return [f"{classes}: {some(data.classes)}", *data.origins]
    counts = data.counts.tolist()
    pairs = list(zip(data.classes, counts, strict=True))
    lines = [f"{classes} (training images): {some([f'{name} ({n:,})' for name, n in pairs])}"]
    (least, fewest), (most, largest) = (
        choose((pair for pair in pairs if pair[1]), key=lambda pair: pair[1])
        for choose in (min, max)
    )
    if len(pairs) > NAMED:
        lines.append(
            f"Training images of a class: from {fewest:,} ({least}) to {largest:,} ({most}), "
            f"median {statistics.median(counts):,.0f}."
        )
    if untrained := [name for name, count in pairs if not count]:
        lines.append(f"{len(untrained):,} of {classes} have no training images: {some(untrained)}.")
    options = run.config.data
    if largest > IMBALANCE * fewest and not (
        options.class_weights != "none" or options.mixup or options.cutmix
    ):
        lines.append(
            f"{most} has {largest / fewest:.3g} times the training images of {least}: "
            "--data.class-weights balanced makes all classes count alike."
        )
    return [*lines, *data.origins]


def end(
    run: Run, folder: Path, what: str, history: Mapping[str, np.ndarray], accuracy: float
) -> str:
    """Describe the result of a finished run, and what can be done next.

    Args:
        run: The run.
        folder: Its directory.
        what: "Finished" or "Already finished".
        history: Columns of history.csv.
        accuracy: Accuracy of the saved network on the watched images.
    """
    lines = []
    loss = history["loss"][-1] if "loss" in history else 0.0
    guessing = math.log(len(run.data.classes))
    if loss > WORSE * guessing:
        rate = run.config.optimizer.learning_rate
        lines.append(
            f"Warning: learning rate {rate:g} is probably too high: the last loss is {loss:.3g}, "
            f"and the loss of guessing is {guessing:.3g}. Try {rate / 10:g}."
        )
    time = ""
    if "seconds" in history:
        time = f" after {duration(history['seconds'][-1])} of training"
    split = run.split or run.data.test
    measured, before = f"{100 * accuracy:.2f} %", ""
    if histories.measured(history, "val_accuracy"):
        last = f"{100 * history['val_accuracy'][-1]:.2f} %"
        before = "" if last == measured else f" After the last epoch it was {last}."
    trusting = ["--trust"] * (run.config.data.is_function or bool(run.config.model.functions))
    return "\n".join(
        [
            *lines,
            f"{what}{time}: {folder / 'model.keras'}",
            f"Accuracy: {measured} of the {split.size:,} {run.monitored} images.{before}",
            f"Next: {command('evaluate', folder, *trusting)}",
        ]
    )
