"""The healthy range of each figure, as data."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

import keras
import numpy as np

from keras_preact import _checks
from keras_preact.wrapped_optimizer import unwrapped


@dataclasses.dataclass(frozen=True)
class Range:
    """The healthy values of a figure, from `low` to `high`.

    Args:
        figure: Name of the figure in a message.
        low, high: Bounds of the range, inclusive; infinite for no bound.
        below, above: Cause of a value below or above the range. `{rate}` becomes the
            learning rate. `keras_preact.health.findings.CAUSES` lists which figures are
            judged on which side, and when.
        if_below, if_above: Remedy for a value below or above the range. `{better_rate}`
            becomes a learning rate that would be in the range.
        margin: A message appears only for values this many times beyond a bound.
            Healthy runs leave some of the ranges for a while.

    Raises:
        ValueError: for bounds that are not in order, or a margin below 1.
    """

    figure: str
    low: float
    high: float
    below: str = ""
    above: str = ""
    if_below: str = ""
    if_above: str = ""
    margin: float = 1.0

    def __post_init__(self):
        if not self.low < self.high:
            raise ValueError(
                f"`low` must be less than `high`. Received: low={self.low}, high={self.high}"
            )
        if not self.margin >= 1:
            raise ValueError(f"`margin` must be at least 1. Received: margin={self.margin}")

    def outside(self, values: np.ndarray, side: str) -> np.ndarray:
        """Return a mask of the `values` that are `"below"` or `"above"` the range by
        its margin. NaN is neither.
        """
        low, high = self.silent
        return values < low if side == "below" else values > high

    @property
    def silent(self) -> tuple[float, float]:
        """The bounds beyond which there is a message: the range with its margin."""
        return (
            self.low / self.margin if self.low > 0 else self.low * self.margin,
            self.high * self.margin if self.high > 0 else self.high / self.margin,
        )

    def healthy(self, side: str, unit: float = 1.0) -> str:
        """Return the bound on a side in words, divided by `unit`."""
        return f"above {self.low / unit:g}" if side == "below" else f"below {self.high / unit:g}"


#: Healthy range of each figure. Of the weights, only kernels (two axes or more) are judged, and
#: none that was 0 before training.
HEALTHY_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "gradient_norm": Range(
            "gradient norm",
            0.1,
            10.0,
            below="The gradient vanishes",
            above="The gradient explodes",
            if_below="Raise the learning rate, or check initialisation and normalisation",
            if_above="Lower the learning rate or clip the gradients",
        ),
        "update_ratio": Range(
            "update/weight ratio",
            1e-3,
            1e-2,
            below="Learning rate {rate} is too low",
            above="Learning rate {rate} is too high",
            if_below="Try {better_rate}",
            if_above="Try {better_rate}",
            # a healthy run of the digits recipe reaches 2 %, one that learns nothing 7 %
            margin=5.0,
        ),
        "gradient_weight_ratio": Range(
            "gradient/weight ratio",
            1e-4,
            0.1,
            below="Some weights get hardly any gradient",
            if_below="Check initialisation and normalisation there",
        ),
        "layer_gradient_ratio": Range(
            "ratio of the gradient norms of the first and last unit",
            0.1,
            10.0,
            below="The gradient vanishes on its way to the first unit",
            above="The gradient explodes on its way to the first unit",
            if_below="Use identity shortcuts and pre-activation",
            if_above="Use identity shortcuts and pre-activation, or clip the gradients",
        ),
        "activation_mean": Range(
            "mean of a layer's input",
            -0.5,
            0.5,
            below="The activations are shifted down",
            above="The activations are shifted up",
            if_below="Check the normalisation",
            if_above="Check the normalisation",
            margin=20.0,
        ),
        "activation_std": Range(
            "standard deviation of a layer's input",
            0.5,
            2.0,
            below="The signal fades",
            above="The signal explodes",
            if_below="Check initialisation and normalisation",
            if_above="Check initialisation and normalisation",
            margin=20.0,  # weight decay shrinks the scales of normalisations to a tenth
        ),
        "train_validation_gap": Range(
            "gap between training and validation",
            -math.inf,
            0.05,
            above="The network overfits",
            if_above="Use more images, augmentation or weight decay",
            margin=6.0,  # the paper's networks end at 0.06 on CIFAR-10 and at 0.24 on CIFAR-100
        ),
    }
)


#: The largest healthy update of `keras.optimizers.Muon`, as a share of the weight. Muon moves all
#: directions of a kernel alike, also directions with hardly any gradient.
MUON_UPDATE = 0.1


def replaced(
    ranges: Mapping[str, Range | None] | None, optimizer: keras.optimizers.Optimizer | None = None
) -> dict[str, Range]:
    """Return the healthy ranges for an optimizer. Rows of `ranges` replace the rows of
    `HEALTHY_RANGES`; None removes a row.
    """
    table: dict[str, Range | None] = dict(HEALTHY_RANGES)
    if isinstance(unwrapped(optimizer), keras.optimizers.Muon):
        usual = HEALTHY_RANGES["update_ratio"]
        table["update_ratio"] = dataclasses.replace(usual, high=MUON_UPDATE)
    for name, row in (ranges or {}).items():
        _checks.lookup(HEALTHY_RANGES, name, "ranges")
        if row is not None and not isinstance(row, Range):
            raise ValueError(
                "`ranges` maps figures to `kp.health.Range` or None. Received: "
                f"ranges[{name!r}]={row!r}"
            )
        table[name] = row
    return {name: row for name, row in table.items() if row is not None}
