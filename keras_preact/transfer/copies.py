"""Copies of a network with something changed in its configuration."""

from collections.abc import Collection
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact.models.base import UnitNetwork
from keras_preact.transfer import _places


def changed_copy(model: UnitNetwork, new: Collection[str] = (), **changes: Any) -> UnitNetwork:
    """Return a new network of the same class and configuration but for `changes`, with
    the weights of this one.

    For what leaves the weights as they are: images of another size, `data_format`,
    `dtype`, `dropout`, `remat`, the preprocessing (`mean` and `std`). Layers are frozen
    where those of `model` are.

    Args:
        model: A network of residual units. It stays as it is.
        new: Names of layers whose weights are drawn anew, and trained: they may have
            other shapes.
        **changes: Of the configuration that `model.get_config()` returns.

    Returns:
        A network, not compiled, with copies of the values of all weights, and of the
        seeds where a layer has as many.

    Raises:
        ValueError: for an option that the configuration does not have, or one that
            gives a layer other weights.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, input_shape=(32, 32, 3))
    >>> larger = kp.transfer.changed_copy(model, input_shape=(48, 48, 3), dropout=0.2)
    >>> larger.input_shape, larger.count_params() == model.count_params()
    ((None, 48, 48, 3), True)
    """
    _places.check(model)
    config = model.get_config()
    frozen = set(config.pop("frozen_layers"))
    if unknown := sorted(changes.keys() - config.keys()):
        raise ValueError(
            f"{model.name} can be changed in {', '.join(sorted(config))}. Received: "
            f"{', '.join(unknown)}"
        )
    copy = type(model).from_config(config | changes)
    originals = {layer.name: layer for layer in model.layers if layer.name not in new}
    for layer in copy.layers:
        if layer.name in originals:
            _copy_values(originals[layer.name], layer)
            if layer.name in frozen:
                layer.trainable = False
    return copy


def _copy_values(source: keras.Layer, target: keras.Layer) -> None:
    originals = {weight.path: weight for weight in source.weights}
    found = {weight.path: weight for weight in target.weights}
    shapes, wanted = (
        {path: tuple(weight.shape) for path, weight in each.items()} for each in (originals, found)
    )
    if shapes != wanted:
        different = sorted(path for path in shapes | wanted if shapes.get(path) != wanted.get(path))
        raise ValueError(
            f"The changed network has other weights in {target.name}: {', '.join(different)}"
        )
    for path, weight in found.items():
        weight.assign(_value(originals[path]))
    seeds, old_seeds = _seeds(target), _seeds(source)
    if len(seeds) == len(old_seeds):
        for seed, old in zip(seeds, old_seeds, strict=True):
            seed.assign(_value(old))


def _seeds(layer: keras.Layer) -> list[keras.Variable]:
    weights = {id(weight) for weight in layer.weights}
    return [variable for variable in layer.variables if id(variable) not in weights]


def _value(variable: keras.Variable) -> np.ndarray:
    """Return a copy: on JAX `fit` gives the arrays of what it trains away."""
    return np.array(ops.convert_to_numpy(variable.value))
