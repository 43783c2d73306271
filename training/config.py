"""The typed configuration of a training run; every field is an option of `python -m training.train`."""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from training.cli import UserError


@dataclasses.dataclass(frozen=True)
class Model:
    """The network: an entry of `kp.list_models()`, and what to change in it (None: as in the entry)."""

    name: str = "digits_resnet20_preact"
    arrangement: str | None = None
    shortcut: str | None = None
    gate_bias: float | None = None
    block: str | None = None
    normalization: str | None = None
    activation: str | None = None
    width_factor: float | None = None
    dropout: float | None = None
    stochastic_depth: float | None = None
    """Rate at which the last unit's branch is left out in training; that of unit l of L is l / L of it."""
    stacked: bool | None = None
    """Whether equal units are one stacked layer: deep networks compile fast. None: from 16 equal units in a stage on."""
    remat: int | None = None
    """Units of a stack that are computed again for the gradient together, to save memory: about the root of their number."""
    dtype: str | None = None
    """A Keras dtype policy, such as mixed_bfloat16."""

    def overrides(self) -> dict:
        """Return the fields that are set, as arguments of `kp.create_model`."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "name" and value is not None}


@dataclasses.dataclass(frozen=True)
class Data:
    """Where the images come from, and what happens to them."""

    name: str = "digits"
    """digits (embedded), cifar10, cifar100, imagenet2012 (TensorFlow Datasets), or folder."""
    dir: Path | None = None
    """For folder: the folder with train/CLASS/IMAGE and test/CLASS/IMAGE. Else TensorFlow Datasets' data dir."""
    augmentation: Literal["none", "pad_crop_flip", "resized_crop_flip"] = "none"
    size: int | None = None
    """Height and width of the images the network gets, for imagenet2012 and folder."""
    holdout: int = 0
    """Training images set aside to choose the best checkpoint by."""
    watch_test: bool = False
    """Without a holdout: measure the test set after every epoch, for the curve. The best checkpoint is not chosen by it."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """SGD with momentum and coupled weight decay (`kp.optimizers.CoupledSGD`)."""

    learning_rate: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    exclude_from_decay: tuple[str, ...] = ()
    """Words; weights with one of them in their path are not decayed: norm spares the normalisations."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate over the run."""

    kind: Literal["steps", "cosine"] = "cosine"
    drops: tuple[float, ...] = ()
    """For steps: where the rate is multiplied by `factor`, in the unit of `length`."""
    factor: float = 0.1
    warmup: float = 0
    """Length of the warm-up, in the unit of `length`: at `warmup_learning_rate` for steps, a line from 0 for cosine."""
    warmup_learning_rate: float = 0.01
    length: float = 10
    """How long to train."""
    unit: Literal["epochs", "iterations"] = "epochs"


@dataclasses.dataclass(frozen=True)
class Config:
    """A training run."""

    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    batch_size: int = 128
    seed: int = 0
    jit_compile: Literal["auto", "on", "off"] = "auto"
    """Whether XLA (TensorFlow) or torch.compile (torch) compiles the step. auto: Keras' choice, but no XLA on a CPU."""
    health: int = 100
    """Iterations between two records of gradients, updates and activations (health.csv, TensorBoard). 0: for none."""
    output: Path | None = None
    """The run directory, new or empty. None: runs/RECIPE-DATE-TIME."""

    def iterations(self, length: float, steps_per_epoch: int) -> int:
        """Turn a length in the schedule's unit into iterations."""
        if not math.isfinite(length):
            raise UserError(f"The lengths of --schedule are numbers of {self.schedule.unit}. Received: {length}")
        return round(length * (steps_per_epoch if self.schedule.unit == "epochs" else 1))
