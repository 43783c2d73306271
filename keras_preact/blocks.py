"""F, the residual branch: one class per block, each with its own options.

A block says which weights a branch has, how wide they are and what they read. The
arrangement says where normalisation and activation are.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import keras

from keras_preact import _checks, initializers
from keras_preact._objects import Specification, from_table, in_config
from keras_preact.dropout import VariableDropout
from keras_preact.layers import chains
from keras_preact.layers.attention import SelfAttention
from keras_preact.layers.spatial import PaddedConv2D
from keras_preact.squeeze_excitation import SqueezeExcitation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block(Specification):
    """The weights of a residual branch.

    To add a block, write a frozen dataclass with its options as fields and register it
    with `keras.saving.register_keras_serializable`.

    Attributes:
        name: Name in tables and files.
        expansion: Channels that the unit returns, as a multiple of `filters`.
        word: First word in the names of its weights.
        inputs: Shape of an input, in words.
        ranks: Numbers of dimensions that an input may have.
        activation: The activation that belongs to the block; None for the unit's.
        gated: Whether each weight but the last has a gate: a second weight that reads
            the same input and multiplies the activated output.
        strided: Index of the weight that has the unit's strides. None: the block works
            on features and has no strides.
    """

    name: ClassVar[str]
    expansion: ClassVar[int] = 1
    word: ClassVar[str]
    inputs: ClassVar[str]
    ranks: ClassVar[range]
    activation: ClassVar[str | None] = None
    gated: ClassVar[bool] = False

    @property
    def strided(self) -> int | None:
        return None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Description of each weight, as in a diagram."""
        return (self.word,)

    def channels(self, filters: int) -> tuple[int, ...]:
        """Return the channels after each weight.

        Raises:
            ValueError: if `filters` does not fit the options.
        """
        raise NotImplementedError

    def weight(self, index: int, channels: int, **settings: Any) -> keras.Layer:
        """Make weight `index` (1, 2, ...) of the branch.

        Args:
            channels: Number of its output channels, from `channels`.
            **settings: `name`, `strides`, `use_bias`, `kernel_initializer`,
                `kernel_regularizer`, `bias_initializer`, `data_format`, `dtype`.
        """
        raise NotImplementedError

    def zeros(self) -> dict[str, Any]:
        """Return the settings of `weight` with which the last weight returns zeros at
        the start and has a gradient.
        """
        return {"kernel_initializer": keras.initializers.Zeros()}

    def projection(self, channels: int, **settings: Any) -> keras.Layer:
        """Make the weight of a shortcut that changes the shape.

        Args:
            channels: Number of its output channels.
            **settings: The settings of `weight`.
        """
        raise NotImplementedError

    def end(self, **settings: Any) -> list[keras.Layer]:
        """Make the layers at the end of F; none by default.

        Args:
            **settings: `kernel_initializer`, `kernel_regularizer`, `data_format`,
                `dtype`.
        """
        return []

    def branch(self, unit: Any, axis: int) -> list[keras.Layer]:
        """Make the layers of F from its first weight to its end.

        Args:
            unit: The `ResidualUnit`, for its options.
            axis: Axis of the channels.
        """
        widths = self.channels(unit.filters)
        last = len(widths)
        layers: list[keras.Layer] = []
        for i, channels in enumerate(widths, 1):
            if i > 1 and unit.dropout_at == "between_weights":
                layers += _dropout(unit, i - 1)
            names = unit.arrangement.last if i == last else unit.arrangement.between
            starts_at_zero = unit.zero_init_last and i == last
            after = unit.components.make(
                names,
                axis,
                channels,
                f"{{}}_{i}",
                gamma_initializer="zeros" if starts_at_zero else None,
            )
            weight = f"{self.word}_{i}"
            settings = unit.weight_settings.at(weight)
            if starts_at_zero and not any(map(chains.has_gamma, after)):
                settings |= self.zeros()
            pooling, blur = [], []
            if i - 1 == self.strided:
                pooling = unit.pooling("weight")
                blur = unit.pooling("branch")
                settings["strides"] = 1 if pooling or blur else unit.strides
            has_bias = unit.components.has_bias(after)
            chain = [
                self.weight(i, channels, name=weight, use_bias=has_bias, **settings),
                *pooling,
                *after,
            ]
            if self.gated and i < last:
                settings = unit.weight_settings.at(f"gate_{i}")
                gate = self.weight(
                    i, channels, name=f"gate_{i}", use_bias=bool(unit.use_bias), **settings
                )
                chain = [chains.Gated(chain, gate, name=f"gated_{i}", dtype=unit.dtype_policy)]
            layers += [*chain, *blur]
        layers += self.end(**unit.weight_settings.kernel_at("squeeze_excitation"))
        if unit.dropout_at == "before_addition":
            layers += _dropout(unit, last)
        return layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolutional(Block):
    """A branch of convolutions over a map.

    Args:
        squeeze_excitation: Reduction ratio, such as 16, of squeeze-and-excitation at
            the end of F. None: no squeeze-and-excitation.
        standardize_weights: Standardise the kernels (arXiv 1903.10520). Use it with a
            normalisation that does not depend on the batch, such as `"group"`.
        dilation: Dilation rate of the 3x3 convolutions.
        dilated_strides: Stride that is replaced by dilation of the 3x3 convolutions
            after the weight that would have the stride. A unit with this number as
            `strides` has the same weights; its output is every `dilated_strides`-th
            pixel of this unit's output.
        stride_on: Which convolution has the unit's strides: the `"first"`, or the first
            `"3x3"`. None: the first, and in `kp.models.resnet_imagenet` the 3x3.
        dimensions: 2, or 1 for sequences `(batch, length, 1, channels)`, with kernels
            of 3x1 instead of 3x3.
    """

    squeeze_excitation: int | None = None
    standardize_weights: bool = False
    dilation: int = 1
    dilated_strides: int = 1
    stride_on: str | None = None
    dimensions: int = 2

    kernel_sizes: ClassVar[tuple[int, ...]]
    word = "conv"
    inputs = "(batch, height, width, channels)"
    ranks = range(4, 5)

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive_int(self.dilation, "dilation")
        _checks.positive_int(self.dilated_strides, "dilated_strides")
        _checks.one_of(self.stride_on, (None, "first", "3x3"), "stride_on")
        _checks.one_of(self.dimensions, (1, 2), "dimensions")
        if self.squeeze_excitation is not None:
            _checks.positive_int(self.squeeze_excitation, "squeeze_excitation")

    @property
    def strided(self) -> int:
        return self.kernel_sizes.index(3) if self.stride_on == "3x3" else 0

    @property
    def kinds(self) -> tuple[str, ...]:
        sizes = map(self._kernel_size, self.kernel_sizes)
        return tuple(f"{height}x{width} conv" for height, width in sizes)

    def _kernel_size(self, size: int) -> tuple[int, int]:
        return (size, size if self.dimensions == 2 else 1)

    def channels(self, filters: int) -> tuple[int, ...]:
        return (*[filters] * (len(self.kernel_sizes) - 1), filters * self.expansion)

    def weight(self, index: int, channels: int, **settings: Any) -> keras.Layer:
        size = self.kernel_sizes[index - 1]
        kernel = initializers.of_branch(
            settings.pop("kernel_initializer"), index, len(self.kernel_sizes)
        )
        if size == 3:
            follows = index - 1 > self.strided
            settings["dilation_rate"] = self.dilation * (self.dilated_strides if follows else 1)
        return PaddedConv2D(
            channels,
            self._kernel_size(size),
            kernel_initializer=kernel,
            standardize=self.standardize_weights,
            **settings,
        )

    def projection(self, channels: int, **settings: Any) -> keras.Layer:
        return PaddedConv2D(channels, 1, standardize=self.standardize_weights, **settings)

    def end(self, **settings: Any) -> list[keras.Layer]:
        if self.squeeze_excitation is None:
            return []
        return [SqueezeExcitation(self.squeeze_excitation, name="squeeze_excitation", **settings)]


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Basic(Convolutional):
    """Two 3x3 convolutions: Fig. 1 of arXiv 1603.05027."""

    name = "basic"
    kernel_sizes = (3, 3)


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Single(Convolutional):
    """One 3x3 convolution: the 1-layer skip of Table 3."""

    name = "single"
    kernel_sizes = (3,)


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bottleneck(Convolutional):
    """1x1, 3x3 and 1x1 convolutions; the last returns `4 * filters` channels.

    Args:
        groups: Groups of the 3x3 convolution, as in ResNeXt (arXiv 1611.05431).
        base_width: Width of a group at 64 filters: the 3x3 convolution has
            `int(filters * base_width / 64) * groups` channels.
    """

    groups: int = 1
    base_width: int = 64

    name = "bottleneck"
    expansion = 4
    kernel_sizes = (1, 3, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive_int(self.groups, "groups")
        _checks.positive_int(self.base_width, "base_width")

    def channels(self, filters: int) -> tuple[int, ...]:
        inner = int(filters * self.base_width / 64) * self.groups
        if not inner:
            raise ValueError(
                "`base_width` is too small: the 3x3 convolution would have no channels. "
                "int(filters * base_width / 64) must be at least 1. Received: "
                f"filters={filters}, base_width={self.base_width}"
            )
        return inner, inner, filters * self.expansion

    def weight(self, index: int, channels: int, **settings) -> keras.Layer:
        if self.kernel_sizes[index - 1] == 3:
            settings["groups"] = self.groups
        return super().weight(index, channels, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features(Block):
    """A branch without convolutions, for inputs with the features on the last axis."""

    word = "dense"
    inputs = "(batch, ..., features)"
    ranks = range(2, 100)

    def projection(self, channels: int, **settings: Any) -> keras.Layer:
        return chains.weight(channels, None, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TwoDense(Features):
    """Two dense layers.

    Args:
        hidden: Width between the two layers; None for the block's own multiple of
            `filters`.
    """

    hidden: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden is not None:
            _checks.positive_int(self.hidden, "hidden")

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.word, self.word)

    def default_width(self, filters: int) -> int:
        return filters

    def channels(self, filters: int) -> tuple[int, ...]:
        inner = self.default_width(filters) if self.hidden is None else self.hidden
        return inner, filters

    def weight(self, index: int, channels: int, **settings: Any) -> keras.Layer:
        kernel = initializers.of_branch(settings.pop("kernel_initializer"), index, 2)
        return chains.weight(channels, None, kernel_initializer=kernel, **settings)


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(_TwoDense):
    """Two dense layers, for vectors: the paper's unit without convolutions.

    Args:
        hidden: Width between the two layers; None for `filters`.
    """

    name = "dense"


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP(_TwoDense):
    """The two dense layers of a transformer (arXiv 1706.03762, Sec. 3.3).

    Args:
        hidden: Width between the two layers; None for `4 * filters`.
    """

    name = "mlp"

    def default_width(self, filters: int) -> int:
        return 4 * filters


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SwiGLU(_TwoDense):
    """The gated MLP `(silu(x W_1) * x W_2) W_3` of arXiv 2002.05202.

    Args:
        hidden: Width between the layers; None for `8/3 * filters`, rounded up to a
            multiple of 8. The three matrices then have the size of the two of an `MLP`.
    """

    name = "swiglu"
    activation = "silu"
    gated = True

    def default_width(self, filters: int) -> int:
        return -(-filters // 3) * 8


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention(Features):
    """Multi-head self-attention over tokens (arXiv 1706.03762, Sec. 3.2).

    Args:
        num_heads: Number of heads; divides `filters`.
        causal: Whether a token sees only itself and the tokens before it.
    """

    num_heads: int = 1
    causal: bool = False

    name = "attention"
    word = "attention"
    inputs = "(batch, tokens, features)"
    ranks = range(3, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive_int(self.num_heads, "num_heads")

    def channels(self, filters: int) -> tuple[int, ...]:
        if filters % self.num_heads:
            raise ValueError(
                "The heads share the features: `filters` must be a multiple of `num_heads`. "
                f"Received: filters={filters}, num_heads={self.num_heads}"
            )
        return (filters,)

    def zeros(self) -> dict[str, Any]:
        # zeros in the value's kernel as well would leave both without a gradient
        return {"output_initializer": keras.initializers.Zeros()}

    def weight(self, index: int, channels: int, **settings: Any) -> keras.Layer:
        del settings["data_format"]
        # SelfAttention calls `of_branch` itself: its four dense layers are two weights in sequence
        return SelfAttention(channels, self.num_heads, causal=self.causal, **settings)


def _dropout(unit: Any, i: int) -> list[keras.Layer]:
    """Make the dropout after weight `i`: a list with one layer, or an empty list."""
    if not unit.dropout and not unit.dropout_varies:
        return []
    name = f"dropout_{i}"
    make = VariableDropout if unit.dropout_varies else keras.layers.Dropout
    return [make(unit.dropout, seed=unit.seed_at(name), name=name, dtype=unit.dtype_policy)]


#: Name to class; every class can be made without arguments.
BLOCKS: Mapping[str, type[Block]] = MappingProxyType(
    {kind.name: kind for kind in (Basic, Bottleneck, Dense, Single, Attention, MLP, SwiGLU)}
)


def get(block: str | dict | Block) -> Block:
    """Return the block of that name, or `block` itself if it is one already.

    Raises:
        ValueError: for an unknown name; the message holds the nearest ones.
    """
    return from_table(block, Block, BLOCKS, "block")


def serialize(block: Block) -> str | dict | Block:
    """Return what a config holds: the name, or the class with its options if any option
    is set.
    """
    if isinstance(block, Convolutional) and block.stride_on == "first":  # the default is the same
        block = dataclasses.replace(block, stride_on=None)
    if BLOCKS.get(block.name) is type(block) and block == type(block)():
        return block.name
    return in_config(block)


def options_of(block: Block | type[Block]) -> set[str]:
    """Return the names of a block's options."""
    return {field.name for field in dataclasses.fields(block)}
