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
    """A variable, and the description that must match when its values are restored.

    Args:
        variable: The variable.
        name: Its path without the numbers in Keras' default names, which depend on what
            the process has made before.
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
        indices = numbers.setdefault(base, {})
        return f"{base}:{indices.setdefault(part, len(indices))}"

    variables = {id(variable): variable for variable in network.variables}.values()
    return [
        Tensors(variable, "/".join(map(renamed, variable.path.split("/"))))
        for variable in variables
    ]


def _unnumbered(variables) -> list[Tensors]:
    return [
        Tensors(variable, re.sub(r"_\d+(?=[/_]|$)", "", variable.path)) for variable in variables
    ]


#: Functions that return the saved variables of a model, by group, in this order.
GROUPS: Mapping[str, Callable[[keras.Model], list[Tensors]]] = {
    "model": _model,
    "optimizer": lambda model: _unnumbered(own_variables(model)),
    "metrics": lambda model: _unnumbered(model.metrics_variables),
}


def read(tensors: Tensors) -> list[np.ndarray]:
    """Return the values of a variable: one array, or one for each replica of
    `tf.distribute` if these differ.
    """
    arrays = [_array(replica) for replica in _replicas(tensors.variable)]
    # NumPy cannot write bfloat16: save it as integers with the same bits
    arrays = [
        array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array for array in arrays
    ]
    same = all(array.tobytes() == arrays[0].tobytes() for array in arrays)
    return arrays[:1] if same else arrays


def not_finite(model: keras.Model) -> str | None:
    """Return the path of the first trained weight that is not finite, None if all are."""
    for variable in model.trainable_variables:
        # replicas are equal
        if not np.isfinite(_array(_replicas(variable)[0])).all():
            return str(variable.path)
    return None


def write(tensors: Tensors, arrays: list[np.ndarray]) -> None:
    """Assign the values that `read` has returned to a variable."""
    variable = tensors.variable
    arrays = [_as_dtype(array, variable.dtype) for array in arrays]
    replicas = _replicas(variable)
    if len(replicas) == 1 and len(arrays) == 1:
        variable.assign(arrays[0])
        return
    for i, replica in enumerate(replicas):
        replica.assign(ops.convert_to_tensor(arrays[min(i, len(arrays) - 1)], variable.dtype))


def _replicas(variable: keras.Variable) -> list:
    """Return the tensors of a variable: with `tf.distribute` one variable per replica of
    this process, else its only value.
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

        # a replicated value is complete here; all processes gather a value that is split
        if value.is_fully_replicated:
            value = value.addressable_data(0)
        else:
            value = multihost_utils.process_allgather(value, tiled=True)
    return np.asarray(ops.convert_to_numpy(value))


def _as_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    import ml_dtypes

    return array.view(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else array
