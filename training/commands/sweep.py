"""The best learning rate at several depths: `keras-preact sweep`."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import children, cli, disk
from ..config import Config, from_json
from ..directory import histories
from ..errors import UserError, check_positive, checking
from . import several, swept, train

#: Default rates over the recipe's.
AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)
DESCRIPTION = """Train a recipe at several depths and learning rates, and show the best rate
at each depth. Every field of a recipe is an option, as in `keras-preact train`.
Each run has its directory, OUTPUT/depth-56/rate-0.1/seed-0. The same command resumes the
runs, skips those that have ended, and adds others if it has more rates, depths or seeds.

Recipes:"""
ABOUT = """Train it at every depth, rate and seed, each in its own process. The best rate of a
depth has the smallest training loss: the mean over the last tenth of the run (or over the last
epoch if epochs are longer), and the median over the seeds. A run that diverges counts as
infinite. OUTPUT gets a table (sweep.csv) and a figure (sweep.png)."""


@dataclasses.dataclass(frozen=True)
class Options(Config):
    """The options of `sweep RECIPE`: those of a run, depths, rates and how many seeds."""

    depths: tuple[int, ...] = ()
    """Numbers of layers, such as 20 56 110. If not given: that of the recipe's network."""
    rates: tuple[float, ...] = ()
    """Learning rates. If not given: a quarter, half, once, twice and four times the rate of the
    recipe, or of --lr."""
    seeds: int = 1
    """Number of runs for each depth and rate, with the seeds --seed, --seed + 1, ..."""
    parallel: int = 1
    """Number of runs to train at the same time. Their messages then go to files such as
    OUTPUT/depth-56/rate-0.1/seed-0.log."""


@dataclasses.dataclass(frozen=True)
class OptionsOfRun(train.OfRun, Options):
    """The options of `sweep --config RUN`."""


def main(argv: Sequence[str]) -> None:
    """Parse the arguments and train the runs."""
    act = train.Command("sweep", DESCRIPTION, Options, OptionsOfRun, [ABOUT], sweep)
    train.start(act, argv)


def sweep(config: Config, recipe: str, options: Options, words: Sequence[str]) -> None:
    """Train a recipe at every depth and rate, and print and write what was measured.

    Args:
        config: Configuration of the runs. Its `output` is the folder of their directories.
        recipe: Name of its recipe.
        options: Depths, rates and number of seeds.
        words: Arguments of this command, for the line that resumes the runs.

    Raises:
        UserError: for options that do not fit, before the first run starts, and at the end
            if runs failed.
        KeyboardInterrupt, SystemExit: see `several.train_all`.
    """
    rates = options.rates or [factor * config.optimizer.learning_rate for factor in AROUND]
    check_positive(seeds=options.seeds, parallel=options.parallel)
    for depth, rate in itertools.product(options.depths or [None], rates):
        check_positive(depths=depth, rates=rate)
    if options.depths and config.model.weights is not None:
        raise UserError(
            "--depths builds new networks, and --model.weights starts from a trained one. Remove "
            "one of them."
        )
    folder = several.folder_of(config, recipe)
    configs = grid(config, folder, options.depths, rates, options.seeds)
    if config.dry_run:
        _rehearse(configs, recipe)
        return
    _check_depths(configs)
    again = several.resuming(config, folder, "sweep", *words)
    failed = several.train_all(configs, recipe, folder, again, options.parallel, swept.size)
    if ended := [each for each in configs if several.has_ended(each)]:
        _report(ended, recipe, folder)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(configs)} runs failed: {', '.join(failed)}. Their messages are "
            "above."
        )


def grid(
    config: Config, folder: Path, depths: Sequence[int], rates: Sequence[float], seeds: int
) -> list[Config]:
    """Return the configurations of the runs, by depth, rate and seed, each of these in
    order and once. Without depths: with the network as it is.
    """
    found = []
    others = tuple(each for each in config.model.options if not each.startswith("depth="))
    every_depth: list[int | None] = [*sorted(set(depths))] or [None]
    for depth, rate, seed in itertools.product(every_depth, sorted(set(rates)), range(seeds)):
        model, place = config.model, folder
        if depth is not None:
            model = dataclasses.replace(model, options=(*others, f"depth={depth}"))
            place = folder / f"depth-{depth}"
        run = dataclasses.replace(
            config,
            model=model,
            optimizer=dataclasses.replace(config.optimizer, learning_rate=rate),
            seed=config.seed + seed,
            output=place / f"rate-{rate:.12g}" / f"seed-{config.seed + seed}",
            resume=True,
        )
        found.append(run)
    return found


def _by_depth(configs: Sequence[Config]) -> dict[int | None, Config]:
    """Return the first run of each depth."""
    found: dict[int | None, Config] = {}
    for config in configs:
        found.setdefault(swept.depth_of(config), config)
    return found


def _rehearse(configs: Sequence[Config], recipe: str) -> None:
    """Train a few steps at each depth, and print what a run costs."""
    shown = _by_depth(configs)
    if any(several.start(list(shown.values()), recipe)):
        sys.exit(2)
    each = "this one" if len(shown) == 1 else "each of these"
    print(f"Runs like {each}: {len(configs) // len(shown)}.")


def _check_depths(configs: Sequence[Config]) -> None:
    """Build the networks of the depths that no run has begun with, in a process of its own,
    whose end frees the memory of a GPU. End this process if one cannot be built.
    """
    shown = _by_depth(configs)
    begun = [each for each in configs if (several.directory(each) / "config.json").is_file()]
    new = [each for depth, each in shown.items() if depth not in _by_depth(begun)]
    if len(shown) == 1 or not new:  # a single network is built by the first run
        return
    depths = " ".join(str(swept.depth_of(each)) for each in new)
    print(f"Checking the networks of --depths {depths}.", flush=True)
    job = json.dumps([dataclasses.asdict(each) for each in new], default=str)
    [status] = children.statuses(f"{__package__}.sweep", [job])
    if status:
        sys.exit(status)


def check(configs: Sequence[Config]) -> None:
    """Check that the network of each configuration can be built.

    Raises:
        UserError: for one that cannot, and for other options that do not fit.
    """
    from .. import data, run
    from ..run import networks

    run.check(configs[0])
    with checking():
        images = data.load(configs[0].data)
        size = networks.image_size(configs[0], images)
    for config in configs:
        model = dataclasses.replace(config.model, dtype=None)  # auto is no policy of Keras
        try:
            networks.build(dataclasses.replace(config, model=model), images, size)
        except ValueError as error:
            depth = swept.depth_of(config)
            raise UserError(f"{config.model.name} cannot have --depths {depth}: {error}") from error


def _report(configs: Sequence[Config], recipe: str, folder: Path) -> None:
    """Print the table of the runs, and write sweep.csv and sweep.png."""
    points = {several.directory(config): swept.measured(config) for config in configs}
    names = {run: {"run": run.relative_to(folder).as_posix()} for run in points}
    rows = [names[run] | dataclasses.asdict(point) for run, point in points.items()]
    histories.write(folder / "sweep.csv", rows)
    with disk.replacing(folder / "sweep.png") as path:
        drawn = swept.figure({"": list(points.values())}, f"Learning rates, recipe {recipe}")
        drawn.savefig(path, format="png", dpi=110)
    split = "held-out" if configs[0].data.holdout else "test"
    print(f"\n{swept.table(list(points.values()))}\n")
    print(
        f"Training loss over the last tenth of the run, in brackets the {split} error: medians of "
        "the seeds. *: the best rate."
    )
    print(swept.sentence(list(points.values())))
    print(f"Wrote {folder / 'sweep.csv'}, {folder / 'sweep.png'}")


if __name__ == "__main__":  # the check of the networks
    described = json.loads(sys.argv[1])
    cli.guard(lambda: check([from_json(Config, each) for each in described]))
