"""Calibrated probabilities by temperature scaling (Guo et al. 2017, arXiv 1706.04599)."""

import numpy as np

from keras_preact.models.base import UnitNetwork, check_network
from keras_preact.models.copies import changed_copy


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature T for which `softmax(logits / T)` has the lowest
    cross-entropy.

    T is above 1 for an overconfident network, and below 1 for an underconfident one,
    such as one trained with label smoothing. It changes no prediction.

    Args:
        logits: Logits of held-out images, `(images, classes)`.
        labels: Their classes, integers `(images,)`.

    Raises:
        ValueError: for logits that are not finite, for labels of another shape or range,
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
    logits, labels = np.asarray(logits, "float64"), np.asarray(labels)
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not len(labels):
        raise ValueError(
            "`logits` must have the shape (images, classes), `labels` (images,). Received: "
            f"shapes {logits.shape} and {labels.shape}"
        )
    if not np.isfinite(logits).all():
        raise ValueError("`logits` must be finite. Received: NaN or infinity")
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise ValueError(
            f"`labels` must be integers from 0 to {logits.shape[1] - 1}. Received: "
            f"{labels.dtype} from {labels.min()} to {labels.max()}"
        )
    logits = logits - logits.max(axis=1, keepdims=True)
    label_logit = logits[np.arange(len(labels)), labels].mean()

    def slope(scale: float) -> float:
        """Derivative of the cross-entropy of `scale * logits`, which is convex."""
        exponentials = np.exp(scale * logits)
        return ((exponentials * logits).sum(axis=1) / exponentials.sum(axis=1)).mean() - label_logit

    if label_logit == 0 or slope(0.0) >= 0:
        raise ValueError(
            "No temperature has the lowest cross-entropy: use more held-out images. Received: "
            f"{len(labels)} images, all classified correctly or no better than by chance"
        )
    low, high = 0.0, 1.0
    while slope(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / high


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
