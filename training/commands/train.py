"""Train a network by a recipe, or resume a run: `keras-preact train`."""

import contextlib
import dataclasses
import difflib
import inspect
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from .. import cli
from ..config import Config, from_json
from ..directory import runs
from ..errors import UserError, command
from ..functions import trust
from ..recipes import RECIPES
from ..run import started

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
    with started(config, recipe) as run:
        from ..run import phases
        from ..run.callbacks import Diverged

        if config.dry_run:
            phases.rehearse(run)
            return None
        try:
            return phases.train(run)
        except Diverged as diverged:
            raise UserError(diverged.explanation) from diverged


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
    trust(config.functions, run / "config.json", again, "--trust" in arguments)
    train(dataclasses.replace(config, output=run, resume=True), described["recipe"])
