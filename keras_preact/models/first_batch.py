"""Checks before a network computes: the range of the first batch, the labels and the
loss.
"""

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_preact.backend.arrays import as_numpy
from keras_preact.preprocessing import InputRange

#: Number of examples to check.
_EXAMPLES = 64


def expected_input(model: keras.Model) -> InputRange:
    """Return the range of inputs that a model expects, from the `Normalization` and
    `Rescaling` layers that it starts with.

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
    """Warn if an array, or the first batch of a `tf.data.Dataset`, has another range than
    `expected`. Other data is not checked.

    A data set is checked while Keras reads it. Reading its first batch here would fill a
    shuffle buffer twice, and change the order that a seed gives.

    Returns:
        The data to give to Keras instead of x.
    """

    def judge(batch) -> None:
        problem = expected.problem(batch)
        if problem is not None:
            warnings.warn(problem, stacklevel=5)

    tf = sys.modules.get("tensorflow")
    if tf is not None and isinstance(x, tf.data.Dataset):
        return _watched_dataset(x, judge)
    if (array := _only(x)) is not None:
        judge(as_numpy(array[:_EXAMPLES]))
    return x


def _only(x: Any) -> Any:
    """Return the array in `x`, if it is the only one."""
    leaves = keras.tree.flatten(x)
    return leaves[0] if len(leaves) == 1 and hasattr(leaves[0], "shape") else None


def _watched_dataset(data: Any, judge: Callable[[np.ndarray], None]) -> Any:
    import tensorflow as tf

    def inputs(element):
        return _only(element[0] if isinstance(element, tuple) else element)

    def judged(x: np.ndarray) -> np.int64:
        judge(x)
        return np.int64(0)

    def look(i, *element):
        element = element if len(element) > 1 else element[0]
        tf.cond(
            i == 0,
            lambda: tf.numpy_function(judged, [inputs(element)[:_EXAMPLES]], tf.int64),
            lambda: tf.constant(0, tf.int64),
        )
        return element

    spec = inputs(data.element_spec)
    if not isinstance(spec, tf.TensorSpec) or not (spec.dtype.is_floating or spec.dtype.is_integer):
        return data
    return data.enumerate().map(look)


def loss_mismatch(loss: Any, activation: str | None) -> str | None:
    """Return a message if `loss` takes probabilities and the network returns logits, or
    the other way round; None if they fit.

    Args:
        loss: A loss in any form that `compile` takes.
        activation: Name of the classifier's activation, None for none.
    """
    loss = _only_loss(loss)
    if not callable(loss):
        return None
    from_logits = getattr(loss, "from_logits", None)
    if from_logits is None and not isinstance(loss, keras.losses.Loss):
        parameter = inspect.signature(loss).parameters.get("from_logits")
        from_logits = None if parameter is None else parameter.default
    if not isinstance(from_logits, bool):
        return None
    name = getattr(loss, "__name__", type(loss).__name__)
    class_name = "".join(word.capitalize() for word in name.split("_")) if "_" in name else name
    if not from_logits and activation in (None, "linear"):
        returned, expected, fitting = "logits", "probabilities", "softmax"
    elif from_logits and activation in ("softmax", "sigmoid"):
        returned, expected, fitting = "probabilities", "logits", None
    else:
        return None
    return (
        f"The network returns {returned}, and the loss expects {expected}: it would learn little. "
        f"Use loss=keras.losses.{class_name}(from_logits={not from_logits}), or build the network "
        f"with classifier_activation={fitting!r}. Received: loss={name}, "
        f"classifier_activation={activation!r}"
    )


def _only_loss(loss: Any) -> Any:
    """Return the loss of `compile`, if it is the only one."""
    leaves = keras.tree.flatten(loss)
    return keras.losses.get(leaves[0]) if len(leaves) == 1 else None


def check_labels(labels: Any, loss: Any, classes: int) -> None:
    """Check that the labels of a sparse cross-entropy are class numbers.

    Raises:
        ValueError: for one-hot labels, or class numbers outside 0 to `classes - 1`.
    """
    loss = _only_loss(loss)
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
