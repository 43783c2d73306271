"""Cross-entropy of integer labels with label smoothing, which Keras has only for one-hot
labels.
"""

import keras
from keras import ops

from keras_preact import _checks


@keras.saving.register_keras_serializable("keras_preact")
class SparseCategoricalCrossentropy(keras.losses.Loss):
    """Cross-entropy of integer labels with label smoothing.

        loss = -(1 - label_smoothing) * log p[label] - label_smoothing * mean(log p)
        p = softmax(logits)

    Args:
        label_smoothing: Share of the target, in [0, 1), that is spread equally over all
            K classes. 0 gives Keras' loss.
        from_logits: Whether predictions are logits; else they are probabilities.
        reduction: Reduction as in every Keras loss: `"sum_over_batch_size"`, `"sum"`,
            `"mean_with_sample_weight"`, `"none"`, ...
        name: Name of the loss.

    Labels: `(batch, ...)` or `(batch, ..., 1)`, from 0 to K - 1. Predictions: `(batch,
        ..., K)`. The loss is in Keras' floatx: float32 for any policy of the network.

    Raises:
        ValueError: for a share outside [0, 1).

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> logits = np.log([[0.7, 0.2, 0.1]])
    >>> loss = kp.losses.SparseCategoricalCrossentropy(label_smoothing=0.3)
    >>> round(float(loss(np.array([0]), logits)), 4)  # -0.8 log 0.7 - 0.1 log 0.2 - 0.1 log 0.1
    0.6765

    Source: Sec. 7 of arXiv 1512.00567.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        from_logits: bool = True,
        reduction: str | None = "sum_over_batch_size",
        name: str = "sparse_categorical_crossentropy",
    ):
        super().__init__(name=name, reduction=reduction)
        _checks.fraction(label_smoothing, "label_smoothing")
        self.label_smoothing = label_smoothing
        self.from_logits = from_logits

    def call(self, y_true, y_pred):
        if len(y_true.shape) == len(y_pred.shape):
            y_true = ops.squeeze(y_true, -1)
        logits = y_pred
        if not self.from_logits:
            logits = ops.log(ops.maximum(y_pred, keras.config.epsilon()))
        of_label = ops.sparse_categorical_crossentropy(y_true, logits, from_logits=True)
        if not self.label_smoothing:
            return of_label
        of_all = -ops.mean(ops.log_softmax(logits, axis=-1), axis=-1)
        return (1 - self.label_smoothing) * of_label + self.label_smoothing * of_all

    def get_config(self):
        return super().get_config() | {
            "label_smoothing": self.label_smoothing,
            "from_logits": self.from_logits,
        }
