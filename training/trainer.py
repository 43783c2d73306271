"""The trainer: takes a run from its beginning or a checkpoint to its end or an
interruption.
"""

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
from .terminal import duration

#: Executions of a dry run: one that compiles, and those that are timed.
TIMED = 4


class Trainer:
    """Data, network and plan of a configuration, compiled for a distribution.

    Args:
        config: Configuration of the run.
        recipe: Name of the recipe.
        distribution: The active distribution.

    Attributes:
        watched: Name of the images that are measured after every epoch, in `split`:
            "held-out" or "test". The held-out ones choose the best epoch.
        split: Those images, or None: nothing is measured after an epoch.

    Raises:
        ValueError: for options that do not fit together; nothing is written then.
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
        self._check_warmup()
        self.rate = plans.learning_rate(config, self.plan)
        self.watched = "held-out" if self.data.holdout else "test"
        self.split = self.data.holdout or (self.data.test if config.data.watch_test else None)
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
            weighted_metrics=[
                "accuracy"
            ],  # without the rows that fill the last batch of an evaluation
            jit_compile=backends.jit_compile(config.jit_compile),
            steps_per_execution=config.steps_per_execution,
        )

    def rehearse(self) -> None:
        """Print a description of the run and its costs. This trains a few steps and
        writes nothing.
        """
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
        sizes = {"to train": data.train, "held out": data.holdout, "to test": data.test}
        counts = ", ".join(
            f"{split.size:,} {name}" for name, split in sizes.items() if split is not None
        )
        described = {
            "Data": (
                f"{data.name}: {counts}; {len(data.classes)} classes; {self.size} x {self.size} "
                f"pixels, {data.channels} channel{'s' * (data.channels > 1)}"
            ),
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
        """Train the rest of the run and return its directory.

        Raises:
            UserError: for a directory that is not empty, a loss that is not finite, a
                full disk.
            KeyboardInterrupt: after the step in which Ctrl-C was pressed; a checkpoint
                is saved.
            SystemExit: with status 75 after the step in which SIGTERM came; a
                checkpoint is saved.
        """
        chief = self.distribution.is_chief
        run = self._directory()
        if (run / "model.keras").is_file():
            self.model.set_weights(networks.load(run / "model.keras").get_weights())
            self._say_end(run, "Already finished")
            return run
        checkpoints = Checkpoints(run / "checkpoints", self.config.checkpoint.keep, write=chief)
        saved = checkpoints.newest(lambda message: self._say(f"Warning: {message}"))
        if saved is not None:
            saved.restore(self.model)
        elif chief:
            self._begin(run)
        self._say(self._opening(run, saved), flush=True)
        fit = Fit(self, run, checkpoints, saved)
        try:
            with fit.stop:
                fit.train()
        except (KeyboardInterrupt, SystemExit) as ended:
            fit.close()
            self._say(
                fit.interruption(
                    "Interrupted" if isinstance(ended, KeyboardInterrupt) else "Stopped by SIGTERM"
                )
            )
            raise
        except callbacks.Diverged as diverged:
            raise UserError(self._explained(diverged, checkpoints, run)) from diverged
        finally:
            fit.close()
        fit.saver.save_now()
        networks.save(self.model, run / "model.keras", write=chief)
        if chief:
            with runs.replacing(run / "curves.png") as temporary:
                curves.draw(
                    run / "history.csv", temporary, f"{self.model.name}, {run.name}", self.watched
                )
        self._say_end(run, "Finished")
        return run

    def evaluation_data(self, split: datasets.Split):
        """Return the images of a split as `evaluate` takes them."""
        config = self.config
        batches = datasets.evaluation_batches(
            self.data, split, config.part_size, config.data.size, self.rows
        )
        if config.data.mixes:  # the loss and the accuracy take one form of labels
            batches = batches.map(
                lambda images, labels: (images, tf.one_hot(labels, len(self.data.classes)))
            )
        return self.distribution.evaluation_data(batches, config.part_size, split.size)

    def _say_end(self, run: Path, what: str) -> None:
        """Print the result of a run, whose weights the model has, and what can be done
        next.
        """
        history = curves.read(run / "history.csv") if self.distribution.is_chief else {}
        time = (
            f" after {duration(history['seconds'][-1])} of training"
            if len(history.get("seconds", ()))
            else ""
        )
        self._say(f"{what}{time}: {run / 'model.keras'}", flush=True)
        split = self.split or self.data.test
        if self.split is None:
            accuracy = self.model.evaluate(
                self.evaluation_data(split), verbose=0, return_dict=True
            )["accuracy"]
        else:
            accuracy = history["val_accuracy"][-1] if "val_accuracy" in history else math.nan
        self._say(f"Accuracy: {100 * accuracy:.2f} % of the {split.size:,} {self.watched} images.")
        self._say(f"Next: {command('evaluate')} {run}")

    def batches(self, first: int) -> Iterator[tuple]:
        """Return the batches of this process from step `first` of `fit` on, as arrays."""
        return self.stream.dataset(first, self.rows).as_numpy_iterator()

    def _say(self, message: str, **options) -> None:
        if self.distribution.is_chief:
            print(message, **options)

    def _directory(self) -> Path:
        """Return the run's directory: a new one, or that of the run to resume."""
        output, chief = self.config.output, self.distribution.is_chief
        if output is not None and (self.config.resume or not chief):
            if (output / "config.json").is_file():
                runs.check_same(output, self.config)
                return output
            if not chief:  # the chief is about to make it
                return output
        return runs.new_directory(output, self.recipe)

    def _begin(self, run: Path) -> None:
        # the configuration first: a run that is killed here can be started again
        run.mkdir(parents=True, exist_ok=True)
        described = describe(
            self.config, self.recipe, self.data, self.plan.iterations, self._parameters
        )
        runs.write_json(run / "config.json", described)
        (run / "checkpoints").mkdir(exist_ok=True)
        with runs.replacing(run / "checkpoints" / networks.ARCHITECTURE) as temporary:
            temporary.write_text(self.model.to_json())

    @property
    def _parameters(self) -> int:
        return sum(math.prod(weight.shape) for weight in self.model.trainable_weights)

    def _opening(self, run: Path, saved: Saved | None) -> str:
        config, plan = self.config, self.plan
        epochs = plan.iterations / plan.steps_per_epoch
        whole = f"{plan.epochs:,} epoch{'s' * (plan.epochs > 1)}"
        length = (
            whole
            if epochs == plan.epochs
            else f"{plan.iterations:,} iterations ({epochs:.3g} epochs)"
        )
        parts = f" in {plan.parts} parts" if plan.parts > 1 else ""
        devices = (
            f", {self.distribution.replicas} devices" if self.distribution.replicas > 1 else ""
        )
        trained = "trained parameters" if config.model.freeze else "parameters"
        images = self.data.name if config.data.name != "folder" else config.data.dir
        lines = [
            f"Training {self.model.name} ({self._parameters:,} {trained}) on "
            f"{self.data.train.size:,} images of {images} for {length}, batch "
            f"{config.batch_size}{parts} ({keras.backend.backend()}{devices}).",
            f"Run directory: {run}",
        ]
        if saved is not None:
            lines.append(f"Resuming after iteration {saved.step // plan.parts:,}.")
        return "\n".join(lines)

    def _check_warmup(self) -> None:
        """Warn of a warm-up that the run does not outlast, or refuse it if the schedule
        needs the rest.
        """
        schedule = self.config.schedule
        if (
            self.config.iterations(schedule.warmup, self.plan.steps_per_epoch)
            < self.plan.iterations
        ):
            return
        message = (
            f"The warm-up ({schedule.warmup:g} {schedule.unit}) is not shorter than the run "
            f"({schedule.length:g} {schedule.unit}): the learning rate never reaches "
            f"{self.config.optimizer.learning_rate:g}. Shorten it, as with --schedule.warmup "
            f"{schedule.length / 10:g}, or train longer."
        )
        if schedule.kind == "cosine":
            raise UserError(message)
        self._say(f"Warning: {message}")

    def _explained(self, diverged: callbacks.Diverged, checkpoints: Checkpoints, run: Path) -> str:
        saved = checkpoints.newest(lambda message: None)
        if saved is None or self.distribution.processes > 1:
            return divergence.message(
                diverged.loss, self._place(diverged.step), self.config.optimizer.learning_rate
            )
        seeds = self.seeds(callbacks.Count(self.plan.per_epoch))
        return divergence.explain(
            self.model,
            saved,
            self.batches,
            diverged.step,
            learning_rate=self.config.optimizer.learning_rate,
            before_step=seeds.before_step if seeds else lambda step: None,
            where=self._place,
        )

    def _place(self, step: int) -> str:
        """Return a step of `fit` in words."""
        return (
            f"iteration {step // self.plan.parts + 1:,} (epoch {step // self.plan.per_epoch + 1})"
        )

    def seeds(self, count: callbacks.Count) -> callbacks.TorchSeeds | None:
        if keras.backend.backend() != "torch":
            return None
        return callbacks.TorchSeeds(self.config.seed, self.distribution.process, count)


def _augmentation(options: Data) -> str:
    """Return the augmentation in words."""
    padding = f", padded with: {options.padding}" if options.augmentation == "pad_crop_flip" else ""
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


def _image_size(config: Config, data: datasets.ImageData) -> int:
    size = config.data.size or data.size
    if size is None:
        raise UserError(
            f"The images of {data.name} differ in size. Choose one for the network, such as "
            "--data.size 64."
        )
    return size


def describe(config: Config, recipe: str, data, iterations: int, parameters: int) -> dict:
    """Return the content of config.json: the configuration, and the data and software
    that a later command needs.
    """
    return {
        "recipe": recipe,
        "config": dataclasses.asdict(config),
        "classes": list(data.classes),
        "images": {
            "train": data.train.size,
            "holdout": data.holdout.size if data.holdout else 0,
            "test": data.test.size,
        },
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
