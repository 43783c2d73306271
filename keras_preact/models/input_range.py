"""The range of inputs that a model expects, from the layers that it starts with."""

import collections
from typing import Any

import keras
import numpy as np

from keras_preact.backend import keras_private
from keras_preact.backend.arrays import as_numpy
from keras_preact.preprocessing import InputRange

#: A function `scale * x + offset`. Both are float64 and broadcast with the input.
_Scaling = tuple[np.ndarray, np.ndarray]
#: Names of operations of Keras, such as in `inputs / 255`, to what they compute.
_OPERATIONS = {
    "Add": np.add,
    "Subtract": np.subtract,
    "Multiply": np.multiply,
    "Divide": np.divide,
    "TrueDivide": np.divide,
}


def expected_input(model: keras.Model) -> InputRange:
    """Return the range of inputs that a model expects, from the scaling that it starts
    with: `Normalization` and `Rescaling` layers, and sums, products and quotients with a
    constant. They may be in nested models, and between augmentations and casts.

    Example:

    >>> import keras_preact as kp
    >>> kp.models.expected_input(kp.create_model("digits_resnet8_preact")).is_plain
    True
    """
    scale, offset = np.ones(()), np.zeros(())
    found: list[_Scaling] = []
    _add_scalings(model, found)
    for factor, term in found:
        scale, offset = factor * scale, factor * offset + term
    scale = np.where(scale == 0, 1, scale)  # of a channel that is not used
    mean, std = np.broadcast_arrays(-offset / scale, 1 / np.abs(scale))
    long = [axis for axis, length in enumerate(mean.shape) if length > 1]
    if len(long) != 1:  # one value, or one for each pixel
        return InputRange(np.mean(mean), np.mean(std))
    axis = -1 if long[0] == mean.ndim - 1 else long[0]
    return InputRange(mean.reshape(-1), std.reshape(-1), axis)


def _add_scalings(model: keras.Model, found: list[_Scaling]) -> bool:
    """Add the scalings that a model starts with to `found`. Return whether nothing else in
    the model changes the range.
    """
    calls, is_chain = _chain(model)
    for operation, arguments in calls:
        scaling = _scaling(operation, arguments)
        if scaling is not None:
            found.append(scaling)
        elif isinstance(operation, keras.Model):
            if not _add_scalings(operation, found):
                return False
        elif not _keeps_range(operation):
            return False
    return is_chain


def _chain(model: keras.Model) -> tuple[list[tuple[Any, tuple]], bool]:
    """Return the operations from the only input of a model on with their arguments, as long
    as each is the only reader of the one before; and whether they are the whole model.
    """
    if isinstance(model, keras.Sequential):
        return [(layer, ()) for layer in model.layers], True
    if len(getattr(model, "inputs", None) or ()) != 1:
        return [], False
    readers = collections.defaultdict(list)
    for node in keras_private.nodes(model):
        for read in node.input_tensors:
            readers[id(read)].append(node)
    [tensor], calls = model.inputs, []
    while len(readers[id(tensor)]) == 1:
        [node] = readers[id(tensor)]
        calls.append((node.operation, node.arguments.args))
        tensor = node.outputs[0]
    return calls, [id(output) for output in model.outputs] == [id(tensor)]


def _scaling(operation: Any, arguments: tuple) -> _Scaling | None:
    """Return what an operation computes, None if that is no scaling."""
    if isinstance(operation, keras.layers.Normalization):
        mean, variance = (
            keras.ops.convert_to_numpy(value).astype("float64")
            for value in (operation.mean, operation.variance)
        )
        std = np.maximum(np.sqrt(variance), keras.config.epsilon())
        return (std, mean) if operation.invert else (1 / std, -mean / std)
    if isinstance(operation, keras.layers.Rescaling):
        return np.asarray(operation.scale, "float64"), np.asarray(operation.offset, "float64")
    name = type(operation).__name__
    if name not in _OPERATIONS or len(arguments) != 2:
        return None
    is_tensor = [isinstance(one, keras.KerasTensor) for one in arguments]
    if all(is_tensor) or (is_tensor[1] and "Divide" in name):
        return None

    def at(x: float) -> np.ndarray:
        values = (x if is_x else one for one, is_x in zip(arguments, is_tensor, strict=True))
        return _OPERATIONS[name](*(np.asarray(as_numpy(value), "float64") for value in values))

    return at(1.0) - at(0.0), at(0.0)


def _keeps_range(operation: Any) -> bool:
    """Whether an operation leaves the range of its input as it is, at inference."""
    if isinstance(operation, keras.layers.Activation):
        return operation.activation is keras.activations.linear
    layers = keras.layers
    kinds = (layers.InputLayer, layers.Identity, layers.Dropout, layers.GaussianNoise)
    return isinstance(operation, (*kinds, keras_private.IMAGE_LAYER)) or (
        type(operation).__name__ in ("Cast", "Identity")
    )
