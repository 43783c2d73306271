"""Memory of a train step, by parts."""

import math

import keras

from .costs import Costs, item_size


def memory(model: keras.Model, cost: Costs, images: int) -> dict[str, int]:
    """Return an estimate of the bytes of a train step, by kind.

    Args:
        model: Compiled.
        cost: Costs of one image.
        images: Images that a device computes at a time: a batch, or with accumulated
            gradients a part of one.

    Temporary copies, workspaces and the program of the backend are not included.
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
