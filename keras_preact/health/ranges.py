"""The ranges in which training is healthy, as data."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from keras_preact import _checks


@dataclasses.dataclass(frozen=True)
class Range:
    """Where a figure is healthy: from `low` to `high`.

    Args:
        figure: What it is called in a message.
        low, high: The bounds, which belong to the range; infinite where there is none.
        below, above: What a figure outside may mean.
        action: What to do then.

    Raises:
        ValueError: for bounds that are not in order.
    """

    figure: str
    low: float
    high: float
    below: str
    above: str
    action: str

    def __post_init__(self):
        if not self.low < self.high:
            raise ValueError(f"A range goes from `low` up to `high`. Received: low={self.low}, high={self.high}")

    def sides(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return which of `values` lie `"below"` and which `"above"`, as masks. What is not a number lies nowhere."""
        return {"below": values < self.low, "above": values > self.high}

    def bound(self, side: str) -> float:
        return self.low if side == "below" else self.high

    def meaning(self, side: str) -> str:
        return self.below if side == "below" else self.above


#: Figure to the range in which it is healthy. The figures of weights are judged for kernels, which have two axes or more.
HEALTHY_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "gradient_norm": Range(
            "gradient norm",
            0.1,
            10.0,
            below="the gradient vanishes, or training has converged",
            above="the gradient explodes",
            action="adjust the learning rate: raise it below the range, lower it or clip the gradients above",
        ),
        "update_ratio": Range(
            "update/weight ratio",
            1e-3,
            1e-2,
            below="the weights hardly move",
            above="the weights move too fast",
            action="adjust the learning rate or clip the gradients",
        ),
        "gradient_weight_ratio": Range(
            "gradient/weight ratio",
            1e-4,
            0.1,
            below="they may be dead",
            above="they may be unstable",
            action="check initialisation and normalisation there",
        ),
        "layer_gradient_ratio": Range(
            "gradient norm of the first over that of the last",
            0.1,
            10.0,
            below="the gradient vanishes on its way to the first",
            above="the gradient explodes on its way to the first",
            action="check the architecture: identity shortcuts, pre-activation",
        ),
        "activation_mean": Range(
            "mean of what a weight reads",
            -0.5,
            0.5,
            below="the activations are shifted down",
            above="the activations are shifted up",
            action="check the normalisation",
        ),
        "activation_std": Range(
            "standard deviation of what a weight reads",
            0.5,
            2.0,
            below="the signal fades",
            above="the signal blows up",
            action="check the initialisation",
        ),
        "train_validation_gap": Range(
            "gap between training and validation",
            -math.inf,
            0.05,
            below="",
            above="the network overfits",
            action="add regularisation",
        ),
    }
)


def replaced(ranges: Mapping[str, Range | None] | None) -> dict[str, Range]:
    """Return `HEALTHY_RANGES` with the rows of `ranges` in place of its own; without those where it has None."""
    table: dict[str, Range | None] = dict(HEALTHY_RANGES)
    for name, row in (ranges or {}).items():
        _checks.lookup(HEALTHY_RANGES, name, "ranges")
        if row is not None and not isinstance(row, Range):
            raise ValueError(f"`ranges` maps figures to `kp.health.Range` or None. Received: ranges[{name!r}]={row!r}")
        table[name] = row
    return {name: row for name, row in table.items() if row is not None}
