"""The layers of a unit: weights, normalisations, shifts and scales; and functions that
build and run chains of them.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import keras
from keras import ops

from keras_preact import _checks
from keras_preact._objects import arguments_of, in_config
from keras_preact.layers.batch_norm import BatchNormalization
from keras_preact.layers.spatial import PaddedConv2D


class SameShape(keras.Layer):
    """A layer whose output has the shape of its input."""

    def compute_output_shape(self, input_shape):
        return input_shape


@keras.saving.register_keras_serializable("keras_preact")
class Shift(SameShape):
    """Adds one trained scalar, 0 at the start, to everything."""

    def build(self, input_shape):
        self.bias = self.add_weight(shape=(), initializer="zeros", name="bias")

    def call(self, x):
        return x + self.bias


@keras.saving.register_keras_serializable("keras_preact")
class Scale(SameShape):
    """Multiplies by a trained factor.

    Args:
        initial: Its value at the start.
        axis: Axis whose entries have a factor each; None: one factor for everything.
    """

    def __init__(self, initial: float = 1.0, axis: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self.initial, self.axis = _checks.plain((initial, axis))

    def build(self, input_shape):
        self.factor = self.add_weight(
            shape=() if self.axis is None else (input_shape[self.axis],),
            initializer=keras.initializers.Constant(self.initial),
            name="factor",
        )

    def call(self, x):
        if self.axis is None:
            return x * self.factor
        shape = [1] * x.ndim
        shape[self.axis] = -1
        return x * ops.reshape(self.factor, shape)

    def get_config(self):
        return super().get_config() | {"initial": self.initial, "axis": self.axis}


@keras.saving.register_keras_serializable("keras_preact")
class StochasticDepth(SameShape):
    """In training, sets F(x) to 0 for a random share `rate` of the examples and
    multiplies the others by `1 / (1 - rate)`.

    The paper scales at inference instead. This is the same network with the weights
    after F scaled. `rate` is in [0, 1).

    Source: arXiv 1603.09382, Sec. 3.
    """

    def __init__(self, rate: float, seed: int | None = None, **kwargs):
        super().__init__(**kwargs)
        _checks.fraction(rate, "rate")
        self.rate = _checks.plain(rate)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, x, rate=None, training=None):
        """Drop examples. A scalar tensor `rate` replaces the layer's rate."""
        if not training:
            return x
        # Keras casts a tensor to the layer's compute dtype
        keep = 1 - (self.rate if rate is None else ops.cast(rate, "float32"))
        shape = (ops.shape(x)[0], *[1] * (x.ndim - 1))
        kept = keras.random.uniform(shape, dtype="float32", seed=self.seed_generator) < keep
        return x * ops.cast(ops.cast(kept, "float32") / keep, x.dtype)

    def get_config(self):
        return super().get_config() | {"rate": self.rate, "seed": self.seed}


def weight(filters: int, kernel_size: int | tuple[int, int] | None, **settings: Any) -> keras.Layer:
    """Make a weight layer: a convolution, or a dense layer if `kernel_size` is None."""
    if kernel_size is not None:
        return PaddedConv2D(filters, kernel_size, **settings)
    for name in ("strides", "standardize", "data_format"):  # a dense layer has none
        settings.pop(name, None)
    return keras.layers.Dense(filters, **settings)


#: Functions that make a normalisation from the channel axis and the number of channels, by name.
#: Batch normalisation has Torch's epsilon and momentum, as in the released code; the paper does not
#: give them.
NORMALIZATIONS: Mapping[str, Callable[[int, int], keras.Layer] | None] = MappingProxyType(
    {
        "batch": lambda axis, _: keras.layers.BatchNormalization(
            axis=axis, momentum=0.9, epsilon=1e-5
        ),
        "layer": lambda axis, _: keras.layers.LayerNormalization(axis=axis, epsilon=1e-5),
        # 32 groups, as arXiv 1803.08494 recommends, or fewer if 32 does not divide the channels
        "group": lambda axis, n: keras.layers.GroupNormalization(
            groups=math.gcd(32, n), axis=axis, epsilon=1e-5
        ),
        "rms": lambda axis, _: keras.layers.RMSNormalization(axis=axis, epsilon=1e-6),
        "none": None,
    }
)


class _OverAxis1(SameShape):
    """Normalises axis 1: moves it to the end, normalises, and moves it back.

    For axis 1, Keras' layer normalisation does not work on PyTorch, and its RMS
    normalisation works on no backend.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs | {"axis": -1})

    def build(self, input_shape):
        super().build((input_shape[0], *input_shape[2:], input_shape[1]))

    def call(self, inputs):
        return ops.moveaxis(super().call(ops.moveaxis(inputs, 1, -1)), -1, 1)


@keras.saving.register_keras_serializable("keras_preact")
class LayerNormalizationOverAxis1(_OverAxis1, keras.layers.LayerNormalization):
    """Layer normalisation over axis 1."""


@keras.saving.register_keras_serializable("keras_preact")
class RMSNormalizationOverAxis1(_OverAxis1, keras.layers.RMSNormalization):
    """RMS normalisation over axis 1."""


#: Replacements of Keras' layers: `OVER_AXIS_1` if the channels are second, `FASTER` if last.
OVER_AXIS_1: dict[type, type] = {
    keras.layers.LayerNormalization: LayerNormalizationOverAxis1,
    keras.layers.RMSNormalization: RMSNormalizationOverAxis1,
}
FASTER: dict[type, type] = {keras.layers.BatchNormalization: BatchNormalization}


def has_gamma(layer: keras.Layer) -> bool:
    """Whether a normalisation has a gamma whose initial value can be set."""
    return hasattr(layer, "gamma_initializer") and getattr(layer, "scale", True)


def like(layer: keras.Layer) -> Callable[..., keras.Layer]:
    """Return a function that makes layers like this one, with changed settings, as
    `remade` does.

    A unit keeps this function instead of `layer`, because Keras would track the
    weights of `layer` as the unit's.
    """
    return functools.partial(remade, type(layer), arguments_of(layer))


def remade(layer_class: type[keras.Layer], config: dict, **settings) -> keras.Layer:
    """Return a layer of this config with changed settings; None keeps a setting.

    Raises:
        ValueError: for a setting that the config lacks.
    """
    changes = {key: value for key, value in settings.items() if value is not None}
    if missing := sorted(changes.keys() - config.keys()):
        raise ValueError(
            f"The configuration of a {layer_class.__name__} must contain {', '.join(missing)}: "
            "start its `get_config` with `super().get_config()`. Received: a configuration of "
            f"{', '.join(sorted(config)) or 'nothing'}"
        )
    return layer_class.from_config(config | changes)


@keras.saving.register_keras_serializable("keras_preact")
class ActivationLayer(keras.layers.Activation):
    """An activation that is a layer itself, such as PReLU. It belongs to one place."""

    def build(self, input_shape):
        if not self.activation.built:  # a file of this layer builds it too
            self.activation.build(input_shape)


def get_activation(activation: Any) -> Callable:
    """Return an activation in the form that `activation_layer` takes: a function, or the
    result of `like` for a layer, because each use needs weights of its own.
    """
    function: Any = keras.activations.get(activation)
    return like(function) if isinstance(function, keras.Layer) else function


def activation_config(function: Callable) -> Any:
    """Return the entry for a config of a result of `get_activation`."""
    return in_config(function() if _makes_layers(function) else function)


def activation_layer(function: Callable, *, dtype: Any, **settings) -> keras.Layer:
    """Make the layer of a result of `get_activation`."""
    if _makes_layers(function):
        layer = function(name="function", dtype=dtype)
        return ActivationLayer(layer, dtype=dtype, **settings)
    return keras.layers.Activation(function, dtype=dtype, **settings)


def _makes_layers(function: object) -> bool:
    """Whether it is a result of `like`."""
    return isinstance(function, functools.partial) and function.func is remade


#: A name from `NORMALIZATIONS`, or the result of `like` for a layer.
Normalization = str | Callable[..., keras.Layer]


def get_normalization(kind: Normalization | dict | keras.Layer) -> Normalization:
    """Return a normalisation in the form that `normalization` takes; unchanged if it
    has this form already.

    Args:
        kind: A name from `NORMALIZATIONS`, or a Keras layer or its config. Each use
            makes a copy of the layer with its own weights, over the axis of the
            channels.

    Raises:
        ValueError: for an unknown name; the message lists the nearest ones.
    """
    if isinstance(kind, dict):  # from a serialised config
        kind = keras.saving.deserialize_keras_object(kind)
    if isinstance(kind, keras.Layer):
        return like(kind)
    if not _makes_layers(kind):
        _checks.lookup(NORMALIZATIONS, kind, "normalization")
    return kind


def normalization_config(kind: Normalization) -> Any:
    """Return the entry for a config: the name, or the layer as `in_config` has it."""
    return kind if isinstance(kind, str) else in_config(kind())


def normalization_template(
    kind: Normalization, axis: int = -1, channels: int = 1
) -> keras.Layer | None:
    """Return a layer with the options of a normalisation; None for `"none"`."""
    if not isinstance(kind, str):
        return kind()
    make = NORMALIZATIONS[kind]
    return None if make is None else make(axis, channels)


def normalization(
    kind: Normalization, axis: int, channels: int, *, gamma_initializer=None, **settings
) -> list[keras.Layer]:
    """Make a normalisation: a list with one layer, or an empty list for `"none"`.

    Args:
        kind: Result of `get_normalization`.
        axis: Axis of the channels. A layer without an axis, such as a normalisation of
            yours, is made as it is.
        channels: Number of channels.
        gamma_initializer: Initialiser of gamma if the layer has one; None keeps the
            layer's own.
        **settings: `name`, `dtype`.
    """
    template = normalization_template(kind, axis, channels)
    if template is None:
        return []
    replacements = OVER_AXIS_1 if axis == 1 else FASTER
    layer_class = replacements.get(type(template), type(template))
    config = arguments_of(template)
    if "axis" in config:
        settings["axis"] = axis
    if has_gamma(template):
        settings["gamma_initializer"] = gamma_initializer
    return [remade(layer_class, config, **settings)]


def is_norm(layer: keras.Layer) -> bool:
    """Whether a component of an arrangement is a normalisation."""
    return not isinstance(layer, (keras.layers.Activation, Shift, Scale))


class Gated(keras.Layer):
    """Multiplies the output of a chain of layers by a parallel weight layer:
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


def in_words(chain: Iterable[keras.Layer]) -> list[str]:
    """Return the names of layers, with the kernels and strides of convolutions, such as
    `conv_1 3x3/2`; for an activation the name of its function.
    """
    words: list[str] = []
    for layer in chain:
        if isinstance(layer, PaddedConv2D):
            size = "x".join(map(str, layer.kernel_size))
            strides = f"/{layer.strides[0]}" if layer.strides != (1, 1) else ""
            words.append(f"{layer.name} {size}{strides}")
        elif isinstance(layer, Gated):
            words += [*in_words(layer.chain), f"* {layer.gate.name}"]
        elif isinstance(layer, keras.layers.Activation):
            words.append(getattr(layer.activation, "__name__", layer.name))
        else:
            words.append(layer.name)
    return words


def prepared(layer: keras.Layer, x):
    """Build the layer for x if needed, and return x as a tensor."""
    if not keras.backend.is_keras_tensor(x):
        x = ops.convert_to_tensor(x, layer.compute_dtype)
    if not layer.built:
        layer.build(tuple(x.shape))
    return x


def build_chain(chain: list[keras.Layer], shape: tuple) -> tuple:
    """Build the layers in turn for an input of `shape`; return the shape of the last
    output.
    """
    for layer in chain:
        layer.build(shape)
        shape = layer.compute_output_shape(shape)
    return shape


def run_chain(chain: Iterable[keras.Layer], x, training: bool | None = None):
    """Apply the layers in turn. With `training=None` they use the mode of the
    surrounding call.

    PyTorch runs the layers one by one, and Keras 3.15 spends 80 us in the `__call__` of
    each: half the time of ResNet-110 for one image. This function skips `__call__` for
    the layers in `_DIRECT` without hooks of PyTorch.
    """
    eager = keras.backend.backend() == "torch" and ops.is_tensor(x)
    direct = eager and training is not None and getattr(x, "_keras_mask", None) is None
    for layer in chain:
        call = _DIRECT.get(type(layer)) if direct and not _has_hooks(layer) else None
        if call is None or keras.backend.standardize_dtype(x.dtype) != layer.compute_dtype:
            x = layer(x, training=training)
        else:
            x = call(layer, x, training)
    return x


def _has_hooks(layer: Any) -> bool:
    """Whether users have added hooks to a layer, on PyTorch."""
    forward = layer._forward_hooks or layer._forward_pre_hooks
    return bool(forward or layer._backward_hooks or layer._backward_pre_hooks)


#: Layers that work without Keras' `__call__` once they are built and x has their dtype.
_DIRECT: dict[type, Callable] = {
    PaddedConv2D: PaddedConv2D.call,
    BatchNormalization: BatchNormalization.call,
    keras.layers.Activation: lambda layer, x, training: layer.activation(x),
}
