"""Functions that the converters share: read a network's structure from the names and
shapes of its weights, build and load our network, and compare its outputs.
"""

import dataclasses
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact import blocks
from keras_preact.layers import chains
from keras_preact.layers.spatial import reordered
from keras_preact.models import named_weights
from keras_preact.models.imagenet import DEPTHS
from keras_preact.models.named_weights import Entry
from keras_preact.models.network import ResidualNetwork, Stage
from keras_preact.weights import files
from keras_preact.weights.layout import Leaves, kind_of

#: Options of a network that converters do not compare: sizes that they copy, and options that
#: change only training or how the outputs are computed.
FREE_OPTIONS = """
name frozen_layers stages stem_filters block input_shape classes include_top pooling
classifier_activation data_format dtype stacked execution remat unroll dropout dropout_at
dropout_varies stochastic_depth kernel_initializer kernel_regularizer bias_initializer
zero_init_last seed
"""

#: Largest difference that `check=` accepts, as a share of the largest output: libraries round
#: differently.
TOLERANCE = 1e-4
#: The same for networks that compute in half precision.
HALF_TOLERANCE = 0.05

#: Images in the data format of the converted network, and what it must return for them.
Sample = tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Structure:
    """Sizes of a network, read from its weights.

    Args:
        stages: The stages.
        block: `"basic"` or `"bottleneck"`.
        stem_filters: Width of the stem.
        channels: Number of channels of the images.
        classes: Number of classes. None: there is no classifier.
    """

    stages: Sequence[Stage]
    block: str
    stem_filters: int
    channels: int
    classes: int | None

    @property
    def depth(self) -> int:
        """Number of weight layers in the units, the stem and the classifier."""
        return _depth(self.block, [stage.units for stage in self.stages])


def _depth(block: str, units: Sequence[int]) -> int:
    return sum(units) * (3 if block == "bottleneck" else 2) + 2


@dataclasses.dataclass(frozen=True)
class Family:
    """Networks of another library that name their weights and compute in the same way.

    Args:
        title: Name for messages, with the library: `"timm's ResNetV2"`.
        assumes: What the networks compute that their weights do not show, as sentences.
        network: Our layers outside the units (`stem_conv`, `stem_norm`, `head_norm`,
            `head_classifier`), in order, to the source's names. If there are several
            names, separated by spaces, all are read and the last one is written.
        unit_name: Function from the numbers of a stage and a unit, from 1, to the start
            of the source's names for the unit's layers.
        unit: Our layers in a unit to the end of the source's names, see `unit_names`.
        numbers: Pattern that matches the source's names of units' weights. Its groups
            are the source's numbers of the stage and of the unit.
        leaves: Kind of layer, `"conv"`, `"norm"` or `"dense"`, to the names of its
            weights.
        options: Options of `ResidualNetwork` for the same computation.
        block_options: Options of the block, for blocks that have them.
        first_unit: The same as `unit` for the first unit of each stage, if it differs.
        strides: Strides of the stages, as many as there are stages. None: any number of
            stages, with stride 2 in all but the last.
        strided_unit: Unit of a stage that has the stride, see `Stage`.
        image_size: Height and width of the images, if the source does not hold them.
        model_name: Function from the structure to a name for the converted network.
    """

    title: str
    assumes: str
    network: Mapping[str, str]
    unit_name: Callable[[int, int], str]
    unit: Mapping[str, str]
    numbers: re.Pattern
    leaves: Mapping[str, Leaves]
    options: Mapping[str, Any]
    block_options: Mapping[str, Any]
    first_unit: Mapping[str, str] | None = None
    strides: tuple[int, ...] | None = None
    strided_unit: str = "first"
    image_size: int = 224
    model_name: Callable[[Structure], str | None] = lambda structure: None

    def matches(self, state: Mapping[str, Any]) -> bool:
        """Whether the weights have the names of this family."""
        head = "head_norm" if "head_norm" in self.network else "head_classifier"
        required = (
            self.network[ours] + self.leaves[kind_of(ours)][0][1] for ours in ("stem_conv", head)
        )
        return all(name in state for name in required) and any(map(self.numbers.match, state))

    def entries(self, units: Sequence[int]) -> list[Entry]:
        """Return the table of names for a network with these numbers of units in its
        stages. The table also has rows for weights that the network may lack: it is the
        same for both blocks, with and without biases.
        """
        layers = [(ours, name) for ours, names in self.network.items() for name in names.split()]
        for s, count in enumerate(units, 1):
            for u in range(1, count + 1):
                below = self.first_unit if u == 1 and self.first_unit else self.unit
                layers += [
                    (f"stage{s}_unit{u}/{ours}", self.unit_name(s, u) + theirs)
                    for ours, theirs in below.items()
                ]
        return [
            Entry(f"{ours}/{leaf}", theirs + end, transform)
            for ours, theirs in layers
            for leaf, end, transform in self.leaves[kind_of(ours)]
        ]

    def block(self, name: str, options: Mapping[str, Any]) -> blocks.Block:
        """Return the block with this name. It gets those of the family's options and of
        `options` that it has.
        """
        block_class = type(blocks.get(name))
        known = {**self.block_options, **options}
        shared = blocks.options_of(block_class) & known.keys()
        return block_class(**{key: known[key] for key in shared})

    def stages(self, filters: Sequence[int], units: Sequence[int]) -> list[Stage]:
        """Return stages of these widths and numbers of units."""
        strides = self.strides or (*[2] * (len(units) - 1), 1)
        return [Stage(*row, self.strided_unit) for row in zip(filters, units, strides, strict=True)]

    def structure(self, state: Mapping[str, np.ndarray]) -> Structure:
        """Read the structure of a network from its weights.

        Raises:
            ValueError: for another number of stages than the family has, or if a weight
                is missing that all its networks have.
        """
        units: dict[int, set[int]] = {}
        for match in filter(None, map(self.numbers.match, state)):
            units.setdefault(int(match[1]), set()).add(int(match[2]))
        counts = [len(numbers) for _, numbers in sorted(units.items())]
        if self.strides and len(counts) != len(self.strides):
            raise ValueError(
                f"A network of {self.title} has {len(self.strides)} stages. Received: weights of "
                f"{len(counts)}"
            )
        entries = self.entries(counts)
        # a weight can have two names in the source; the state has one of them
        known = {entry.ours: entry for entry in entries if entry.theirs in state}

        def kernel(path: str) -> tuple[int, ...]:
            entry = known.get(path)
            if entry is None or state[entry.theirs].ndim != 4:
                theirs = next(entry.theirs for entry in entries if entry.ours == path)
                raise ValueError(
                    f"A network of {self.title} has a convolution {theirs!r}, which these weights "
                    f"lack. They are: {some(state)}"
                )
            return entry.transform.to_ours(state[entry.theirs]).shape

        block = "bottleneck" if "stage1_unit1/branch/conv_3/kernel" in known else "basic"
        numbers = range(1, len(counts) + 1)
        filters = [kernel(f"stage{s}_unit1/branch/conv_1/kernel")[-1] for s in numbers]
        stem = [ours for ours in self.network if ours.startswith("stem_conv")]
        channels, stem_filters = kernel(named_weights.STEM)[-2], kernel(f"{stem[-1]}/kernel")[-1]
        bias = known.get("head_classifier/bias")
        classes = None if bias is None else len(state[bias.theirs])
        return Structure(self.stages(filters, counts), block, stem_filters, channels, classes)

    def convert(
        self,
        state: Mapping[str, np.ndarray],
        *,
        input_shape: Sequence[int | None] | None,
        classes: int | None,
        check: Sample | None,
        options: Mapping[str, Any],
        shape: Sequence[int | None] | None = None,
    ) -> ResidualNetwork:
        """Build a network and load weights of this family.

        Args:
            state: Names to arrays.
            input_shape: Shape of its images. None: the source's.
            classes: Number of classes. None: as in the weights.
            check: Images and the outputs that the network must return for them.
            options: Other options of `ResidualNetwork` and of its block. They replace
                the family's.
            shape: Shape of the source's images, channels last. None: the source is a
                file of weights, which does not hold it and may be cut short.

        Raises:
            WeightsMismatch: for weights that do not fit the network.
            ValueError: for weights that are not finite, or if the outputs differ from
                those in `check`.
        """
        structure = self.structure(state)
        if shape is None:
            shape = (self.image_size, self.image_size, structure.channels)
            _warn_of_missing_units(structure)
        infinite = [name for name, array in state.items() if not np.isfinite(array).all()]
        if infinite:
            raise ValueError(
                f"Weights must be finite numbers. Received: NaN or infinity in {some(infinite)}. "
                "The file is damaged, or its training diverged."
            )
        new_classifier = structure.classes is None and classes is not None
        include_top = structure.classes is not None or new_classifier
        block = self.block(structure.block, options)
        network_options = {
            "name": self.model_name(structure),
            **self.options,
            "stem_filters": structure.stem_filters,
            "include_top": include_top,
            "pooling": None if include_top else "avg",
            **{key: value for key, value in options.items() if key not in blocks.options_of(block)},
        }
        if input_shape is None:
            target = network_options.get("data_format")
            input_shape = reordered(shape, "channels_last", target)
        model = ResidualNetwork(
            structure.stages,
            block=block,
            input_shape=input_shape,
            classes=(structure.classes or 1) if classes is None else classes,
            **network_options,
        )
        entries = self.entries([stage.units for stage in stages(model)])
        if model.logits is None:
            dropped = {
                entry.theirs for entry in entries if entry.ours.startswith(named_weights.CLASSIFIER)
            }
            state = {name: array for name, array in state.items() if name not in dropped}
        named_weights.load(model, state, entries, new_classifier=new_classifier)
        if check is not None:
            self.compare(model, check)
        return model

    def compare(self, model: ResidualNetwork, check: Sample) -> None:
        """Compare a network's outputs with its source's.

        Raises:
            ValueError: if they differ by more than rounding, with the largest
                difference.
        """
        if not isinstance(check, tuple | list) or len(check) != 2:
            raise ValueError(f"`check` must be a pair of images and outputs. Received: {check!r}")
        images, expected = (np.asarray(files.as_array(part), "float32") for part in check)
        wanted = model.input_shape[1:]
        fits = images.ndim == len(wanted) + 1 and all(
            size in (received, None)
            for received, size in zip(images.shape[1:], wanted, strict=True)
        )
        if not fits or not len(images):
            raise ValueError(
                f"The network takes images of shape {(None, *wanted)}. Received: check with images "
                f"of shape {images.shape}. Change the order of their axes, or give `input_shape`."
            )
        outputs = ops.convert_to_numpy(ops.cast(model(images, training=False), "float32"))
        if outputs.shape != expected.shape:
            raise ValueError(
                f"The converted network returns outputs of shape {outputs.shape}. Received: check "
                f"with outputs of shape {expected.shape}. Check a conversion before `classes` or "
                "`include_top` change it."
            )
        compute_dtype = keras.dtype_policies.get(model.arguments["dtype"]).compute_dtype
        half = compute_dtype in ("bfloat16", "float16")
        largest = np.abs(outputs - expected).max()
        limit = (HALF_TOLERANCE if half else TOLERANCE) * np.abs(expected).max()
        if not largest <= limit:  # NaN is no agreement either
            raise ValueError(
                "The converted network does not compute what its source does. The largest "
                f"difference from the outputs in `check` is {largest:.3g}; rounding explains "
                f"{limit:.1g}. {self.assumes} If the source differs, give the option that it has, "
                "such as activation='gelu'."
            )

    def check(self, model: ResidualNetwork) -> None:
        """Check that a network computes what this family does.

        Raises:
            ValueError: if options or strides differ; the message holds them.
        """
        if not isinstance(model, ResidualNetwork):
            raise ValueError(f"`model` must be a ResidualNetwork. Received: model={model!r}")
        config = _options(model)  # equal names and shapes of weights do not ensure equal options
        wanted = _options(
            ResidualNetwork(
                [Stage(8, 1)],
                block=self.block(blocks.get(model.arguments["block"]).name, {}),
                input_shape=(None, None, 3),
                data_format="channels_last",
                classes=1,
                stem_filters=8,
                **self.options,
            )
        )
        different = "; ".join(
            f"{key}={config[key]!r} where it has {wanted[key]!r}"
            for key in sorted(wanted)
            if _effective(key, config[key]) != _effective(key, wanted[key])
        )
        if different:
            raise ValueError(
                f"The network {model.name!r} does not compute what {self.title} does: {different}"
            )
        strides = [stage.strides for stage in stages(model)]
        if self.strides and strides != list(self.strides):
            raise ValueError(
                f"{self.title} has stages with the strides {list(self.strides)}. Received: "
                f"{model.name!r} with {strides}"
            )

    def extract(self, model: ResidualNetwork) -> dict[str, np.ndarray]:
        """Return the weights of a network under this family's names.

        Raises:
            ValueError: for a network that does not compute what this family does.
            WeightsMismatch: for weights without a name in this family.
        """
        self.check(model)
        return named_weights.extract(model, self.entries([stage.units for stage in stages(model)]))


def _warn_of_missing_units(structure: Structure) -> None:
    """Warn if a single stage has fewer units than in a known network."""
    units = tuple(stage.units for stage in structure.stages)
    known = {row for block, row in DEPTHS.values() if block == structure.block}
    if len(units) == 3:  # networks for CIFAR have three equal stages
        known = {(max(units),) * 3}
    for row in () if units in known else sorted(known):
        is_larger = len(row) == len(units) and sum(row) > sum(units)
        if is_larger and sum(map(operator.ne, row, units)) == 1:
            warnings.warn(
                f"The weights have stages of {units} units; the nearest known network, ResNet-"
                f"{_depth(structure.block, row)}, has {row}. If the file was cut short, convert "
                "the complete file.",
                stacklevel=4,
            )


def some(names: Any) -> str:
    """Return the first names, for a message."""
    return ", ".join([*names][: named_weights.SHOWN]) or "none"


def _options(model: ResidualNetwork) -> dict[str, Any]:
    """Return the options of a network and of its block, without `FREE_OPTIONS`."""
    config = model.get_config()
    block = blocks.get(config["block"])
    options = config | block.get_config()
    if block.name == "basic":  # its first convolution is a 3x3 one
        options.pop("stride_on", None)
    return {key: value for key, value in options.items() if key not in FREE_OPTIONS.split()}


def stages(model: ResidualNetwork) -> list[Stage]:
    """Return the stages of a network."""
    return [Stage(*stage) for stage in model.arguments["stages"]]


def values_of(layers: Iterable[keras.Layer]) -> dict[str, np.ndarray]:
    """Return the weights of layers by `LAYER/WEIGHT`, as Keras' libraries name them."""
    return {
        f"{layer.name}/{weight.name}": ops.convert_to_numpy(weight.value)
        for layer in layers
        for weight in layer.weights
    }


def assign(layers: Iterable[keras.Layer], values: Mapping[str, np.ndarray]) -> None:
    """Assign what `values_of` returns."""
    for layer in layers:
        for weight in layer.weights:
            weight.assign(values[f"{layer.name}/{weight.name}"])


def _effective(key: str, value):
    """Return the part of an option that changes the outputs."""
    if key == "normalization":
        layers = chains.normalization(chains.get_normalization(value), -1, 64, name="norm")
        effective = ("epsilon", "center", "scale", "groups", "rms_scaling", "renorm")
        return [
            (type(layer).__name__, {k: v for k, v in layer.get_config().items() if k in effective})
            for layer in layers
        ]
    if key == "shortcut":
        return (
            value["class_name"],
            value["config"].get("shortcut"),
            value["config"].get("residual"),
        )
    defaults = {("shape_shortcut", "auto"): "projection", ("stride_on", None): "first"}
    return defaults.get((key, value), value) if isinstance(value, str | None) else value
