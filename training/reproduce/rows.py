"""The rows of the paper's tables: each published number with the recipe and the network
that are to reach it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras_preact as kp

from .. import recipes
from ..config import Checkpoint, Config, Data, Model, Schedule

#: Measurements of the test set in a run.
MEASUREMENTS = 64
#: Steps per execution on an accelerator, at most.
TOGETHER = 100
#: The schedule of a run that only shows that everything works.
SMOKE = Schedule("steps", drops=(4, 6), warmup=1, length=8, unit="iterations")


def small() -> Config:
    """The paper's recipe, shortened: 700 iterations of 32 digits. The rate is divided by
    10 after a half and three quarters.
    """
    return Config(
        data=Data("digits"),
        schedule=Schedule("steps", drops=(350, 525), warmup=35, length=700, unit="iterations"),
        batch_size=32,
    )


def eighth() -> Config:
    """The paper's recipe with an eighth of its schedule: 8,000 iterations, 50 of them
    warm-up. The rate is divided by 10 at 4,000 and 6,000.
    """
    paper = recipes.cifar10()
    schedule = paper.schedule
    return dataclasses.replace(
        paper,
        schedule=dataclasses.replace(
            schedule,
            drops=tuple(drop / 8 for drop in schedule.drops),
            warmup=schedule.warmup / 8,
            length=schedule.length / 8,
        ),
    )


#: Name to recipe; their lengths are in iterations.
RECIPES: Mapping[str, Callable[[], Config]] = {
    "paper": recipes.cifar10,
    "eighth": eighth,
    "batch64": recipes.cifar10_batch64,
    "small": small,
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """What is trained for a row, with one or more seeds. Several rows can share it.

    Args:
        name: Unique name, such as `cifar10/resnet110-original`: the path of its results.
        dataset: Name of the data set.
        recipe: Name in `RECIPES`.
        model: The network.
        measurements: Of the test set in a run.
    """

    name: str
    dataset: str
    recipe: str
    model: Model
    measurements: int = MEASUREMENTS

    def config(
        self,
        seed: int,
        *,
        dtype: str = "float32",
        together: int = 1,
        on_device: bool = False,
        data: Path | None = None,
        smoke: bool = False,
    ) -> Config:
        """Return the configuration of a run.

        Args:
            seed: Seed of weights, order and augmentation.
            dtype: Keras dtype policy.
            together: Steps per execution, at most.
            on_device: Whether the images stay on the device.
            data: Data directory.
            smoke: Whether to train eight steps on the digits, or random images for
                the tables of CIFAR.
        """
        recipe = RECIPES[self.recipe]()
        if smoke:
            recipe = dataclasses.replace(recipe, schedule=SMOKE, batch_size=8)
        fake = smoke and self.dataset != "digits"
        iterations = round(recipe.schedule.length)
        measurements = 2 if smoke else self.measurements
        together = max(n for n in range(1, together + 1) if not iterations % n)
        return dataclasses.replace(
            recipe,
            model=dataclasses.replace(self.model, dtype=dtype),
            data=dataclasses.replace(
                recipe.data,
                name="fake" if fake else self.dataset,
                dir=data,
                watch_test=True,
                on_device=on_device and not fake,
            ),
            checkpoint=Checkpoint(minutes=2, keep=1, best=False),
            seed=seed,
            steps_per_epoch=max(1, round(iterations / measurements / together)) * together,
            steps_per_execution=together,
            health=0,
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """A trial, with the published result that it is to reach, if there is one."""

    label: str
    trial: Trial
    result: kp.published.Result | None = None

    @property
    def published(self) -> kp.published.Result:
        """The published result.

        Raises:
            ValueError: if there is none.
        """
        if self.result is None:
            raise ValueError(f"Nothing is published for {self.label}.")
        return self.result


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the paper.

    Args:
        title: What it shows.
        rows: In the paper's order, all of them with published results or none.
        shortened: How its runs are less than the paper's, a sentence: no number is to be
            expected, but an order. Empty: they are the paper's.
        unlike: What is unlike the published numbers, as their heading names it.
        depths: Whether its rows are compared across networks, which differ in nothing
            but their depth.
        about: What is trained, where the title does not say it.
    """

    title: str
    rows: tuple[Row, ...]
    shortened: str = ""
    unlike: str = ""
    depths: bool = False
    about: str = ""

    @property
    def published(self) -> bool:
        """Whether its rows have published results."""
        return all(row.result is not None for row in self.rows)


def _label(value: Any) -> str:
    """Return an argument of a builder as a part of a trial's name."""
    if isinstance(value, Mapping):  # a shortcut with parameters
        snake = "".join(
            f"_{letter.lower()}" if letter.isupper() else letter for letter in value["class_name"]
        )
        return "-".join([snake.strip("_"), *map(_label, value["config"].values())])
    return f"{value:g}" if isinstance(value, float) else str(value)


def _model(arguments: Mapping[str, Any]) -> Model:
    """Return the arguments of `kp.models.resnet_cifar` as options of --model."""
    changes = {key: value for key, value in arguments.items() if key not in ("depth", "classes")}
    shortcut = changes.get("shortcut")
    if isinstance(shortcut, Mapping):  # constant scaling with its factors
        factors = shortcut["config"]
        changes |= {
            "shortcut": "constant_scaling",
            "scales": (factors["shortcut"], factors["residual"]),
        }
    return Model(f"cifar_resnet{arguments['depth']}_original", **changes)


def _trial(
    arguments: Mapping[str, Any], recipe: str, dataset: str, more: Mapping[str, Any]
) -> Trial:
    own = {key: value for key, value in arguments.items() if key not in ("depth", "classes")}
    parts = [f"b{value:g}" if key == "gate_bias" else _label(value) for key, value in own.items()]
    network = f"resnet{arguments['depth']}"
    name = "-".join([network, *parts, *([recipe] if recipe in ("batch64", "eighth") else [])])
    return Trial(f"{dataset}/{name}", dataset, recipe, _model({**arguments, **more}))


def _table(
    title: str,
    recipe: str = "paper",
    small: Mapping[str, Any] | None = None,
    shortened: str = "",
    unlike: str = "",
    depths: bool = False,
    depth: int | None = None,
    **of: str,
) -> Table:
    """Return the table of the published rows `of`; with `depth`, of networks this deep."""
    rows = []
    for published in kp.published.results(**of):
        arguments = {**published.arguments, **({"depth": depth} if depth else {})}
        dataset = "digits" if small else published.dataset
        trial = _trial(arguments, recipe, dataset, small or {})
        data = "CIFAR-100, " if published.dataset == "cifar100" else ""
        network = f"ResNet-{depth}" if depth else published.network
        rows.append(Row(f"{data}{network}, {published.row}", trial, published))
    return Table(title, tuple(rows), shortened, unlike, depths)


#: What makes the networks of the paper small: 4, 8, 16 channels, for images of 8 x 8 pixels.
_SMALL: Mapping[str, Any] = {
    "recipe": "small",
    "small": {"width_factor": 0.25},
    "shortened": "Small networks on small images",
    "unlike": "CIFAR-10",
}
_EIGHTH: Mapping[str, Any] = {
    "recipe": "eighth",
    "depth": 56,
    "network": "ResNet-110",
    "shortened": "An eighth of the paper's schedule, 8,000 iterations, and ResNet-56 in place of "
    "ResNet-110; one seed unless n says more",
    "unlike": "ResNet-110, 64,000 iterations",
}

#: Pre-activation at the depths of the first paper, which neither paper trained.
_PREACT = Table(
    "Full pre-activation at 20 to 56 layers, on CIFAR-10",
    tuple(
        Row(
            f"ResNet-{depth}, full_preactivation",
            Trial(
                f"cifar10/resnet{depth}-full_preactivation",
                "cifar10",
                "paper",
                Model(f"cifar_resnet{depth}_preact"),
            ),
        )
        for depth in (20, 32, 44, 56)
    ),
    about="The recipe of Table 6 of arXiv 1512.03385, whose networks of these depths have the "
    "original units.",
)

#: The paper's recipe is not for these networks, nor did the paper train them.
_DEEP = Table(
    "Ten thousand layers, on digits",
    (
        Row(
            "ResNet-10001, full_preactivation, DepthScaledHe",
            Trial(
                "digits/resnet10001-full_preactivation",
                "digits",
                "small",
                Model("digits_resnet10001_preact", width_factor=0.25),
                measurements=20,
            ),
        ),
    ),
    about="A quarter of the channels, the recipe of the small tables, and weights that are scaled "
    "for the depth: the last of each branch by 1 / sqrt(3,333), the number of units.",
)

#: Name of a command to its table.
TABLES: Mapping[str, Table] = {
    "table1": _table("Table 1: shortcuts", table="1"),
    "table2": _table("Table 2: arrangements of the activations", table="2"),
    "table3": _table("Table 3: pre-activation against the original", table="3"),
    "table4": _table("Table 4: ResNet-1001 with batches of 64", "batch64", table="4"),
    "first_paper": _table(
        "Table 6 of arXiv 1512.03385: depth", depths=True, table="6 of 1512.03385"
    ),
    "preact": _PREACT,
    "eighth1": _table("Table 1 with ResNet-56 and an eighth of the schedule", **_EIGHTH, table="1"),
    "eighth2": _table("Table 2 with ResNet-56 and an eighth of the schedule", **_EIGHTH, table="2"),
    "digits1": _table("Table 1 in small, on digits", **_SMALL, table="1"),
    "digits2": _table("Table 2 in small, on digits", **_SMALL, table="2"),
    "deep": _DEEP,
}

#: Name to trial, each once.
TRIALS: Mapping[str, Trial] = {
    row.trial.name: row.trial for table in TABLES.values() for row in table.rows
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of training curves in the paper: for each panel its title, and rows as
    (table, label).
    """

    title: str
    panels: Mapping[str, tuple[tuple[str, str], ...]]

    def trials(self) -> dict[str, list[Trial]]:
        """Return each panel's title with its trials."""
        return {
            title: [
                next(row.trial for row in TABLES[table].rows if row.label == label)
                for table, label in rows
            ]
            for title, rows in self.panels.items()
        }


_BASELINE = ("table1", "ResNet-110, identity (1, 1)")

#: What the paper draws of the training, by the number of its figure.
FIGURES: Mapping[str, Figure] = {
    "figure1": Figure(
        "Fig. 1: ResNet-1001 on CIFAR-10",
        {
            "": (
                ("table3", "ResNet-1001, original"),
                ("table3", "ResNet-1001, full_preactivation"),
            )
        },
    ),
    "figure3": Figure(
        "Fig. 3: shortcuts, ResNet-110 on CIFAR-10",
        {
            "constant scaling": (
                ("table1", "ResNet-110, constant scaling (0.5, 0.5)"),
                _BASELINE,
            ),
            "exclusive gating": (
                ("table1", "ResNet-110, exclusive gating (1-g(x), g(x)), b_g = -6"),
                _BASELINE,
            ),
            "shortcut-only gating": (
                ("table1", "ResNet-110, shortcut-only gating (1-g(x), 1), b_g = 0"),
                _BASELINE,
            ),
            "1x1 convolution": (
                ("table1", "ResNet-110, 1x1 convolution (1x1 conv, 1)"),
                _BASELINE,
            ),
        },
    ),
    "figure6": Figure(
        "Fig. 6: activations, on CIFAR-10",
        {
            "ResNet-110": (
                ("table2", "ResNet-110, bn_after_addition"),
                ("table2", "ResNet-110, original"),
            ),
            "ResNet-164": (
                ("table2", "ResNet-164, full_preactivation"),
                ("table2", "ResNet-164, original"),
            ),
        },
    ),
    "preact": Figure(
        "Full pre-activation against the original, on CIFAR-10",
        {
            f"ResNet-{depth}": (
                ("preact", f"ResNet-{depth}, full_preactivation"),
                ("first_paper", f"ResNet-{depth}, {depth} layers"),
            )
            for depth in (20, 32, 44, 56)
        },
    ),
    "eighth": Figure(
        "Fig. 1 and 6 with ResNet-56 and an eighth of the schedule, on CIFAR-10",
        {
            arrangement: (
                ("eighth2", f"ResNet-56, {arrangement}"),
                ("eighth2", "ResNet-56, original"),
            )
            for arrangement in ("full_preactivation", "bn_after_addition")
        },
    ),
    "deep": Figure(
        "Ten thousand layers, on digits",
        {"": tuple(("deep", row.label) for row in _DEEP.rows)},
    ),
}
