"""The layers a unit is made of, each made by name: weights, normalisations, components
of an arrangement.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import keras
from keras import ops

from keras_preact import _checks, initializers
from keras_preact.layers.batch_norm import BatchNormalization
from keras_preact.layers.spatial import PaddedConv2D


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
    """Sets F(x) to 0 for a share of `rate` of the examples and multiplies the rest by
    `1 / (1 - rate)`, in training only.

    The paper scales at inference instead: the same network with the weights behind F
    scaled. `rate` is in [0, 1).

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


def weight(
    filters: int,
    kernel_size: int | None,
    *,
    strides=1,
    standardize=False,
    data_format=None,
    **kwargs,
) -> keras.Layer:
    """Make a weight layer: a convolution, or without a kernel size a dense layer."""
    if kernel_size is None:
        return keras.layers.Dense(filters, **kwargs)
    return PaddedConv2D(
        filters,
        kernel_size,
        strides=strides,
        standardize=standardize,
        data_format=data_format,
        **kwargs,
    )


#: Name to a function of the channel axis and the channel count. Batch normalisation has Torch's
#: epsilon and momentum, as in the released code; the paper does not give them.
NORMALIZATIONS: Mapping[str, Callable[[int, int], keras.Layer] | None] = MappingProxyType(
    {
        "batch": lambda axis, _: keras.layers.BatchNormalization(
            axis=axis, momentum=0.9, epsilon=1e-5
        ),
        "layer": lambda axis, _: keras.layers.LayerNormalization(axis=axis, epsilon=1e-5),
        # 32 groups, as arXiv 1803.08494 recommends, or as many as the channels can be divided into
        "group": lambda axis, n: keras.layers.GroupNormalization(
            groups=math.gcd(32, n), axis=axis, epsilon=1e-5
        ),
        "rms": lambda axis, _: keras.layers.RMSNormalization(axis=axis, epsilon=1e-6),
        "none": None,
    }
)


class _OverAxis1(keras.Layer):
    """Normalises axis 1: moves it behind the others, and back.

    Keras' own layer normalisation does not work there on Torch, and its RMS
    normalisation on no backend.
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


#: Layers to take in place of Keras' own: where the channels stand second, and where they stand
#: last.
OVER_AXIS_1: dict[type, type] = {
    keras.layers.LayerNormalization: _LayerNormalizationOverAxis1,
    keras.layers.RMSNormalization: _RMSNormalizationOverAxis1,
}
FASTER: dict[type, type] = {keras.layers.BatchNormalization: BatchNormalization}


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Class and config of a layer, to make others like it.

    A layer that holds the pattern as a layer would count its weights as its own; it
    holds this instead.
    """

    layer_class: type[keras.Layer]
    config: dict

    @classmethod
    def of(cls, layer: keras.Layer) -> "Pattern":
        return cls(type(layer), layer.get_config())

    def make(self, **settings) -> keras.Layer:
        """Make a layer with those of `settings` that its config knows and that are not
        None.
        """
        config = self.config | {
            key: value
            for key, value in settings.items()
            if key in self.config and value is not None
        }
        return self.layer_class.from_config(config)

    def at(self, place: str) -> "Pattern":
        """Return the pattern for layers at `place`: seeds in it become that place's
        own.
        """
        own: dict = {}
        if (
            initializer := keras.initializers.get(self.config.get("kernel_initializer"))
        ) is not None:
            own["kernel_initializer"] = initializers.spawn(initializer, place)
        if (seed := self.config.get("seed")) is not None:
            own["seed"] = initializers.derive_seed(seed, place)
        return Pattern(self.layer_class, self.config | own)

    def serialize(self) -> dict:
        return keras.saving.serialize_keras_object(self.make())


class Normalization:
    """Makes the normalisations of a unit, all of one kind.

    Args:
        kind: A name from `NORMALIZATIONS`, or a Keras layer as a pattern (or the config
            of one): each place gets a copy with its own weights, over the axis that
            fits there.
    """

    def __init__(self, kind: str | dict | keras.Layer):
        if isinstance(kind, dict):  # from a serialised config
            kind = keras.saving.deserialize_keras_object(kind)
        if isinstance(kind, keras.Layer):
            self.kind: str | Pattern = Pattern.of(kind)
        else:
            _checks.lookup(NORMALIZATIONS, kind, "normalization")
            self.kind = kind

    @classmethod
    def get(cls, kind: "str | dict | keras.Layer | Normalization") -> "Normalization":
        """Return `kind` itself if it is one already."""
        return kind if isinstance(kind, Normalization) else cls(kind)

    def make(
        self, axis: int, channels: int, *, name: str, dtype=None, gamma_initializer=None
    ) -> list[keras.Layer]:
        """Make the layer for one place: a list of one, or of none for `"none"`."""
        pattern = self.kind
        if not isinstance(pattern, Pattern):
            make = NORMALIZATIONS[pattern]
            if make is None:
                return []
            pattern = Pattern.of(make(axis, channels))
        replacements = OVER_AXIS_1 if axis == 1 else FASTER
        pattern = Pattern(
            replacements.get(pattern.layer_class, pattern.layer_class), pattern.config
        )
        return [
            pattern.make(axis=axis, name=name, dtype=dtype, gamma_initializer=gamma_initializer)
        ]

    def serialize(self) -> str | dict:
        """Return what a config holds: the name, or the pattern."""
        return self.kind.serialize() if isinstance(self.kind, Pattern) else self.kind


def components(
    names,
    normalization,
    activation,
    *,
    axis,
    channels,
    name="{}",
    dtype=None,
    gamma_initializer=None,
) -> list[keras.Layer]:
    """Make the layers of an arrangement's components, `("norm", "activation")`, each
    called `name.format(component)`.

    `gamma_initializer` is of the normalisations, those that have one; None for their
    own.
    """
    layers: list[keras.Layer] = []
    is_relu = keras.activations.get(activation) is keras.activations.relu
    for i, component in enumerate(names):
        called = name.format(component) + "_again" * names[:i].count(component)
        if component == "norm":
            layers += normalization.make(
                axis, channels, name=called, dtype=dtype, gamma_initializer=gamma_initializer
            )
            if layers and isinstance(layers[-1], BatchNormalization):
                layers[-1].relu_follows = is_relu and names[i + 1 : i + 2] == ("activation",)
        elif component == "activation":
            layers.append(keras.layers.Activation(activation, name=called, dtype=dtype))
        else:
            layers.append({"shift": Shift, "scale": Scale}[component](name=called, dtype=dtype))
    return layers


def is_norm(layer: keras.Layer) -> bool:
    """Whether a layer made by `components` is a normalisation."""
    return not isinstance(layer, (keras.layers.Activation, Shift, Scale))


def has_gamma(layers: list[keras.Layer]) -> bool:
    """Whether one of the layers starts with its own `gamma_initializer`."""
    return any("gamma_initializer" in layer.get_config() for layer in layers)


class Gated(keras.Layer):
    """A chain of layers whose output a second weight layer, beside it, multiplies:
    `chain(x) * gate(x)`.
    """

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
    """Build layers that stand one behind the other for an input of `shape`; return the
    shape of the last one's output.
    """
    for layer in chain:
        layer.build(shape)
        shape = layer.compute_output_shape(shape)
    return shape


def run_chain(chain: Iterable[keras.Layer], x, training: bool | None = None):
    """Apply the layers in turn; `training` None is that of the call around."""
    for layer in chain:
        x = layer(x, training=training)
    return x
