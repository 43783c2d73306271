"""The fit of a run: `model.fit` from a checkpoint on, with its callbacks."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

import keras_preact as kp

from . import callbacks, networks, plans
from . import data as datasets
from .averages import Averages
from .checkpoints import Best, Checkpoints, Saved, Saver
from .cli import command
from .progress import Progress
from .signals import Stop

if TYPE_CHECKING:
    from .trainer import Trainer

#: Images that the activations are measured on.
HEALTH_IMAGES = 32
#: Training batches that the batch statistics of averaged weights are computed from.
STATISTICS_BATCHES = 50


class Fit:
    """`model.fit` of a trainer, from a checkpoint on.

    Args:
        trainer: Trainer of the run.
        run: Run directory.
        checkpoints: Checkpoints in it.
        saved: Checkpoint that the model was restored from; None for a new run.
    """

    def __init__(
        self, trainer: "Trainer", run: Path, checkpoints: Checkpoints, saved: Saved | None
    ):
        self.trainer = trainer
        self.saved = saved
        self.run = run
        config, plan, chief = trainer.config, trainer.plan, trainer.distribution.is_chief
        done = 0 if saved is None else saved.step
        self.count = callbacks.Count(plan.per_epoch, done)
        self.progress = Progress(
            plan.iterations,
            plan.steps_per_epoch,
            config.batch_size,
            done=done // plan.parts,
            parts=plan.parts,
            held_out=trainer.watched,
            tensorboard=run / "tensorboard" if chief else None,
            learning_rate=plans.rate_at(trainer.rate),
            stream=None if chief else open(os.devnull, "w"),  # noqa: SIM115  (as long as the process lives)
        )
        self.history = callbacks.History(
            run / "history.csv",
            lambda: self.count.step // plan.parts,
            lambda: self.progress.figures,
            write=chief,
        )
        self.averages = None if config.optimizer.ema is None else Averages(self._plain_images)
        self.best = Best(run / "checkpoints", *_monitored(trainer), save=self._save)
        self.health = self._health()
        self.saver = Saver(
            checkpoints,
            config.checkpoint.minutes,
            config.checkpoint.every * plan.parts,
            self._state,
        )
        self.stop = Stop(self.saver.save_now, self.progress.report)
        self.saver.saved_step = done
        if saved is not None:
            self.history.restore(saved.progress["history"])
            self.best.restore(saved.progress["best"])
            self.progress.restore(saved.progress["progress"])
            if self.health is not None and saved.progress["health"] is not None:
                self.health.restore(saved.progress["health"])

    def train(self) -> None:
        """Train to the end of the run."""
        trainer, plan = self.trainer, self.trainer.plan
        epoch = min(len(self.history.rows), plan.epochs)
        done = max(0, self.count.step - epoch * plan.per_epoch)
        self.saver.set_model(trainer.model)
        if self.saved is None:
            self.saver.save_now()  # from which a divergence is explained
        watching = [
            self.count,
            trainer.seeds(self.count),
            callbacks.StopOnNaN(self.count),
            self.health,
            self.averages,
            self.progress,
            self.history,
            self.best,
            callbacks.StopAt(plan.steps, self.count),
            self.saver,
            self.stop,
        ]
        trainer.model.fit(
            trainer.distribution.training_data(self._batches(done)),
            initial_epoch=epoch,
            epochs=plan.epochs,
            steps_per_epoch=plan.per_epoch,
            validation_data=None
            if trainer.split is None
            else trainer.evaluation_data(trainer.split),
            shuffle=False,  # the batches come shuffled
            callbacks=callbacks.Continued(
                [callback for callback in watching if callback is not None],
                done=done,
                restore=self._restore_metrics,
                model=trainer.model,
                epochs=plan.epochs,
                steps=plan.per_epoch,
            ),
            verbose=0,
        )

        if self.averages is not None:
            self.averages.finish()

    def close(self) -> None:
        self.progress.close()
        if self.health is not None:
            self.health.remove()

    def interruption(self, what: str) -> str:
        """Return what a person wants to know of a run that was ended early."""
        parts = self.trainer.plan.parts
        missing = self.count.step // parts - self.saver.saved_step // parts
        saved = (
            "the checkpoint is saved"
            if not missing
            else f"the last checkpoint is {missing:,} iterations older"
        )
        return (
            f"{what} after iteration {self.count.step // parts:,} of "
            f"{self.trainer.plan.iterations:,}; {saved}. Resume: {command('train')} --resume "
            f"{self.run}"
        )

    def _state(self) -> dict:
        return {
            "step": self.count.step,
            "history": self.history.state(),
            "best": self.best.state(),
            "progress": self.progress.state(),
            "health": None if self.health is None else self.health.state(),
        }

    def _restore_metrics(self) -> None:
        assert self.saved is not None
        self.saved.restore_metrics(self.trainer.model)

    def _save(self, path: Path) -> None:
        """Save the model as it is evaluated."""
        write = self.trainer.distribution.is_chief
        with contextlib.nullcontext() if self.averages is None else self.averages.active():
            networks.save(self.trainer.model, path, write)

    def _plain_images(self) -> Iterator[np.ndarray]:
        """Return batches of training images to compute batch statistics from."""
        trainer = self.trainer
        batches = datasets.evaluation_batches(
            trainer.data, trainer.data.train, trainer.config.part_size, trainer.size
        )
        return (images for images, _ in batches.take(STATISTICS_BATCHES).as_numpy_iterator())

    def _batches(self, done: int) -> tf.data.Dataset:
        """Return the batches from the beginning of the epoch on; those of the steps
        already done are empty.
        """
        trainer = self.trainer
        batches = trainer.stream.dataset(self.count.step, trainer.rows)
        if not done:
            return batches
        empty = tf.nest.map_structure(
            lambda spec: tf.zeros(spec.shape, spec.dtype), batches.element_spec
        )
        return tf.data.Dataset.from_tensors(empty).repeat(done).concatenate(batches)

    def _health(self) -> kp.TrainingHealth | None:
        """Return the callback for the health of training, which measures the first
        training images; None for no health.
        """
        trainer = self.trainer
        if trainer.config.health < 1:
            return None
        chief = trainer.distribution.is_chief
        return kp.TrainingHealth(
            trainer.config.health,
            sample=_sample(trainer) if trainer.distribution.processes == 1 else None,
            csv=self.run / "health.csv" if chief else None,
            tensorboard=self.run / "tensorboard" / "health" if chief else None,
            report=lambda message: self.progress.report(f"Health: {message}"),
        )


def _sample(trainer: "Trainer") -> np.ndarray:
    batches = datasets.evaluation_batches(
        trainer.data, trainer.data.train, HEALTH_IMAGES, trainer.size
    )
    [(images, _)] = batches.take(1).as_numpy_iterator()
    return images


def _monitored(trainer: "Trainer") -> tuple[str, bool]:
    """Return the figure that chooses the best epoch, and whether higher is better."""
    return ("val_accuracy", True) if trainer.data.holdout else ("loss", False)
