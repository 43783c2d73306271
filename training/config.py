"""The typed configuration of a training run. Every field is an option of `keras-preact
train`.
"""

import contextlib
import dataclasses
import math
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from .errors import UserError
from .functions import is_own

#: Fields of `Model` that say where a network starts. They are not arguments of its builder.
START = ("name", "weights", "freeze", "mean", "std")

#: Fields whose options have another name: `dtype` is the builder's argument.
NAMES = {"dtype": "precision"}

#: Prefixes of the names of data sets of TensorFlow Datasets and Hugging Face.
TFDS, HUGGING_FACE = "tfds:", "hf:"


def read_option(text: str) -> tuple[str, Any]:
    """Return name and value of `NAME=VALUE`. The value is a number, a bool, None or the
    text itself.
    """
    name, _, value = text.partition("=")
    if not value:
        raise UserError(f"Options are written NAME=VALUE. Received: {text}")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return name, kind(value)
    return name, value


# Names of the library's tables, written here because importing the library takes seconds and
# `--help` should not.
Arrangement = Literal[
    "original",
    "bn_after_addition",
    "relu_before_addition",
    "relu_only_preactivation",
    "full_preactivation",
    "bn_only_preactivation",
]
Shortcut = Literal[
    "identity",
    "constant_scaling",
    "exclusive_gating",
    "shortcut_only_gating",
    "conv1x1",
    "dropout",
    "none",
    "scaled_residual",
    "orthogonal",
    "decayed_identity",
    "depth_scaling",
    "hyper_connections",
]
Block = Literal["basic", "bottleneck", "single", "dense"]
Normalization = Literal["batch", "layer", "group", "rms", "none"]
Downsampling = Literal["strided", "average", "blur", "max"]
Precision = Literal["auto", "float32", "mixed_bfloat16", "mixed_float16"]


def own_parts(model: Mapping[str, Any]) -> list[str]:
    """Return the objects of a person in options of --model, also of another version."""
    values = [model.get(option) for option in ("name", "arrangement", "shortcut", "block")]
    return [value for value in values if value is not None and is_own(value)]


@dataclasses.dataclass(frozen=True)
class Model:
    """The network: a registered model and what to change in it. An option that is not
    given keeps the model's own value.
    """

    name: str = "digits_resnet20_preact"
    """A registered model, such as cifar_resnet110_preact; `keras-preact train --help` lists all. Or
    yours: MODULE:FUNCTION, which returns a Keras model."""
    weights: Path | None = None
    """For finetune: a trained network, which gets a new classifier: a run directory, a file of this
    package or of another library, or MODEL:WEIGHTS, such as cifar_resnet20_preact:cifar10 or
    ResNet50V2:imagenet."""
    freeze: str | None = None
    """Freeze --model.weights up to here: stem, stage2, stage2_unit1 or head (before classifier)."""
    mean: tuple[float, ...] = ()
    """Mean pixel (0 to 255) of a network of --model.weights without preprocessing layer."""
    std: tuple[float, ...] = ()
    """Standard deviation of the pixels, together with --model.mean."""
    arrangement: Arrangement | str | None = None
    """Order of BN, ReLU and weights in a unit (Fig. 4 of the paper), or yours: MODULE:OBJECT."""
    shortcut: Shortcut | str | None = None
    """Type of shortcut (Table 1 of the paper, and later ones), or yours: MODULE:OBJECT."""
    shortcut_options: tuple[str, ...] = ()
    """Options of --model.shortcut, as NAME=VALUE: for hyper_connections, constraint=none
    streams=2."""
    scales: tuple[float, float] | None = None
    """Factors of shortcut and residual, such as 0.5 1. For constant_scaling."""
    gate_bias: float | None = None
    """Initial bias of the gates, such as -6. For the two gating shortcuts."""
    block: Block | str | None = None
    """Weights of the residual branch, or yours: MODULE:OBJECT."""
    normalization: Normalization | None = None
    """Normalisation layer."""
    activation: str | None = None
    """Any Keras activation, such as relu or gelu."""
    width_factor: float | None = None
    """Multiply the number of channels by this factor."""
    dropout: float | None = None
    """Dropout rate inside the residual branch."""
    stochastic_depth: float | None = None
    """Drop the last unit's branch with this probability; earlier ones proportionally less."""
    squeeze_excitation: int | None = None
    """Add squeeze-and-excitation with this reduction, such as 16."""
    downsampling: Downsampling | None = None
    """How units halve the map: strides, average (ResNet-D), blur (anti-aliased) or max pooling."""
    standardize_weights: bool | None = None
    """Standardise convolution kernels. Use it with group normalisation."""
    zero_init_last: bool | None = None
    """Initialise every branch to zero, so that each unit starts as its shortcut."""
    stacked: bool | None = None
    """Stack equal units in one layer, to compile fast. Default: from 16 equal units per stage."""
    remat: int | None = None
    """Recompute this many units together in the backward pass, to save memory."""
    dtype: Annotated[
        Precision | str | None, tyro.conf.arg(name="precision", aliases=["--precision"])
    ] = None
    """Precision of the training. auto: the faster of float32 and mixed_bfloat16. The mixed ones
    compute in 16 bits, with weights in float32. Or any Keras dtype policy. The precision of an
    export is an option of `keras-preact export`."""
    options: tuple[str, ...] = ()
    """Other options of network, units or block, as NAME=VALUE: output_stride=8 use_bias=true."""

    @property
    def functions(self) -> list[str]:
        """Objects of a person that the network is made of, each as MODULE:OBJECT."""
        return own_parts(vars(self))

    def overrides(self) -> dict:
        """Return the fields that are set, as arguments of `kp.create_model`."""
        changes = {
            key: value
            for key, value in dataclasses.asdict(self).items()
            if key not in (*START, "scales", "shortcut_options", "options") and value is not None
        }
        scaling = {} if self.scales is None else {"shortcut": self._scaling(*self.scales)}
        return changes | scaling | dict(map(read_option, self.options))

    def _scaling(self, shortcut: float, residual: float) -> Any:
        if self.shortcut != "constant_scaling":
            raise UserError(
                f"--model.scales needs --model.shortcut constant_scaling. Received: {self.shortcut}"
            )
        from keras_preact.shortcuts import ConstantScaling  # brings Keras

        return ConstantScaling(shortcut, residual)


@dataclasses.dataclass(frozen=True)
class Data:
    """The images and their augmentation."""

    name: str = "digits"
    """digits, cifar10, cifar100, imagenet2012, tfds:NAME, hf:NAME (Hugging Face); fake (random);
    yours: folder, npz, or MODULE:FUNCTION, which returns (x_train, y_train), (x_test, y_test)."""
    dir: Path | None = None
    """Folder with train/CLASS/IMAGE and test/CLASS/IMAGE, or CLASS/IMAGE; .npz file; data dir of
    TFDS; cache of Hugging Face."""
    augmentation: Literal["none", "pad_crop_flip", "resized_crop_flip"] = "none"
    """Random changes: pad, crop and flip (CIFAR), or resized crops (ImageNet)."""
    size: int | None = None
    """Height and width: images are resized, then cropped. Needed if their sizes differ."""
    padding: Literal["mean", "black", "reflect"] = "mean"
    """Pixels around the images, for pad_crop_flip. The paper's code takes the mean colour."""
    border: int = 4
    """Number of pixels around the images on each side, for pad_crop_flip."""
    flip: Literal["random", "alternating", "none"] = "random"
    """random: mirror half of the images. alternating: each image in every other epoch (only for
    pad_crop_flip, arXiv 2404.00498). none: for digits, text and traffic signs."""
    rand_augment: tuple[int, int] | None = None
    """RandAugment: number of operations per image and their magnitude (0 to 30), such as 2 9."""
    mixup: float = 0.0
    """Alpha of mixup, such as 0.2; 0: none. Accuracy then counts the label of the larger share."""
    cutmix: float = 0.0
    """Alpha of CutMix, such as 1; 0: none. With mixup, each batch uses one of them at random."""
    holdout: float = 0
    """Training images to hold out, a number or share. They choose the best checkpoint."""
    test: float = 0
    """For a folder without test or val: share of the images of each class for the test, such as
    0.2. They are the same in every run, whatever its seed."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weigh images by the rarity of their class, also in the training accuracy."""
    watch_test: bool = False
    """Without held-out images: measure the test images after every epoch."""
    skip_broken: bool = False
    """For folder: decode every image at the start, and leave out and list the broken ones."""
    on_device: bool = False
    """Keep the training images on the device, for pad_crop_flip or none. Needs one device."""

    @property
    def is_function(self) -> bool:
        """Whether the name is the MODULE:FUNCTION of a person."""
        return ":" in self.name and not self.name.startswith((TFDS, HUGGING_FACE))


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The paper's SGD (kp.optimizers.CoupledSGD), or another one of kp.optimizers."""

    name: Literal["sgd", "muon", "adamw", "lion"] = "sgd"
    """sgd: coupled weight decay. muon: orthogonal updates of kernels, AdamW for other weights."""
    learning_rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 0.1
    """Learning rate after the warm-up."""
    momentum: float = 0.9
    """Momentum; for adamw and lion, beta_1."""
    nesterov: bool = False
    """For sgd and muon: use Nesterov momentum."""
    weight_decay: float = 1e-4
    """sgd: added to the gradient, as in the paper. Others: decoupled, times the learning rate."""
    adam_ratio: float = 0.1
    """For muon: rate of the weights that are trained by AdamW, over the learning rate."""
    exclude_from_decay: tuple[str, ...] = ()
    """Do not decay weights with such a word in their path: norm excludes all normalisations."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale the rate with --batch-size. It is given for --optimizer.reference-batch-size."""
    reference_batch_size: int = 256
    """Batch size that the learning rate is given for, with --optimizer.scaling."""
    layer_decay: float | None = None
    """Factor on the rate from each stage to the one before it, such as 0.7."""
    clip_norm: float | None = None
    """Clip the norm of all gradients together to this value."""
    ema: float | None = None
    """Evaluate and save a moving average of the weights with this momentum, such as 0.999."""
    label_smoothing: float = 0.0
    """Spread this share of the target over all classes."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate over the run."""

    kind: Literal["steps", "cosine", "linear"] = "cosine"
    """Divide the rate at --schedule.drops, or follow a cosine or a straight line to 0."""
    drops: tuple[float, ...] = ()
    """For steps: when the rate is multiplied by --schedule.factor, in --schedule.unit."""
    factor: float = 0.1
    """For steps: factor of each drop."""
    warmup: float = 0
    """Length of the warm-up, in --schedule.unit."""
    stable: float = 0
    """For linear: length at the full rate between warm-up and fall, in --schedule.unit."""
    cycles: int = 1
    """For cosine: how often the rate falls, each time from the full rate (warm restarts)."""
    warmup_learning_rate: float = 0.01
    """For steps: rate during the warm-up. The others warm up linearly from 0."""
    length: float = 10
    """Length of the run, in --schedule.unit. --epochs N stretches the rest too."""
    unit: Literal["epochs", "iterations"] = "epochs"
    """Unit of length, warm-up and drops."""

    def over(self, epochs: float) -> "Schedule":
        """Return the schedule for a run of `epochs`: its parts keep their share of the run."""
        scale = epochs / self.length
        return dataclasses.replace(
            self,
            length=epochs,
            unit="epochs",
            warmup=self.warmup * scale,
            stable=self.stable * scale,
            drops=tuple(drop * scale for drop in self.drops),
        )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When the state of the run is saved to checkpoints/, so that it can be resumed."""

    minutes: float = 5.0
    """Minutes between two checkpoints. One more is saved at the end and on interruption."""
    every: int = 0
    """Iterations between two checkpoints, instead of --checkpoint.minutes. 0: by time."""
    keep: int = 3
    """Number of checkpoints to keep."""
    best: bool = True
    """Write best.keras after the best epoch so far. --checkpoint.no-best: never."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A training run."""

    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    checkpoint: Checkpoint = Checkpoint()
    batch_size: Annotated[int, tyro.conf.arg(aliases=["--batch"])] = 128
    """Images per update, over all devices."""
    steps_per_epoch: int = 0
    """Iterations per epoch, after which the run is measured. 0: one pass over the images."""
    accumulate: int = 1
    """Number of micro-batches per batch, to save memory. Each has its own batch statistics."""
    seed: int = 0
    """Seed of weights, order of images, augmentation and dropout."""
    distribution: Literal["none", "data_parallel", "model_parallel", "mirrored", "multi_worker"] = (
        "none"
    )
    """Several devices. data_parallel, model_parallel: JAX. mirrored: TensorFlow. Others: any."""
    batch_norm: Literal["synchronized", "per_replica"] = "synchronized"
    """Compute batch statistics over the images of all devices, or of each device."""
    steps_per_execution: int = 1
    """Iterations per call of the compiled train step."""
    jit_compile: Literal["auto", "on", "off"] = "auto"
    """Compile the train step (XLA, torch.compile). auto: as Keras; TensorFlow on a CPU: off."""
    compile_cache: str = "auto"
    """Folder of compiled steps, which the next run of the same network need not compile. off: none.
    auto: for JAX, in ~/.cache/keras-preact. TensorFlow compiles with XLA only."""
    health: int = 100
    """Iterations between records of gradients, updates and activations (health.csv). 0: none."""
    callbacks: tuple[str, ...] = ()
    """Further Keras callbacks: MODULE:FUNCTION, which gets the run directory and returns one. With
    several processes only the first one has them: they may log, not change the training."""
    profile: tuple[int, int] | None = None
    """Record what these iterations do, from the first to the last, for TensorBoard's profiler."""
    output: Path | None = None
    """New run directory. If not given: runs/RECIPE-DATE-TIME."""
    resume: bool = False
    """With --output RUN: resume that run, or start it if there is none. For restarting jobs."""
    dry_run: bool = False
    """Train four steps, print parameters, FLOPs, memory and time, and write nothing."""

    @property
    def has_soft_labels(self) -> bool:
        """Whether labels are shares of the classes: mixed, smoothed or one-hot."""
        return bool(self.data.mixup or self.data.cutmix or self.optimizer.label_smoothing)

    @property
    def functions(self) -> list[str]:
        """Functions and objects of a person that the options name, each as MODULE:FUNCTION."""
        data = [self.data.name] if self.data.is_function else []
        return [*self.model.functions, *data, *self.callbacks]

    @property
    def micro_batch_size(self) -> int:
        """Images in each of the micro-batches that a batch is computed in."""
        return self.batch_size // self.accumulate

    @property
    def iterations_at_once(self) -> int:
        """Iterations of which an epoch has a multiple: a whole number of executions."""
        return self.steps_per_execution // math.gcd(self.steps_per_execution, self.accumulate)

    def iterations(self, length: float, steps_per_epoch: int) -> int:
        """Turn a length in the schedule's unit into iterations."""
        return round(length * (steps_per_epoch if self.schedule.unit == "epochs" else 1))


T = typing.TypeVar("T")

#: Options that may change when a run is resumed: they do not change what it computes, except for
#: rounding.
FREE = [
    "output",
    "resume",
    "dry_run",
    "checkpoint",
    "distribution",
    "compile_cache",
    "health",
    "callbacks",
    "profile",
]


def from_json(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return the configuration, or a part of it, from what `dataclasses.asdict` wrote
    to config.json.

    Raises:
        UserError: for an unknown option, or a value of another type.
    """
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise UserError(
            f"Another version of keras-preact wrote this configuration: its option {unknown[0]} "
            "is unknown here."
        )
    return kind(**{name: _read(name, hints[name], value) for name, value in values.items()})


def _read(name: str, hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value)
    if isinstance(value, list):
        value = tuple(value)
    elif isinstance(value, str) and Path in (hint, *typing.get_args(hint)):
        value = Path(value)
    if not _is_of(hint, value):
        raise UserError(f"The option {name} cannot be {value!r}.")
    return value


def _is_of(hint: Any, value: Any) -> bool:
    """Return whether a value has the type of an option."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return value in arguments
    if typing.get_origin(hint) is tuple:
        each = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return isinstance(value, tuple) and (
            len(each) == len(value) and all(map(_is_of, each, value))
        )
    if arguments:  # one of several types
        return any(_is_of(each, value) for each in arguments)
    if isinstance(value, bool):  # which Python counts as an int
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def differences(one: Config, other: Config, ignored: Collection[str] = ()) -> list[str]:
    """Return the options, as named on the command line, in which two configurations
    differ, except for `FREE` options and the `ignored` ones.
    """
    first, second = options(one), options(other)
    names = [f"--{name}" for name in first if first[name] != second[name]]
    return [name for name in names if name not in ignored]


def options(config: Config) -> dict[str, Any]:
    """Return the options of a configuration, by their names on the command line without
    dashes, except for `FREE` options.
    """
    return _flat(dataclasses.asdict(config))


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field, value in fields.items():
        name = prefix + NAMES.get(field, field).replace("_", "-")
        if prefix or field not in FREE:
            flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
