"""What the analyses take: a batch of inputs, perhaps with labels, and the loss whose gradients are looked at."""

from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_preact.analysis.graph import Graph, Step


def check_sample(sample, argument: str = "x"):
    """Return the sample as a float or integer NumPy array, or a list of them for a model with several inputs.

    Raises:
        ValueError: where it is empty, has no batch axis, holds no numbers, or numbers that are not finite.
    """
    if isinstance(sample, list | tuple):
        return [check_sample(part, argument) for part in sample]
    array = np.asarray(ops.convert_to_numpy(sample) if keras.ops.is_tensor(sample) else sample)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"`{argument}` must hold numbers. Received: dtype={array.dtype}")
    if array.ndim < 2 or not array.size:
        raise ValueError(f"`{argument}` must be a batch of at least one example. Received: shape={array.shape}")
    if not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).sum())
        raise ValueError(f"`{argument}` must be finite. Received: {bad} of {array.size} values are infinite or not a number")
    return array.astype("float32") if array.dtype.kind in "fb" else array


def check_labels(labels, examples: int):
    """Return labels as an array, one for each example; None stays."""
    if labels is None:
        return None
    labels = np.asarray(labels)
    labels = labels.astype("float32") if labels.dtype.kind == "f" else labels
    if len(labels) != examples:
        raise ValueError(f"There must be a label for each example. Received: {len(labels)} labels for {examples} examples")
    return labels


def loss_of(graph: Graph, labels, loss: Callable | None) -> Callable:
    """Return the function from a model's output to the scalar E.

    With `loss`, a function of labels and output, that; else with labels the sparse categorical cross-entropy, of logits or
    of probabilities as the model returns them; else the mean over the batch of half the squared norm of the output.
    """
    if loss is not None:
        wanted = None if labels is None else ops.convert_to_tensor(labels)
        return lambda output: ops.mean(loss(wanted, output))
    if len(graph.outputs) > 1:
        raise ValueError(f"A model with several outputs needs a `loss`. Received: {len(graph.outputs)} outputs and loss=None")
    if labels is None:
        return lambda output: ops.sum(ops.square(ops.cast(output, "float32"))) / (2 * output.shape[0])
    producer = graph.producers.get(graph.outputs[0])
    logits = producer is None or not _is_softmax(graph.steps[producer])
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=logits)
    return lambda output: entropy(labels, ops.cast(output, "float32"))


def _is_softmax(step: Step) -> bool:
    activation = getattr(step.operation, "activation", None)
    return step.kind == "Softmax" or activation is keras.activations.softmax
