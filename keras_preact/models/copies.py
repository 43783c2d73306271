"""Copies of a network with something changed: the one way to do it."""

from collections.abc import Collection
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact import _checks
from keras_preact.models.base import UnitNetwork, check_network
from keras_preact.stacks import UnitStack, check_frozen_together


def changed_copy(model: UnitNetwork, new: Collection[str] = (), **changes: Any) -> UnitNetwork:
    """Return a new network of the same class and configuration but for `changes`, with
    the weights of this one.

    For changes that keep the weights: images of another size, `data_format`, `dtype`,
    `dropout`, `stacked`, `execution`, `remat`, the preprocessing (`mean` and `std`).
    A layer is frozen if it is frozen in `model`.

    Args:
        model: A network of residual units. It stays as it is.
        new: Names of layers whose weights are drawn anew, and trained: they may have
            other shapes.
        **changes: Entries of the configuration that `model.get_config()` returns.

    Returns:
        A network, not compiled, with copies of the values of all weights, and of the
        seeds if a layer has as many.

    Raises:
        ValueError: for an option that the configuration does not have, one that gives a
            layer other weights, or units of a stack of which some are frozen.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, input_shape=(32, 32, 3))
    >>> larger = kp.models.changed_copy(model, input_shape=(48, 48, 3), dropout=0.2)
    >>> larger.input_shape, larger.count_params() == model.count_params()
    ((None, 48, 48, 3), True)
    """
    check_network(model)
    config = model.get_config()
    config.pop("frozen_layers")
    if unknown := sorted(changes.keys() - config.keys()):
        raise ValueError(
            f"{model.name} can be changed in {', '.join(sorted(config))}. Received: "
            f"{', '.join(unknown)}"
        )
    copy = type(model).from_config(config | changes)
    values = {name: own for layer in model.layers for name, own in _values(layer).items()}
    for layer in copy.layers:
        if layer.name not in new:
            _assign(layer, values)
    return copy


def stack(model: UnitNetwork) -> UnitNetwork:
    """Return the network with the equal units of each stage as one `UnitStack`, with
    copies of its weights and seeds.

    Raises:
        ValueError: if some units of a stage are frozen and others are not.

    Example:

    >>> import keras_preact as kp
    >>> stacked = kp.models.stack(kp.models.resnet_cifar(20, input_shape=(8, 8, 1)))
    >>> [segment.name for segment in stacked.segments][:3]
    ['stage1_unit1', 'stage1_units', 'stage2_unit1']
    """
    return _with_stacks(model, True)


def unstack(model: UnitNetwork) -> UnitNetwork:
    """Return the network with every unit a layer of its own, with copies of its weights
    and seeds.

    Example:

    >>> import keras_preact as kp
    >>> single = kp.models.unstack(kp.models.resnet_cifar(20, stacked=True, input_shape=(8, 8, 1)))
    >>> [segment.name for segment in single.segments][:3]
    ['stage1_unit1', 'stage1_unit2', 'stage1_unit3']
    """
    return _with_stacks(model, False)


def _with_stacks(model: UnitNetwork, stacked: bool) -> UnitNetwork:
    if "stacked" not in model.get_config():
        raise ValueError(
            "Units of one configuration make stacks; a ResidualNetwork has them. Received: "
            f"{model!r}"
        )
    return changed_copy(model, stacked=stacked)


def reset_classifier(model: UnitNetwork, classes: int, activation: Any = None) -> UnitNetwork:
    """Return a new network with another classifier and copies of everything else:
    weights, seeds, what is frozen.

    The new classifier is drawn as the network's builder draws it, and is trained.

    Args:
        model: A network of residual units, stacked or not, with a classifier or
            without. It stays as it is.
        classes: Classes of the new classifier. 0 for none: the network ends with its
            pooling and returns the embedding, `(batch, channels)`.
        activation: Activation after the new classifier: None for logits, or
            `"softmax"`, ...

    Returns:
        A network of the same class, not compiled.

    Raises:
        ValueError: for a bad number of classes, a model that is no network of residual
            units, and one of a class without `include_top` if classes is 0.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, classes=100)
    >>> kp.transfer.reset_classifier(model, 3).output_shape
    (None, 3)
    >>> kp.transfer.reset_classifier(model, 0).output_shape
    (None, 64)
    """
    check_network(model)
    has_top = "include_top" in model.get_config()
    if classes == 0 and not isinstance(classes, bool):
        if not has_top:
            raise ValueError(
                f"A {type(model).__name__} has a classifier: `classes` must be 1 or more. "
                "Received: classes=0"
            )
        pooling = model.get_config()["pooling"] or "avg"
        return changed_copy(model, include_top=False, pooling=pooling, classifier_activation=None)
    _checks.positive_int(classes, "classes")
    changes = {"include_top": True} if has_top else {}
    return changed_copy(
        model, ("head_classifier",), classes=classes, classifier_activation=activation, **changes
    )


#: Of a layer: whether it is trained, its weights by path, the states of its seeds.
_Values = tuple[bool, dict[str, np.ndarray], list[np.ndarray]]


def _values(layer: keras.Layer) -> dict[str, _Values]:
    """Return the values of a layer, or of each unit of a stack, by name."""
    if not isinstance(layer, UnitStack):
        weights, seeds = _split(layer, [(variable, variable) for variable in layer.variables])
        return {
            layer.name: (
                layer.trainable,
                {path: _array(value) for path, value in weights.items()},
                [_array(value) for value in seeds],
            )
        }
    weights, seeds = _split(layer.pattern, layer.stacked_variables)
    arrays = {path: _array(value) for path, value in weights.items()}
    states = [_array(value) for value in seeds]
    return {
        name: (
            layer.trainable,
            {path: array[i] for path, array in arrays.items()},
            [state[i] for state in states],
        )
        for i, name in enumerate(layer.unit_names)
    }


def _assign(layer: keras.Layer, values: dict[str, _Values]) -> None:
    """Give a layer, or the units of a stack, the values under their names."""
    stacked = isinstance(layer, UnitStack)
    names = layer.unit_names if stacked else [layer.name]
    if any(name not in values for name in names):
        return
    given = [values[name] for name in names]
    check_frozen_together({name: values[name][0] for name in names})
    pattern = layer.pattern if stacked else layer
    pairs = layer.stacked_variables if stacked else [(each, each) for each in layer.variables]
    weights, seeds = _split(pattern, pairs)
    wanted = {path: tuple(variable.shape)[stacked:] for path, variable in weights.items()}
    shapes = {path: array.shape for path, array in given[0][1].items()}
    if shapes != wanted:
        different = sorted(path for path in shapes | wanted if shapes.get(path) != wanted.get(path))
        raise ValueError(
            f"The changed network has other weights in {layer.name}: {', '.join(different)}"
        )
    for path, variable in weights.items():
        arrays = [own[path] for _, own, _ in given]
        variable.assign(np.stack(arrays) if stacked else arrays[0])
    if len(seeds) == len(given[0][2]):
        for i, seed in enumerate(seeds):
            states = [own[i] for _, _, own in given]
            seed.assign(np.stack(states) if stacked else states[0])
    if not given[0][0]:
        layer.trainable = False


def _split(layer: keras.Layer, pairs: list[tuple]) -> tuple[dict, list]:
    """Split the second of each pair, whose first are the variables of `layer`, into
    weights by their path below the layer, and seeds.
    """
    weights = {id(weight) for weight in layer.weights}
    by_path = {
        own.path.split(f"{layer.name}/", 1)[-1]: value for own, value in pairs if id(own) in weights
    }
    return by_path, [value for own, value in pairs if id(own) not in weights]


def _array(variable: keras.Variable) -> np.ndarray:
    """Return a copy: on JAX `fit` gives the arrays of what it trains away."""
    return np.array(ops.convert_to_numpy(variable.value))
