"""The phases of a run, in the order of time: restore or begin, fit, finish. Or a rehearsal
of a few steps, which writes nothing.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np

from .. import disk
from ..data import broken
from ..directory import curves, histories, models, runs
from ..directory.checkpoints import Checkpoints
from ..errors import checking
from . import callbacks, estimates, messages
from .fit import Fit
from .run import Run

#: Number of executions in a rehearsal. The first one compiles, the others are timed.
TIMED = 4


def train(run: Run, again: str | None = None) -> Path:
    """Train the rest of a run and return its directory.

    Args:
        run: The run.
        again: How to resume it, for the message of an interruption. None: with
            `keras-preact resume`.

    Raises:
        UserError: if the directory is not empty, another process trains in it, or the
            disk is full.
        callbacks.Diverged: for a loss or weights that are not finite, with an explanation.
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
        return folder

    with _locked(run, folder):
        added = callbacks.make(run.config.callbacks, folder) if run.is_chief else []

        # --- Restore the newest checkpoint, or begin
        checkpoints = Checkpoints(
            folder / "checkpoints", run.config.checkpoint.keep, write=run.is_chief
        )
        saved = checkpoints.newest(lambda message: run.say(f"Warning: {message}"))
        if saved is not None:
            saved.restore(run.model)
            if run.is_chief:
                runs.keep_free_options(folder, run.config)
        elif run.is_chief:
            _begin(run, folder)

        # --- Fit
        run.say(messages.beginning(run, folder, saved))
        with checking():
            fit = Fit(run, folder, checkpoints, saved, added, again)
        fit.train()

        # --- Finish
        models.save(run.network, folder / "model.keras", write=run.is_chief)
        _draw(run, folder)
        _say_end(run, folder, "Finished")
    return folder


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


@contextlib.contextmanager
def _locked(run: Run, folder: Path) -> Iterator[None]:
    """Hold the directory while the process that writes trains in it."""
    if not run.is_chief:
        yield
        return
    begun = (folder / "config.json").is_file()
    disk.make(folder, None if begun else "--output")
    with runs.locked(folder):
        _directory(run, folder)  # another process may have begun a run in it since
        yield


def _begin(run: Run, folder: Path) -> None:
    # write the configuration first: a run that is killed here can be started again
    disk.write_json(folder / "config.json", run.described())
    if run.data.broken:
        with disk.replacing(folder / runs.BROKEN) as temporary:
            temporary.write_bytes(broken.lines(run.data.broken))
    disk.make(folder / "checkpoints")
    with disk.replacing(folder / "checkpoints" / models.ARCHITECTURE) as temporary:
        temporary.write_text(run.network.to_json())


def _draw(run: Run, folder: Path) -> None:
    """Draw the learning curves of a finished run."""
    if run.is_chief:
        title = f"{run.network.name}, {folder.name}"
        with disk.replacing(folder / "curves.png") as temporary:
            curves.draw(
                {title: histories.read(folder / "history.csv")}, temporary, title, run.monitored
            )


def _say_end(run: Run, folder: Path, what: str) -> None:
    """Print the result of a run. The model has its final weights."""
    history = histories.read(folder / "history.csv") if run.is_chief else {}
    # measured again: callbacks may have changed the weights since the last epoch
    images = run.evaluation_data(run.split or run.data.test)
    accuracy = run.model.evaluate(images, verbose=0, return_dict=True)["accuracy"]
    run.say(messages.end(run, folder, what, history, accuracy))
