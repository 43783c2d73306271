"""What a train step needs of memory, by parts."""

import math

import keras

from .costs import Costs, item_size


def memory(model: keras.Model, cost: Costs, images: int) -> dict[str, int]:
    """Return the bytes that a train step needs of each kind, an estimate.

    Args:
        model: Compiled.
        cost: Of one image.
        images: That a device takes at a time: a batch, or the part of one where gradients are accumulated.

    What the backend takes beside them (copies while it computes, its workspaces, the program) is not in it.
    """
    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return {
        "weights": sum(map(_bytes, model.weights)),
        "gradients": sum(map(_bytes, model.trainable_variables)),
        "optimizer": sum(map(_bytes, optimizer.variables)),
        "activations": images * cost.kept,
    }


def _bytes(variable: keras.Variable) -> int:
    return math.prod(variable.shape) * item_size(variable.dtype)
