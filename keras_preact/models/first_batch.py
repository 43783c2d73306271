"""What a network looks at before it computes: the range of the first batch, the labels
and the loss.
"""

import inspect
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_preact.preprocessing import InputRange

#: Rows of an array, or examples of a data set, that are looked at.
_EXAMPLES = 64


def expected_input(model: keras.Model) -> InputRange:
    """Return what a model expects, from the `Normalization` and `Rescaling` layers that
    it starts with.

    Example:

    >>> import keras_preact as kp
    >>> kp.models.expected_input(kp.create_model("digits_resnet8_preact")).is_plain
    True
    """
    scale, offset = np.ones(()), np.zeros(())
    axis = -1
    for layer in model.layers:
        if isinstance(layer, keras.layers.Normalization):
            mean, variance = (
                keras.ops.convert_to_numpy(value).astype("float64")
                for value in (layer.mean, layer.variance)
            )
            if mean.size > 1:
                axis = int(np.argmax(mean.shape))
            std = np.sqrt(variance.reshape(-1))
            scale, offset = scale / std, (offset - mean.reshape(-1)) / std
        elif isinstance(layer, keras.layers.Rescaling):
            scale = scale * np.asarray(layer.scale, "float64")
            offset = offset * layer.scale + np.asarray(layer.offset, "float64")
        elif not isinstance(layer, keras.layers.InputLayer):
            break
    return InputRange(-offset / scale, 1 / scale, axis)


def watched(x: Any, expected: InputRange) -> Any:
    """Warn if the first batch of the data of `fit`, `evaluate` or `predict` has another
    range than `expected`.

    Args:
        x: Whatever these take. An array is looked at now, and a `PyDataset` or
            `DataLoader` through some of its examples. A `tf.data.Dataset` or generator
            is looked at while Keras reads it: it gives the same elements as before.

    Returns:
        The data to give to Keras in its place.
    """

    def judge(batch) -> None:
        problem = expected.problem(batch)
        if problem is not None:
            warnings.warn(problem, stacklevel=5)

    tf, torch = sys.modules.get("tensorflow"), sys.modules.get("torch")
    if tf is not None and isinstance(x, tf.data.Dataset):
        return _watched_dataset(x, judge)
    if isinstance(x, types.GeneratorType):
        return _watched_generator(x, judge)
    if isinstance(x, keras.utils.PyDataset):
        x_first = _inputs(x[0])
    elif torch is not None and isinstance(x, torch.utils.data.DataLoader):
        x_first = _of_loader(x)
    else:
        x_first = _only(x)
    if x_first is not None:
        judge(_rows(x_first))
    return x


def _only(x: Any) -> Any:
    """Return the array in `x`, if it is the only one."""
    leaves = keras.tree.flatten(x)
    return leaves[0] if len(leaves) == 1 and hasattr(leaves[0], "shape") else None


def _inputs(element: Any) -> Any:
    """Return the inputs in an element of a data set, if they are one array."""
    return _only(element[0] if isinstance(element, tuple) else element)


def _rows(x: Any) -> np.ndarray:
    x = x[:_EXAMPLES]
    return keras.ops.convert_to_numpy(x) if keras.ops.is_tensor(x) else np.asarray(x)


def _of_loader(loader: Any) -> Any:
    """Return some inputs of a torch `DataLoader` without reading from it, which would
    change the order of its batches.
    """
    if not hasattr(loader.dataset, "__getitem__") or not len(loader.dataset):
        return None
    examples = range(min(len(loader.dataset), loader.batch_size or 1, _EXAMPLES))
    first = [_inputs(tuple(loader.dataset[i])) for i in examples]
    return None if any(x is None for x in first) else np.stack([np.asarray(x) for x in first])


def _watched_dataset(data: Any, judge) -> Any:
    import tensorflow as tf

    spec = _inputs(data.element_spec)
    if not isinstance(spec, tf.TensorSpec) or not (spec.dtype.is_floating or spec.dtype.is_integer):
        return data

    def judged(x: np.ndarray) -> np.int64:
        judge(x)
        return np.int64(0)

    def look(i, *element):
        x = _inputs(element if len(element) > 1 else element[0])
        tf.cond(
            i == 0,
            lambda: tf.numpy_function(judged, [x[:_EXAMPLES]], tf.int64),
            lambda: tf.constant(0, tf.int64),
        )
        return element if len(element) > 1 else element[0]

    return data.enumerate().map(look)


def _watched_generator(data: Iterator, judge) -> Iterator:
    for i, element in enumerate(data):
        if i == 0 and (x := _inputs(element)) is not None:
            judge(_rows(x))
        yield element


def loss_mismatch(loss: Any, activation: str | None) -> str | None:
    """Return what is wrong if `loss` takes probabilities and the network returns logits,
    or the other way round; None if they fit.

    Args:
        loss: A loss as `compile` takes it.
        activation: Name of the classifier's activation, None for none.
    """
    leaves = keras.tree.flatten(loss)
    loss = keras.losses.get(leaves[0]) if len(leaves) == 1 else None
    if not callable(loss):
        return None
    from_logits = getattr(loss, "from_logits", None)
    if from_logits is None and not isinstance(loss, keras.losses.Loss):
        parameter = inspect.signature(loss).parameters.get("from_logits")
        from_logits = None if parameter is None else parameter.default
    if not isinstance(from_logits, bool):
        return None
    name = getattr(loss, "__name__", type(loss).__name__)
    kind = "".join(word.capitalize() for word in name.split("_")) if "_" in name else name
    if not from_logits and activation in (None, "linear"):
        return (
            "The network returns logits, and the loss expects probabilities: it would learn "
            f"little. Use loss=keras.losses.{kind}(from_logits=True), or build the network with "
            f"classifier_activation='softmax'. Received: loss={name}, classifier_activation=None"
        )
    if from_logits and activation in ("softmax", "sigmoid"):
        return (
            "The network returns probabilities, and the loss expects logits: it would learn "
            f"little. Use loss=keras.losses.{kind}(from_logits=False), or build the network with "
            f"classifier_activation=None. Received: loss={name}, "
            f"classifier_activation={activation!r}"
        )
    return None


def check_labels(labels: Any, loss: Any, classes: int) -> None:
    """Refuse labels of a sparse cross-entropy that no class has.

    Raises:
        ValueError: for one-hot labels, or class numbers outside 0 to `classes - 1`.
    """
    leaves = keras.tree.flatten(loss)
    loss = keras.losses.get(leaves[0]) if len(leaves) == 1 else None
    name = getattr(loss, "__name__", type(loss).__name__).replace("_", "").lower()
    if name != "sparsecategoricalcrossentropy" or getattr(loss, "ignore_class", None) is not None:
        return
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iuf" or not labels.size:
        return
    if labels.ndim == 2 and labels.shape[1] == classes > 1:
        raise ValueError(
            "This loss takes class numbers, one per example. Received: labels of shape "
            f"{labels.shape}, which look one-hot. Use `labels.argmax(axis=1)`, or "
            "keras.losses.CategoricalCrossentropy"
        )
    low, high = labels.min(), labels.max()
    if low < 0 or high >= classes:
        raise ValueError(
            f"The network has {classes} classes, so labels must be 0 to {classes - 1}. Received: "
            f"labels from {low} to {high}"
        )
