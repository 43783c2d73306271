"""Copy a network for serving: unroll units and stacks into plain layers, and fold batch
normalisations into the weights before them.
"""

import collections
from collections.abc import Callable, Iterator

import keras
import numpy as np

from keras_preact import _lora
from keras_preact.backend import keras_private
from keras_preact.stacks import LayerStack
from keras_preact.units import ResidualUnit

#: Layers with a kernel. Scaling its last axis scales their output channels.
WEIGHTS = (keras.layers.Conv2D, keras.layers.Dense)


def flat(model: keras.Model, *, fold: bool = False) -> keras.Model:
    """Return a functional model of plain layers that computes what `model` does at
    inference.

    Residual units, stacks and nested models are replaced by the layers and operations
    that they call. Kernels of layers that compute in 16 bits are stored in 16 bits.

    Args:
        model: A functional model with the channels last. It stays as it is.
        fold: Whether to fold batch normalisations into the convolutions and dense
            layers before them.
    """
    names: collections.Counter[str] = collections.Counter(layer.name for layer in model.layers)
    copies: dict[int, list[keras.Layer]] = {}

    def inline(layer, *args, **kwargs):
        if not _is_composite(layer):
            return layer(*args, **kwargs)
        if id(layer) not in copies:
            copies[id(layer)] = _copies(layer, names)
        x = args[0]
        for copy in copies[id(layer)]:
            if isinstance(copy, ResidualUnit):  # `call` alone does not cast its input
                x = copy.call(keras.ops.cast(x, copy.compute_dtype), training=False)
            else:
                x = copy.call(x, training=False) if _is_composite(copy) else copy(x)
        return x

    while any(map(_is_composite, model.layers)):
        model = _rebuilt(model, inline)
    replacements = {
        id(layer): _copy(layer, dtype=layer.compute_dtype)
        for layer in model.layers
        if isinstance(layer, WEIGHTS) and layer.compute_dtype in ("bfloat16", "float16")
    }
    folded: set[int] = set()
    for weight, norm in _foldable(model) if fold else ():
        replacements[id(weight)] = _fold(weight, norm)
        folded.add(id(norm))

    def replace(layer, *args, **kwargs):
        if id(layer) in folded:
            return args[0]
        if _is_bfloat16_norm(layer, *args):
            layer = _FusedNorm(layer)
        return replacements.get(id(layer), layer)(*args, **kwargs)

    return _rebuilt(model, replace)


def _is_composite(layer: keras.Layer) -> bool:
    return keras_private.is_nested(layer) or isinstance(layer, ResidualUnit | LayerStack)


def _rebuilt(model: keras.Model, call: Callable) -> keras.Model:
    """Return `model` with each call of a layer replaced by `call(layer, *inputs)`."""
    return keras.models.clone_model(model, clone_function=lambda layer: layer, call_function=call)


def _copies(layer: keras.Layer, names: collections.Counter) -> list[keras.Layer]:
    """Return copies of the units of a stack, or of another composite layer itself.
    Their inner layers get names that are unique in the whole graph.
    """
    if isinstance(layer, LayerStack):
        copies = [layer.unit(i) for i in range(layer.depth)]
    else:
        copies = [_copy(layer)]
    for copy in copies:
        for inner in keras_private.sublayers(copy):
            name = f"{copy.name}_{inner.name}"
            names[name] += 1
            inner.name = name if names[name] == 1 else f"{name}_{names[name]}"
    return copies


def _copy(layer: keras.Layer, **changes) -> keras.Layer:
    """Return a layer with the same weights and with changes in its configuration."""
    copy = type(layer).from_config(layer.get_config() | changes)
    if not copy.built:
        copy.build_from_config(layer.get_build_config())
    for weight, value in zip(copy.weights, _lora.merged(layer).values(), strict=True):
        weight.assign(value)
    return copy


def _is_bfloat16_norm(layer, x=None, *_) -> bool:
    return (
        isinstance(layer, keras.layers.BatchNormalization)
        and _is_known(layer)
        and layer.compute_dtype == "bfloat16"
        and len(x.shape) == 4
        and layer.axis in (-1, 3)
        and layer.scale
        and layer.center
    )


class _FusedNorm(keras.layers.Layer):
    """Batch normalisation of bfloat16 feature maps with TensorFlow's fused kernel.
    Keras would cast each map to float32 and back.
    """

    def __init__(self, norm: keras.layers.BatchNormalization):
        super().__init__(name=f"{norm.name}_fused", dtype="bfloat16")
        self.epsilon = norm.epsilon
        self.values = [
            self.add_weight(shape=weight.shape, dtype="float32", name=weight.name, autocast=False)
            for weight in norm.weights
        ]
        for weight, original in zip(self.values, norm.weights, strict=True):
            weight.assign(original.value)

    def call(self, x):
        import tensorflow as tf

        scale, offset, mean, variance = (weight.value for weight in self.values)
        return tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=scale,
            offset=offset,
            mean=mean,
            variance=variance,
            epsilon=self.epsilon,
            is_training=False,
        )[0]


def _foldable(model: keras.Model) -> Iterator[tuple[keras.Layer, keras.Layer]]:
    """Yield pairs of a layer and the batch normalisation that alone reads its output."""
    nodes = keras_private.nodes(model)
    made_by = {id(output): node.operation for node in nodes for output in node.outputs}
    reads = collections.Counter(id(tensor) for node in nodes for tensor in node.input_tensors)
    reads.update(map(id, model.outputs))
    calls = collections.Counter(id(node.operation) for node in nodes)
    for node in nodes:
        for tensor in node.input_tensors[:1]:
            pair = made_by.get(id(tensor)), node.operation
            if (
                reads[id(tensor)] == 1
                and all(calls[id(layer)] == 1 for layer in pair)
                and _fits(*pair, len(tensor.shape))
            ):
                yield pair


def _fits(weight, norm, axes: int) -> bool:
    """Whether a normalisation can be folded into a layer, whose output has `axes` axes."""
    if not (
        isinstance(weight, WEIGHTS)
        and isinstance(norm, keras.layers.BatchNormalization)
        and all(map(_is_known, (weight, norm)))
    ):
        return False
    channels_first = getattr(weight, "data_format", None) == "channels_first"
    return (
        not getattr(weight, "standardize", False)  # it would undo the scaling
        and not getattr(weight, "lora_enabled", False)  # the kernel is a sum
        and not getattr(weight, "quantization_mode", None)  # the kernel is in integers
        and weight.activation in (None, keras.activations.linear)
        and norm.axis % axes == (1 if channels_first else axes - 1)
    )


def _is_known(layer: keras.Layer) -> bool:
    """Whether what a layer computes is known: a subclass of a user's may change it."""
    return type(layer).__module__.split(".")[0] in ("keras", "keras_preact")


def _fold(weight: keras.Layer, norm: keras.layers.BatchNormalization) -> keras.Layer:
    """Return a copy of `weight` that computes `norm(weight(x))`."""

    def value(variable, default: float) -> np.ndarray:
        if variable is None:
            return np.asarray(default, "float64")
        return keras.ops.convert_to_numpy(variable).astype("float64")

    factor = value(norm.gamma, 1) / np.sqrt(value(norm.moving_variance, 1) + norm.epsilon)
    short = {"dtype": weight.compute_dtype} if weight.compute_dtype != weight.dtype else {}
    copy = type(weight).from_config(weight.get_config() | {"use_bias": True} | short)
    copy.build_from_config(weight.get_build_config())
    copy.kernel.assign(value(weight.kernel, 1) * factor)
    copy.bias.assign(
        value(norm.beta, 0) + (value(weight.bias, 0) - value(norm.moving_mean, 0)) * factor
    )
    return copy
