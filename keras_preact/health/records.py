"""What was measured at one step, and what of it is outside the healthy ranges."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from keras_preact.health.probe import GRADIENT, UPDATE, WEIGHT
from keras_preact.health.ranges import Range
from keras_preact.health.weights import Place, Watched


@dataclasses.dataclass(frozen=True)
class Record:
    """The figures of one update of n weights; those of a stack are counted unit by unit.

    Args:
        step: Number of the update, from 1.
        epoch: From 0.
        loss: As `fit` logs it: the mean of the epoch so far.
        gradient_norms: Norm of each weight's gradient, `(n,)`, before clipping.
        weight_norms: Norm of each weight before the update, `(n,)`.
        update_norms: Norm of what the update changed of each weight, `(n,)`, decay included.
        layer_gradient_ratio: Norm of the gradient of the first unit's weights over that of the last one's; of the first and
            the last layer in a model without units. NaN where there are not two.
        activation_means, activation_stds: Of what each of m weight layers reads, `(m,)`. Empty without a sample.
        gap: Between training and validation at the end of the last epoch; NaN without.
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

    @classmethod
    def of(cls, figures: np.ndarray, watched: Watched, **rest) -> "Record":
        groups = list(watched.group_norms(figures[GRADIENT]).values())
        first, last = groups[0], groups[-1]
        ratio = first / last if len(groups) > 1 and last else float("nan")
        gradients, weights, updates = (figures[row] for row in (GRADIENT, WEIGHT, UPDATE))
        return cls(gradient_norms=gradients, weight_norms=weights, update_norms=updates, layer_gradient_ratio=ratio, **rest)

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
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A figure outside its range.

    Args:
        name: Of the figure, a key of the ranges.
        side: `"below"` or `"above"`.
        places: Where; empty for a figure of the whole network.
        text: What a user reads.
    """

    name: str
    side: str
    places: tuple[Place, ...]
    text: str


def of_network(step: int, figures: Mapping[str, float], ranges: Mapping[str, Range]) -> Iterator[Finding]:
    """Yield which figures of the whole network are outside their range."""
    for name, value in figures.items():
        for side, outside in (ranges[name].sides(np.array(value)) if name in ranges else {}).items():
            if outside:
                row = ranges[name]
                what = f"step {step}: {row.figure} {value:.3g} is {side} {row.bound(side):g}"
                yield Finding(name, side, (), f"{what}: {row.meaning(side)}; {row.action}.")


def of_places(record: Record, ranges: Mapping[str, Range], watched: Watched, read: list[Place]) -> Iterator[Finding]:
    """Yield which figures of weights and their inputs are outside their range; `read` are the places of the inputs."""
    kernels = [place for place, kernel in zip(watched.places, watched.kernels, strict=True) if kernel]
    # what the classifier reads is averaged, what the stem reads is an image: the ranges are of units, where there are any
    inside = np.array([place.in_unit for place in read], bool)
    inside = inside if inside.any() else np.ones(len(read), bool)
    judged = [place for place, taken in zip(read, inside, strict=True) if taken]
    figures = {
        "gradient_weight_ratio": (kernels, record.gradient_weight_ratios[watched.kernels]),
        "update_ratio": (kernels, record.update_ratios[watched.kernels]),
        "activation_mean": (judged, record.activation_means[inside]),
        "activation_std": (judged, record.activation_stds[inside]),
    }
    for name, (places, values) in figures.items():
        for side, outside in (ranges[name].sides(values) if name in ranges else {}).items():
            if outside.any():
                yield _of_places(record.step, name, side, ranges[name], places, values, outside)


def _of_places(step: int, name: str, side: str, row: Range, places: list[Place], values, outside) -> Finding:
    groups = {place.group for place in places}
    found = tuple(place for place, out in zip(places, outside, strict=True) if out)
    where = list(dict.fromkeys(place.group for place in found))
    noun = "units" if all(place.in_unit for place in places) else "units and layers" if _any_unit(places) else "layers"
    extreme = np.nanargmin(values) if side == "below" else np.nanargmax(values)
    names = where[0] if len(where) == 1 else f"{where[0]} to {where[-1]}"
    text = (
        f"step {step}: {len(where)} of {len(groups)} {noun} ({names}): {row.figure} {side} {row.bound(side):g}, "
        f"{'least' if side == 'below' else 'most'} {values[extreme]:.3g} at {places[extreme].name}: {row.meaning(side)}; "
        f"{row.action}."
    )
    return Finding(name, side, found, text)


def _any_unit(places: list[Place]) -> bool:
    return any(place.in_unit for place in places)
