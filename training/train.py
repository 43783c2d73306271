"""Train a network: `python -m training.train RECIPE [--option value ...]`, or go on with a run: `--resume RUN`.

Writes a run directory (runs/RECIPE-DATE-TIME, or --output). `python -m training.train --help` lists the recipes, `python -m
training.train RECIPE --help` every option. The environment's KERAS_BACKEND chooses tensorflow (default), jax or torch.
"""

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path

from keras_preact import _checks

from . import backends, cli
from .config import Config, from_json
from .recipes import RECIPES


def train(config: Config, recipe: str) -> Path | None:
    """Train as `config` says and return the run directory; none with `dry_run`.

    Raises:
        ValueError: for a configuration that does not fit; nothing is written then.
    """
    import keras

    import keras_preact as kp

    from .trainer import Trainer

    _check(config)
    backends.keep_accelerator_for_backend(keras.backend.backend())
    with kp.distribution.start(config.distribution, batch_norm=config.batch_norm) as distribution:
        keras.utils.set_random_seed(config.seed)
        trainer = Trainer(config, recipe, distribution)
        if config.dry_run:
            trainer.rehearse()
            return None
        return trainer.run()


def _check(config: Config) -> None:
    import keras

    from . import finetune

    finetune.check(config)
    if config.health < 0:
        raise cli.UserError(f"--health must be a number of iterations, or 0 for none. Received: {config.health}")
    if config.steps_per_execution > 1 and keras.backend.backend() == "torch":
        raise cli.UserError(
            f"--steps-per-execution must be 1 on torch, as Keras has it. Received: {config.steps_per_execution}"
        )
    if config.output is None and (config.resume or config.distribution == "multi_worker"):
        option = "--resume" if config.resume else "--distribution multi_worker"
        raise cli.UserError(f"{option} needs --output, the directory of the run.")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    argv, verbose = cli.split_verbose(argv)

    def run() -> None:
        import tyro

        if argv and argv[0] == "--resume":
            _go_on(argv[1:])
            return
        if argv and not argv[0].startswith("-"):
            _checks.lookup(RECIPES, argv[0], "recipe")
        choices = {name: ((inspect.getdoc(recipe) or "").split("\n")[0], recipe()) for name, recipe in RECIPES.items()}
        config = tyro.extras.overridable_config_cli(choices, prog=cli.program(), args=argv, description=cli.described(__doc__))
        train(config, recipe=argv[0])

    cli.guard(run, verbose)


def _go_on(arguments: list[str]) -> None:
    """Go on with a run as it was begun."""
    from . import runs

    if len(arguments) != 1:
        raise cli.UserError(
            "--resume in front takes the directory of a run and nothing else: "
            f"{cli.command('train')} --resume runs/NAME. Received: {' '.join(arguments)}"
        )
    run = Path(arguments[0])
    described = runs.read_config(run)
    config = from_json(Config, described["config"])
    train(dataclasses.replace(config, output=run, resume=True), described["recipe"])


if __name__ == "__main__":
    main()
