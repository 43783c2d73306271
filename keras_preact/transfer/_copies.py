"""Copies of a network with something changed in its configuration."""

from collections.abc import Collection
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact.models.base import UnitNetwork


def changed_copy(model: UnitNetwork, new: Collection[str] = (), **changes: Any) -> UnitNetwork:
    """Return a new network of the same class and configuration but for `changes`, with the weights of this one.

    It has copies of the values of all weights, and of the seeds where a layer has as many; and its layers are frozen where
    those of `model` are.

    Args:
        model: Stays as it is.
        new: Names of layers that stay as they are made, and are trained.
        **changes: Of the configuration.

    Raises:
        ValueError: for changes that give a layer other weights.
    """
    config = model.get_config()
    frozen = set(config.pop("frozen_layers"))
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
    shapes, wanted = ({path: tuple(weight.shape) for path, weight in each.items()} for each in (originals, found))
    if shapes != wanted:
        different = sorted(path for path in shapes | wanted if shapes.get(path) != wanted.get(path))
        raise ValueError(f"The changed network has other weights in {target.name}: {', '.join(different)}")
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
