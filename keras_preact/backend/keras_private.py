"""The private names of Keras that this package reads. No other file does, so that only this
one changes with Keras. Overridden methods are where their classes are: `_moments` in
layers/batch_norm.py, and the steps of an update in optimizers.py.
"""

from collections.abc import Iterator
from typing import Any

import keras


def layers(layer: keras.Layer) -> Iterator[keras.Layer]:
    """Return a layer and all layers inside it, also those that it only holds in a list."""
    return layer._flatten_layers()


def sublayers(layer: keras.Layer, *, nested: bool = True) -> Iterator[keras.Layer]:
    """Return the layers inside a layer; without `nested`, those that it holds itself."""
    return layer._flatten_layers(include_self=False, recursive=nested)


def own_kernel(layer: keras.Layer) -> keras.Variable:
    """Return the kernel of a layer without the product of LoRA's weights."""
    return layer._kernel


def value_or_none(variable: keras.Variable) -> Any:
    """Return the value of a variable; None while Keras trains on JAX and holds it."""
    return variable._value


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
