"""Check the arguments of the analyses: a batch of inputs, labels, and a loss."""

import math
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_preact.backend import autodiff
from keras_preact.backend.arrays import as_numpy
from keras_preact.graph import Graph, Step
from keras_preact.models import first_batch
from keras_preact.models.base import UnitNetwork

#: Largest exponent of a loss scale: the scaled loss must be finite in float32.
_LARGEST_SCALE = 100


def check_sample(model: keras.Layer, sample, argument: str = "x") -> list[np.ndarray]:
    """Return the sample as arrays in the dtypes of the model's inputs, one per input.

    Raises:
        ValueError: if it is empty, has values that are not finite numbers, or does not
            fit the model.
    """
    parts = sample if isinstance(sample, list | tuple) else [sample]
    arrays = [as_numpy(part) for part in parts]
    inputs = getattr(model, "inputs", None) or [None] * len(arrays)
    if len(inputs) != len(arrays):
        raise ValueError(
            f"The model has {len(inputs)} inputs. Received: {len(arrays)} arrays as `{argument}`"
        )
    return [_check(array, symbol, argument) for array, symbol in zip(arrays, inputs, strict=True)]


def _check(array: np.ndarray, symbol, argument: str) -> np.ndarray:
    if array.dtype.kind not in "fiub":
        raise ValueError(f"`{argument}` must hold numbers. Received: dtype={array.dtype}")
    if array.ndim < 2 or not array.size:
        raise ValueError(
            f"`{argument}` must be a batch of at least one example. Received: an array of shape "
            f"{array.shape}"
        )
    if not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).sum())
        raise ValueError(
            f"`{argument}` must be finite. Received: {bad} of {array.size} values are infinite or "
            "not a number"
        )
    if symbol is None:
        return array.astype("float32") if array.dtype.kind == "f" else array
    shape = tuple(symbol.shape)
    if len(shape) != array.ndim or any(
        b not in (a, None) for a, b in zip(array.shape[1:], shape[1:], strict=True)
    ):
        raise ValueError(f"The model takes `{argument}` of shape {shape}. Received: {array.shape}")
    return array.astype(symbol.dtype) if symbol.dtype != "bfloat16" else array.astype("float32")


def watch(model: keras.Model, x) -> None:
    """Warn, as `fit` does, if `x` does not have the range that a network of this package
    expects. The warning names the caller of the function that calls this one.
    """
    if isinstance(model, UnitNetwork):
        first_batch.watched(x, first_batch.expected_input(model))


def check_labels(labels, examples: int):
    """Return labels as an array, one per example, or None if there are none."""
    if labels is None:
        return None
    labels = as_numpy(labels)
    labels = labels.astype("float32") if labels.dtype.kind == "f" else labels
    if len(labels) != examples:
        raise ValueError(
            f"There must be a label for each example. Received: {len(labels)} labels for "
            f"{examples} examples"
        )
    return labels


def check_classes(labels: np.ndarray, graph: Graph) -> None:
    """Refuse labels that are not class numbers of the model's output."""
    output = graph.specs[graph.outputs[0]].shape
    classes = output[-1]
    if labels.ndim == len(output) == 2 and labels.shape[1] == classes > 1:
        raise ValueError(
            f"`labels` must be class numbers, one per example. Received: shape {labels.shape}, "
            "which looks one-hot; pass `labels.argmax(axis=1)`"
        )
    if labels.min() < 0 or labels.max() >= classes or (labels % 1).any():
        raise ValueError(
            f"The model has {classes} outputs, so labels must be whole numbers, 0 to "
            f"{classes - 1}. Received: labels from {labels.min()} to {labels.max()}"
        )


def loss_of(graph: Graph, labels, loss: Callable | None) -> Callable:
    """Return the function from a list of the model's outputs to the scalar E.

    With `loss`, a function of labels and output, E is its mean. With labels alone, E is
    their sparse categorical cross-entropy, from logits or probabilities. Without both,
    E is half the squared norm of all outputs, averaged over the batch.
    """
    if loss is not None:
        targets = None if labels is None else ops.convert_to_tensor(labels)
        return lambda outputs: ops.mean(loss(targets, outputs[0] if len(outputs) == 1 else outputs))
    if labels is None:
        return lambda outputs: sum(
            ops.sum(ops.square(ops.cast(y, "float32"))) / (2 * y.shape[0]) for y in outputs
        )
    if len(graph.outputs) > 1:
        raise ValueError(
            "Labels of a model with several outputs need a `loss`. Received: "
            f"{len(graph.outputs)} outputs"
        )
    check_classes(labels, graph)
    producer = graph.producers.get(graph.outputs[0])
    logits = producer is None or not is_softmax(graph.steps[producer])
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=logits)
    return lambda outputs: entropy(labels, ops.cast(outputs[0], "float32"))


def loss_scale(model: keras.Layer, inputs, loss: Callable, training: bool) -> float:
    """Return the factor for a loss with which its largest derivative on an output is
    about 1, if layers compute in float16; else 1.

    The small gradients of a network that is sure of its answers would be 0 in float16.
    Training scales its loss for the same reason.

    Args:
        model: The model.
        inputs: A batch as the model takes it.
        loss: The function from a list of the model's outputs to the loss.
        training: Whether the model is called in training mode.
    """
    if not any(layer.compute_dtype == "float16" for layer in model._flatten_layers()):
        return 1.0
    with keras.StatelessScope(), autodiff.without_gradients():
        outputs = [
            ops.cast(output, "float32")
            for output in keras.tree.flatten(model(inputs, training=training))
        ]
    _, _, derivatives, _ = autodiff.value_and_gradients(lambda *y: (loss(list(y)), []), outputs)
    largest = max(float(np.abs(ops.convert_to_numpy(each)).max()) for each in derivatives)
    if not 0 < largest < math.inf:
        return 1.0
    return 2.0 ** min(round(-math.log2(largest)), _LARGEST_SCALE)


def is_softmax(step: Step) -> bool:
    """Whether the operation is a softmax, or a layer that ends in one."""
    activation = getattr(step.operation, "activation", None)
    return step.kind == "Softmax" or activation is keras.activations.softmax


def before_softmax(step: Step) -> Callable | None:
    """Return the function from the input of a softmax, or of a dense layer that ends in
    one, to the logits; None for any other step.
    """
    layer = step.operation
    if not is_softmax(step):
        return None
    if isinstance(layer, keras.layers.Dense):
        return lambda x: ops.matmul(x, layer.kernel) + (layer.bias if layer.use_bias else 0)
    return None if step.has_kernel else lambda x: x
