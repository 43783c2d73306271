"""What the outputs of a classifier mean: logits or probabilities, of one class among many
or of several classes at once. All other code asks here.
"""

import dataclasses
from typing import Any

import keras
import numpy as np

#: Name of an activation to its function on a NumPy array of logits in float64.
PROBABILITIES = {
    "softmax": lambda x: (
        (e := np.exp(x - x.max(axis=-1, keepdims=True))) / e.sum(axis=-1, keepdims=True)
    ),
    "sigmoid": lambda x: np.where(x >= 0, 1, np.exp(-np.abs(x))) / (1 + np.exp(-np.abs(x))),
}


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of a classifier.

    Args:
        count: Number of outputs.
        activation: Function from logits to probabilities. `"softmax"`: an example has
            one of `count` classes. `"sigmoid"`: with one output, the classifier is
            binary; with several, an example has any of the classes.
        are_logits: Whether the model returns logits.
    """

    count: int
    activation: str
    are_logits: bool

    @property
    def is_binary(self) -> bool:
        return self.activation == "sigmoid" and self.count == 1

    @property
    def labels(self) -> str:
        """The labels that fit, in words."""
        if self.activation == "softmax":
            return f"whole numbers, 0 to {self.count - 1}, one per example"
        if self.is_binary:
            return "0 or 1, one per example"
        return f"0 or 1 for each of the {self.count} outputs: an array (examples, {self.count})"

    @property
    def label_shapes(self) -> list[tuple[int, ...]]:
        """The shapes that the label of an example may have."""
        if self.is_binary:
            return [(1,), ()]
        return [()] if self.activation == "softmax" else [(self.count,)]

    @property
    def highest_label(self) -> int:
        return self.count - 1 if self.activation == "softmax" else 1

    def looks_one_hot(self, shape: tuple[int | None, ...]) -> bool:
        """Whether labels of this shape seem to be one-hot in place of class numbers."""
        return self.activation == "softmax" and shape[1:] == (self.count,) and self.count > 1

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        return PROBABILITIES[self.activation](np.asarray(logits, "float64"))

    def answers(self, outputs: np.ndarray) -> np.ndarray:
        """Return the answers to the outputs of the model: class numbers `(n,)`, or 0 and
        1 as the labels have them, `(n,)` for a binary classifier, else `(n, count)`. If it
        classifies pixels or tokens, their axes come after the first.
        """
        if self.activation == "softmax":
            return outputs.argmax(axis=-1)
        answers = (outputs > (0 if self.are_logits else 0.5)).astype(int)
        return answers[..., 0] if self.is_binary else answers

    def check_labels(
        self,
        labels: np.ndarray,
        argument: str = "labels",
        places: tuple[int | None, ...] = (),
    ) -> np.ndarray:
        """Return labels in the shape of `answers`.

        Args:
            labels: The labels of a batch.
            argument: Their name, for the error.
            places: Axes between those of the batch and of the outputs, if the model
                classifies each pixel or token; None for an axis of any size. The label of
                a place may have an axis of size 1 at the end, as masks often have.

        Raises:
            ValueError: for labels that do not fit.
        """
        ends = [*self.label_shapes, *([(1,)] if places and () in self.label_shapes else [])]
        inside = labels.shape[1 : 1 + len(places)]
        fits = len(inside) == len(places) and all(
            wanted in (None, size) for size, wanted in zip(inside, places, strict=True)
        )
        if labels.ndim == 0 or not fits or labels.shape[1 + len(places) :] not in ends:
            where = f", for each of the places {places} of its output" if places else ""
            hint = ""
            if self.looks_one_hot(labels.shape):
                hint = ", which looks one-hot; pass `labels.argmax(axis=1)`"
            raise ValueError(
                f"`{argument}` of this model must be {self.labels}{where}. Received: shape "
                f"{labels.shape}{hint}"
            )
        is_number = labels.dtype.kind in "iufb"
        if (
            not is_number
            or labels.min() < 0
            or labels.max() > self.highest_label
            or (labels % 1).any()
        ):
            values = f"{labels.min()} to {labels.max()}" if is_number else f"{labels.dtype}"
            raise ValueError(
                f"`{argument}` of this model must be {self.labels}. Received: labels from {values}"
            )
        has_axis = () in self.label_shapes and labels.ndim == 2 + len(places)
        return labels[..., 0] if has_axis else labels

    def loss(self) -> keras.losses.Loss:
        """Return the cross-entropy of the model's outputs and labels."""
        if self.activation == "softmax":
            return keras.losses.SparseCategoricalCrossentropy(from_logits=self.are_logits)
        return keras.losses.BinaryCrossentropy(from_logits=self.are_logits)


def outputs_of(
    model: keras.Model, operation: Any, count: int, are_averages: bool = True
) -> Outputs:
    """Return what the outputs of a model mean.

    Without an activation they are logits: of a binary classifier if there is one, of
    several classes at once if the model was compiled with a binary loss, else of one
    class among many.

    Args:
        model: The model.
        operation: The layer or operation that makes its output.
        count: Number of outputs.
        are_averages: Whether only averages are pooled after the operation.
    """
    activation = pooled(activation_of(operation), are_averages)
    if activation in PROBABILITIES:
        return Outputs(count, activation, are_logits=False)
    return Outputs(count, activation_of_logits(count, getattr(model, "loss", None)), True)


def activation_of_logits(count: int, loss: Any = None) -> str:
    """Return the activation that turns logits into probabilities.

    Args:
        count: Number of logits.
        loss: The loss of `compile`, if there is one.
    """
    return "sigmoid" if count == 1 or is_binary(loss) else "softmax"


def pooled(activation: str, are_averages: bool) -> str:
    """Return the name of an activation whose values are pooled: the maxima of a softmax are
    no probabilities of one class among many.
    """
    return "other" if activation == "softmax" and not are_averages else activation


def activation_of(operation: Any, rank: int | None = None) -> str:
    """Return the name of the activation that ends a layer or operation: `"softmax"`,
    `"sigmoid"`, `"linear"` for none, or `"other"`.

    Args:
        operation: The layer or operation.
        rank: Number of axes of what it returns. None: as in the model that it is part of.
    """
    if isinstance(operation, keras.layers.TimeDistributed):
        return activation_of(operation.layer, rank and rank - 1)
    is_layer = isinstance(operation, keras.layers.Softmax)
    # an operation, such as keras.ops.sigmoid(x)
    kind = "softmax" if is_layer else type(operation).__name__.lower()
    if kind in PROBABILITIES:
        last = (rank or _rank(operation)) - 1
        return kind if getattr(operation, "axis", -1) in (-1, last) else "other"
    function = getattr(operation, "activation", None)
    for name in ("softmax", "sigmoid", "linear"):
        if function is not None and function in (
            getattr(keras.activations, name),
            getattr(keras.ops, name, None),
        ):
            return name
    return "linear" if isinstance(operation, keras.layers.Dense) and function is None else "other"


def _rank(operation: Any) -> int:
    """Return the number of axes of what an operation returns; 2 if it is in no model."""
    try:
        return len(operation.output.shape)
    except (AttributeError, ValueError):
        return 2


def is_binary(loss: Any) -> bool:
    """Whether a loss of `compile` is for outputs that are each a class of their own."""
    loss = only_loss(loss)
    return loss is not None and _name_of(loss).startswith("binary")


def only_loss(loss: Any, count: int | None = None) -> Any:
    """Return the loss of `compile`, if it is the only one.

    Args:
        loss: What `compile` got.
        count: Number of outputs, which decides what `"crossentropy"` means.
    """
    if is_cross_entropy(loss):
        losses = keras.losses
        return losses.binary_crossentropy if count == 1 else losses.categorical_crossentropy
    leaves = keras.tree.flatten(loss)
    return keras.losses.get(leaves[0]) if len(leaves) == 1 else None


def is_cross_entropy(loss: Any) -> bool:
    """Whether a loss of `compile` is the word for a cross-entropy that the labels choose."""
    return [str(leaf).lower() for leaf in keras.tree.flatten(loss)] in (["crossentropy"], ["ce"])


def is_sparse(loss: Any) -> bool:
    """Whether a loss of `compile` takes class numbers, without one that it ignores."""
    loss = only_loss(loss)
    ignores = getattr(loss, "ignore_class", None) is not None
    return loss is not None and _name_of(loss) == "sparsecategoricalcrossentropy" and not ignores


def _name_of(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__).replace("_", "").lower()
