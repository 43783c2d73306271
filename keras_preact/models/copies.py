"""Copies of a network with something changed: the one way to do it."""

from collections.abc import Collection
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_preact import _checks
from keras_preact._paths import below
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
            layer other weights, or a stack with some frozen units.

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


class _Values(NamedTuple):
    """What a layer, or a unit of a stack, holds."""

    trainable: bool
    weights: dict[str, np.ndarray]
    seeds: list[np.ndarray]


def _values(layer: keras.Layer) -> dict[str, _Values]:
    """Return the values of a layer, or of each unit of a stack, by name."""
    names, weights, seeds = _variables(layer)
    stacked = isinstance(layer, UnitStack)

    def rows(variable: keras.Variable) -> np.ndarray:
        # a copy: on JAX `fit` gives the arrays of what it trains away
        array = np.array(ops.convert_to_numpy(variable.value))
        return array if stacked else array[None]

    arrays = {path: rows(variable) for path, variable in weights.items()}
    states = [rows(variable) for variable in seeds]
    return {
        name: _Values(
            layer.trainable,
            {path: array[i] for path, array in arrays.items()},
            [state[i] for state in states],
        )
        for i, name in enumerate(names)
    }


def _assign(layer: keras.Layer, values: dict[str, _Values]) -> None:
    """Give a layer, or the units of a stack, the values under their names."""
    names, weights, seeds = _variables(layer)
    if any(name not in values for name in names):
        return
    given = [values[name] for name in names]
    check_frozen_together({name: values[name].trainable for name in names})
    own_axes = 1 if isinstance(layer, UnitStack) else 0
    wanted = {path: tuple(variable.shape)[own_axes:] for path, variable in weights.items()}
    shapes = {path: array.shape for path, array in given[0].weights.items()}
    if shapes != wanted:
        different = sorted(path for path in shapes | wanted if shapes.get(path) != wanted.get(path))
        raise ValueError(
            f"The changed network has other weights in {layer.name}: {', '.join(different)}"
        )
    for path, variable in weights.items():
        variable.assign(np.reshape([each.weights[path] for each in given], variable.shape))
    if len(seeds) == len(given[0].seeds):
        for i, seed in enumerate(seeds):
            seed.assign(np.reshape([each.seeds[i] for each in given], seed.shape))
    if not given[0].trainable:
        layer.trainable = False


def _variables(
    layer: keras.Layer,
) -> tuple[list[str], dict[str, keras.Variable], list[keras.Variable]]:
    """Return the name of a layer, or the names of a stack's units; the weights by their
    path below it; and the states of the seeds.
    """
    names, owner, pairs = [layer.name], layer, [(each, each) for each in layer.variables]
    if isinstance(layer, UnitStack):
        names, owner, pairs = layer.unit_names, layer.pattern, layer.stacked_variables
    of_owner = {id(weight) for weight in owner.weights}
    weights = {below(owner, own): variable for own, variable in pairs if id(own) in of_owner}
    return names, weights, [variable for own, variable in pairs if id(own) not in of_owner]
