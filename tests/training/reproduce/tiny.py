"""Trials that take seconds: a network of eight layers, few images of 8 x 8 pixels,
twelve steps.
"""

import contextlib
import dataclasses
import types

import keras
import numpy as np

from training.config import Config, Data, Optimizer, Schedule
from training.reproduce import run, trials
from training.reproduce.images import Images
from training.reproduce.run import Run, Settings
from training.reproduce.trials import Trial

#: Iterations of a run, of a leg, and images in a batch.
STEPS, LEG, BATCH = 12, 4, 4

ARGUMENTS = {"depth": 8, "width_factor": 0.25, "arrangement": "full_preactivation", "classes": 10}
PLAIN = Trial("digits/tiny", "digits", "resnet_cifar", ARGUMENTS, "tiny")
#: Draws random numbers in every step.
DROPOUT = Trial(
    "digits/tiny-dropout", "digits", "resnet_cifar", ARGUMENTS | {"shortcut": "dropout"}, "tiny"
)
DIVERGING = Trial("digits/tiny-diverging", "digits", "resnet_cifar", ARGUMENTS, "diverging")


def recipe() -> Config:
    return Config(
        data=Data("digits", augmentation="pad_crop_flip"),
        schedule=Schedule("steps", drops=(6, 10), warmup=3, length=STEPS, unit="iterations"),
        batch_size=BATCH,
    )


def diverging() -> Config:
    return dataclasses.replace(
        recipe(),
        optimizer=Optimizer(learning_rate=1e30),
        schedule=Schedule("steps", (6, 10), length=STEPS, unit="iterations"),
    )


def install() -> None:
    """Put recipes and trials among those of the package, in this process."""
    own = {"tiny": recipe, "diverging": diverging}
    trials.RECIPES = types.MappingProxyType(trials.RECIPES | own)
    trials.TRIALS = types.MappingProxyType(
        trials.TRIALS | {each.name: each for each in (PLAIN, DROPOUT, DIVERGING)}
    )
    run.LEGS = STEPS // LEG


@contextlib.contextmanager
def installed():
    """Put them there for the time of a context."""
    before = trials.RECIPES, trials.TRIALS, run.LEGS
    install()
    try:
        yield
    finally:
        trials.RECIPES, trials.TRIALS, run.LEGS = before


def images(seed: int = 0, train: int = 30, test: int = 8) -> Images:
    """Return random images, of which seven batches and a half are an epoch."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (train + test, 8, 8, 1), "uint8")
    labels = random.integers(0, 10, train + test)
    return Images(
        "digits",
        tuple("0123456789"),
        pixels[:train],
        labels[:train],
        pixels[train:],
        labels[train:],
    )


class Calls:
    """Says that the time is over behind so many calls."""

    def __init__(self, calls: float = float("inf")):
        self.left = calls

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def make(
    folder,
    trial: Trial = PLAIN,
    calls: float = float("inf"),
    together: int = 1,
    data: Images | None = None,
) -> Run:
    """Return a run whose results and state are below the folder."""
    settings = Settings(folder / "results", folder / "work", dtype="float32", together=together)
    return Run(
        trial, data or images(), settings, out_of_time=Calls(calls), say=lambda message: None
    )


def values(of: Run) -> list[np.ndarray]:
    """Return all that training has changed: weights, statistics, states of generators,
    and the optimizer's variables.
    """
    assert of.model is not None
    variables = [*of.model.network.variables, *of.model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def assert_identical(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
