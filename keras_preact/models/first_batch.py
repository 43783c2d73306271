"""Checks before a network computes: the range of the first batch, and the labels."""

import contextlib
import copy
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_preact import classifiers
from keras_preact.backend.arrays import as_numpy
from keras_preact.preprocessing import InputRange

#: Number of examples to check.
_EXAMPLES = 64


class Checks:
    """Looks at the data of a `fit`, `evaluate` or `predict`: warns if the inputs have another
    range than a network expects, and refuses labels that its outputs cannot have.

    Data that Keras reads in batches is checked while Keras reads it. Reading its first batch
    here would fill a shuffle buffer twice, and change the order that a seed gives. The
    inputs of the first batch and the labels of every batch are checked.

    Args:
        expected: The range of inputs.
        loss: The loss of `compile`. None: labels are not checked.
        count: Number of outputs.
    """

    def __init__(self, expected: InputRange, loss: Any = None, count: int | None = None):
        self.expected = expected
        #: The outputs whose labels are checked; None if no labels are.
        self.outputs: classifiers.Outputs | None = None
        if count is not None and (classifiers.is_sparse(loss) or classifiers.is_binary(loss)):
            activation = "sigmoid" if classifiers.is_binary(loss) else "softmax"
            self.outputs = classifiers.Outputs(count, activation, are_logits=True)
        #: What is wrong with the labels of a batch.
        self.problem: str | None = None
        self._is_first = True

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Return a context in which a problem that was found in a data pipeline is a
        ValueError, whatever the pipeline makes of it.
        """
        try:
            yield
        except Exception as error:
            if self.problem is None or str(error) == self.problem:
                raise
            raise ValueError(self.problem) from error

    def watched(self, x: Any, y: Any = None) -> Any:
        """Check arrays now, and batches while they are read.

        Returns:
            The data to give to Keras in place of x.
        """
        tf, torch = sys.modules.get("tensorflow"), sys.modules.get("torch")
        if tf is not None and isinstance(x, tf.data.Dataset):
            return _watched_dataset(x, self)
        if isinstance(x, keras.utils.PyDataset):
            return _WatchedPyDataset(x, self)
        if isinstance(x, types.GeneratorType):
            return _watched_batches(x, self)
        if torch is not None and isinstance(x, torch.utils.data.DataLoader):
            loader = copy.copy(x)  # it has the same sampler, so the order is the same
            loader.collate_fn = _Collated(x.collate_fn, self)
            return loader
        if (array := _only(x)) is not None:
            self.check_input(array)
        if (labels := _only(y)) is not None:
            self.check_labels(labels)
        return x

    def check_batch(self, batch: Any, may_be_first: bool = True) -> None:
        """Check what a pipeline gives to Keras: inputs alone, or a tuple of inputs, labels
        and weights. The inputs of the first batch that may be the first are checked.
        """
        x, y, *_ = (*batch, None) if isinstance(batch, tuple | list) else (batch, None)
        if self._is_first and may_be_first:
            self._is_first = False
            if (array := _only(x)) is not None:
                self.check_input(array)
        if (labels := _only(y)) is not None:
            self.check_labels(labels)

    def check_input(self, array: Any) -> None:
        try:
            problem = self.expected.problem(as_numpy(array[:_EXAMPLES]))
        except (TypeError, ValueError):  # Keras says what it cannot take
            return
        if problem is not None:
            warnings.warn(problem, stacklevel=4)  # where `fit` is called

    def check_labels(self, labels: Any) -> None:
        """Check the labels of a cross-entropy.

        Raises:
            ValueError: for one-hot labels and class numbers in the place of the other, and
                values outside the range.
        """
        if self.outputs is None:
            return
        try:
            labels = as_numpy(labels)
        except (TypeError, ValueError):
            return
        if labels.dtype.kind in "iufb" and labels.size:
            self._refuse(_wrong_shape(self.outputs, labels.shape))
            self._refuse(_wrong_values(self.outputs, labels.min(), labels.max()))

    def check_shape(self, shape: Sequence[int | None]) -> None:
        """Check the shape of labels, as `check_labels` does."""
        if self.outputs is not None:
            self._refuse(_wrong_shape(self.outputs, tuple(shape)))

    def _refuse(self, problem: str | None) -> None:
        if problem is not None:
            self.problem = problem
            raise ValueError(problem)


def _wrong_shape(outputs: classifiers.Outputs, shape: tuple[int | None, ...]) -> str | None:
    count = outputs.count
    if outputs.looks_one_hot(shape):
        return (
            "This loss takes class numbers, one per example. Received: labels of shape "
            f"{shape}, which look one-hot. Use `labels.argmax(axis=1)`, or "
            "keras.losses.CategoricalCrossentropy"
        )
    # class numbers may be those of the tokens or pixels of an example
    if outputs.activation == "sigmoid" and shape[1:] not in outputs.label_shapes:
        return (
            f"This loss takes 0 or 1 for each of the {count} outputs: labels of shape "
            f"(examples, {count}). Received: labels of shape {shape}. For class numbers, "
            "use keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
        )
    return None


def _wrong_values(outputs: classifiers.Outputs, low, high) -> str | None:
    if low >= 0 and high <= outputs.highest_label:
        return None
    received = f"Received: labels from {low} to {high}"
    if outputs.activation == "sigmoid":
        return f"This loss takes labels from 0 to 1. {received}"
    if outputs.count == 1:
        return (
            "A network with one output is a binary classifier: use "
            f"keras.losses.BinaryCrossentropy(from_logits=True). {received}"
        )
    return (
        f"The network has {outputs.count} classes, so labels must be 0 to "
        f"{outputs.highest_label}. {received}"
    )


def _only(x: Any) -> Any:
    """Return the array in `x`, if it is the only one."""
    leaves = keras.tree.flatten(x)
    return leaves[0] if len(leaves) == 1 and hasattr(leaves[0], "shape") else None


def _watched_dataset(data: Any, checks: Checks) -> Any:
    import tensorflow as tf

    def parts(element) -> tuple:
        """Return the array of inputs and the array of labels; None for what is no array."""
        x, y, *_ = (*element, None) if isinstance(element, tuple) else (element, None)
        return tuple(
            array if isinstance(array, tf.Tensor | tf.TensorSpec) and is_number(array) else None
            for array in (_only(x), _only(y))
        )

    def is_number(array) -> bool:
        return array.dtype.is_floating or array.dtype.is_integer

    def checked(check: Callable, array) -> Callable:
        def call(array: np.ndarray) -> np.int64:
            check(array)
            return np.int64(0)

        return lambda: tf.numpy_function(call, [array], tf.int64)

    def nothing():
        return tf.constant(0, tf.int64)

    @tf.autograph.experimental.do_not_convert
    def look(i, *element):
        element = element if len(element) > 1 else element[0]
        x, labels = parts(element)
        if x is not None:
            tf.cond(i == 0, checked(checks.check_input, x[:_EXAMPLES]), nothing)
        if labels is not None and checks.outputs is not None:
            highest = tf.cast(checks.outputs.highest_label, labels.dtype)
            is_wrong = tf.reduce_any((labels < 0) | (labels > highest))
            tf.cond(is_wrong, checked(checks.check_labels, labels), nothing)
        return element

    x, labels = parts(data.element_spec)
    if labels is not None and labels.shape.rank is not None:
        checks.check_shape(labels.shape)
    return data if x is None and labels is None else data.enumerate().map(look)


def _watched_batches(batches: Iterator, checks: Checks) -> Iterator:
    for batch in batches:
        checks.check_batch(batch)
        yield batch


class _Collated:
    """A `collate_fn` of a torch DataLoader that checks its batches."""

    def __init__(self, collate: Callable, checks: Checks):
        self.collate, self.checks = collate, checks

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        self.checks.check_batch(batch)
        return batch


class _WatchedPyDataset(keras.utils.PyDataset):
    """A `PyDataset` that checks the batches of another one."""

    def __init__(self, data: keras.utils.PyDataset, checks: Checks):
        super().__init__(data.workers, data.use_multiprocessing, data.max_queue_size)
        self.data, self.checks = data, checks

    def __getitem__(self, index: int) -> Any:
        batch = self.data[index]
        self.checks.check_batch(batch, may_be_first=index == 0)  # several threads read at once
        return batch

    def __len__(self) -> int:
        return len(self.data)

    @property
    def num_batches(self) -> int | None:
        return self.data.num_batches

    def on_epoch_begin(self) -> None:
        self.data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.data.on_epoch_end()
