"""Check the arguments of the analyses: a batch of inputs, labels, and a loss."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact._samples import as_taken
from keras_preact.backend import autodiff, keras_private
from keras_preact.backend.arrays import as_numpy
from keras_preact.classifiers import PROBABILITIES, Outputs, activation_of, outputs_of
from keras_preact.graph import Graph
from keras_preact.models.base import UnitNetwork
from keras_preact.models.input_range import expected_input
from keras_preact.paths import Step

#: Largest exponent of a loss scale: the scaled loss must be finite in float32.
_LARGEST_SCALE = 100


def check_sample(model: keras.Layer, sample, argument: str = "x"):
    """Return the sample as the model takes it, see `as_taken`, as arrays in the dtypes of the
    model's inputs.

    Raises:
        ValueError: if it is empty, has values that are not finite numbers, or does not
            fit the model.
    """
    batch = as_taken(model, sample, argument)
    parts = keras.tree.flatten(batch)
    inputs = getattr(model, "inputs", None) or [None] * len(parts)
    arrays = [
        _check(as_numpy(part), symbol, argument) for part, symbol in zip(parts, inputs, strict=True)
    ]
    return keras.tree.pack_sequence_as(batch, arrays)


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
        [array] = keras.tree.flatten(as_taken(model, x))
        problem = expected_input(model).problem(as_numpy(array))
        if problem is not None:
            warnings.warn(problem, stacklevel=3)


def check_labels(labels, examples: int):
    """Return labels as an array, one per example, or None if there are none."""
    if labels is None:
        return None
    labels = as_numpy(labels)
    labels = labels.astype("float32") if labels.dtype.kind == "f" else labels
    if not labels.ndim or len(labels) != examples:
        received = f"{len(labels)} labels" if labels.ndim else f"the single label {labels}"
        raise ValueError(
            f"There must be a label for each example. Received: {received} for {examples} examples"
        )
    return labels


def classifier(graph: Graph) -> Outputs:
    """Return what the outputs of a model mean, if it is a classifier."""
    output = graph.outputs[0]
    tensor, are_averages = graph.pooled(output)
    producer = graph.producers.get(tensor)
    operation = None if producer is None else graph.steps[producer].operation
    return outputs_of(graph.model, operation, graph.specs[output].shape[-1], are_averages)


def logit_calls(graph: Graph, analysis: str) -> dict[int, Callable]:
    """Return what replaces steps of a classifier's graph so that it returns logits, for
    `Graph.walk`.

    Raises:
        ValueError: for a model that has not one output `(batch, classes)`; it names the
            analysis.
    """
    outputs = [graph.specs[output].shape for output in graph.outputs]
    if len(outputs) > 1 or len(outputs[0]) != 2:
        raise ValueError(
            f"{analysis} needs a model with one output of shape (batch, classes). Received: "
            f"outputs of shape {outputs}"
        )
    last = graph.producers[graph.origin(graph.outputs[0])]
    call = before_activation(graph.steps[last])
    return {last: call} if call else {}


def class_weights(graph: Graph, logits: np.ndarray, classes) -> tuple[np.ndarray, np.ndarray]:
    """Return a class for each example, and factors on its outputs, `(examples, outputs)`,
    whose sum is the logit of that class.

    Args:
        graph: The graph of a classifier.
        logits: Its logits.
        classes: Class numbers, 0 or 1 for a binary classifier. None: the predicted ones;
            of several classes at once the most probable.

    Raises:
        ValueError: for classes that the model does not have.
    """
    model = classifier(graph)
    answers = Outputs(model.count, "sigmoid" if model.is_binary else "softmax", are_logits=True)
    classes = check_labels(classes, len(logits))
    classes = answers.answers(logits) if classes is None else classes
    chosen = answers.check_labels(classes, "classes").astype(int)
    # the logit of class 0 of a binary classifier is minus that of class 1
    return chosen, 2.0 * chosen[:, None] - 1 if model.is_binary else np.eye(model.count)[chosen]


def check_classes(labels: np.ndarray, graph: Graph, outputs: Outputs) -> np.ndarray:
    """Return labels in the form of the model's answers, see `Outputs.answers`.

    Args:
        labels: From `check_labels`.
        graph: The graph of the model.
        outputs: Its `classifier`.

    Raises:
        ValueError: for labels that the model's output cannot have.
    """
    # a model may have an output for each token or pixel
    return outputs.check_labels(labels, places=tuple(graph.specs[graph.outputs[0]].shape[1:-1]))


def loss_of(graph: Graph, labels, loss: Callable | None) -> Callable:
    """Return the function from a list of the model's outputs to the scalar E.

    With `loss`, a function of labels and output, E is its mean. With labels alone, E is
    the cross-entropy of the classifier, from logits or probabilities: sparse
    categorical, or binary for one output and for several classes at once. Without both,
    E is half the squared norm of all outputs, averaged over the batch.
    """
    if loss is not None:
        if not callable(loss):  # a name does not say whether the model returns logits
            raise ValueError(
                "`loss` must be a function of labels and output, such as "
                f"keras.losses.MeanSquaredError(). Received: loss={loss!r}"
            )
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
    model = classifier(graph)
    answers = check_classes(labels, graph, model)
    targets = answers[..., None] if model.is_binary else answers
    entropy = model.loss()
    return lambda outputs: entropy(targets, ops.cast(outputs[0], "float32"))


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
    if not any(layer.compute_dtype == "float16" for layer in keras_private.layers(model)):
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


def before_activation(step: Step) -> Callable | None:
    """Return the function from the input of a softmax or sigmoid, or of a dense layer that
    ends in one, to the logits; None for any other step.
    """
    layer = step.operation
    if activation_of(layer) not in PROBABILITIES:
        return None
    if isinstance(layer, keras.layers.Dense):
        return lambda x: ops.matmul(x, layer.kernel) + (layer.bias if layer.use_bias else 0)
    return None if step.has_kernel else lambda x: x


def examples(batch, chosen: slice | np.ndarray = slice(None)) -> Any:
    """Return some examples of a batch in any structure."""
    return keras.tree.map_structure(lambda array: array[chosen], batch)


def size(batch) -> int:
    """Return the number of examples in a batch in any structure."""
    return len(keras.tree.flatten(batch)[0])


def scaled_loss(
    model: keras.Layer, inputs, loss: Callable, training: bool
) -> tuple[Callable, float]:
    """Return the function without arguments that computes the loss of a batch times the
    scale of `loss_scale`, and the scale. The arguments are those of `loss_scale`.
    """
    scale = loss_scale(model, inputs, loss, training)
    return lambda: scale * loss(keras.tree.flatten(model(inputs, training=training))), scale


def checked_loss(
    model: keras.Layer, x, labels, loss: Callable | None, training: bool
) -> tuple[Callable, float]:
    """Return what `scaled_loss` does, for arguments of a user.

    Raises:
        ValueError: for a batch, labels or a loss that do not fit the model.
    """
    batch = check_sample(model, x)
    total = loss_of(Graph(model, batch), check_labels(labels, size(batch)), loss)
    return scaled_loss(model, batch, total, training)
