"""Copies of a network with changed options. All copies are made here."""

from collections.abc import Collection
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_preact import _checks, _lora, stacks
from keras_preact._inside import check_frozen_together, freeze_inside, frozen_inside
from keras_preact.layers import spatial
from keras_preact.models.base import UnitNetwork, check_network
from keras_preact.models.named_weights import variables_of
from keras_preact.stacks import LayerStack


def changed_copy(
    model: UnitNetwork, new: str | Collection[str] = (), **changes: Any
) -> UnitNetwork:
    """Return a copy of a network with some options changed and the same weights.

    Use it for changes that keep the weights: images of another size, `data_format`,
    `dtype`, `dropout`, `stacked`, the preprocessing (`mean` and `std`). `execution`,
    `remat` and `unroll` also make stacks.
    Layers, and layers inside units, are frozen if they are frozen in `model`. Weights of
    LoRA are added to the kernels.

    Args:
        model: A network of residual units. It stays as it is.
        new: Names of layers that get new weights and are trainable. The new weights may
            have other shapes.
        **changes: Entries of the configuration that `model.get_config()` returns. A new
            `data_format` moves the channels of `input_shape`, unless a shape is given.

    Returns:
        A network of the same class, not compiled, with copies of all weights. The seeds
        of a layer are copied if the new layer has the same number of seeds.

    Raises:
        ValueError: for an option that the configuration does not have, an option that
            changes the weights of a layer, a layer that the network does not have, or a
            stack with some frozen units.

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
            f"Unknown option. The options of {model.name} are {', '.join(sorted(config))}. "
            f"Received: {', '.join(unknown)}"
        )
    if "data_format" in changes:
        config["input_shape"] = spatial.reordered(
            config["input_shape"], config["data_format"], changes["data_format"]
        )
    if "stacked" in config and stacks.check_effect(changes.get("stacked"), changes):
        config["stacked"] = True
    copy = type(model).from_config(config | changes)
    redrawn = {new} if isinstance(new, str) else set(new)
    if others := redrawn - {layer.name for layer in (*model.layers, *copy.layers)}:
        raise ValueError(
            f"`new` must hold names of layers of {model.name!r}. Received: "
            f"{', '.join(map(repr, sorted(others)))}"
        )
    states = {name: state for layer in model.layers for name, state in _states(layer).items()}
    for layer in copy.layers:
        if layer.name not in redrawn:
            _assign(layer, states)
    return copy


def stack(model: UnitNetwork) -> UnitNetwork:
    """Return a copy of a network with the equal units of each stage as one `UnitStack`.
    Weights and seeds are copied.

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
    """Return a copy of a network with every unit as a separate layer. Weights and seeds
    are copied.

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
            "Only a ResidualNetwork can be stacked or unstacked: its units have one "
            f"configuration. Received: {model!r}"
        )
    return changed_copy(model, stacked=stacked)


def reset_classifier(model: UnitNetwork, classes: int, activation: Any = None) -> UnitNetwork:
    """Return a copy of a network with a new classifier. Everything else is copied:
    weights, seeds, and which layers are frozen.

    The new classifier has the initial weights of the network's builder, and is
    trainable.

    Args:
        model: A network of residual units, stacked or not, with a classifier or
            without. It stays as it is.
        classes: Classes of the new classifier. 0: no classifier; the network ends with
            its pooling and returns the embedding, `(batch, channels)`.
        activation: Activation after the new classifier: None for logits, or
            `"softmax"`, ...

    Returns:
        A network of the same class, not compiled.

    Raises:
        ValueError: for an invalid number of classes, a model that is not a network of
            residual units, and, if `classes` is 0, a network without `include_top`.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, classes=100)
    >>> kp.transfer.reset_classifier(model, 3).output_shape
    (None, 3)
    >>> kp.transfer.reset_classifier(model, 0).output_shape
    (None, 64)
    """
    check_network(model)
    has_top = "include_top" in model.arguments
    if classes == 0 and not isinstance(classes, bool):
        if not has_top:
            raise ValueError(
                f"A {type(model).__name__} always has a classifier: `classes` must be 1 or more. "
                "Received: classes=0"
            )
        pooling = model.arguments["pooling"] or "avg"
        return changed_copy(model, include_top=False, pooling=pooling, classifier_activation=None)
    _checks.positive_int(classes, "classes")
    changes = {"include_top": True} if has_top else {}
    return changed_copy(
        model, ("head_classifier",), classes=classes, classifier_activation=activation, **changes
    )


class _State(NamedTuple):
    """State of a layer, or of a unit in a stack."""

    trainable: bool
    frozen_inside: list[str]
    weights: dict[str, np.ndarray]
    seeds: list[np.ndarray]


def _states(layer: keras.Layer) -> dict[str, _State]:
    """Return the state of a layer, or of each unit in a stack, by name."""
    names, owner, weights, seeds = variables_of(layer)
    stacked = isinstance(layer, LayerStack)

    def rows(value) -> np.ndarray:
        # a copy: on JAX, `fit` donates the arrays of the variables that it trains
        array = np.array(ops.convert_to_numpy(value))
        return array if stacked else array[None]

    values = _lora.merged(layer)
    arrays = {
        path: rows(values[id(variable)])
        for path, variable in weights.items()
        if id(variable) in values
    }
    seed_states = [rows(variable.value) for variable in seeds]
    return {
        name: _State(
            layer.trainable,
            frozen_inside(owner),
            {path: array[i] for path, array in arrays.items()},
            [state[i] for state in seed_states],
        )
        for i, name in enumerate(names)
    }


def _assign(layer: keras.Layer, states: dict[str, _State]) -> None:
    """Assign the states of the same names to a layer, or to the units of a stack."""
    names, owner, weights, seeds = variables_of(layer)
    if any(name not in states for name in names):
        return
    unit_states = [states[name] for name in names]
    check_frozen_together(
        {name: (states[name].trainable, states[name].frozen_inside) for name in names}
    )
    stack_axes = 1 if isinstance(layer, LayerStack) else 0
    expected = {path: tuple(variable.shape)[stack_axes:] for path, variable in weights.items()}
    shapes = {path: array.shape for path, array in unit_states[0].weights.items()}
    if shapes != expected:
        different = sorted(
            path for path in shapes | expected if shapes.get(path) != expected.get(path)
        )
        raise ValueError(
            f"The changes give {layer.name} other weights: {', '.join(different)}. Name this layer "
            "in `new` to draw new weights for it."
        )
    for path, variable in weights.items():
        variable.assign(np.reshape([state.weights[path] for state in unit_states], variable.shape))
    if len(seeds) == len(unit_states[0].seeds):
        for i, seed in enumerate(seeds):
            seed.assign(np.reshape([state.seeds[i] for state in unit_states], seed.shape))
    freeze_inside(owner, unit_states[0].frozen_inside)
    if not unit_states[0].trainable:
        layer.trainable = False
