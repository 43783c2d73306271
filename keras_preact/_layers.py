"""The layers a unit is made of, each made by name: normalisations, weights, dropout."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import keras
from keras import ops

from keras_preact import _checks, _loops, _products, initializers
from keras_preact._attention import SelfAttention
from keras_preact._batch_norm import BatchNormalization


@keras.saving.register_keras_serializable("keras_preact")
class PaddedConv2D(keras.layers.Conv2D):
    """A convolution that pads `(kernel - 1) / 2` on every side, whatever the stride.

    `padding="same"` pads nothing at the top and left of an even map at stride 2, where Torch, and with it the released code,
    pads one row on each side: weights would not carry over, and the map would be sampled off its centre.

    Args:
        filters: Channels out.
        kernel_size: Odd; the kernel is square.
        **kwargs: As in `keras.layers.Conv2D`, without `padding`.

    Input: `(batch, height, width, channels)`, output: `(batch, ceil(height / strides), ceil(width / strides), filters)`; with
    `data_format="channels_first"` the channels stand second in both.
    """

    def __init__(self, filters, kernel_size, **kwargs):
        kwargs.pop("padding", None)  # a config holds it
        super().__init__(filters, kernel_size, padding="same", **kwargs)
        self.pad = 0
        if self.strides != (1, 1):  # at stride 1 "same" is symmetric, and spares a copy of the map
            self.padding, self.pad = "valid", self.kernel_size[0] // 2

    def convolution_op(self, inputs, kernel):
        if self.strides != (1, 1) or not _loops.convolutions_are_slow():
            return super().convolution_op(inputs, kernel)
        # JAX 0.10, two cores, gradient of 17 units of each stage of ResNet-164 in a scan, batch 16: 484, 222, 139 ms with
        # products, 2266, 2257, 1755 ms with convolutions; outside a loop those take 592, 276, 183 ms.
        # What is kept for the gradient is the input, not its nine shifts.
        convolve = keras.remat(lambda images, kernel: _products.convolve(images, kernel, self.groups))
        kernel = ops.convert_to_tensor(kernel)
        if self.data_format == "channels_last":
            return convolve(inputs, kernel)
        return ops.moveaxis(convolve(ops.moveaxis(inputs, 1, -1), kernel), -1, 1)

    def call(self, inputs):
        inputs = pad_sides(inputs, self.pad, self.data_format) if self.pad else inputs
        if self.data_format == "channels_last" or not self.use_bias:
            return super().call(inputs)
        # Keras 3.15 on TensorFlow adds a bias of shape (1, n, 1, 1) to the last axis, not the channels, if that is n wide.
        outputs = self.convolution_op(inputs, self.kernel) + ops.reshape(self.bias, (1, -1, 1, 1))
        return outputs if self.activation is None else self.activation(outputs)

    def compute_output_shape(self, input_shape):
        return strided_shape(input_shape, self.strides[0], self.data_format, self.filters)


@keras.saving.register_keras_serializable("keras_preact")
class Shift(keras.Layer):
    """Adds one trained scalar, 0 at the start, to everything."""

    def build(self, input_shape):
        self.bias = self.add_weight(shape=(), initializer="zeros", name="bias")

    def call(self, x):
        return x + self.bias

    def compute_output_shape(self, input_shape):
        return input_shape


@keras.saving.register_keras_serializable("keras_preact")
class Scale(keras.Layer):
    """Multiplies everything by one trained scalar, 1 at the start."""

    def build(self, input_shape):
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor

    def compute_output_shape(self, input_shape):
        return input_shape


@keras.saving.register_keras_serializable("keras_preact")
class StochasticDepth(keras.Layer):
    """Sets F(x) to 0 for a share of `rate` of the examples and multiplies the rest by `1 / (1 - rate)`, in training only.

    The paper scales at inference instead: the same network with the weights behind F scaled. `rate` is in [0, 1).

    Source: arXiv 1603.09382, Sec. 3.
    """

    def __init__(self, rate: float, seed: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, x, rate=None, training=None):
        """Apply it; `rate`, a scalar tensor, takes the place of the layer's own."""
        if not training:
            return x
        keep = 1 - (self.rate if rate is None else rate)
        shape = (ops.shape(x)[0], *[1] * (x.ndim - 1))
        kept = keras.random.uniform(shape, seed=self.seed_generator) < keep
        return x * ops.cast(ops.cast(kept, "float32") / keep, x.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return super().get_config() | {"rate": self.rate, "seed": self.seed}


@keras.saving.register_keras_serializable("keras_preact")
class PaddedMaxPooling2D(keras.layers.MaxPooling2D):
    """Max pooling that pads `(pool_size - 1) / 2` on every side with minus infinity, as Torch does.

    Input and output: as `PaddedConv2D`, with the channels unchanged.
    """

    def __init__(self, pool_size, strides, **kwargs):
        kwargs.pop("padding", None)
        super().__init__(pool_size, strides, padding="valid", **kwargs)

    def call(self, inputs):
        return super().call(pad_sides(inputs, self.pool_size[0] // 2, self.data_format, float("-inf")))

    def compute_output_shape(self, input_shape):
        return strided_shape(input_shape, self.strides[0], self.data_format)


def channel_axis(data_format: str, rank: int) -> int:
    return 1 if data_format == "channels_first" and rank == 4 else -1


def pad_sides(images, pad: int, data_format: str, value: float = 0.0):
    """Pad height and width of `(batch, height, width, channels)`, or channels first, on both sides."""
    sides = [(0, 0), (pad, pad), (pad, pad)]
    sides.insert(1 if data_format == "channels_first" else 3, (0, 0))
    return ops.pad(images, sides, constant_values=value)


def strided_shape(shape: tuple, strides: int, data_format: str, channels: int | None = None) -> tuple:
    """Return the shape behind a step of `strides` (an image's size divided by it, rounded up) into `channels`.

    A shape that is not an image's keeps its sizes; without `channels` their number stays.
    """
    axis = channel_axis(data_format, len(shape))
    new = list(shape)
    if len(shape) == 4:
        for i in (1, 2) if axis == -1 else (2, 3):
            new[i] = None if new[i] is None else -(-new[i] // strides)
    if channels is not None:
        new[axis] = channels
    return tuple(new)


#: In place of a kernel size: self-attention.
ATTENTION = "attention"

KernelSize = int | str | None


def weight_name(kernel_size: KernelSize) -> str:
    """Return the word for a weight layer that stands in the paths of its weights."""
    return "conv" if isinstance(kernel_size, int) else kernel_size or "dense"


def weight(
    filters: int, kernel_size: KernelSize, *, strides=1, groups=1, num_heads=1, causal=False, data_format=None, **kwargs
) -> keras.Layer:
    """Make a weight layer: a convolution, a dense one where `kernel_size` is None, or self-attention."""
    if kernel_size is None:
        return keras.layers.Dense(filters, **kwargs)
    if kernel_size == ATTENTION:
        return SelfAttention(filters, num_heads, causal=causal, **kwargs)
    return PaddedConv2D(filters, kernel_size, strides=strides, groups=groups, data_format=data_format, **kwargs)


#: Name to a function of the channel axis and the channel count. Batch normalisation has Torch's epsilon and momentum, as
#: in the released code; the paper does not give them.
NORMALIZATIONS: Mapping[str, Callable[[int, int], keras.Layer] | None] = MappingProxyType(
    {
        "batch": lambda axis, _: keras.layers.BatchNormalization(axis=axis, momentum=0.9, epsilon=1e-5),
        "layer": lambda axis, _: keras.layers.LayerNormalization(axis=axis, epsilon=1e-5),
        # 32 groups, as arXiv 1803.08494 recommends, or as many as the channels can be divided into
        "group": lambda axis, n: keras.layers.GroupNormalization(groups=math.gcd(32, n), axis=axis, epsilon=1e-5),
        "rms": lambda axis, _: keras.layers.RMSNormalization(axis=axis, epsilon=1e-6),
        "none": None,
    }
)


class _OverAxis1(keras.Layer):
    """Normalises axis 1: moves it behind the others, and back.

    Keras' own layer normalisation does not work there on Torch, and its RMS normalisation on no backend.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs | {"axis": -1})

    def build(self, input_shape):
        super().build((input_shape[0], *input_shape[2:], input_shape[1]))

    def call(self, inputs):
        return ops.moveaxis(super().call(ops.moveaxis(inputs, 1, -1)), -1, 1)

    def compute_output_shape(self, input_shape):
        return input_shape


class _LayerNormalizationOverAxis1(_OverAxis1, keras.layers.LayerNormalization):
    pass


class _RMSNormalizationOverAxis1(_OverAxis1, keras.layers.RMSNormalization):
    pass


#: Layers to take in place of Keras' own: where the channels stand second, and where they stand last.
OVER_AXIS_1: dict[type, type] = {
    keras.layers.LayerNormalization: _LayerNormalizationOverAxis1,
    keras.layers.RMSNormalization: _RMSNormalizationOverAxis1,
}
FASTER: dict[type, type] = {keras.layers.BatchNormalization: BatchNormalization}


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Class and config of a layer, to make others like it.

    A layer that holds the pattern as a layer would count its weights as its own; it holds this instead.
    """

    layer_class: type[keras.Layer]
    config: dict

    @classmethod
    def of(cls, layer: keras.Layer) -> "Pattern":
        return cls(type(layer), layer.get_config())

    def make(self, **settings) -> keras.Layer:
        """Make a layer with those of `settings` that its config knows and that are not None."""
        config = self.config | {key: value for key, value in settings.items() if key in self.config and value is not None}
        return self.layer_class.from_config(config)

    def at(self, place: str) -> "Pattern":
        """Return the pattern for layers at `place`: seeds in it become that place's own."""
        own: dict = {}
        if (initializer := keras.initializers.get(self.config.get("kernel_initializer"))) is not None:
            own["kernel_initializer"] = initializers.spawn(initializer, place)
        if (seed := self.config.get("seed")) is not None:
            own["seed"] = initializers.derive_seed(seed, place)
        return Pattern(self.layer_class, self.config | own)

    def serialize(self) -> dict:
        return keras.saving.serialize_keras_object(self.make())


class Normalization:
    """Makes the normalisations of a unit, all of one kind.

    Args:
        kind: A name from `NORMALIZATIONS`, or a Keras layer as a pattern (or the config of one): each place gets a copy with
            its own weights, over the axis that fits there.
    """

    def __init__(self, kind: str | dict | keras.Layer):
        if isinstance(kind, dict):  # from a serialised config
            kind = keras.saving.deserialize_keras_object(kind)
        if isinstance(kind, keras.Layer):
            self.kind: str | Pattern = Pattern.of(kind)
        else:
            _checks.lookup(NORMALIZATIONS, kind, "normalization")
            self.kind = kind

    def make(self, axis: int, channels: int, *, name: str, dtype=None) -> list[keras.Layer]:
        """Make the layer for one place: a list of one, or of none for `"none"`."""
        pattern = self.kind
        if not isinstance(pattern, Pattern):
            make = NORMALIZATIONS[pattern]
            if make is None:
                return []
            pattern = Pattern.of(make(axis, channels))
        replacements = OVER_AXIS_1 if axis == 1 else FASTER
        pattern = Pattern(replacements.get(pattern.layer_class, pattern.layer_class), pattern.config)
        return [pattern.make(axis=axis, name=name, dtype=dtype)]

    def serialize(self) -> str | dict:
        """Return what a config holds: the name, or the pattern."""
        return self.kind.serialize() if isinstance(self.kind, Pattern) else self.kind


def components(names, normalization, activation, *, axis, channels, name="{}", dtype=None) -> list[keras.Layer]:
    """Make the layers of an arrangement's components, `("norm", "activation")`, each called `name.format(component)`."""
    layers: list[keras.Layer] = []
    for i, component in enumerate(names):
        called = name.format(component) + "_again" * names[:i].count(component)
        if component == "norm":
            layers += normalization.make(axis, channels, name=called, dtype=dtype)
        elif component == "activation":
            layers.append(keras.layers.Activation(activation, name=called, dtype=dtype))
        else:
            layers.append({"shift": Shift, "scale": Scale}[component](name=called, dtype=dtype))
    return layers


class Gated(keras.Layer):
    """A chain of layers whose output a second weight layer, beside it, multiplies: `chain(x) * gate(x)`."""

    def __init__(self, chain: list[keras.Layer], gate: keras.Layer, **kwargs):
        super().__init__(**kwargs)
        self.chain = chain
        self.gate = gate

    def build(self, input_shape):
        build_chain(self.chain, input_shape)
        self.gate.build(input_shape)

    def call(self, x, training=None):
        return run_chain(self.chain, x, training) * self.gate(x)

    def compute_output_shape(self, input_shape):
        return self.gate.compute_output_shape(input_shape)


def build_chain(chain: list[keras.Layer], shape: tuple) -> tuple:
    """Build layers that stand one behind the other for an input of `shape`; return the shape of the last one's output."""
    for layer in chain:
        layer.build(shape)
        shape = layer.compute_output_shape(shape)
    return shape


def run_chain(chain: list[keras.Layer], x, training: bool | None = None):
    """Apply the layers in turn; `training` None is that of the call around."""
    for layer in chain:
        x = layer(x, training=training)
    return x
