"""Train a network by a recipe, or resume a run: `keras-preact train`."""

import contextlib
import dataclasses
import difflib
import inspect
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import cli
from ..config import Config, from_json
from ..directory import runs
from ..errors import UserError, checking, command
from ..functions import functions, trust
from ..recipes import RECIPES
from ..run import limits

if TYPE_CHECKING:
    from ..run.run import Run

#: Beginning of the help text. Braces in names of models list alternatives.
DESCRIPTION = """Train a network by a recipe. Every field of a recipe is an option.
The run is written to runs/RECIPE-DATE-TIME, or to --output.
Interrupted runs resume exactly: train --resume RUN, with --trust if it has functions of yours.
Set KERAS_BACKEND to tensorflow (default), jax or torch.

Models for --model.name:
  digits_resnet{8,20,10001}_preact
  digits_vanilla10000
  cifar_resnet{20,32,44,56,110,164,1001,1202}_{preact,original}
  cifar_resnet{110,164}_{bn_after_addition,bn_only_preact,relu_before_addition,relu_only_preact}
  cifar_wide_resnet{16_8,28_10,40_4}
  cifar_fast_resnet8
  imagenet_resnet{18,34,50,101,152,200}_{preact,original}
  imagenet_resnext{50_32x4d,101_32x8d}_preact

Recipes:"""

#: Option that is not a field: it stretches the whole schedule of the recipe.
EPOCHS = "--epochs"
EPOCHS_HELP = "--epochs N stretches the whole schedule to N epochs."


def train(config: Config, recipe: str) -> Path | None:
    """Train as configured and return the run directory, None with `dry_run`.

    Raises:
        UserError: for a configuration that does not fit; nothing is written then.
    """
    from ..run import fit
    from ..run.callbacks import Diverged

    with started(config, recipe) as run:
        if config.dry_run:
            fit.rehearse(run)
            return None
        try:
            return fit.train(run)
        except Diverged as diverged:
            raise UserError(diverged.explanation) from diverged


@contextlib.contextmanager
def started(config: Config, recipe: str) -> "Iterator[Run]":
    """Make the run of a configuration, and yield it inside its distribution.

    Raises:
        UserError: for a configuration that does not fit.
    """
    limits.check(config)

    import keras

    import keras_preact as kp

    from ..run.run import Run

    _check(config)
    with contextlib.ExitStack() as stack:
        with checking():
            distribution = stack.enter_context(
                kp.distribution.start(config.distribution, batch_norm=config.batch_norm)
            )
            keras.utils.set_random_seed(config.seed)
            run = Run(config, recipe, distribution)
        stack.enter_context(run.data.naming_broken_images())
        yield run


def _check(config: Config) -> None:
    """Check what does not depend on the data, before they are opened."""
    import keras

    import keras_preact as kp

    from ..data import pipelines
    from ..run import callbacks, finetune, plans

    finetune.check(config)
    if config.model.weights is None:
        with checking():
            kp.model_entry(config.model.name)
    plans.check(config)
    pipelines.check_options(config.data.augmentation, config.data.border, config.data.flip)
    if config.data.on_device and config.distribution != "none":
        raise UserError(
            "--data.on-device needs --distribution none. Received: --distribution "
            f"{config.distribution}"
        )
    if config.optimizer.layer_decay is not None and config.optimizer.name != "sgd":
        raise UserError(
            "--optimizer.layer-decay is for --optimizer.name sgd. Received: --optimizer.name "
            f"{config.optimizer.name}"
        )
    if config.optimizer.nesterov and config.optimizer.name in ("adamw", "lion"):
        raise UserError(
            "--optimizer.nesterov is for --optimizer.name sgd and muon. Received: "
            f"{config.optimizer.name}"
        )
    if config.data.class_weights != "none" and (config.data.mixup or config.data.cutmix):
        raise UserError(
            "--data.class-weights needs images of one class: remove --data.mixup and --data.cutmix."
        )
    for name in config.callbacks:
        callbacks.of_user(name)
    if config.steps_per_execution > 1 and keras.backend.backend() == "torch":
        raise UserError(
            "--steps-per-execution must be 1 on torch: Keras supports no other. Received: "
            f"{config.steps_per_execution}"
        )
    if config.output is None and (config.resume or config.distribution == "multi_worker"):
        option = "--resume" if config.resume else "--distribution multi_worker"
        raise UserError(f"{option} needs --output, the directory of the run.")
    if not (config.resume or config.dry_run or config.distribution == "multi_worker"):
        runs.new_directory(config.output, "")


def main(argv: Sequence[str]) -> None:
    """Parse the arguments and train."""
    words, verbose = cli.split_verbose(argv)
    if words[:1] == ["--resume"]:
        cli.guard(lambda: _resume(words[1:]), verbose)
        return
    lines = {name: _about(name)[0] for name in RECIPES}
    cli.choose("train", DESCRIPTION, lines, _start, argv, word="RECIPE")


def _start(recipe: str, argv: Sequence[str]) -> None:
    default, options = _stretched(RECIPES[recipe](), argv)
    description = "\n\n".join([*_about(recipe), EPOCHS_HELP])
    train(cli.parse(f"train {recipe}", Config, options, description, default=default), recipe)


def _about(recipe: str) -> list[str]:
    """Return the paragraphs of a recipe's docstring. The first one must be one line."""
    return (inspect.getdoc(RECIPES[recipe]) or "").split("\n\n")


def _stretched(default: Config, argv: Sequence[str]) -> tuple[Config, list[str]]:
    """Return the recipe's configuration with the schedule that `--epochs` asks for, and
    the other options.
    """
    options: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name == EPOCHS:
            epochs = _epochs(value if equals else next(words, ""))
            default = dataclasses.replace(default, schedule=default.schedule.over(epochs))
        elif difflib.get_close_matches(name, [EPOCHS], cutoff=0.9):
            raise UserError(f"Unknown option {name}. Did you mean {EPOCHS}?")
        else:
            options.append(word)
    return default, options


def _epochs(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise UserError(f"--epochs takes a positive number. Received: {text!r}")


def _resume(arguments: Sequence[str]) -> None:
    """Resume a run with its own options."""
    others = [argument for argument in arguments if argument != "--trust"]
    if len(others) != 1:
        raise UserError(
            f"`{command('train', '--resume', 'RUN')}` takes a run directory and no other "
            f"option than --trust. Received: {shlex.join(arguments)}"
        )
    run = Path(others[0])
    described = runs.read_config(run)
    config = from_json(Config, described["config"])
    again = command("train", "--resume", run, "--trust")
    trust(functions(config), run / "config.json", again, "--trust" in arguments)
    train(dataclasses.replace(config, output=run, resume=True), described["recipe"])
