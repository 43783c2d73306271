"""What the tables of the results train: recipes, and networks with their recipes."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .. import recipes
from ..commands.evaluate.views import Views
from ..config import Checkpoint, Config, Data, Model, Optimizer, Schedule
from ..functions import is_own

if TYPE_CHECKING:
    import keras

#: Measurements of the test set in a run.
MEASUREMENTS = 64
#: Steps per execution on an accelerator, at most.
STEPS_PER_EXECUTION = 100
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


def small_batch(size: int, rate: float) -> Config:
    """Return `small` with as many epochs in batches of another size."""
    paper = small()
    scale = paper.batch_size / size
    schedule = paper.schedule
    return dataclasses.replace(
        paper,
        batch_size=size,
        optimizer=Optimizer(learning_rate=rate),
        schedule=dataclasses.replace(
            schedule,
            drops=tuple(drop * scale for drop in schedule.drops),
            warmup=schedule.warmup * scale,
            length=schedule.length * scale,
            warmup_learning_rate=rate / 10,
        ),
    )


def small_cold() -> Config:
    """Return `small` without warm-up."""
    paper = small()
    return dataclasses.replace(paper, schedule=dataclasses.replace(paper.schedule, warmup=0))


def small_early_dropout() -> Config:
    """Return `small` for a network whose dropout falls to 0 in the first half."""
    return dataclasses.replace(small(), callbacks=(f"{__name__}:early_dropout",))


def early_dropout(run: Path) -> "keras.callbacks.Callback":
    """Return what lets a dropout of 0.1 fall to 0 until the rate drops for the first time."""
    import keras_preact as kp  # brings Keras

    first, *_ = small().schedule.drops
    return kp.DropoutSchedule(kp.schedules.linear_schedule(0.1, steps=round(first)))


def small_adamw() -> Config:
    """AdamW for transformers: 1,400 iterations of 32 digits, 140 of them warm-up. The rate
    falls along a cosine to 0.
    """
    return dataclasses.replace(
        small(),
        optimizer=Optimizer("adamw", learning_rate=1e-3, weight_decay=0.05),
        schedule=Schedule("cosine", warmup=140, length=1_400, unit="iterations"),
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


def plain(optimizer: Optimizer) -> Config:
    """The iterations of `small` without warm-up and weight decay. The rate falls along a
    cosine to 0.
    """
    paper = small()
    return dataclasses.replace(
        paper,
        optimizer=dataclasses.replace(optimizer, weight_decay=0),
        schedule=Schedule("cosine", length=paper.schedule.length, unit="iterations"),
    )


def plain_muon(layers: int) -> Config:
    """Return `plain` with Muon. The deeper the network, the less each layer moves: the rate
    is 0.1 / layers. Muon trains the kernels between the first and the last one; those have
    the rate 0.001.
    """
    rate = 0.1 / layers
    return plain(Optimizer("muon", learning_rate=rate, nesterov=True, adam_ratio=0.001 / rate))


#: Name to recipe.
RECIPES: Mapping[str, Callable[[], Config]] = {
    "paper": recipes.cifar10,
    "eighth": eighth,
    "batch64": recipes.cifar10_batch64,
    "small": small,
    "small_cold": small_cold,
    "small_early_dropout": small_early_dropout,
    "small_adamw": small_adamw,
    # the rate of `small` is for 32 images: scaled by the root, not at all, and linearly
    "small_batch4": lambda: small_batch(4, 0.1 / 8**0.5),
    "small_batch128": lambda: small_batch(128, 0.2),
    "small_batch128_same": lambda: small_batch(128, 0.1),
    "small_batch128_linear": lambda: small_batch(128, 0.4),
    "fast": recipes.cifar10_fast,
    "plain_sgd": lambda: plain(Optimizer(learning_rate=3e-4)),
    "plain_muon": lambda: plain_muon(1_000),
    "plain_muon10000": lambda: plain_muon(10_000),
    "residual_muon": lambda: plain(Optimizer("muon", learning_rate=0.02, nesterov=True)),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """What is trained for a row, with one or more seeds. Several rows can share it.

    Args:
        name: Unique name, such as `cifar10/resnet110-original`: the data set, and the path
            of its results.
        recipe: Name in `RECIPES`, or a recipe of a person, MODULE:RECIPE, with its own
            data set.
        model: The network.
        measurements: Measurements of the test images in a run. 0: only at its end, with
            the views of `views`.
        views: Views of an image; their logits are averaged. See `keras-preact evaluate`.
        signals: Whether the signals of the trained network are measured.
    """

    name: str
    recipe: str
    model: Model
    measurements: int = MEASUREMENTS
    views: tuple[Views, ...] = ()
    signals: bool = False

    @property
    def dataset(self) -> str:
        """Name of the data set."""
        return self.name.partition("/")[0]

    def config(
        self,
        seed: int,
        *,
        dtype: str = "float32",
        steps_per_execution: int = 1,
        on_device: bool = False,
        data: Path | None = None,
        smoke: bool = False,
    ) -> Config:
        """Return the configuration of a run.

        Args:
            seed: Seed of weights, order and augmentation.
            dtype: Keras dtype policy.
            steps_per_execution: Steps per execution, at most.
            on_device: Whether the images stay on the device.
            data: Data directory.
            smoke: Whether to train only eight steps, on the digits, or on random images
                for the tables on CIFAR.
        """
        own = is_own(self.recipe)
        recipe = recipes.find(self.recipe)() if own else RECIPES[self.recipe]()
        if smoke:
            recipe = dataclasses.replace(recipe, schedule=SMOKE, batch_size=8)
        fake = smoke and self.dataset != "digits" and not own
        # the epochs of a person's recipe are as long as its images are many
        in_epochs = own and recipe.schedule.unit == "epochs"
        iterations = 1 if in_epochs else round(recipe.schedule.length)
        measurements = min(2, self.measurements) if smoke else self.measurements
        at_once = max(n for n in range(1, steps_per_execution + 1) if not iterations % n)
        every = 0
        if measurements and not in_epochs:
            every = max(1, round(iterations / measurements / at_once)) * at_once
        return dataclasses.replace(
            recipe,
            model=dataclasses.replace(self.model, dtype=dtype),
            data=dataclasses.replace(
                recipe.data,
                name="fake" if fake else recipe.data.name if own else self.dataset,
                dir=None if fake else data or (recipe.data.dir if own else None),
                holdout=0,
                watch_test=measurements > 0,
                on_device=recipe.data.on_device if own else on_device and not fake,
            ),
            checkpoint=Checkpoint(minutes=2, keep=1, best=False),
            seed=seed,
            steps_per_epoch=every,
            steps_per_execution=at_once,
            health=0,
        )
