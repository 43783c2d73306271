"""Whether the loss and the metrics of `compile` fit what a model returns: logits or
probabilities, of one class among many or of several classes at once.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import KerasTensor

from keras_preact.backend import keras_private
from keras_preact.classifiers import (
    PROBABILITIES,
    activation_of,
    is_binary,
    is_cross_entropy,
    only_loss,
    pooled,
)
from keras_preact.graph import Graph

#: Metrics that compare each output with a threshold, to the name of that option.
_THRESHOLDS = {
    "BinaryAccuracy": "threshold",
    "BinaryIoU": "threshold",
    "Precision": "thresholds",
    "Recall": "thresholds",
}


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of a model.

    Args:
        name: Name of the layer or operation that computes it.
        activation: The activation at its end, see `classifiers.activation_of`.
        count: Size of its last axis.
    """

    name: str
    activation: str
    count: int | None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is wrong with a loss or a metric.

    Args:
        of: `"loss"` or `"metrics"`.
        output: Name of the output.
        text: What is wrong, and what to do.
    """

    of: str
    output: str
    text: str


def problems(model: keras.Model, sample: Any = None) -> list[Problem] | None:
    """Return the losses and metrics of a model that take logits where it returns
    probabilities, or the other way round. None if it is not compiled, or cannot be traced.

    An output is judged if its last layer or operation says what it is: a dense layer or
    convolution without an activation, a softmax or a sigmoid.

    Args:
        model: Any built Keras model.
        sample: Inputs of the model. A functional or sequential model needs none.
    """
    inputs = getattr(model, "inputs", None) or sample
    if not model.compiled or inputs is None:
        return None
    try:
        outputs = outputs_of(model, inputs)
    except ValueError:  # it cannot be traced
        return None
    parts = [
        _of_each(part, len(outputs), getattr(model, "output_names", None))
        for part in (model.loss, *keras_private.metrics_of(model))
    ]
    found = []
    for output, loss, *metrics in zip(outputs, *parts, strict=True):
        end = output.activation, output.count
        wrong = loss_problem(loss, *end)
        texts = [wrong] if wrong else metric_problems(metrics, loss, *end)
        of = "loss" if wrong else "metrics"
        which = f"Output {output.name!r}: " if len(outputs) > 1 else ""
        found += [Problem(of, output.name, f"{which}{text}") for text in texts]
    return found


def outputs_of(model: keras.Layer, inputs: Any) -> list[Output]:
    """Return how each output of a model or layer ends.

    Args:
        model: Any Keras model or layer that can be called with Keras tensors.
        inputs: Its inputs, an array or a structure; only shapes and dtypes matter.

    Raises:
        ValueError: for a model that cannot be traced.
    """
    graph = Graph(model, inputs, opaque=(keras.Layer,))  # fast: layers stay whole
    return [_output(graph, tensor) for tensor in graph.outputs]


def _output(graph: Graph, tensor: int) -> Output:
    shape = graph.specs[tensor].shape
    count = shape[-1] if shape else None
    origin, are_averages = graph.pooled(tensor)
    i = graph.producers.get(origin)
    if i is None:
        return Output("the input", "other", count)
    step = graph.steps[i]
    layer, inputs = step.operation, [graph.specs[number] for number in step.inputs]
    activation = activation_of(layer, len(graph.specs[origin].shape))
    if isinstance(layer, keras.layers.TimeDistributed):
        layer = layer.layer
        inputs = [KerasTensor((x.shape[0], *x.shape[2:]), x.dtype) for x in inputs]
    if activation == "other" and inputs and isinstance(layer, keras.Layer):
        with contextlib.suppress(ValueError):  # it cannot be traced
            inside = outputs_of(layer, inputs if len(inputs) > 1 else inputs[0])
            activation = inside[step.outputs.index(origin)].activation
    return Output(step.name, pooled(activation, are_averages), count)


def _of_each(structure: Any, count: int, names: Sequence[str] | None) -> list:
    """Return the part of an argument of `compile` that each output has; None for none."""
    if isinstance(structure, Mapping):
        # without names, the outputs are a dictionary, which Keras sorts
        keys = names if names and structure.keys() <= set(names) else sorted(structure)
        structure = [structure.get(key) for key in keys]
    elif not isinstance(structure, list | tuple):
        structure = [structure] * count
    elif count == 1 and len(structure) != 1:
        structure = [structure]
    return list(structure) if len(structure) == count else [None] * count


def loss_problem(
    loss: Any, activation: str | None, count: int | None, option: str = ""
) -> str | None:
    """Return a message if a loss takes probabilities and the network returns logits, or the
    other way round; None if they fit.

    Args:
        loss: A loss of one output, in any form that `compile` takes.
        activation: The activation at the end of the network, as its config has it; None and
            `"linear"` for none.
        count: Number of outputs.
        option: The option of the network's builder that has the activation, if there is one.
    """
    depends_on_labels = is_cross_entropy(loss) and count != 1
    loss = only_loss(loss, count)
    if loss is None:
        return None
    received = f"{option or 'activation'}={activation!r}"
    if activation == "softmax" and count == 1:
        return (
            "The softmax of one output is always 1: the network cannot learn. For a binary "
            f"classifier, {_ended('sigmoid', option)}, or {_ended(None, option)} and use the loss "
            f"keras.losses.BinaryCrossentropy(from_logits=True). Received: {received} with one "
            "output"
        )
    takes = takes_logits(loss)
    if takes is False and activation in (None, "linear"):
        returned, expected = "logits", "probabilities"
        fitting = "sigmoid" if is_binary(loss) else "softmax"
    elif takes and activation in tuple(PROBABILITIES):
        returned, expected, fitting = "probabilities", "logits", None
    else:
        return None
    name = getattr(loss, "__name__", type(loss).__name__)
    class_name = "".join(word.capitalize() for word in name.split("_")) if "_" in name else name
    uses = f"keras.losses.{class_name}(from_logits={not takes})"
    if depends_on_labels:
        uses = (
            f"keras.losses.SparseCategoricalCrossentropy(from_logits={not takes}) for class "
            f"numbers, {uses} for one-hot labels"
        )
    return (
        f"The network returns {returned}, and the loss expects {expected}: it would learn little. "
        f"Use loss={uses}, or {_ended(fitting, option)}. Received: loss={name}, {received}"
    )


def _ended(activation: str | None, option: str) -> str:
    """Return how to give a network an activation at its end."""
    if option:
        return f"build the network with {option}={activation!r}"
    return (
        f"end the network in a {activation}" if activation else "remove the activation at its end"
    )


def takes_logits(loss: Any) -> bool | None:
    """Return whether a loss takes logits; None for one that does not say."""
    found = getattr(loss, "from_logits", None)
    if found is None and callable(loss) and not isinstance(loss, keras.losses.Loss):
        with contextlib.suppress(ValueError):  # a function of C has no signature
            parameter = inspect.signature(loss).parameters.get("from_logits")
            found = None if parameter is None else parameter.default
    return found if isinstance(found, bool) else None


def metric_problems(
    metrics: Any, loss: Any, activation: str | None, count: int | None
) -> list[str]:
    """Return a message for each metric that takes probabilities and gets logits, for each
    threshold that every probability passes, and for an accuracy that means another thing
    than the loss.

    Args:
        metrics: Metrics of one output, in any form that `compile` takes.
        loss: The loss of the output, which it fits.
        activation: Name of the activation at the end of the network; None and `"linear"`
            for none.
        count: Number of outputs.
    """
    loss = only_loss(loss, count)
    are_logits = activation in (None, "linear") and takes_logits(loss) is True
    if not are_logits and activation not in tuple(PROBABILITIES):
        return []
    found = []
    for metric in keras.tree.flatten(metrics):
        name, options = _name_and_options(metric, is_binary(loss) and count == 1)
        text = None
        if name in ("accuracy", "acc") and is_binary(loss):
            text = (
                f"The metric {metric!r} compares only the largest of the {count} outputs with the "
                "largest label, and the loss takes each output as a class of its own. Use "
                f"keras.metrics.BinaryAccuracy(threshold={0 if are_logits else 0.5})"
            )
        elif are_logits and options.get("from_logits") is False:
            text = (
                f"The network returns logits, and the metric {name} expects probabilities. Use "
                f"keras.metrics.{name}(from_logits=True)"
            )
        elif name in _THRESHOLDS and options.get("top_k") is None:
            option = _THRESHOLDS[name]
            limits = keras.tree.flatten(options.get(option, 0.5))
            if are_logits and 0.5 in limits:
                text = (
                    f"The network returns logits, and the metric {name} compares them with 0.5: it "
                    "counts only probabilities above 0.62. Use "
                    f"keras.metrics.{name}({option}=0)"
                )
            elif not are_logits and any(limit <= 0 for limit in limits):
                text = (
                    f"The network returns probabilities, and the metric {name} compares them with "
                    f"0: it counts all of them. Use keras.metrics.{name}({option}=0.5)"
                )
        found += [] if text is None else [text]
    return found


def _name_and_options(metric: Any, is_binary: bool) -> tuple[str, dict]:
    """Return the class of a metric of `compile` and the options that it was made with.

    Args:
        metric: The metric.
        is_binary: Whether Keras reads `"accuracy"` as `BinaryAccuracy`.
    """
    if is_binary and str(metric).lower() in ("accuracy", "acc"):
        metric = keras.metrics.BinaryAccuracy()
    elif isinstance(metric, str) and metric.lower() not in ("accuracy", "acc"):
        metric = keras.metrics.get(metric)
    if isinstance(metric, keras.metrics.Metric):
        options = {key: value for key, value in metric.get_config().items() if value is not None}
        return type(metric).__name__, options
    if metric is keras.metrics.binary_accuracy:
        return "BinaryAccuracy", {}
    return str(getattr(metric, "__name__", metric)), {}
