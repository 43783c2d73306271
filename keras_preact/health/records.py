"""The measurements of one update."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class HealthRecord:
    """The figures of one update of n weights. A stacked weight counts once per unit.

    Args:
        step: Number of the update, from 1.
        epoch: Number of the epoch, from 0.
        loss: Mean loss of the epoch so far, as `fit` logs it.
        gradient_norms: Norm of each weight's gradient, `(n,)`, before clipping.
        weight_norms: Norm of each weight before the update, `(n,)`.
        update_norms: Norm of each weight's change in the update, `(n,)`, decay
            included.
        layer_gradient_ratio: Gradient norm of the first unit divided by the gradient
            norm of the last. In a model without units, the first and last layers count
            instead. NaN if there are not two.
        activation_means, activation_stds: Mean and standard deviation of the input of
            each of m weight layers, `(m,)`. Empty without a sample.
        gap: Gap between training and validation after the last epoch; NaN without
            validation.
    """

    step: int
    epoch: int
    loss: float
    gradient_norms: np.ndarray
    weight_norms: np.ndarray
    update_norms: np.ndarray
    layer_gradient_ratio: float
    activation_means: np.ndarray
    activation_stds: np.ndarray
    gap: float

    @property
    def gradient_norm(self) -> float:
        """Norm of the gradient of all weights."""
        return float(np.sqrt(np.sum(np.square(self.gradient_norms, dtype="float64"))))

    @property
    def gradient_weight_ratios(self) -> np.ndarray:
        """||gradient|| / ||weight|| of each weight, `(n,)`; NaN for a weight of zeros."""
        return _ratio(self.gradient_norms, self.weight_norms)

    @property
    def update_ratios(self) -> np.ndarray:
        """||update|| / ||weight|| of each weight, `(n,)`; NaN for a weight of zeros."""
        return _ratio(self.update_norms, self.weight_norms)

    def scalars(self) -> dict[str, float]:
        """Return the figures of the whole network."""
        return {
            "loss": self.loss,
            "gradient_norm": self.gradient_norm,
            "layer_gradient_ratio": self.layer_gradient_ratio,
        }


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(
        numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0
    )
