"""The trainer: a run from its beginning, or a checkpoint, to its end or an interruption."""

import dataclasses
import math
import platform
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_preact as kp

from . import backends, callbacks, curves, divergence, estimates, finetune, networks, plans, runs
from . import data as datasets
from .checkpoints import Checkpoints, Saved
from .cli import UserError, command
from .config import Config, Data
from .fit import Fit

#: Executions of a rehearsal: one that compiles, and those that are timed.
TIMED = 4


class Trainer:
    """What is made of a configuration: data, network and plan, compiled for the distribution that is active.

    Args:
        config: Of the run.
        recipe: Its name.
        distribution: Inside of which this is made.

    Raises:
        ValueError: for a configuration that does not fit; nothing is written then.
    """

    def __init__(self, config: Config, recipe: str, distribution: kp.distribution.Distribution):
        self.recipe = recipe
        self.distribution = distribution
        self.data = datasets.load(config.data)
        trained = None
        if config.model.weights is not None:
            config, self.data, trained = finetune.begin(config, self.data)
        self.config = config
        self.size = _image_size(config, self.data)
        self.plan = plans.plan(config, self.data.train.size)
        self.rate = plans.learning_rate(config, self.plan)
        self.stream = datasets.training_stream(
            self.data,
            config.part_size,
            config.data.augmentation,
            self.size,
            config.seed,
            config.data.padding,
            rand_augment=config.data.rand_augment,
            mixup=config.data.mixup,
            cutmix=config.data.cutmix,
        )
        self.rows = distribution.rows(config.part_size)
        self.model = networks.build(config, self.data, self.size) if trained is None else trained
        distribution.compile(
            self.model,
            optimizer=networks.optimizer(config, self.rate, self.model),
            loss=networks.loss(config),
            weighted_metrics=["accuracy"],  # without the rows that fill the last batch of an evaluation
            jit_compile=backends.jit_compile(config.jit_compile),
            steps_per_execution=config.steps_per_execution,
        )

    def rehearse(self) -> None:
        """Print what the run would be and take; train a few steps for it and write nothing."""
        together = self.config.steps_per_execution
        clock = estimates.Clock()
        self.model.fit(
            self.distribution.training_data(self.stream.dataset(0, self.rows)),
            steps_per_epoch=TIMED * together,
            shuffle=False,
            callbacks=[clock],
            verbose=0,
        )
        data, options = self.data, self.config.data
        sizes = {"train": data.train, "held out": data.holdout, "test": data.test}
        counts = ", ".join(f"{split.size:,} {name}" for name, split in sizes.items() if split is not None)
        described = {
            "Data": f"{data.name}: {counts}; {len(data.classes)} classes, {self.size} x {self.size} x {data.channels} pixels",
            "Augmentation": _augmentation(options),
        }
        self._say(
            estimates.describe_run(
                self.model,
                data=described,
                batch_size=self.config.batch_size,
                iterations=self.plan.iterations,
                steps_per_epoch=self.plan.steps_per_epoch,
                rate=plans.rate_at(self.rate),
                parts=self.plan.parts,
                devices=self.distribution.replicas,
                timing=clock.timing,
                updates_timed=together / self.plan.parts,
            )
        )

    def run(self) -> Path:
        """Train from where the run stands to its end and return its directory.

        Raises:
            UserError: for a directory with something else in it, a loss that is not finite, a full disk.
            KeyboardInterrupt: behind the step in which Ctrl-C was pressed; a checkpoint was saved then.
            SystemExit: with status 75 behind the step in which SIGTERM came; a checkpoint was saved then.
        """
        chief = self.distribution.is_chief
        run = self._directory()
        if (run / "model.keras").is_file():
            self._say(f"Finished already: {run / 'model.keras'}. Next: {command('evaluate')} {run}")
            return run
        checkpoints = Checkpoints(run / "checkpoints", self.config.checkpoint.keep, write=chief)
        saved = checkpoints.newest(lambda message: self._say(f"warning: {message}"))
        if saved is not None:
            saved.restore(self.model)
        elif chief:
            self._begin(run)
        self._say(self._opening(run, saved), flush=True)
        fit = Fit(self, run, checkpoints, saved)
        try:
            with fit.stop:
                fit.train()
        except KeyboardInterrupt:
            self._say(fit.summary("Interrupted"))
            raise
        except callbacks.Diverged as diverged:
            raise UserError(self._explained(diverged, checkpoints, run)) from diverged
        finally:
            fit.close()
        fit.saver.save_now()
        networks.save(self.model, run / "model.keras", write=chief)
        if chief:
            measured_on = "validation" if self.data.holdout else "test"
            with runs.replacing(run / "curves.png") as temporary:
                curves.draw(run / "history.csv", temporary, f"{self.model.name}, {run.name}", measured_on)
        self._say(f"Finished: {run / 'model.keras'}. Next: {command('evaluate')} {run}")
        return run

    def batches(self, first: int) -> Iterator[tuple]:
        """Return this process's batches from step `first` of `fit` on, as arrays."""
        return self.stream.dataset(first, self.rows).as_numpy_iterator()

    def _say(self, message: str, **options) -> None:
        if self.distribution.is_chief:
            print(message, **options)

    def _directory(self) -> Path:
        """Return the run's directory: a new one, or that of a run which this one goes on with."""
        output, chief = self.config.output, self.distribution.is_chief
        if output is not None and (self.config.resume or not chief):
            if (output / "config.json").is_file():
                runs.check_same(output, self.config)
                return output
            if not chief:  # who is about to begin it
                return output
        return runs.new_directory(output, self.recipe)

    def _begin(self, run: Path) -> None:
        # the configuration first: a run that is killed in here can be begun again
        run.mkdir(parents=True, exist_ok=True)
        described = describe(self.config, self.recipe, self.data, self.plan.iterations, self._parameters)
        runs.write_json(run / "config.json", described)
        (run / "checkpoints").mkdir(exist_ok=True)
        with runs.replacing(run / "checkpoints" / networks.ARCHITECTURE) as temporary:
            temporary.write_text(self.model.to_json())

    @property
    def _parameters(self) -> int:
        return sum(math.prod(weight.shape) for weight in self.model.trainable_weights)

    def _opening(self, run: Path, saved: Saved | None) -> str:
        devices = f" on {self.distribution.replicas} devices" if self.distribution.replicas > 1 else ""
        done = "" if saved is None else f" Going on behind iteration {saved.step // self.plan.parts:,}."
        return (
            f"Training {self.model.name} ({self._parameters:,} trainable parameters) on {self.data.train.size:,} images of "
            f"{self.data.name} for {self.plan.iterations:,} iterations of {self.config.batch_size} "
            f"({keras.backend.backend()}{devices}). Run directory: {run}.{done}"
        )

    def _explained(self, diverged: callbacks.Diverged, checkpoints: Checkpoints, run: Path) -> str:
        saved = checkpoints.newest(lambda message: None)
        if saved is None or self.distribution.processes > 1:
            return (
                f"The loss is {diverged.loss} in {self._place(diverged.step)}: training diverged. Lower "
                f"--optimizer.learning-rate or lengthen --schedule.warmup. The checkpoints of {run} are of before."
            )
        seeds = self.seeds(callbacks.Count(self.plan.per_epoch))
        before_step = seeds.before_step if seeds else lambda step: None
        return divergence.explain(self.model, saved, self.batches, diverged.step, before_step=before_step, where=self._place)

    def _place(self, step: int) -> str:
        """Return the name that a step of `fit` has for a person."""
        return f"iteration {step // self.plan.parts + 1:,} (epoch {step // self.plan.per_epoch + 1})"

    def seeds(self, count: callbacks.Count) -> callbacks.TorchSeeds | None:
        if keras.backend.backend() != "torch":
            return None
        return callbacks.TorchSeeds(self.config.seed, self.distribution.process, count)


def _augmentation(options: Data) -> str:
    """Return in words what happens to the images."""
    padding = f", padded with: {options.padding}" if options.augmentation == "pad_crop_flip" else ""
    parts = [options.augmentation + padding]
    if options.rand_augment is not None:
        count, magnitude = options.rand_augment
        parts.append(f"RandAugment, {count} operations of magnitude {magnitude}")
    parts += [
        f"{name} with alpha {alpha:g}" for name, alpha in (("mixup", options.mixup), ("CutMix", options.cutmix)) if alpha
    ]
    return "; ".join(parts)


def _image_size(config: Config, data: datasets.ImageData) -> int:
    size = config.data.size or data.size
    if size is None:
        raise UserError(f"The images of {data.name} differ in size: give --data.size.")
    return size


def describe(config: Config, recipe: str, data, iterations: int, parameters: int) -> dict:
    """Return what config.json holds: the configuration, and all that a later command has to know of data and software."""
    return {
        "recipe": recipe,
        "config": dataclasses.asdict(config),
        "classes": list(data.classes),
        "images": {"train": data.train.size, "holdout": data.holdout.size if data.holdout else 0, "test": data.test.size},
        "preprocessing": data.preprocessing.to_dict(),
        "iterations": iterations,
        "trainable_parameters": parameters,
        "versions": {
            "python": platform.python_version(),
            "keras": keras.__version__,
            "backend": keras.backend.backend(),
            "tensorflow": tf.__version__,
            "numpy": np.__version__,
        },
    }
