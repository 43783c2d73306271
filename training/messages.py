"""What a person reads before, after and about a run."""

import math
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np

from . import plans
from .checkpoints import Saved
from .cli import command
from .config import Data
from .estimates import Timing, describe_run
from .run import Run
from .terminal import duration

#: A training that ends with so many times the loss of guessing had too high a learning rate.
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
    parts = f" in {plan.parts} parts" if plan.parts > 1 else ""
    devices = f", {replicas} devices" if replicas > 1 else ""
    precision = f"; {run.precision}" if run.precision else ""
    trained = "trained parameters" if config.model.freeze else "parameters"
    images = config.data.dir if data.name in ("folder", "npz") else data.name
    lines = [
        f"Training {run.network.name} ({run.parameters:,} {trained}) on {data.train.size:,} images "
        f"of {images} for {length}, batch {config.batch_size}{parts} ({keras.backend.backend()}"
        f"{devices}{precision}).",
        f"Run directory: {folder}",
    ]
    if saved is not None:
        lines.append(f"Resuming after iteration {saved.step // plan.parts:,}.")
    return "\n".join(lines)


def end(
    run: Run, folder: Path, what: str, history: Mapping[str, np.ndarray], accuracy: float
) -> str:
    """Describe the result of a finished run, and what can be done next.

    Args:
        run: The run.
        folder: Its directory.
        what: "Finished" or "Already finished".
        history: Columns of history.csv.
        accuracy: Accuracy of the watched images.
    """
    lines = []
    loss = history["loss"][-1] if "loss" in history else 0.0
    guessing = math.log(len(run.data.classes))
    if loss > WORSE * guessing:
        rate = run.config.optimizer.learning_rate
        lines.append(
            f"Warning: learning rate {rate:g} is probably too high: the last loss is {loss:.3g}, "
            f"and that of guessing is {guessing:.3g}. Try {rate / 10:g}."
        )
    time = ""
    if "seconds" in history:
        time = f" after {duration(history['seconds'][-1])} of training"
    split = run.split or run.data.test
    return "\n".join(
        [
            *lines,
            f"{what}{time}: {folder / 'model.keras'}",
            f"Accuracy: {100 * accuracy:.2f} % of the {split.size:,} {run.watched} images.",
            f"Next: {command('evaluate')} {folder}",
        ]
    )


def rehearsal(run: Run, timing: Timing) -> str:
    """Describe a run and its costs before it begins.

    Args:
        run: The run.
        timing: Timing of its train step.
    """
    config, plan, data = run.config, run.plan, run.data
    sizes = {"to train": data.train, "held out": data.holdout, "to test": data.test}
    counts = ", ".join(
        f"{split.size:,} {name}" for name, split in sizes.items() if split is not None
    )
    described = {
        "Data": (
            f"{data.name}: {counts}; {len(data.classes)} classes; {run.size} x {run.size} pixels, "
            f"{data.channels} channel{'s' * (data.channels > 1)}"
        ),
        "Augmentation": _augmentation(config.data),
    }
    return describe_run(
        run.network,
        data=described,
        batch_size=config.batch_size,
        plan=plan,
        rate=plans.rate_at(run.rate),
        timing=timing,
        devices=run.distribution.replicas,
        together=config.steps_per_execution,
    )


def _augmentation(options: Data) -> str:
    padding = (
        f", padded by {options.border} pixels with: {options.padding}"
        if options.augmentation == "pad_crop_flip"
        else ""
    )
    parts = [options.augmentation + padding]
    if options.rand_augment is not None:
        count, magnitude = options.rand_augment
        parts.append(f"RandAugment, {count} operations of magnitude {magnitude}")
    parts += [
        f"{name} with alpha {alpha:g}"
        for name, alpha in (("mixup", options.mixup), ("CutMix", options.cutmix))
        if alpha
    ]
    return "; ".join(parts)
