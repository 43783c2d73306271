"""The trainer: takes a run from its beginning or a checkpoint to its end or an
interruption.
"""

import math
from pathlib import Path

import keras

from . import callbacks, curves, divergence, estimates, histories, networks, plans, runs
from .checkpoints import Checkpoints, Saved
from .cli import command
from .config import Data
from .experiment import Experiment
from .fit import Fit
from .terminal import duration

#: Executions of a dry run: one that compiles, and those that are timed.
TIMED = 4
#: A training that ends with so many times the loss of guessing had too high a learning rate.
WORSE = 10


class Trainer:
    """Trains an experiment in a run directory.

    Args:
        experiment: What is trained.
        recipe: Name of the recipe.
    """

    def __init__(self, experiment: Experiment, recipe: str):
        self.experiment = experiment
        self.recipe = recipe
        self._run: Path | None = None
        for warning in (*experiment.data.notes, experiment.warning):
            if warning is not None:
                self._say(f"Warning: {warning}")

    def rehearse(self) -> None:
        """Print a description of the run and its costs. This trains a few steps and
        writes nothing.
        """
        experiment = self.experiment
        config, plan, data = experiment.config, experiment.plan, experiment.data
        clock = estimates.Clock()
        experiment.model.fit(
            experiment.distribution.training_data(experiment.training_data()),
            steps_per_epoch=TIMED * config.steps_per_execution,
            shuffle=False,
            callbacks=[clock],
            verbose=0,
        )
        sizes = {"to train": data.train, "held out": data.holdout, "to test": data.test}
        counts = ", ".join(
            f"{split.size:,} {name}" for name, split in sizes.items() if split is not None
        )
        described = {
            "Data": (
                f"{data.name}: {counts}; {len(data.classes)} classes; {experiment.size} x "
                f"{experiment.size} pixels, {data.channels} "
                f"channel{'s' * (data.channels > 1)}"
            ),
            "Augmentation": _augmentation(config.data),
        }
        self._say(
            estimates.describe_run(
                experiment.network,
                data=described,
                batch_size=config.batch_size,
                iterations=plan.iterations,
                steps_per_epoch=plan.steps_per_epoch,
                rate=plans.rate_at(experiment.rate),
                parts=plan.parts,
                devices=experiment.distribution.replicas,
                timing=clock.timing,
                updates_timed=config.steps_per_execution / plan.parts,
            )
        )

    def run(self) -> Path:
        """Train the rest of the run and return its directory.

        Raises:
            UserError: for a directory that is not empty or in which another process
                trains, a full disk.
            callbacks.Diverged: for a loss that is not finite; `explain` says why.
            KeyboardInterrupt: after the step in which Ctrl-C was pressed; a checkpoint
                is saved.
            SystemExit: with status 75 after the step in which SIGTERM came; a
                checkpoint is saved.
        """
        run = self._run = self._directory(self.experiment.config.output)
        if (run / "model.keras").is_file():
            self.experiment.network.set_weights(networks.load(run / "model.keras").get_weights())
            if not (run / "curves.png").is_file():  # the process was killed before it drew them
                self._draw(run)
            self._say_end(run, "Already finished")
            return run
        if not self.experiment.distribution.is_chief:
            return self._train(run)
        run.mkdir(parents=True, exist_ok=True)
        with runs.held(run):
            self._directory(run)  # another process may have begun a run in it since
            return self._train(run)

    def _train(self, run: Path) -> Path:
        experiment = self.experiment
        chief = experiment.distribution.is_chief
        checkpoints = self._checkpoints(run)
        saved = checkpoints.newest(lambda message: self._say(f"Warning: {message}"))
        if saved is not None:
            saved.restore(experiment.model)
        elif chief:
            self._begin(run)
        self._say(self._opening(run, saved), flush=True)
        fit = Fit(experiment, run, checkpoints, saved)
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
        finally:
            fit.close()
        fit.saver.save_now()
        networks.save(experiment.network, run / "model.keras", write=chief)
        self._draw(run)
        self._say_end(run, "Finished")
        return run

    def explain(self, diverged: callbacks.Diverged) -> str:
        """Return why a run diverged: the cause and the remedy."""
        experiment = self.experiment
        rate = experiment.config.optimizer.learning_rate
        assert self._run is not None
        saved = self._checkpoints(self._run).newest(lambda message: None)
        if saved is None or experiment.distribution.processes > 1:
            return divergence.message(diverged.loss, experiment.place(diverged.step), rate)
        seeds = experiment.seeds(callbacks.Count(experiment.plan.per_epoch))
        return divergence.explain(
            experiment.model,
            saved,
            experiment.batches,
            diverged.step,
            learning_rate=rate,
            before_step=seeds.before_step if seeds else lambda step: None,
            where=experiment.place,
        )

    def _directory(self, output: Path | None) -> Path:
        """Return the run's directory: a new one, or that of the run to resume."""
        chief = self.experiment.distribution.is_chief
        if output is not None and (self.experiment.config.resume or not chief):
            if (output / "config.json").is_file():
                runs.check_same(output, self.experiment.config)
                return output
            if not chief:  # the chief is about to make it
                return output
        return runs.new_directory(output, self.recipe)

    def _checkpoints(self, run: Path) -> Checkpoints:
        return Checkpoints(
            run / "checkpoints",
            self.experiment.config.checkpoint.keep,
            write=self.experiment.distribution.is_chief,
        )

    def _draw(self, run: Path) -> None:
        """Draw the learning curves of a finished run."""
        if self.experiment.distribution.is_chief:
            title = f"{self.experiment.network.name}, {run.name}"
            with runs.replacing(run / "curves.png") as temporary:
                curves.draw(
                    {title: histories.read(run / "history.csv")},
                    temporary,
                    title,
                    self.experiment.watched,
                )

    def _say_end(self, run: Path, what: str) -> None:
        """Print the result of a run, whose weights the model has, and what can be done
        next.
        """
        experiment = self.experiment
        history = histories.read(run / "history.csv") if experiment.distribution.is_chief else {}
        time = (
            f" after {duration(history['seconds'][-1])} of training"
            if len(history.get("seconds", ()))
            else ""
        )
        loss = history["loss"][-1] if "loss" in history else 0.0
        guessing = math.log(len(experiment.data.classes))
        if loss > WORSE * guessing:
            rate = experiment.config.optimizer.learning_rate
            self._say(
                f"Warning: learning rate {rate:g} is probably too high: the last loss is "
                f"{loss:.3g}, and that of guessing is {guessing:.3g}. Try {rate / 10:g}."
            )
        self._say(f"{what}{time}: {run / 'model.keras'}", flush=True)
        split = experiment.split or experiment.data.test
        if experiment.split is None:
            accuracy = experiment.model.evaluate(
                experiment.evaluation_data(split), verbose=0, return_dict=True
            )["accuracy"]
        else:
            accuracy = history["val_accuracy"][-1] if "val_accuracy" in history else math.nan
        self._say(
            f"Accuracy: {100 * accuracy:.2f} % of the {split.size:,} {experiment.watched} images."
        )
        self._say(f"Next: {command('evaluate')} {run}")

    def _say(self, message: str, **options) -> None:
        if self.experiment.distribution.is_chief:
            print(message, **options)

    def _begin(self, run: Path) -> None:
        # the configuration first: a run that is killed here can be started again
        runs.write_json(run / "config.json", self.experiment.described(self.recipe))
        (run / "checkpoints").mkdir(exist_ok=True)
        with runs.replacing(run / "checkpoints" / networks.ARCHITECTURE) as temporary:
            temporary.write_text(self.experiment.network.to_json())

    def _opening(self, run: Path, saved: Saved | None) -> str:
        experiment = self.experiment
        config, plan, data = experiment.config, experiment.plan, experiment.data
        replicas = experiment.distribution.replicas
        epochs = plan.iterations / plan.steps_per_epoch
        whole = f"{plan.epochs:,} epoch{'s' * (plan.epochs > 1)}"
        length = (
            whole
            if epochs == plan.epochs
            else f"{plan.iterations:,} iterations ({epochs:.3g} epochs)"
        )
        parts = f" in {plan.parts} parts" if plan.parts > 1 else ""
        devices = f", {replicas} devices" if replicas > 1 else ""
        precision = f"; {experiment.precision}" if experiment.precision else ""
        trained = "trained parameters" if config.model.freeze else "parameters"
        images = data.name if data.name != "folder" else config.data.dir
        lines = [
            f"Training {experiment.network.name} ({experiment.parameters:,} {trained}) on "
            f"{data.train.size:,} images of {images} for {length}, batch "
            f"{config.batch_size}{parts} ({keras.backend.backend()}{devices}{precision}).",
            f"Run directory: {run}",
        ]
        if saved is not None:
            lines.append(f"Resuming after iteration {saved.step // plan.parts:,}.")
        return "\n".join(lines)


def _augmentation(options: Data) -> str:
    """Return the augmentation in words."""
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
