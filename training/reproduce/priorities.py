"""The missing runs of the paper's tables, those that are worth most first, and how long they are expected to take."""

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
#: Kind of block to the mean channels of a layer's output, by those of a basic block: a bottleneck's are 1, 1 and 4.
CHANNELS: Mapping[str, int] = {"basic": 1, "single": 1, "bottleneck": 2}
#: From this depth on, the paper's networks are of bottlenecks.
BOTTLENECKS = 164


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that are worth the same.

    Args:
        title: What they are.
        table: Name of the table that trains them.
        names: Of trials, with `*` for any letters; a trial of an earlier group is not in a later one.
    """

    title: str
    table: str
    names: tuple[str, ...]


#: What is worth most comes first.
GROUPS = (
    Group("Table 2, the claim", "table2", ("cifar10/resnet110-full_preactivation", "cifar10/resnet110-original")),
    Group("Table 2, other arrangements", "table2", ("cifar10/resnet110-*",)),
    Group("Table 1", "table1", ("*",)),
    Group("Table 2, ResNet-164", "table2", ("cifar10/resnet164-*",)),
    Group("Table 3, ResNet-1001", "table3", ("cifar10/resnet1001-full_preactivation", "cifar10/resnet1001-original")),
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
    """A run that is to be made.

    Args:
        group: That it belongs to.
        trial, seed: Which it is.
        done, total: Iterations: those whose state is saved, and all.
    """

    group: Group
    trial: Trial
    seed: int
    done: int
    total: int

    @property
    def images(self) -> int:
        """Images that are left to train on."""
        return (self.total - self.done) * self.trial.config().batch_size

    def command(self, minutes: float | None = None) -> str:
        """Return what makes it, and the runs of lower seeds that the row lacks, and ends after so many minutes."""
        short = self.trial.name.partition("/")[2]
        same = [row for row in TABLES[self.group.table].rows if row.trial.name.partition("/")[2] == short]
        limit = "" if minutes is None else f" --device-minutes {minutes:g}"
        table = self.group.table.replace("_", "-")
        rows = short if len(same) == 1 else self.trial.name
        return f"{cli.command('reproduce')} {table} --rows {rows} --seeds {self.seed + 1}{limit}"


#: Trial and seed of an unfinished run to its iterations: those that are done, and all.
Unfinished = Mapping[tuple[str, int], tuple[int, int]]


def missing(made: Collection[tuple[str, int]], unfinished: Unfinished) -> list[Missing]:
    """Return all runs that are missing, the one that is worth most first.

    Group by group: what is unfinished, the least left first; then seed 0 of every row, seed 1 of every row, ...

    Args:
        made: Trial and seed of the runs that have results.
        unfinished: Those whose state is saved.
    """
    found = []
    for group, trials in grouped():
        totals = {trial.name: plans.plan(trial.config(), IMAGES[trial.dataset]).iterations for trial in trials}
        own = [
            Missing(group, trial, seed, *unfinished.get((trial.name, seed), (0, totals[trial.name])))
            for seed in range(SEEDS)
            for trial in trials
            if (trial.name, seed) not in made
        ]
        found += sorted(own, key=lambda item: item.total - item.done if item.done else math.inf)
    return found


def size(trial: Trial) -> int:
    """Return what the time for an image is taken to grow with: layers times their channels. Shortcuts do not count."""
    depth = trial.arguments["depth"]
    return depth * CHANNELS[trial.arguments.get("block") or ("bottleneck" if depth >= BOTTLENECKS else "basic")]


def costs(records: Iterable[Record], device: str) -> dict[str, float]:
    """Return the seconds of the device for a training image, median over the runs, of each trial that was measured on it."""
    own: dict[str, list[float]] = {}
    for record in records:
        speed = record.cost["images_per_second"]
        if record.device["name"] == device and record.data["name"] in IMAGES and speed:
            own.setdefault(record.trial, []).append(1 / (speed * record.cost["together"]))
    return {name: float(np.median(values)) for name, values in own.items() if name in TRIALS}


def expected(item: Missing, known: Mapping[str, float]) -> float | None:
    """Return the minutes that a run is expected to take, compilation left out; None where nothing is known.

    Args:
        item: The run.
        known: Trial to its seconds for an image, on the device in question. A trial that is not in it has those of the
            one that is nearest in `size`, by the ratio of their sizes.
    """
    if not known:
        return None
    own = size(item.trial)
    nearest = min(known, key=lambda name: (name != item.trial.name, abs(math.log(size(TRIALS[name]) / own)), name))
    return item.images * known[nearest] * own / size(TRIALS[nearest]) / 60


def next_run(minutes: float | None, items: Sequence[Missing], known: Mapping[str, float]) -> Missing | None:
    """Return the first run that fits into so many minutes, or whose time is not known; the first of all if none fits.

    Args:
        minutes: Of the device. None: as many as it takes.
        items: What is missing, as `missing` returns it.
        known: As for `expected`.

    Returns:
        None where nothing is missing.
    """
    times = {item: expected(item, known) for item in items}
    fits = (item for item, time in times.items() if minutes is None or time is None or time <= minutes)
    return next(fits, next(iter(items), None))
