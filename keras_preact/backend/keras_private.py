"""The private names of Keras that this package reads. No other file does, so that only this
one changes with Keras. Overridden methods are where their classes are: `_moments` in
layers/batch_norm.py, and the steps of an update in optimizers.py.
"""

from collections.abc import Iterator
from typing import Any

import keras

#: The class of layers that change images: augmentations, which do nothing at inference, crops and
#: changes of the size.
IMAGE_LAYER = keras.layers.RandomFlip.__base__


def layers(layer: keras.Layer) -> Iterator[keras.Layer]:
    """Return a layer and all layers inside it, also those that it only holds in a list."""
    return layer._flatten_layers()


def sublayers(layer: keras.Layer, *, nested: bool = True) -> Iterator[keras.Layer]:
    """Return the layers inside a layer; without `nested`, those that it holds itself."""
    return layer._flatten_layers(include_self=False, recursive=nested)


def generators_without_seed(layer: keras.Layer) -> list[keras.random.SeedGenerator]:
    """Return the generators of random numbers in a layer, and in all layers inside it, that
    were made without a seed.
    """
    generators = (each for inner in layers(layer) for each in inner._seed_generators)
    return [each for each in generators if getattr(each, "_initial_seed", 0) is None]


def set_seed(generator: keras.random.SeedGenerator, seed: int | None) -> None:
    """Let a generator count as made with a seed, or without one. Its state stays."""
    generator._initial_seed = seed


def own_kernel(layer: keras.Layer) -> keras.Variable:
    """Return the kernel of a layer without the product of LoRA's weights."""
    return layer._kernel


def value_or_none(variable: keras.Variable) -> Any:
    """Return the value of a variable; None while Keras trains on JAX and holds it."""
    return variable._value


def is_nested(operation: Any) -> bool:
    """Whether an operation is a model with one input, whose layers can take its place."""
    return isinstance(operation, keras.Model) and len(getattr(operation, "inputs", None) or ()) == 1


def functional(layer: keras.Layer) -> Any:
    """Return the functional model that a sequential one holds; other layers as they are."""
    return getattr(layer, "_functional", None) or layer


def inputs_of(model: keras.Layer) -> Any:
    """Return the Keras tensors that a functional or sequential model was built from, in
    their structure; None for any other model.
    """
    return getattr(functional(model), "_inputs_struct", None)


def forget_jax_state(model: keras.Model) -> None:
    """Let a model forget the values that Keras held when an error ended its training."""
    model._jax_state = None


def strategy_of(model: keras.Model) -> Any:
    """Return the strategy of `tf.distribute` in which a model was made, or None."""
    return model._distribute_strategy


def built_for(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables that an optimizer was built for."""
    return optimizer._trainable_variables


def apply_unscaled(optimizer: keras.optimizers.LossScaleOptimizer) -> Any:
    """Return the function that applies scaled gradients and decides about the scale in one
    replica.
    """
    return optimizer._common_apply


def steps(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Return the counter of train steps. `iterations` counts updates, which take several
    steps with accumulated gradients.
    """
    return optimizer._iterations


def rate(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return the learning rate of an optimizer: a variable or a schedule."""
    return optimizer._learning_rate


def accumulated_gradient(optimizer: keras.optimizers.Optimizer, variable: keras.Variable):
    """Return the sum of the gradients of a variable since its last update."""
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


def hold(layer: keras.Layer, inner: keras.Layer) -> None:
    """Let a layer hold another one without its variables: loops over all layers reach it."""
    layer._layers.append(inner)


def takes_training(layer: keras.Layer) -> bool:
    """Return whether the `call` of a layer has the argument `training`."""
    return layer._call_has_training_arg


def has_metrics(layer: keras.Layer) -> bool:
    """Return whether a layer itself has metrics, without those of the layers inside."""
    return bool(layer._metrics)


def is_trainable_itself(variable: keras.Variable) -> bool:
    """Return whether a variable is trainable, whatever a subclass makes of `trainable`."""
    return variable._trainable


def initializer_of(variable: keras.Variable) -> Any:
    """Return the initialiser of a variable without a value; None for others."""
    return variable._initializer


def is_autocast(variable: keras.Variable) -> bool:
    """Return whether a layer in mixed precision reads a variable in the compute dtype."""
    return variable._autocast


def keep_dtype(variable: keras.Variable) -> None:
    """Let layers in mixed precision read a variable in its own dtype."""
    variable._autocast = False


def metrics_of(model: keras.Model) -> tuple[Any, Any]:
    """Return the arguments `metrics` and `weighted_metrics` of a model's `compile`."""
    compiled = model._compile_metrics
    if compiled is None:
        return None, None
    return compiled._user_metrics, compiled._user_weighted_metrics


def nodes(model: keras.Model) -> list[Any]:
    """Return the calls of layers and operations in the graph of a functional or sequential
    model.
    """
    return [node for level in functional(model)._nodes_by_depth.values() for node in level]


def calls(operation: keras.Operation) -> list[Any]:
    """Return the calls of an operation or a layer with Keras tensors, the first one first."""
    return operation._inbound_nodes


def forget_call(node: Any) -> None:
    """Remove a call from the calls of its operation."""
    node.operation._inbound_nodes = [each for each in calls(node.operation) if each is not node]
