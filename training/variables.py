"""The variables of a model in training as arrays, on each backend and distribution."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact.health.probe import own_variables


@dataclasses.dataclass(frozen=True)
class Tensors:
    """A variable, and what has to be the same where its values are to be taken over.

    Args:
        variable: The variable.
        name: Its path without the numbers that Keras gives to what has no name of its
            own: they count on in a process.
    """

    variable: keras.Variable
    name: str

    @property
    def description(self) -> dict[str, Any]:
        variable = self.variable
        return {
            "path": variable.path,
            "name": self.name,
            "shape": list(variable.shape),
            "dtype": variable.dtype,
        }


def _model(model: keras.Model) -> list[Tensors]:
    network = getattr(model, "network", model)  # without the images of `OnDevice`
    numbers: dict[str, dict[str, int]] = {}

    def renamed(part: str) -> str:
        base = re.sub(r"_?\d+$", "", part)
        own = numbers.setdefault(base, {})
        return f"{base}:{own.setdefault(part, len(own))}"

    variables = {id(variable): variable for variable in network.variables}.values()
    return [Tensors(each, "/".join(map(renamed, each.path.split("/")))) for each in variables]


def _unnumbered(variables) -> list[Tensors]:
    return [Tensors(each, re.sub(r"_\d+(?=[/_]|$)", "", each.path)) for each in variables]


#: What is saved of a model, in this order.
GROUPS: Mapping[str, Callable[[keras.Model], list[Tensors]]] = {
    "model": _model,
    "optimizer": lambda model: _unnumbered(own_variables(model)),
    "metrics": lambda model: _unnumbered(model.metrics_variables),
}


def read(tensors: Tensors) -> list[np.ndarray]:
    """Return the values of a variable: one array, or one for each replica of
    `tf.distribute` where these differ.
    """
    arrays = [_array(part) for part in _parts(tensors.variable)]
    # NumPy writes no bfloat16: it becomes integers of the same bits
    arrays = [
        array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array for array in arrays
    ]
    same = all(array.tobytes() == arrays[0].tobytes() for array in arrays)
    return arrays[:1] if same else arrays


def array_of(variable: keras.Variable) -> np.ndarray:
    """Return the value of a variable, that of the first replica where there are
    several.
    """
    return _array(_parts(variable)[0])


def write(tensors: Tensors, arrays: list[np.ndarray]) -> None:
    """Give a variable the values that `read` has returned."""
    variable = tensors.variable
    arrays = [_own_dtype(array, variable.dtype) for array in arrays]
    parts = _parts(variable)
    if len(parts) == 1 and len(arrays) == 1:
        variable.assign(arrays[0])
        return
    for i, part in enumerate(parts):
        part.assign(ops.convert_to_tensor(arrays[min(i, len(arrays) - 1)], variable.dtype))


def _parts(variable: keras.Variable) -> list:
    """Return what a variable consists of: on TensorFlow the variables of the replicas
    of this process.
    """
    value = variable.value
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if isinstance(value, tf.distribute.DistributedValues):
            return list(value.values)
    return [value]


def _array(value) -> np.ndarray:
    if keras.backend.backend() == "jax" and not value.is_fully_addressable:
        from jax.experimental import multihost_utils

        # a replica is here; what is split over processes is gathered by all of them
        if value.is_fully_replicated:
            value = value.addressable_data(0)
        else:
            value = multihost_utils.process_allgather(value, tiled=True)
    return np.asarray(ops.convert_to_numpy(value))


def _own_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    import ml_dtypes

    return array.view(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else array
