"""The values that an exported network computes with: its weights, with batch
normalisations folded into them, in few bits.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_preact import _batch_norm
from keras_preact.stacks import UnitStack
from keras_preact.units import ResidualUnit

#: The layers that multiply: scaling their last axis scales their output's channels.
WEIGHTS = (keras.layers.Conv2D, keras.layers.Dense)


@dataclasses.dataclass(frozen=True)
class Values:
    """What stands in the place of a network's weights.

    Args:
        stored: The TensorFlow variables that the network reads, each once.
        mapping: Each of the network's variables that is read, with what stands for it.
        unread: Those that are not. A stack takes its slices of them all the same.
        folded: Batch normalisations whose factors stand in the weights in front of
            them; None: as the network is.
    """

    stored: list[Any]
    mapping: list[tuple[keras.Variable, Any]]
    unread: list[keras.Variable]
    folded: list[keras.Layer] | None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While active, the network computes with them; its own variables stay as they
        are.
        """
        import tensorflow as tf

        folding = (
            contextlib.nullcontext() if self.folded is None else _batch_norm.folded(self.folded)
        )
        with keras.StatelessScope() as scope, folding:
            # Given to the scope as they are: it would bring each to the variable's own dtype, and
            # the layer back.
            scope.state_mapping.update({id(variable): value for variable, value in self.mapping})
            scope.state_mapping.update(
                {id(variable): tf.zeros(variable.shape) for variable in self.unread}
            )
            yield


def of(model: keras.Model, *, fold: bool) -> Values:
    """Return the values that `model` is to compute with; Keras runs on TensorFlow.

    The kernels of layers that compute in 16 bits are kept in those.

    Args:
        model: A functional model; images have the channels last.
        fold: Whether to fold batch normalisations into the convolutions and dense
            layers in front of them.
    """
    import tensorflow as tf

    layers, place = _layers_and_places(model)
    pairs = [*_pairs_of_graph(model), *_pairs_of_units(layers)] if fold else []
    arrays: dict[int, np.ndarray] = {}
    unread: list[keras.Variable] = []
    for weight, norm in pairs:
        arrays |= _fold(weight, norm, place)
        unread += map(place, (norm.gamma, norm.moving_mean, norm.moving_variance))
    short = {
        id(place(layer.kernel)): layer.compute_dtype
        for layer in layers
        if isinstance(layer, WEIGHTS) and layer.compute_dtype in ("bfloat16", "float16")
    }
    skipped = {id(variable) for variable in unread}
    mapping: list[tuple[keras.Variable, Any]] = []
    for variable in model.weights:
        key, value = id(variable), variable.value
        if key in arrays or key in short:
            value = tf.cast(arrays.get(key, value), short.get(key, variable.dtype))
            value = tf.Variable(value, trainable=False, name=variable.path)
        if key not in skipped:
            mapping.append((variable, value))
    return Values(
        [value for _, value in mapping],
        mapping,
        unread,
        [norm for _, norm in pairs] if fold else None,
    )


def _layers_and_places(model: keras.Model) -> tuple[list[keras.Layer], Callable]:
    """Return all layers, those of a stack's unit among them, and what gives the
    variable that holds a layer's values.
    """
    layers: list[keras.Layer] = []
    stacked: dict[int, tuple] = {}
    for layer in model._flatten_layers(include_self=False):
        layers.append(layer)
        if isinstance(layer, UnitStack):
            layers += layer.pattern._flatten_layers()
            stacked |= {id(own): (own, values) for own, values in layer.stacked_variables}
    return (
        layers,
        lambda variable: stacked[id(variable)][1] if id(variable) in stacked else variable,
    )


def _fold(weight: keras.Layer, norm: keras.Layer, place: Callable) -> dict[int, np.ndarray]:
    """Return what `weight`, and `beta` of `norm`, become where `norm` adds its `beta`
    alone, by the variables' identities.
    """

    def values(variable):
        return keras.ops.convert_to_numpy(place(variable)).astype("float64")

    factor = values(norm.gamma) / np.sqrt(
        values(norm.moving_variance) + norm.epsilon
    )  # (..., channels); ... of a stack
    kernel = values(weight.kernel)
    shape = (*factor.shape[:-1], *[1] * (kernel.ndim - factor.ndim), factor.shape[-1])
    changed = {
        id(place(weight.kernel)): kernel * factor.reshape(shape),
        id(place(norm.beta)): values(norm.beta) - values(norm.moving_mean) * factor,
    }
    if weight.bias is not None:
        changed[id(place(weight.bias))] = values(weight.bias) * factor
    return changed


def _fits(weight, norm) -> bool:
    return (
        isinstance(weight, WEIGHTS)
        and not getattr(weight, "standardize", False)  # which takes a factor away again
        and weight.activation in (None, keras.activations.linear)
        and isinstance(norm, _batch_norm.BatchNormalization)
        and norm.axis in (-1, 1 if isinstance(weight, keras.layers.Dense) else 3)
        and norm.scale
        and norm.center
    )


def _pairs_of_units(layers: list[keras.Layer]) -> Iterator[tuple]:
    """Find weights with batch normalisations right behind them in residual units."""
    for layer in layers:
        if isinstance(layer, ResidualUnit):
            for chain in (layer.rest, layer.shape_change):
                yield from (pair for pair in itertools.pairwise(chain) if _fits(*pair))


def _pairs_of_graph(model: keras.Model) -> Iterator[tuple]:
    """Find weights of which nothing but a batch normalisation reads the output, among a
    functional model's own layers.
    """
    nodes = [node for level in model._nodes_by_depth.values() for node in level]
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
                and _fits(*pair)
            ):
                yield pair
