"""Several runs of one command, each in a process and a directory of its own."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import children
from ..cli.terminal import duration
from ..config import Config, differences
from ..directory import runs
from ..errors import UserError, command


def folder_of(config: Config, recipe: str) -> Path:
    """Return the folder for the directories of several runs: `config.output`, or a new
    one. It is empty, or holds such runs.

    Raises:
        UserError: for another folder, and for options with which each run needs several
            processes.
    """
    if config.distribution == "multi_worker":
        raise UserError(
            "Several runs start from one process. Received: --distribution multi_worker"
        )
    folder = config.output or runs.default_directory(recipe)
    if not runs.several(folder):
        runs.new_directory(folder, recipe)
    return folder


def train_all(
    configs: Sequence[Config],
    recipe: str,
    folder: Path,
    again: str,
    parallel: int = 1,
    size: Callable[[Config], float] = lambda config: 1,
    after: Callable[[Config], object] = lambda config: None,
) -> list[str]:
    """Train runs, each in a process of its own. Those that have ended are skipped, those
    that have begun are resumed.

    Args:
        configs: Configurations with `output`, a directory in `folder`.
        recipe: Name of their recipe.
        folder: The folder of all directories.
        again: How to resume the runs, to print after an interruption.
        parallel: Number of runs at the same time. If there are several, their messages are
            written to RUN.log.
        size: Returns a number that the time of a run is about proportional to.
        after: Called with each run that this command has trained.

    Returns:
        The directories in `folder` of the runs that failed. Those that diverged are none
        of them.

    Raises:
        UserError: for a run that was begun with other options; nothing is trained then.
        KeyboardInterrupt, SystemExit: after SIGINT or SIGTERM, when the run has saved its
            state; and if a run could not even begin: the others could not either.
    """
    missing = [config for config in configs if not has_ended(config)]
    print(f"{len(missing)} of {len(configs)} runs are missing in {folder}.", flush=True)
    failed = []
    left, trained, spent = sum(map(size, missing)), 0.0, 0.0
    try:
        for first in range(0, len(missing), parallel):
            together = missing[first : first + parallel]
            names = [directory(each).relative_to(folder).as_posix() for each in together]
            numbers = ", ".join(str(configs.index(each) + 1) for each in together)
            rest = f", at most about {duration(spent * left / trained)} left" if trained else ""
            print(f"\n{', '.join(names)}, run {numbers} of {len(configs)}{rest}:", flush=True)
            begin = time.monotonic()
            ended = _train(together, recipe, parallel)
            failed += [name for name, well in zip(names, ended, strict=True) if not well]
            # those that diverge or fail take less time
            full = [each for each in together if (directory(each) / "model.keras").is_file()]
            if full:
                spent, trained = spent + time.monotonic() - begin, trained + sum(map(size, full))
            left -= sum(map(size, together))
            for config in together:
                after(config)
    except (KeyboardInterrupt, SystemExit) as ended:
        begun = any((directory(each) / "config.json").is_file() for each in configs)
        if begun or getattr(ended, "code", None) != 2:  # 2: a mistake in the options
            print(again, flush=True)
        raise
    return failed


def resuming(config: Config, folder: Path, *words: object) -> str:
    """Return how to resume the runs of a command. Without `--output`, it needs the folder
    that was chosen.
    """
    output = [] if config.output else ["--output", folder]
    return f"Resume all runs: {command('', *words, *output)}"


def directory(config: Config) -> Path:
    """Return the directory of a run of several."""
    assert config.output is not None
    return config.output


def has_ended(config: Config) -> bool:
    """Return whether a run is finished or has diverged.

    Raises:
        UserError: for a run that was begun with other options.
    """
    run = directory(config)
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
    return (run / "model.keras").is_file() or runs.diverged_at(run) is not None


def start(configs: Sequence[Config], recipe: str, parallel: int = 1) -> list[int]:
    """Train runs in processes of their own, and return their exit statuses."""
    jobs = [
        json.dumps((recipe, dataclasses.asdict(config), parallel > 1), default=str)
        for config in configs
    ]
    # JAX takes so much of a GPU's memory at once
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / parallel:.2f}"} if parallel > 1 else {}
    return children.statuses(f"{__package__}.train", jobs, parallel, share)


def _train(configs: Sequence[Config], recipe: str, parallel: int) -> list[bool]:
    """Train runs at the same time, and return which ones ended or diverged. If one has not even
    begun, this process ends too.
    """
    found = []
    for config, status in zip(configs, start(configs, recipe, parallel), strict=True):
        if status and not (directory(config) / "config.json").is_file():
            sys.exit(status)
        found.append(not status or runs.diverged_at(directory(config)) is not None)
    return found
