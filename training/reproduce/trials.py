"""What is trained for the paper's tables: the rows of `kp.published`, each with its
network and its recipe.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import keras_preact as kp

from .. import recipes
from ..config import Config, Data, Model, Schedule


def small() -> Config:
    """The paper's recipe, shortened: 700 iterations of 32 digits, the rate divided by
    10 behind a half and three quarters.
    """
    return Config(
        data=Data("digits"),
        schedule=Schedule("steps", drops=(350, 525), warmup=35, length=700, unit="iterations"),
        batch_size=32,
    )


#: Name to the recipe of a trial.
RECIPES: Mapping[str, Callable[[], Config]] = MappingProxyType(
    {"paper": recipes.cifar10, "batch64": recipes.cifar10_batch64, "small": small}
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A network, its data and its recipe: what is trained once a seed, whichever rows
    it stands in.

    Args:
        name: Such as `cifar10/resnet110-original`: unlike those of all others, and the
            path of its results.
        dataset: Its data.
        builder: Name of a function of `kp.models`.
        arguments: Of that function.
        recipe: Name in `RECIPES`.
    """

    name: str
    dataset: str
    builder: str
    arguments: Mapping[str, Any] = dataclasses.field(hash=False)
    recipe: str

    def config(self, dtype: str = "float32") -> Config:
        """Return the recipe as a configuration; of its model, only the dtype counts."""
        config = RECIPES[self.recipe]()
        data = dataclasses.replace(config.data, name=self.dataset)
        return dataclasses.replace(config, model=Model(self.name, dtype=dtype), data=data)


@dataclasses.dataclass(frozen=True)
class Row:
    """A published result, and the trial that is to reach it."""

    label: str
    published: kp.published.Result
    trial: Trial


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the paper.

    Args:
        title: What it shows.
        rows: In the paper's order.
        small: Whether the networks and data are small stand-ins: no number is to be
            expected, but an order.
        depths: Whether its rows are compared across networks, which differ in nothing
            but their depth.
    """

    title: str
    rows: tuple[Row, ...]
    small: bool = False
    depths: bool = False


def _label(value: Any) -> str:
    """Return an argument of a builder as a part of a trial's name."""
    if isinstance(value, Mapping):  # a shortcut with parameters
        snake = "".join(
            f"_{letter.lower()}" if letter.isupper() else letter for letter in value["class_name"]
        )
        return "-".join([snake.strip("_"), *map(_label, value["config"].values())])
    return f"{value:g}" if isinstance(value, float) else str(value)


def _trial(
    published: kp.published.Result, recipe: str, dataset: str, more: Mapping[str, Any]
) -> Trial:
    own = {
        key: value for key, value in published.arguments.items() if key not in ("depth", "classes")
    }
    parts = [f"b{value:g}" if key == "gate_bias" else _label(value) for key, value in own.items()]
    name = "-".join(
        [
            f"resnet{published.arguments['depth']}",
            *parts,
            *([recipe] if recipe == "batch64" else []),
        ]
    )
    return Trial(
        f"{dataset}/{name}",
        dataset,
        published.builder,
        MappingProxyType({**published.arguments, **more}),
        recipe,
    )


def _table(
    title: str,
    recipe: str = "paper",
    small: Mapping[str, Any] | None = None,
    depths: bool = False,
    **of: str,
) -> Table:
    rows = []
    for published in kp.published.results(**of):
        trial = _trial(published, recipe, "digits" if small else published.dataset, small or {})
        data = "CIFAR-100, " if published.dataset == "cifar100" else ""
        rows.append(Row(f"{data}{published.network}, {published.row}", published, trial))
    return Table(title, tuple(rows), small is not None, depths)


#: What makes the networks of the paper small: 4, 8, 16 channels, for images of 8 x 8 pixels.
_SMALL: Mapping[str, Any] = MappingProxyType({"width_factor": 0.25})

#: Name of a command to its table.
TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "table1": _table("Table 1: shortcuts", table="1"),
        "table2": _table("Table 2: arrangements of the activations", table="2"),
        "table3": _table("Table 3: pre-activation against the original", table="3"),
        "table4": _table("Table 4: ResNet-1001 with batches of 64", "batch64", table="4"),
        "first_paper": _table(
            "Table 6 of arXiv 1512.03385: depth", depths=True, table="6 of 1512.03385"
        ),
        "digits1": _table("Table 1 in small, on digits", "small", _SMALL, table="1"),
        "digits2": _table("Table 2 in small, on digits", "small", _SMALL, table="2"),
    }
)

#: Name to trial, each once.
TRIALS: Mapping[str, Trial] = MappingProxyType(
    {row.trial.name: row.trial for table in TABLES.values() for row in table.rows}
)


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
FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
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
    }
)
