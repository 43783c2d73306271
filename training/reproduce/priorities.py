"""The missing runs of the paper's tables, the most valuable first, and their expected
times.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from .. import cli, plans
from .results import SEEDS, Record
from .trials import TABLES, TRIALS, Trial

#: Data set to its training images, all of 32 x 32 pixels.
IMAGES: Mapping[str, int] = {"cifar10": 50_000, "cifar100": 50_000}
#: Kind of block to the mean channels of a layer's output, relative to a basic block: a bottleneck's
#: are 1, 1 and 4.
CHANNELS: Mapping[str, int] = {"basic": 1, "single": 1, "bottleneck": 2}
#: Smallest depth of the paper's networks with bottlenecks.
BOTTLENECKS = 164


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows of equal value.

    Args:
        title: Description of the rows.
        table: Name of the table that trains them.
        names: Names of trials, with `*` for any letters. A trial belongs to the first
            group that matches.
    """

    title: str
    table: str
    names: tuple[str, ...]


#: The most valuable group comes first.
GROUPS = (
    Group(
        "Table 2, the claim",
        "table2",
        ("cifar10/resnet110-full_preactivation", "cifar10/resnet110-original"),
    ),
    Group("Table 2, other arrangements", "table2", ("cifar10/resnet110-*",)),
    Group("Table 1", "table1", ("*",)),
    Group("Table 2, ResNet-164", "table2", ("cifar10/resnet164-*",)),
    Group(
        "Table 3, ResNet-1001",
        "table3",
        ("cifar10/resnet1001-full_preactivation", "cifar10/resnet1001-original"),
    ),
    Group("Table 3, 1-layer skips", "table3", ("cifar10/resnet110-single-*",)),
    Group("The first paper's depths", "first_paper", ("*",)),
    Group("Table 4", "table4", ("*",)),
    Group("Table 3, CIFAR-100", "table3", ("cifar100/*",)),
)


def grouped() -> list[tuple[Group, list[Trial]]]:
    """Return the groups with their trials, each trial once."""
    taken: set[str] = set()
    found = []
    for group in GROUPS:
        names = [row.trial.name for row in TABLES[group.table].rows]
        own = [name for pattern in group.names for name in fnmatch.filter(names, pattern)]
        own = [name for name in dict.fromkeys(own) if name not in taken]
        taken.update(own)
        found.append((group, [TRIALS[name] for name in own]))
    return found


@dataclasses.dataclass(frozen=True)
class Missing:
    """A missing run.

    Args:
        group: Group of the trial.
        trial, seed: The run.
        done, total: Saved iterations, and all iterations.
    """

    group: Group
    trial: Trial
    seed: int
    done: int
    total: int

    @property
    def images(self) -> int:
        """Images that remain to be trained on."""
        return (self.total - self.done) * self.trial.config().batch_size

    def command(self, minutes: float | None = None) -> str:
        """Return the command for this run and the row's missing runs of lower seeds,
        limited to some minutes.
        """
        short = self.trial.name.partition("/")[2]
        same = [
            row
            for row in TABLES[self.group.table].rows
            if row.trial.name.partition("/")[2] == short
        ]
        limit = "" if minutes is None else f" --device-minutes {minutes:g}"
        table = self.group.table.replace("_", "-")
        rows = short if len(same) == 1 else self.trial.name
        return f"{cli.command('reproduce')} {table} --rows {rows} --seeds {self.seed + 1}{limit}"


#: Trial and seed of an unfinished run to its saved iterations and all iterations.
Unfinished = Mapping[tuple[str, int], tuple[int, int]]


def missing(made: Collection[tuple[str, int]], unfinished: Unfinished) -> list[Missing]:
    """Return all missing runs, the most valuable first.

    Group by group: unfinished runs, the least remaining first; then seed 0 of every
    row, seed 1 of every row, ...

    Args:
        made: Trial and seed of the finished runs.
        unfinished: Runs whose state is saved.
    """
    found = []
    for group, trials in grouped():
        totals = {
            trial.name: plans.plan(trial.config(), IMAGES[trial.dataset]).iterations
            for trial in trials
        }
        own = [
            Missing(
                group, trial, seed, *unfinished.get((trial.name, seed), (0, totals[trial.name]))
            )
            for seed in range(SEEDS)
            for trial in trials
            if (trial.name, seed) not in made
        ]
        found += sorted(own, key=lambda item: item.total - item.done if item.done else math.inf)
    return found


def size(trial: Trial) -> int:
    """Return the assumed cost of an image: layers times their channels. Shortcuts do
    not count.
    """
    depth = trial.arguments["depth"]
    return (
        depth
        * CHANNELS[
            trial.arguments.get("block") or ("bottleneck" if depth >= BOTTLENECKS else "basic")
        ]
    )


def costs(records: Iterable[Record], device: str) -> dict[str, float]:
    """Return each trial's seconds per training image on a device, median over its runs."""
    own: dict[str, list[float]] = {}
    for record in records:
        speed = record.cost["images_per_second"]
        if record.device["name"] == device and record.data["name"] in IMAGES and speed:
            own.setdefault(record.trial, []).append(1 / (speed * record.cost["together"]))
    return {name: float(np.median(values)) for name, values in own.items() if name in TRIALS}


def expected(item: Missing, known: Mapping[str, float]) -> float | None:
    """Return the expected minutes of a run without compilation; None if nothing is
    known.

    Args:
        item: The run.
        known: Trial to its seconds per image on the device. Another trial uses those of
            the nearest one in `size`, scaled by their sizes.
    """
    if not known:
        return None
    own = size(item.trial)
    nearest = min(
        known,
        key=lambda name: (name != item.trial.name, abs(math.log(size(TRIALS[name]) / own)), name),
    )
    return item.images * known[nearest] * own / size(TRIALS[nearest]) / 60


def next_run(
    minutes: float | None, items: Sequence[Missing], known: Mapping[str, float]
) -> Missing | None:
    """Return the first run that fits into the minutes, or whose time is not known; the
    first of all if none fits.

    Args:
        minutes: Minutes of the device. None: no limit.
        items: Missing runs from `missing`.
        known: See `expected`.

    Returns:
        None if nothing is missing.
    """
    times = {item: expected(item, known) for item in items}
    fits = (
        item for item, time in times.items() if minutes is None or time is None or time <= minutes
    )
    return next(fits, next(iter(items), None))
