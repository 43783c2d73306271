"""Train a network: `python -m training.train RECIPE [--option value ...]`.

Writes a run directory (runs/RECIPE-DATE-TIME, or --output). `python -m training.train --help` lists the recipes, `python -m
training.train RECIPE --help` every option. The environment's KERAS_BACKEND chooses tensorflow (default), jax or torch.
"""

import dataclasses
import inspect
import math
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_preact import _checks
from training import backends, cli
from training.config import Config
from training.recipes import RECIPES

#: On which the activations are measured.
HEALTH_IMAGES = 32


def train(config: Config, recipe: str) -> Path:
    """Train as `config` says and return the run directory.

    Raises:
        ValueError: for a configuration that does not fit; nothing is written then.
    """
    import keras

    import keras_preact as kp
    from training import data as datasets
    from training import runs

    run = runs.new_directory(config.output, recipe)
    keras.utils.set_random_seed(config.seed)
    backends.keep_accelerator_for_backend(keras.backend.backend())
    data = datasets.load(config.data)
    size = config.data.size or data.size
    if size is None:
        raise cli.UserError(f"The images of {data.name} differ in size: give --data.size.")
    batches = datasets.training_batches(data, config.batch_size, config.data.augmentation, size, config.seed)
    if batches.element_spec[0].shape[1:3] != (size, size):
        raise cli.UserError(
            f"--data.augmentation {config.data.augmentation} keeps the images at {data.size} x {data.size} pixels: it does "
            f"not go with --data.size. Received: --data.size {size}"
        )
    steps_per_epoch = max(1, round(data.train.size / config.batch_size))
    iterations = config.iterations(config.schedule.length, steps_per_epoch)
    if config.health < 0:
        raise cli.UserError(f"--health must be a number of iterations, or 0 for none. Received: {config.health}")
    if iterations < 1:
        raise cli.UserError(f"--schedule.length leaves no iteration. Received: {config.schedule.length}")

    model = build_model(config, data, size)
    model.compile(
        optimizer=kp.optimizers.CoupledSGD(
            _learning_rate(config, steps_per_epoch, iterations),
            momentum=config.optimizer.momentum,
            nesterov=config.optimizer.nesterov,
            coupled_weight_decay=config.optimizer.weight_decay,
            exclude_from_decay=config.optimizer.exclude_from_decay,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=backends.jit_compile(config.jit_compile),
    )
    validation = data.holdout or (data.test if config.data.watch_test else None)
    validation_batches = validation and datasets.evaluation_batches(data, validation, config.batch_size, config.data.size)

    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    runs.write_json(run / "config.json", describe(config, recipe, data, model, iterations))
    print(
        f"Training {model.name} ({_trainable(model):,} trainable parameters) on {data.train.size:,} images of {data.name} for "
        f"{iterations:,} iterations of {config.batch_size} ({keras.backend.backend()}). Run directory: {run}",
        flush=True,
    )
    try:
        with runs.Interruption() as interruption:
            model.fit(
                batches,
                steps_per_epoch=steps_per_epoch,
                epochs=math.ceil(iterations / steps_per_epoch),
                validation_data=validation_batches,
                shuffle=False,  # the batches come shuffled
                callbacks=[
                    *_health(config, data, size, run),
                    interruption,
                    runs.StopAt(iterations),
                    runs.StopOnNaN(),
                    runs.Checkpoints(run / "checkpoints", *(("val_accuracy", True) if data.holdout else ("loss", False))),
                    keras.callbacks.CSVLogger(run / "history.csv"),
                    keras.callbacks.TensorBoard(run / "tensorboard", write_graph=False),
                ],
                verbose="auto" if sys.stdout.isatty() else 2,
            )
    except KeyboardInterrupt:
        kept = (run / "checkpoints" / "last.keras").is_file()
        advice = "evaluate or export the last checkpoint with --checkpoint last" if kept else "there is no checkpoint yet"
        print(f"Interrupted. Run directory: {run}; {advice}.")
        raise
    with runs.replacing(run / "model.keras") as temporary:
        model.save(temporary)
    print(f"Finished: {run / 'model.keras'}. Next: python -m training.evaluate {run}")
    return run


def _health(config: Config, data, size: int, run: Path) -> list:
    """Return the callback that watches the training's health, on the first training images, if it is wanted."""
    from keras_preact.health import TrainingHealth
    from training import data as datasets

    if config.health < 1:
        return []
    [(images, _)] = datasets.evaluation_batches(data, data.train, HEALTH_IMAGES, size).take(1).as_numpy_iterator()
    return [
        TrainingHealth(
            config.health, sample=images, csv=run / "health.csv", tensorboard=run / "tensorboard" / "health", report=_report
        )
    ]


def _report(message: str) -> None:
    print(f"Health: {message}", flush=True)


def build_model(config: Config, data, size: int):
    """Make the configured network for the data set's classes and images."""
    import keras_preact as kp

    return kp.create_model(
        config.model.name,
        classes=len(data.classes),
        input_shape=(size, size, data.channels),
        data_format="channels_last",  # as tf.data delivers them, whatever Keras is set to
        mean=data.preprocessing.mean,
        std=data.preprocessing.std,
        **config.model.overrides(),
    )


def describe(config: Config, recipe: str, data, model, iterations: int) -> dict:
    """Return what config.json holds: the configuration, and all that a later command has to know of data and software."""
    import keras
    import numpy
    import tensorflow

    return {
        "recipe": recipe,
        "config": dataclasses.asdict(config),
        "classes": list(data.classes),
        "images": {"train": data.train.size, "holdout": data.holdout.size if data.holdout else 0, "test": data.test.size},
        "preprocessing": data.preprocessing.to_dict(),
        "iterations": iterations,
        "trainable_parameters": _trainable(model),
        "versions": {
            "python": platform.python_version(),
            "keras": keras.__version__,
            "backend": keras.backend.backend(),
            "tensorflow": tensorflow.__version__,
            "numpy": numpy.__version__,
        },
    }


def _trainable(model) -> int:
    return sum(math.prod(weight.shape) for weight in model.trainable_weights)


def _learning_rate(config: Config, steps_per_epoch: int, iterations: int):
    import keras_preact as kp

    schedule = config.schedule
    if not 0 < config.optimizer.learning_rate < math.inf:
        raise cli.UserError(f"--optimizer.learning-rate must be positive. Received: {config.optimizer.learning_rate}")
    warmup = config.iterations(schedule.warmup, steps_per_epoch)
    if schedule.kind == "cosine":
        return kp.schedules.cosine_schedule(config.optimizer.learning_rate, iterations, warmup_steps=warmup)
    if not schedule.drops and not warmup:
        return config.optimizer.learning_rate
    return kp.schedules.step_schedule(
        config.optimizer.learning_rate,
        [config.iterations(drop, steps_per_epoch) for drop in schedule.drops],
        factor=schedule.factor,
        warmup_steps=warmup,
        warmup_learning_rate=schedule.warmup_learning_rate,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    import tyro

    argv = list(sys.argv[1:] if argv is None else argv)

    def run() -> None:
        if argv and not argv[0].startswith("-"):
            _checks.lookup(RECIPES, argv[0], "recipe")
        choices = {name: ((inspect.getdoc(recipe) or "").split("\n")[0], recipe()) for name, recipe in RECIPES.items()}
        config = tyro.extras.overridable_config_cli(choices, args=argv, description=__doc__)
        train(config, recipe=argv[0])

    cli.guard(run)


if __name__ == "__main__":
    main()
