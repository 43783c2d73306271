"""Calibrated probabilities by temperature scaling (Guo et al. 2017, arXiv 1706.04599)."""

import keras
import numpy as np

from keras_preact import _checks
from keras_preact.classifiers import PROBABILITIES, Outputs
from keras_preact.models.base import UnitNetwork, check_network
from keras_preact.models.copies import changed_copy


def fit_temperature(logits: np.ndarray, labels: np.ndarray, activation: str | None = None) -> float:
    """Return the temperature T for which the probabilities of `logits / T` have the lowest
    cross-entropy.

    T is above 1 for an overconfident network, and below 1 for an underconfident one,
    such as one trained with label smoothing. It changes no prediction.

    Args:
        logits: Logits of held-out images, `(images, outputs)`.
        labels: Their classes, integers `(images,)`: 0 or 1 for a binary classifier, with
            one output. For several classes at once, 0 or 1 for each output, `(images,
            outputs)`.
        activation: `"softmax"` or `"sigmoid"`, from logits to probabilities. None:
            sigmoid for one output, and for labels of several classes at once.

    Raises:
        ValueError: for a model in place of its logits, for logits that are not finite, for
            labels that do not fit, for labels that may be one-hot without an `activation`,
            and if no temperature is the best. That is the case if all images are
            classified correctly, or no better than by chance.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> logits = np.array([[3.0, 0.0]] * 4)  # 95 % sure of class 0, right three times of four
    >>> temperature = kp.transfer.fit_temperature(logits, np.array([0, 0, 0, 1]))
    >>> round(float(1 / (1 + np.exp(-3 / temperature))), 3)
    0.75
    """
    if isinstance(logits, keras.Layer):
        raise ValueError(
            "`logits` must be an array, such as `model.predict(images)` of a model that returns "
            f"logits. Received: the model {logits.name!r}"
        )
    logits, labels = np.asarray(logits, "float64"), np.asarray(labels)
    if logits.ndim == 1:
        logits = logits[:, None]
    if logits.ndim != 2 or labels.shape[:1] != logits.shape[:1] or not len(labels):
        raise ValueError(
            "`logits` must have the shape (images, outputs), `labels` (images,) or (images, "
            f"outputs). Received: shapes {logits.shape} and {labels.shape}"
        )
    if not np.isfinite(logits).all():
        raise ValueError("`logits` must be finite. Received: NaN or infinity")
    if activation is None:
        activation = _activation_for(labels, logits.shape[1])
    _checks.one_of(activation, PROBABILITIES, "activation")
    outputs = Outputs(logits.shape[1], activation, are_logits=True)
    labels = outputs.check_labels(labels).astype(int)
    if activation == "softmax":
        logits = logits - logits.max(axis=1, keepdims=True)
        at_labels = logits[np.arange(len(labels)), labels].mean()
    else:
        labels = labels.reshape(logits.shape)
        at_labels = (logits * labels).mean()

    def slope(scale: float) -> float:
        """Derivative of the cross-entropy of `scale * logits`, which is convex."""
        expected = outputs.probabilities(scale * logits) * logits
        return (expected.sum(axis=1) if activation == "softmax" else expected).mean() - at_labels

    # the mean of the logits at the labels if every answer is right
    highest = 0.0 if activation == "softmax" else float(np.maximum(logits, 0).mean())
    if at_labels == highest or slope(0.0) >= 0:
        raise ValueError(
            f"Cannot fit a temperature: all {len(labels)} images are classified correctly, or no "
            "better than by chance. Use more held-out images."
        )
    low, high = 0.0, 1.0
    while slope(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / high


def _activation_for(labels: np.ndarray, count: int) -> str:
    if labels.ndim < 2 or labels.shape[1] == 1:
        return "sigmoid" if count == 1 else "softmax"
    if (np.asarray(labels).sum(axis=1) == 1).all():
        raise ValueError(
            "Labels with a single 1 per image may be one-hot: pass `labels.argmax(axis=1)`, or "
            "activation='sigmoid' for several classes at once. Received: labels of shape "
            f"{labels.shape}"
        )
    return "sigmoid"


def apply_temperature(model: UnitNetwork, temperature: float) -> UnitNetwork:
    """Return a copy of a network with logits that are divided by a temperature.

    The kernel and the bias of its classifier are divided, so every file and export of
    the copy has calibrated probabilities.

    Args:
        model: A network of residual units with a classifier. It stays as it is.
        temperature: Positive number, such as the result of `fit_temperature`.

    Raises:
        ValueError: for a network without a classifier, and a temperature that is not
            positive and finite.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.create_model("digits_resnet8_preact")
    >>> images = np.random.default_rng(0).normal(size=(2, 8, 8, 1)).astype("float32")
    >>> halved = kp.transfer.apply_temperature(model, 2.0)
    >>> bool(np.allclose(halved(images) * 2, model(images), atol=1e-6))
    True
    """
    check_network(model)
    if model.logits is None:
        raise ValueError(
            "The network has no classifier, so there are no logits to divide. Received: "
            f"{model.name!r}"
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(
            f"`temperature` must be positive and finite. Received: temperature={temperature}"
        )
    copy = changed_copy(model)
    classifier = copy.get_layer("head_classifier")
    classifier.set_weights([weight / temperature for weight in classifier.get_weights()])
    return copy
