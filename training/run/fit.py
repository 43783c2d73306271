"""`model.fit` of a run: from which step, on which batches, with which callbacks."""

import os
from collections.abc import Sequence
from pathlib import Path

import keras
import tensorflow as tf

import keras_preact as kp

from .. import disk
from ..directory import models, runs
from ..directory.checkpoints import Best, Checkpoints, Saved, Saver
from . import callbacks, divergence, plans
from .progress import Progress
from .run import Run
from .signals import Stop

#: Number of images on which activations are measured.
HEALTH_IMAGES = 32
#: Executions between two exchanges of signals among several processes. An exchange takes
#: milliseconds.
AGREE = 4
#: Callbacks that an option turns off, also when a run is resumed.
OPTIONAL = ("best", "health")


class Fit:
    """`model.fit` of a run, from a checkpoint on.

    Args:
        run: The run.
        folder: Its directory.
        checkpoints: Its checkpoints.
        saved: Checkpoint that the model was restored from; None for a new run.
        added: Callbacks of the user.
        again: How to resume the run. None: with `keras-preact resume`.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        checkpoints: Checkpoints,
        saved: Saved | None,
        added: Sequence[keras.callbacks.Callback],
        again: str | None,
    ):
        self.run = run
        self.folder = folder
        self.saved = saved
        self.added = added
        self.again = again
        config, plan, chief = run.config, run.plan, run.is_chief
        done = 0 if saved is None else saved.step
        self.count = callbacks.Count(plan.per_epoch, done)
        self.progress = Progress(
            plan.iterations,
            plan.epochs,
            config.batch_size,
            done=done,
            micro_batches=plan.micro_batches,
            held_out=run.monitored,
            tensorboard=folder / "tensorboard" if chief else None,
            learning_rate=self._rate,
            stream=None if chief else open(os.devnull, "w"),  # noqa: SIM115  (as long as the process lives)
        )
        self.history = callbacks.History(
            folder / "history.csv",
            lambda: self.count.step // plan.micro_batches,
            lambda: self.progress.figures,
            write=chief,
        )
        self.first_losses = callbacks.FirstLosses(
            folder / "first_losses.csv", self.count, write=chief
        )
        self.averages = None if config.optimizer.ema is None else keras.callbacks.SwapEMAWeights()
        self.best = self._best() if config.checkpoint.best else None
        self.health = self._health() if config.health else None
        self.profile = None
        if config.profile and chief:
            first, last = config.profile
            steps = (first - 1) * plan.micro_batches + 1, last * plan.micro_batches
            self.profile = callbacks.Profile(folder / "tensorboard", *steps, self.count)
        self.saver = Saver(
            checkpoints,
            config.checkpoint.minutes,
            config.checkpoint.every * plan.micro_batches,
            self._state,
        )
        self.stop = Stop(
            self.saver.save_now,
            self.progress.report,
            run.distribution.highest,
            AGREE if run.distribution.processes > 1 else 1,
        )
        self.saver.saved_step = done
        if saved is not None:
            self.history.restore(saved.progress["history"])
            self.progress.restore(saved.progress["progress"])
            for name in OPTIONAL:
                callback, state = getattr(self, name), saved.progress[name]
                if callback is not None and state is not None:
                    callback.restore(state)

    def train(self) -> None:
        """Train to the end of the run, and close what was opened for it.

        Raises:
            callbacks.Diverged: for a loss or weights that are not finite, with an explanation.
            KeyboardInterrupt, SystemExit: after the step in which a signal came; a
                checkpoint is saved, and a message says so.
        """
        diverged_in = self.folder / runs.DIVERGED
        if self.run.is_chief:
            diverged_in.unlink(missing_ok=True)  # it is resumed
        try:
            with self.stop:
                self._call_fit()
        except (KeyboardInterrupt, SystemExit) as ended:
            self._close()
            self.run.say(self._interruption(ended))
            raise
        except callbacks.Diverged as diverged:
            diverged.explanation = divergence.message(
                diverged.fault,
                self.run.describe_step(diverged.step),
                self.run.config.optimizer.learning_rate,
                self.health,
            )
            if self.run.is_chief:
                iteration = diverged.step // self.run.plan.micro_batches + 1
                disk.write_json(diverged_in, {"iteration": iteration})
            raise
        finally:
            self._close()

    def _call_fit(self) -> None:
        run, plan = self.run, self.run.plan
        model = run.model
        # not by the steps: the last epoch may be short
        epoch = min(len(self.history.rows), plan.epochs)
        done = max(0, self.count.step - epoch * plan.per_epoch)
        self.saver.set_model(model)
        if self.saved is None:
            self.saver.save_now()  # from now on the run does not need the file of `model.weights`
        # In order: the counter that others read, what looks at the step, the progress and the
        # history that reads it, what saves them, and last what may end the run.
        watching = [
            self.count,
            run.seeds(self.count),
            self.first_losses,
            callbacks.StopOnNaN(self.count),
            self.health,
            self.averages,
            self.progress,
            self.history,
            self.best,
            self.profile,
            *self.added,
            callbacks.StopAt(plan.steps, self.count),
            self.saver,
            self.stop,
        ]
        split = run.split
        model.fit(
            run.distribution.training_data(self._batches(done)),
            initial_epoch=epoch,
            epochs=plan.epochs,
            steps_per_epoch=plan.per_epoch,
            class_weight=run.class_weights,
            validation_data=None if split is None else run.evaluation_data(split),
            shuffle=False,  # the batches come shuffled
            callbacks=callbacks.Continued(
                [callback for callback in watching if callback is not None],
                done=done,
                restore=self._restore_metrics,
                model=model,
                epochs=plan.epochs,
                steps=plan.per_epoch,
            ),
            verbose=0,
        )

    def _close(self) -> None:
        self.progress.close()
        if self.health is not None:
            self.health.remove()
        if self.profile is not None:
            self.profile.close()

    def _interruption(self, ended: BaseException) -> str:
        """Return the message of a run that ended early."""
        plan = self.run.plan
        event = "Interrupted" if isinstance(ended, KeyboardInterrupt) else "Stopped by SIGTERM"
        iteration = self.count.step // plan.micro_batches
        missing = iteration - self.saver.saved_step // plan.micro_batches
        saved = (
            "the checkpoint is saved"
            if not missing
            else f"the last checkpoint is {missing:,} iterations older"
        )
        return (
            f"{event} after iteration {iteration:,} of {plan.iterations:,}; {saved}. Resume: "
            f"{self.again or runs.resuming(self.folder)}"
        )

    def _state(self) -> dict:
        return {
            "step": self.count.step,
            "history": self.history.state(),
            "progress": self.progress.state(),
            **{name: self._state_of(name) for name in OPTIONAL},
        }

    def _state_of(self, name: str) -> dict | None:
        """Return the state of a callback. One that is off keeps the state that it had."""
        callback = getattr(self, name)
        if callback is not None:
            return callback.state()
        return None if self.saved is None else self.saved.progress[name]

    def _restore_metrics(self) -> None:
        assert self.saved is not None
        run = self.run
        if keras.backend.backend() == "tensorflow" and run.distribution.kind == "none":
            # Without a strategy, TensorFlow makes the metrics when it traces the first step. They
            # are made here, so that they can get the saved values.
            labels = run.training_data().element_spec[1]
            scores = tf.zeros((labels.shape[0], len(run.data.classes)))
            run.model.compute_metrics(None, tf.zeros(labels.shape, labels.dtype), scores)
        self.saved.restore_metrics(run.model)

    def _best(self) -> Best:
        """Return the callback that saves the best epoch, by the held-out accuracy or
        the training loss.
        """
        monitor = ("val_accuracy", True) if self.run.data.holdout else ("loss", False)
        return Best(self.folder / "checkpoints", *monitor, save=self._save)

    def _save(self, path: Path) -> None:
        """Save the network as it is evaluated."""
        if self.averages is not None:
            self.averages.on_test_begin()
        models.save(self.run.network, path, self.run.is_chief)
        if self.averages is not None:
            self.averages.on_test_end()

    def _rate(self, update: int) -> float:
        """Return the learning rate of an update. Without a schedule, it is read from the
        optimizer: callbacks may have changed it.
        """
        rate = self.run.rate if callable(self.run.rate) else self.run.model.optimizer.learning_rate
        return plans.rate_at(rate)(update)

    def _batches(self, done: int) -> tf.data.Dataset:
        """Return the batches from the start of the epoch. Batches of the steps that are
        already done hold zeros: `Continued` skips them without training.
        """
        batches = self.run.training_data(self.count.step)
        if not done:
            return batches
        zeros = tf.nest.map_structure(
            lambda spec: tf.zeros(spec.shape, spec.dtype), batches.element_spec
        )
        return tf.data.Dataset.from_tensors(zeros).repeat(done).concatenate(batches)

    def _health(self) -> kp.TrainingHealth:
        """Return the callback for the health of training, which measures some training
        images.
        """
        run = self.run
        one_process = run.distribution.processes == 1
        return kp.TrainingHealth(
            run.config.health,
            sample=run.plain_images(HEALTH_IMAGES) if one_process else None,
            csv=self.folder / "health.csv" if run.is_chief else None,
            tensorboard=self.folder / "tensorboard" / "health" if run.is_chief else None,
            report=lambda message: self.progress.report(f"Health: {message}"),
        )
