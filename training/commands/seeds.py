"""Several runs that differ only in the seed: `keras-preact train RECIPE --seeds N`."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import children
from ..config import Config, differences
from ..directory import runs
from ..errors import UserError, check_positive, command
from .compare import compare


def train_seeds(config: Config, recipe: str, count: int, words: Sequence[str]) -> None:
    """Train runs with the seeds `config.seed`, `config.seed + 1`, ... one after the other,
    each in a process and a directory of its own, and compare them. Finished runs are
    skipped, and a run that has begun is resumed.

    Args:
        config: Configuration of the runs. Its `output` is the folder of their directories.
        recipe: Name of its recipe.
        count: Number of runs.
        words: Arguments of this command, for the line that resumes the runs.

    Raises:
        UserError: for options that do not fit, runs that were begun with other options,
            and after the others if runs failed.
        KeyboardInterrupt, SystemExit: after SIGINT or SIGTERM, when the run has saved its
            state.
    """
    check_positive(seeds=count)
    if config.distribution == "multi_worker":
        raise UserError(
            "--seeds starts the runs from one process. Received: --distribution multi_worker"
        )
    folder = config.output or runs.default_directory(recipe)
    if not any(folder.glob("seed-*")):
        runs.new_directory(folder, recipe)
    configs = {
        seed: dataclasses.replace(config, seed=seed, output=folder / f"seed-{seed}", resume=True)
        for seed in range(config.seed, config.seed + count)
    }
    finished = [seed for seed, each in configs.items() if _is_finished(each)]
    print(f"{count - len(finished)} of {count} runs are missing in {folder}.", flush=True)
    failed = []
    try:
        for number, (seed, each) in enumerate(configs.items(), start=1):
            if seed not in finished:
                print(f"\nSeed {seed}, run {number} of {count}:", flush=True)
                if not _train(each, recipe):
                    failed.append(str(seed))
    except (KeyboardInterrupt, SystemExit):
        output = [] if config.output else ["--output", folder]
        print(f"Resume all runs: {command('train', *words, *output)}", flush=True)
        raise
    print()
    begun = [each.output for each in configs.values() if each.output is not None]
    compare(tuple(run for run in begun if (run / "history.csv").is_file()))
    if failed:
        raise UserError(
            f"{len(failed)} of {count} runs failed: seed {', '.join(failed)}. The messages are "
            "above."
        )


def _is_finished(config: Config) -> bool:
    """Return whether a run is finished.

    Raises:
        UserError: for a run that was begun with other options.
    """
    run = config.output
    assert run is not None
    if not (run / "config.json").is_file():
        return False
    before = runs.config_of(run / "config.json", runs.read_config(run))
    # what a run decides when it begins
    decided = ["--model.precision"] * (config.model.dtype == "auto")
    decided += ["--model.name", "--data.size"] * (config.model.weights is not None)
    different = differences(before, config, decided)
    if different:
        raise UserError(
            f"{run} was started with another value of {', '.join(different)}. Give the options "
            "of the other runs in this folder, or another --output."
        )
    return (run / "model.keras").is_file()


def _train(config: Config, recipe: str) -> bool:
    """Train a run in a process of its own, and return whether it ended well. If it has not
    even begun, this process ends too: the others could not begin either.
    """
    job = json.dumps((recipe, dataclasses.asdict(config)), default=str)
    [status] = children.statuses(f"{__package__}.train", [job])
    if status and not (Path(str(config.output)) / "config.json").is_file():
        sys.exit(status)
    return not status
