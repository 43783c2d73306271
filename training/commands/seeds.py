"""Several runs that differ only in the seed: `keras-preact train RECIPE --seeds N`."""

import dataclasses
from collections.abc import Sequence

from ..config import Config
from ..directory import runs
from ..errors import UserError, check_positive
from . import several
from .compare import compare


def train_seeds(config: Config, recipe: str, count: int, words: Sequence[str]) -> None:
    """Train runs with the seeds `config.seed`, `config.seed + 1`, ... and compare them.

    Args:
        config: Configuration of the runs. Its `output` is the folder of their directories.
        recipe: Name of its recipe.
        count: Number of runs.
        words: Arguments of this command, for the line that resumes the runs.

    Raises:
        UserError: for options that do not fit, runs that were begun with other options,
            and after the others if runs failed or diverged.
        KeyboardInterrupt, SystemExit: see `several.train_all`.
    """
    check_positive(seeds=count)
    folder = several.folder_of(config, recipe)
    configs = [
        dataclasses.replace(config, seed=seed, output=folder / f"seed-{seed}", resume=True)
        for seed in range(config.seed, config.seed + count)
    ]
    again = several.resuming(config, folder, "train", *words)
    failed = several.train_all(configs, recipe, folder, again)
    begun = list(map(several.directory, configs))
    diverged = [run for run in begun if runs.diverged_at(run) is not None]
    failed += [f"{run.name} (diverged)" for run in diverged]
    print()
    if shown := tuple(run for run in begun if run in diverged or (run / "history.csv").is_file()):
        compare(shown)
    if failed:
        raise UserError(
            f"{len(failed)} of {count} runs failed: {', '.join(failed)}. The messages of those "
            "that this command has trained are above."
        )
