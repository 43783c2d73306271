"""A sample in the structure in which a model takes its inputs."""

import contextlib
from collections.abc import Mapping
from typing import Any

import keras

from keras_preact.backend import keras_private


def as_taken(model: keras.Layer, sample: Any, argument: str = "x") -> Any:
    """Return the arrays of a sample as the model takes them: an array for one input, else the
    structure with which a functional model was built.

    Args:
        model: Any Keras model or layer.
        sample: An array, or arrays in the order of the inputs, or a dictionary with the names
            of the inputs, as `fit` takes them.
        argument: Name of the sample, for errors.

    Raises:
        ValueError: for another number of arrays, or other names.
    """
    structure = keras_private.inputs_of(model)
    if structure is None:  # a model that says nothing about its inputs
        is_only = isinstance(sample, list | tuple) and len(sample) == 1
        return sample[0] if is_only else sample
    with contextlib.suppress(ValueError, TypeError):
        keras.tree.assert_same_structure(sample, structure)
        return sample
    symbols = keras.tree.flatten(structure)
    if isinstance(sample, Mapping):
        names = [symbol.name for symbol in symbols]
        if not set(names) <= set(sample):  # `fit` takes no notice of other arrays
            raise ValueError(
                f"The model has the input{'s' * (len(names) > 1)} {', '.join(names)}. Received: "
                f"`{argument}` with {', '.join(map(str, sample)) or 'none'}"
            )
        arrays = [sample[name] for name in names]
    else:
        arrays = list(sample) if isinstance(sample, list | tuple) else [sample]
    if len(arrays) != len(symbols):
        raise ValueError(
            f"The model has {_counted(len(symbols), 'input')}. Received: "
            f"{_counted(len(arrays), 'array')} as `{argument}`"
        )
    is_one = len(symbols) == 1 and not isinstance(structure, Mapping)
    return arrays[0] if is_one else keras.tree.pack_sequence_as(structure, arrays)


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
