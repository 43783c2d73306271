"""The typed configuration of a training run; every field is an option of `python -m training.train`."""

import dataclasses
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from .cli import UserError

#: Fields of `Model` that say what a network starts from, which is none of its own arguments.
START = ("name", "weights", "freeze", "mean", "std")


@dataclasses.dataclass(frozen=True)
class Model:
    """The network: an entry of `kp.list_models()`, and what to change in it (None: as in the entry)."""

    name: str = "digits_resnet20_preact"
    weights: Path | None = None
    """For the recipe finetune: the trained network to start from, the directory of a run or a .keras file. Its classifier
    makes room for a new one, and its preprocessing stays."""
    freeze: str | None = None
    """Of those weights: the place up to which they stay as they are, such as stem, stage2, stage2_unit1, or head, all but the
    classifier. None: all are trained."""
    mean: tuple[float, ...] = ()
    """Of those weights, where the network has no preprocessing layer: the mean pixel it was trained with, from 0 to 255."""
    std: tuple[float, ...] = ()
    """Standard deviation to that."""
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
    squeeze_excitation: int | None = None
    """The reduction, such as 16, of squeeze-and-excitation at the end of every branch."""
    downsampling: str | None = None
    """How units shrink their map: strided; average, ResNet-D's projection behind a pooling; blur, without aliases."""
    standardize_weights: bool | None = None
    """Whether convolutions use standardised kernels, which belong to group normalisation."""
    zero_init_last: bool | None = None
    """Whether every branch starts at 0, and so every unit as its shortcut."""
    stacked: bool | None = None
    """Whether equal units are one stacked layer: deep networks compile fast. None: from 16 equal units in a stage on."""
    remat: int | None = None
    """Units of a stack that are computed again for the gradient together, to save memory: about the root of their number."""
    dtype: str | None = None
    """A Keras dtype policy, such as mixed_bfloat16."""

    def overrides(self) -> dict:
        """Return the fields that are set, as arguments of `kp.create_model`."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in START and value is not None}


@dataclasses.dataclass(frozen=True)
class Data:
    """Where the images come from, and what happens to them."""

    name: str = "digits"
    """digits (embedded), cifar10, cifar100, imagenet2012 (TensorFlow Datasets), folder, or fake: one random batch again and
    again, to measure the model alone."""
    dir: Path | None = None
    """For folder: the folder with train/CLASS/IMAGE and test/CLASS/IMAGE. Else TensorFlow Datasets' data dir."""
    augmentation: Literal["none", "pad_crop_flip", "resized_crop_flip"] = "none"
    size: int | None = None
    """Height and width of the images the network gets, for imagenet2012, folder and fake (32)."""
    padding: Literal["mean", "black", "reflect"] = "mean"
    """For pad_crop_flip: what the 4 pixels around an image are. mean: the mean colour, what the paper's code pads with."""
    rand_augment: tuple[int, int] | None = None
    """RandAugment behind the augmentation: the number of operations on an image, and their magnitude, from 0 to 30, such as
    2 9. None: no RandAugment."""
    mixup: float = 0.0
    """Alpha of mixup, such as 0.2: every image of a batch, or of a part of one, is mixed with another, and so are the labels.
    The accuracy in training is that of the label with the larger share. 0: no mixup."""
    cutmix: float = 0.0
    """Alpha of CutMix, such as 1: a box of every image is replaced by that of another. With mixup: one of the two for each
    batch, by chance. 0: no CutMix."""
    holdout: int = 0
    """Training images set aside to choose the best checkpoint by."""
    watch_test: bool = False
    """Without a holdout: measure the test set after every epoch, for the curve. The best checkpoint is not chosen by it."""

    @property
    def mixes(self) -> bool:
        """Whether the labels in training are shares of the classes."""
        return bool(self.mixup or self.cutmix)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """SGD with momentum and coupled weight decay (`kp.optimizers.CoupledSGD`)."""

    learning_rate: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    exclude_from_decay: tuple[str, ...] = ()
    """Words; weights with one of them in their path are not decayed: norm spares the normalisations."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rates grow with the batch size, from those given, which are for batches of `reference_batch_size`."""
    reference_batch_size: int = 256
    layer_decay: float | None = None
    """Factor on the learning rate from each part of the network to the one in front of it, such as 0.7: the classifier has the
    full rate, the last stage 0.7 of it, the stage in front of that 0.49, the stem the least. None: one rate for all."""
    clip_norm: float | None = None
    """What the norm of all gradients together is clipped to."""
    ema: float | None = None
    """Share of itself that the moving average of the weights keeps in an update, such as 0.999; the average is what is
    evaluated and kept. None: no average."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""


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
class Checkpoint:
    """When what a run needs to go on is written to checkpoints/."""

    minutes: float = 5.0
    """At least so many between two; one more stands at the end, and where the run is interrupted."""
    every: int = 0
    """Iterations between two, whatever the time. 0: by time alone."""
    keep: int = 3
    """How many of them stay."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A training run."""

    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    checkpoint: Checkpoint = Checkpoint()
    batch_size: int = 128
    """Images in an update, over all devices."""
    accumulate: int = 1
    """Parts a batch is computed in, one after another, to save memory. Each has batch statistics of its own."""
    seed: int = 0
    distribution: Literal["none", "data_parallel", "model_parallel", "mirrored", "multi_worker"] = "none"
    """Devices that train together. JAX: data_parallel (this machine's), model_parallel, multi_worker (several processes);
    TensorFlow: mirrored, multi_worker; torch: multi_worker."""
    batch_norm: Literal["synchronized", "per_replica"] = "synchronized"
    """Whether a batch's statistics are those of all devices' images together, or of each device's."""
    steps_per_execution: int = 1
    """Iterations that the backend runs at a time."""
    jit_compile: Literal["auto", "on", "off"] = "auto"
    """Whether XLA (TensorFlow) or torch.compile (torch) compiles the step. auto: Keras' choice, but no XLA on a CPU."""
    health: int = 100
    """Iterations between two records of gradients, updates and activations (health.csv, TensorBoard). 0: for none."""
    output: Path | None = None
    """The run directory, new or empty. None: runs/RECIPE-DATE-TIME."""
    resume: bool = False
    """Go on with the run in --output where there is one, and begin it where there is none: what launchers restart."""
    dry_run: bool = False
    """Say what the run would be and take, and train no more than a few steps."""

    @property
    def part_size(self) -> int:
        """Images in each of the parts that a batch is computed in."""
        if self.batch_size < 1:
            raise UserError(f"--batch-size must be positive. Received: {self.batch_size}")
        if self.accumulate < 1 or self.batch_size % self.accumulate:
            raise UserError(
                "--accumulate must divide --batch-size. "
                f"Received: --accumulate {self.accumulate} --batch-size {self.batch_size}"
            )
        return self.batch_size // self.accumulate

    def iterations(self, length: float, steps_per_epoch: int) -> int:
        """Turn a length in the schedule's unit into iterations."""
        if not math.isfinite(length):
            raise UserError(f"The lengths of --schedule are numbers of {self.schedule.unit}. Received: {length}")
        return round(length * (steps_per_epoch if self.schedule.unit == "epochs" else 1))


T = typing.TypeVar("T")

#: Options that a run may go on with another value of: they do not change what it computes, but for the last bits.
FREE = ("output", "resume", "dry_run", "checkpoint", "distribution", "health")


def from_json(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return the configuration, or a part of it, that config.json holds as `dataclasses.asdict` gave it.

    Raises:
        UserError: for an option that there is not, of another version.
    """
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise UserError(f"Another version wrote this configuration: it has the option {unknown[0]}, which there is not here.")
    return kind(**{name: _read(hints[name], value) for name, value in values.items()})


def _read(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value)
    if isinstance(value, list):
        return tuple(value)
    return Path(value) if isinstance(value, str) and Path in typing.get_args(hint) else value


def differences(one: Config, other: Config) -> list[str]:
    """Return the options in which two runs would compute something else, as the command line names them."""
    first, second = (_flat(dataclasses.asdict(config)) for config in (one, other))
    return [f"--{name.replace('_', '-')}" for name in first if first[name] != second[name]]


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        if prefix or name not in FREE:
            found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
