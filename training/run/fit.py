"""The training of a run, from the start or a checkpoint to the end or an interruption:
restore or begin, `model.fit` with its callbacks, finish.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_preact as kp

from .. import disk
from ..directory import curves, histories, models, runs
from ..directory.checkpoints import Best, Checkpoints, Saved, Saver
from ..errors import checking, command
from ..functions import functions
from . import callbacks, divergence, estimates, messages, plans
from .progress import Progress
from .run import Run
from .signals import Stop

#: Number of executions in a dry run. The first one compiles, the others are timed.
TIMED = 4
#: Number of images on which activations are measured.
HEALTH_IMAGES = 32
#: Executions between two exchanges of signals among several processes. An exchange takes
#: milliseconds.
AGREE = 4


def train(run: Run) -> Path:
    """Train the rest of a run and return its directory.

    Raises:
        UserError: if the directory is not empty, another process trains in it, or the
            disk is full.
        callbacks.Diverged: for a loss that is not finite, with an explanation.
        KeyboardInterrupt: after the step in which Ctrl-C was pressed; a checkpoint is
            saved.
        SystemExit: with status 75 after the step in which SIGTERM came; a checkpoint is
            saved.
    """
    folder = _directory(run)
    if (folder / "model.keras").is_file():
        run.network.set_weights(models.load(folder / "model.keras").get_weights())
        if not (folder / "curves.png").is_file():  # the process was killed before it drew them
            _draw(run, folder)
        _say_end(run, folder, "Already finished")
    elif run.is_chief:
        disk.make(folder)
        with runs.held(folder):
            _directory(run, folder)  # another process may have begun a run in it since
            _train_in(folder, run)
    else:
        _train_in(folder, run)
    return folder


def _train_in(folder: Path, run: Run) -> None:
    added = callbacks.made_by_user(run.config.callbacks, folder) if run.is_chief else []

    # --- Restore the newest checkpoint, or begin
    checkpoints = Checkpoints(
        folder / "checkpoints", run.config.checkpoint.keep, write=run.is_chief
    )
    saved = checkpoints.newest(lambda message: run.say(f"Warning: {message}"))
    if saved is not None:
        saved.restore(run.model)
    elif run.is_chief:
        # write the configuration first: a run that is killed here can be started again
        disk.write_json(folder / "config.json", run.described())
        disk.make(folder / "checkpoints")
        with disk.replacing(folder / "checkpoints" / models.ARCHITECTURE) as temporary:
            temporary.write_text(run.network.to_json())

    # --- Fit
    run.say(messages.beginning(run, folder, saved))
    with checking():
        fit = Fit(run, folder, checkpoints, saved, added)
    try:
        with fit.stop:
            fit.train()
    except (KeyboardInterrupt, SystemExit) as ended:
        fit.close()
        run.say(fit.interruption(ended))
        raise
    finally:
        fit.close()

    # --- Finish
    models.save(run.network, folder / "model.keras", write=run.is_chief)
    _draw(run, folder)
    _say_end(run, folder, "Finished")


def rehearse(run: Run) -> None:
    """Train a few steps and print a description of the run and its costs; write
    nothing.
    """
    ends: list[float] = []

    def note(batch, logs):
        float(logs["loss"])  # wait for the results
        ends.append(time.perf_counter())

    run.model.fit(
        run.distribution.training_data(run.training_data()),
        steps_per_epoch=TIMED * run.config.steps_per_execution,
        shuffle=False,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_train_begin=lambda logs: ends.append(time.perf_counter()),
                on_train_batch_end=note,
            )
        ],
        verbose=0,
    )
    run.say(estimates.describe(run, np.diff(ends).tolist()))


class Fit:
    """`model.fit` of a run, from a checkpoint on.

    Args:
        run: The run.
        folder: Its directory.
        checkpoints: Its checkpoints.
        saved: Checkpoint that the model was restored from; None for a new run.
        added: Callbacks of the user.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        checkpoints: Checkpoints,
        saved: Saved | None,
        added: Sequence[keras.callbacks.Callback],
    ):
        self.run = run
        self.folder = folder
        self.saved = saved
        self.added = added
        config, plan, chief = run.config, run.plan, run.is_chief
        done = 0 if saved is None else saved.step
        self.count = callbacks.Count(plan.per_epoch, done)
        self.progress = Progress(
            plan.iterations,
            plan.epochs,
            config.batch_size,
            done=done // plan.parts,
            parts=plan.parts,
            held_out=run.watched,
            tensorboard=folder / "tensorboard" if chief else None,
            learning_rate=self._rate,
            stream=None if chief else open(os.devnull, "w"),  # noqa: SIM115  (as long as the process lives)
        )
        self.history = callbacks.History(
            folder / "history.csv",
            lambda: self.count.step // plan.parts,
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
            steps = (first - 1) * plan.parts + 1, last * plan.parts
            self.profile = callbacks.Profile(folder / "tensorboard", *steps, self.count)
        self.saver = Saver(
            checkpoints,
            config.checkpoint.minutes,
            config.checkpoint.every * plan.parts,
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
            for name in ("best", "health"):
                callback, state = getattr(self, name), saved.progress[name]
                if callback is not None and state is not None:
                    callback.restore(state)

    def train(self) -> None:
        """Train to the end of the run.

        Raises:
            callbacks.Diverged: for a loss that is not finite, with an explanation.
        """
        try:
            self._call_fit()
        except callbacks.Diverged as diverged:
            diverged.explanation = divergence.message(
                diverged.loss,
                self.run.place(diverged.step),
                self.run.config.optimizer.learning_rate,
                self.health,
            )
            raise

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

    def close(self) -> None:
        self.progress.close()
        if self.health is not None:
            self.health.remove()
        if self.profile is not None:
            self.profile.close()

    def interruption(self, ended: BaseException) -> str:
        """Return the message of a run that ended early."""
        plan = self.run.plan
        event = "Interrupted" if isinstance(ended, KeyboardInterrupt) else "Stopped by SIGTERM"
        missing = self.count.step // plan.parts - self.saver.saved_step // plan.parts
        saved = (
            "the checkpoint is saved"
            if not missing
            else f"the last checkpoint is {missing:,} iterations older"
        )
        trusting = ["--trust"] if functions(self.run.config) else []
        return (
            f"{event} after iteration {self.count.step // plan.parts:,} of {plan.iterations:,}; "
            f"{saved}. Resume: {command('train', '--resume', self.folder, *trusting)}"
        )

    def _state(self) -> dict:
        return {
            "step": self.count.step,
            "history": self.history.state(),
            "best": None if self.best is None else self.best.state(),
            "progress": self.progress.state(),
            "health": None if self.health is None else self.health.state(),
        }

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
        """Return the callback for the health of training, which measures the first
        training images.
        """
        run = self.run
        one_process = run.distribution.processes == 1
        return kp.TrainingHealth(
            run.config.health,
            sample=next(run.plain_images(HEALTH_IMAGES, 1)) if one_process else None,
            csv=self.folder / "health.csv" if run.is_chief else None,
            tensorboard=self.folder / "tensorboard" / "health" if run.is_chief else None,
            report=lambda message: self.progress.report(f"Health: {message}"),
        )


def _directory(run: Run, output: Path | None = None) -> Path:
    """Return the directory of a run: a new one, or the one to resume."""
    output = output or run.config.output
    if output is not None and (run.config.resume or not run.is_chief):
        if (output / "config.json").is_file():
            runs.check_same(output, run.config, run.described_data())
            return output
        if not run.is_chief:  # the chief is about to make it
            return output
    return runs.new_directory(output, run.recipe)


def _draw(run: Run, folder: Path) -> None:
    """Draw the learning curves of a finished run."""
    if run.is_chief:
        title = f"{run.network.name}, {folder.name}"
        with disk.replacing(folder / "curves.png") as temporary:
            curves.draw(
                {title: histories.read(folder / "history.csv")}, temporary, title, run.watched
            )


def _say_end(run: Run, folder: Path, what: str) -> None:
    """Print the result of a run. The model has its final weights."""
    history = histories.read(folder / "history.csv") if run.is_chief else {}
    # measured again: callbacks may have changed the weights since the last epoch
    images = run.evaluation_data(run.split or run.data.test)
    accuracy = run.model.evaluate(images, verbose=0, return_dict=True)["accuracy"]
    run.say(messages.end(run, folder, what, history, accuracy))
