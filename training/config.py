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
    a model of yours: MODULE:FUNCTION, which returns a Keras model."""
    weights: Path | None = None
    """Trained network to fine-tune; it gets a new classifier. A run directory, a file of this
    package or of another library, or MODEL:WEIGHTS, such as cifar_resnet20_preact:cifar10 or
    ResNet50V2:imagenet."""
    freeze: str | None = None
    """Freeze the network of --model.weights up to this part: stem, stage2, stage2_unit1 or head
    (all but the classifier)."""
    mean: tuple[float, ...] = ()
    """Mean of the pixels (0 to 255), for a network of --model.weights without a preprocessing
    layer."""
    std: tuple[float, ...] = ()
    """Standard deviation of the pixels. Give it together with --model.mean."""
    arrangement: Arrangement | str | None = None
    """Order of BN, ReLU and weights in a unit (Fig. 4 of the paper), or an arrangement of yours:
    MODULE:OBJECT."""
    shortcut: Shortcut | str | None = None
    """Type of shortcut (Table 1 of the paper, and later ones), or a shortcut of yours:
    MODULE:OBJECT."""
    shortcut_options: tuple[str, ...] = ()
    """Options of --model.shortcut, each as NAME=VALUE, such as constraint=none streams=2 for
    hyper_connections."""
    scales: tuple[float, float] | None = None
    """Factors on the shortcut and on the residual branch, for constant_scaling, such as 0.5 1."""
    gate_bias: float | None = None
    """Initial bias of the gates, for the two gating shortcuts, such as -6."""
    block: Block | str | None = None
    """Layers with weights in the residual branch, or a block of yours: MODULE:OBJECT."""
    normalization: Normalization | None = None
    """Kind of normalisation layers."""
    activation: str | None = None
    """Any Keras activation, such as relu or gelu."""
    width_factor: float | None = None
    """Multiply the number of channels by this factor."""
    dropout: float | None = None
    """Dropout rate inside the residual branch."""
    stochastic_depth: float | None = None
    """Probability of dropping the last unit's branch. It is proportionally smaller for earlier
    units."""
    squeeze_excitation: int | None = None
    """Add squeeze-and-excitation to every unit, with this reduction ratio, such as 16."""
    downsampling: Downsampling | None = None
    """How a unit halves its map: strides, average pooling (ResNet-D), blur (anti-aliased) or max
    pooling."""
    standardize_weights: bool | None = None
    """Standardise convolution kernels. Use it with group normalisation."""
    zero_init_last: bool | None = None
    """Initialise every branch to zero, so that each unit starts as its shortcut."""
    stacked: bool | None = None
    """Stack equal units in one layer, which compiles faster. If not given: stack with
    --model.remat, and if a stage has 16 or more equal units."""
    remat: int | None = None
    """Recompute this many units of a stack together in the backward pass, to save memory."""
    dtype: Annotated[
        Precision | str | None, tyro.conf.arg(name="precision", aliases=["--precision"])
    ] = None
    """Precision of the training. auto: the faster of float32 and mixed_bfloat16. The mixed
    precisions compute in 16 bits and keep the weights in float32. Other Keras dtype policies work
    too. The precision of an export is an option of `keras-preact export`."""
    options: tuple[str, ...] = ()
    """Other options of the network, its units or its block, each as NAME=VALUE, such as
    output_stride=8 use_bias=true."""

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


#: The data and their place in commands that measure. Errors about them name them as `train` does.
DataName = Annotated[str | None, tyro.conf.arg(aliases=["--data.name"])]
DataDir = Annotated[Path | None, tyro.conf.arg(aliases=["--data.dir"])]


@dataclasses.dataclass(frozen=True)
class Data:
    """The images and their augmentation."""

    name: str = "digits"
    """Data set: digits, cifar10, cifar100, imagenet2012, tfds:NAME (TensorFlow Datasets), hf:NAME
    (Hugging Face) or fake (random images). For your own images: folder, npz, or MODULE:FUNCTION,
    which returns (x_train, y_train), (x_test, y_test)."""
    dir: Path | None = None
    """Place of the data. For folder: a folder with train/CLASS/IMAGE and test/CLASS/IMAGE, or with
    CLASS/IMAGE. For npz: the .npz file. For TensorFlow Datasets and Hugging Face: their data or
    cache folder."""
    augmentation: Literal["none", "pad_crop_flip", "resized_crop_flip"] = "none"
    """Random changes of the training images: pad, crop and flip (CIFAR), or resized crops and flips
    (ImageNet)."""
    size: int | None = None
    """Height and width of the images. They are resized, then cropped. Needed if their sizes
    differ."""
    padding: Literal["mean", "black", "reflect"] = "mean"
    """Pixels that pad_crop_flip adds around the images. The paper's code takes the mean colour."""
    border: int = 4
    """Number of pixels that pad_crop_flip adds on each side."""
    flip: Literal["random", "alternating", "none"] = "random"
    """random: mirror half of the images. alternating: mirror each image in every other epoch (only
    for pad_crop_flip of images in memory, arXiv 2404.00498). none: mirror no image, for digits,
    text and traffic signs."""
    rand_augment: tuple[int, int] | None = None
    """RandAugment: number of operations per image and their magnitude (0 to 30), such as 2 9."""
    mixup: float = 0.0
    """Alpha of mixup, such as 0.2. 0: no mixup. The training accuracy then counts the label with
    the larger share."""
    cutmix: float = 0.0
    """Alpha of CutMix, such as 1. 0: no CutMix. With mixup as well, each batch uses one of them at
    random."""
    holdout: float = 0
    """Training images to hold out: a number, or a share such as 0.1. The best checkpoint is chosen
    on them. A data set that has validation images beside its test images holds those out."""
    test: float = 0
    """Share of each class to test on, such as 0.2, for a folder without test or val. Every run
    tests the same images, whatever its seed."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weigh each image by the rarity of its class, in the loss and in the training
    accuracy."""
    watch_test: bool = False
    """Measure the test images after every epoch. For runs without held-out images."""
    skip_broken: bool = False
    """For folder: decode every image at the start, leave out the broken ones and list them."""
    on_device: bool = False
    """Keep the training images in the memory of the device. For one device, and for the
    augmentations pad_crop_flip and none."""

    @property
    def is_function(self) -> bool:
        """Whether the name is the MODULE:FUNCTION of a person."""
        return ":" in self.name and not self.name.startswith((TFDS, HUGGING_FACE))


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The paper's SGD (kp.optimizers.CoupledSGD), or another one of kp.optimizers."""

    name: Literal["sgd", "muon", "adamw", "lion"] = "sgd"
    """sgd: coupled weight decay, as in the paper. muon: orthogonal updates of kernels, and AdamW
    for the other weights. adamw and lion: decoupled weight decay."""
    learning_rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 0.1
    """Learning rate after the warm-up."""
    momentum: float = 0.9
    """Momentum. For adamw and lion: beta_1."""
    nesterov: bool = False
    """Use Nesterov momentum. For sgd and muon."""
    weight_decay: float = 1e-4
    """Strength of the weight decay. sgd adds it to the gradient, as in the paper. The others
    subtract it from the weights, times the learning rate."""
    adam_ratio: float = 0.1
    """For muon: learning rate of AdamW, as a multiple of --optimizer.learning-rate."""
    exclude_from_decay: tuple[str, ...] = ()
    """Do not decay weights that have one of these words in their path. norm excludes all
    normalisations."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale the learning rate by the ratio of --batch-size to --optimizer.reference-batch-size, or
    by its square root."""
    reference_batch_size: int = 256
    """Batch size for which the learning rate is given. Used with --optimizer.scaling."""
    layer_decay: float | None = None
    """Factor on the learning rate from each stage to the one before it, such as 0.7."""
    clip_norm: float | None = None
    """Clip the norm of all gradients together to this value."""
    ema: float | None = None
    """Evaluate and save a moving average of the weights with this momentum, such as 0.999."""
    label_smoothing: float = 0.0
    """Spread this share of each label over all classes."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate over the run."""

    kind: Literal["steps", "cosine", "linear"] = "cosine"
    """steps: multiply the rate by --schedule.factor at --schedule.drops. cosine: follow a cosine to
    0. linear: follow a straight line to 0."""
    drops: tuple[float, ...] = ()
    """For steps: when the rate drops, in --schedule.unit."""
    factor: float = 0.1
    """For steps: factor on the rate at each drop."""
    warmup: float = 0
    """Length of the warm-up, in --schedule.unit."""
    stable: float = 0
    """For linear: length at the full rate, between the warm-up and the fall, in --schedule.unit."""
    cycles: int = 1
    """For cosine: number of cycles. Each starts at the full rate (warm restarts)."""
    warmup_learning_rate: float = 0.01
    """For steps: learning rate during the warm-up. cosine and linear warm up from 0."""
    length: float = 10
    """Length of the run, in --schedule.unit. --epochs N also stretches the warm-up and the
    drops."""
    unit: Literal["epochs", "iterations"] = "epochs"
    """Unit of all lengths of the schedule."""

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
    """Save a checkpoint every so many minutes, at the end and on interruption."""
    every: int = 0
    """Save a checkpoint every so many iterations, in place of --checkpoint.minutes. 0: by time."""
    keep: int = 3
    """Number of checkpoints to keep."""
    best: bool = True
    """Write best.keras after every epoch that is the best so far."""


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
    """Iterations per epoch. The run is measured after each epoch. 0: one pass over the images."""
    accumulate: int = 1
    """Number of micro-batches per batch, to save memory. Each has its own batch statistics."""
    seed: int = 0
    """Seed of weights, order of images, augmentation and dropout."""
    distribution: Literal["none", "data_parallel", "model_parallel", "mirrored", "multi_worker"] = (
        "none"
    )
    """How to use several devices: data_parallel or model_parallel (JAX), mirrored (TensorFlow), or
    multi_worker (any backend)."""
    batch_norm: Literal["synchronized", "per_replica"] = "synchronized"
    """Compute batch statistics over the images of all devices, or of each device."""
    steps_per_execution: int = 1
    """Iterations per call of the compiled train step."""
    jit_compile: Literal["auto", "on", "off"] = "auto"
    """Compile the train step (XLA, torch.compile). auto: as Keras does, but off for TensorFlow on a
    CPU."""
    compile_cache: str = "auto"
    """Folder of compiled steps, so that the next run of the same network need not compile.
    TensorFlow keeps only what XLA compiles. auto: a folder in ~/.cache/keras-preact, for JAX only.
    off: no folder."""
    health: int = 100
    """Iterations between two records of gradients, updates and activations (health.csv). 0: no
    records."""
    callbacks: tuple[str, ...] = ()
    """Further Keras callbacks, each as MODULE:FUNCTION. The function gets the run directory and
    returns a callback. With several processes, only the first one has them: they may log, but not
    change the training."""
    profile: tuple[int, int] | None = None
    """First and last iteration to record for TensorBoard's profiler."""
    output: Path | None = None
    """New run directory. If not given: runs/RECIPE-DATE-TIME."""
    resume: bool = False
    """Resume the run in --output, or start it if there is none. For jobs that are started again."""
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

#: Options of a command, not of the run that it trains.
OF_COMMAND = ["output", "resume", "dry_run"]
#: Options that may change when a run is resumed: they do not change what it computes, except for
#: rounding.
FREE = ["checkpoint", "distribution", "compile_cache", "health", "callbacks", "profile"]


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
    differ, except for those of the command, `FREE` ones and the `ignored` ones.
    """
    first, second = options(one), options(other)
    names = [f"--{name}" for name in first if first[name] != second[name]]
    return [name for name in names if name not in ignored]


def options(config: Config) -> dict[str, Any]:
    """Return the options of a configuration, by their names on the command line without
    dashes, except for those of the command and `FREE` ones.
    """
    return _flat(dataclasses.asdict(config))


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field, value in fields.items():
        name = prefix + NAMES.get(field, field).replace("_", "-")
        if prefix or field not in (*OF_COMMAND, *FREE):
            flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
