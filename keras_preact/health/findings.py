"""The causes of unhealthy training that a record shows, and the messages about them.
Effects of a cause are not reported.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import keras
import numpy as np

from keras_preact.backend import keras_private
from keras_preact.health.ranges import Range
from keras_preact.health.records import HealthRecord
from keras_preact.health.weights import Watched, WeightPlace

#: Training is stuck if after this number of updates ...
STUCK_UPDATES = 100
#: ... the loss is above this share of its first value ...
STUCK_LOSS = 0.8
#: ... and the training accuracy, if there is one, is below this.
STUCK_ACCURACY = 0.9
#: The name of the cause that training has diverged.
DIVERGENCE = "divergence"
#: The name of the cause that a learning rate is too high.
TOO_HIGH = "update_ratio above"
#: The name of the cause that moving statistics are out of date.
STALE = "moving statistics"
#: Moving statistics are out of date while they hold more than this share of their first values.
STALE_SHARE = 0.05
#: A gap is reported after it was outside the range for this number of epochs in a row.
GAP_EPOCHS = 5


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause of unhealthy training, visible as a figure outside its range.

    Args:
        figure: A key of the ranges.
        side: `"below"` or `"above"`.
        at_once: Whether to report it after one record. Other causes must be in two
            records in a row.
        if_stuck: Whether to report it only while the loss does not fall: a network that
            learns is healthy whatever this figure is. At the end of training, for
            example, gradients are small.
    """

    figure: str
    side: str
    at_once: bool = False
    if_stuck: bool = False

    @property
    def name(self) -> str:
        """Name of the cause, to report it only once."""
        return f"{self.figure} {self.side}"

    @property
    def is_of_inference(self) -> bool:
        """Whether the figure is measured at inference, with moving statistics."""
        return self.figure.startswith("activation_")


#: Causes come before their effects: only the first cause that a record shows is reported.
CAUSES = (
    Cause("update_ratio", "above", at_once=True),
    Cause("activation_std", "above"),
    Cause("activation_mean", "above"),
    Cause("activation_mean", "below"),
    Cause("activation_std", "below", if_stuck=True),
    Cause("layer_gradient_ratio", "below", if_stuck=True),
    Cause("layer_gradient_ratio", "above", if_stuck=True),
    Cause("gradient_norm", "below", if_stuck=True),
    Cause("gradient_norm", "above", if_stuck=True),
    Cause("update_ratio", "below", if_stuck=True),
    Cause("gradient_weight_ratio", "below", if_stuck=True),
)
#: After one of these is reported, later causes are its effects.
FINAL = frozenset({TOO_HIGH, DIVERGENCE})


@dataclasses.dataclass(frozen=True)
class Rates:
    """Learning rates of a run.

    Args:
        now: Learning rate of the recorded update.
        highest: Highest learning rate of the run.
    """

    now: float
    highest: float

    @property
    def share(self) -> float:
        """`now` divided by `highest`."""
        return self.now / self.highest if self.highest > 0 else 1.0

    def better(self, ratio: float, row: Range, side: str) -> float:
        """Return a round learning rate that would bring the updates into the range. The
        present rate has this `ratio`.
        """
        bound = row.high if side == "above" else row.low
        return _round(self.now * bound / ratio) if ratio > 0 else 10 * self.highest


@dataclasses.dataclass(frozen=True)
class FigureValues:
    """Values of a figure, one for each of `places`, or one for the whole network."""

    values: np.ndarray
    places: Sequence[WeightPlace] = ()


def measured(
    record: HealthRecord,
    watched: Watched,
    read: Sequence[WeightPlace],
    from_zero: Collection[str] = (),
) -> dict[str, FigureValues]:
    """Return the figures of a record that are judged.

    Args:
        record: Record of the weights `watched`.
        read: Places of the record's activations.
        from_zero: Names of the kernels that were 0 before training. They are not judged: such a
            kernel is the sum of its updates, so each is a large part of it.
    """
    places = watched.places
    taken = watched.kernels & np.array([place.name not in from_zero for place in places], bool)
    kernels = list(itertools.compress(places, taken))
    # only units are judged, if there are any: the classifier's input is averaged, the stem's is an
    # image
    inside = np.array([place.in_unit for place in read], bool)
    inside = inside if inside.any() else np.ones(len(read), bool)
    judged = list(itertools.compress(read, inside))
    updates = record.update_ratios[taken]
    updates = updates[~np.isnan(updates)]
    return {
        "gradient_norm": FigureValues(np.array([record.gradient_norm])),
        "layer_gradient_ratio": FigureValues(np.array([record.layer_gradient_ratio])),
        "update_ratio": FigureValues(np.array([np.median(updates) if updates.size else math.nan])),
        "gradient_weight_ratio": FigureValues(record.gradient_weight_ratios[taken], kernels),
        "activation_mean": FigureValues(record.activation_means[inside], judged),
        "activation_std": FigureValues(record.activation_stds[inside], judged),
    }


def causes(
    figures: Mapping[str, FigureValues], ranges: Mapping[str, Range], rates: Rates, stuck: bool
) -> list[Cause]:
    """Return the causes that the figures of a record show, the first cause first."""
    shown = []
    for cause in CAUSES:
        if cause.figure not in ranges or (cause.if_stuck and not stuck):
            continue
        values = figures[cause.figure].values
        if (cause.figure, cause.side) == ("update_ratio", "below"):
            # small updates are normal in a warm-up and at the end of a schedule
            values = values / rates.share if rates.share > 0 else values * math.nan
        if ranges[cause.figure].outside(values, cause.side).any():
            shown.append(cause)
    return shown


def message(cause: Cause, figures: Mapping[str, FigureValues], row: Range, rates: Rates) -> str:
    """Return the message to the user: the cause, the evidence, the remedy."""
    figure = figures[cause.figure]
    below = cause.side == "below"
    extreme = int((np.nanargmin if below else np.nanargmax)(figure.values))
    value = float(figure.values[extreme])
    if cause.figure == "update_ratio":
        healthy = row.healthy(cause.side, 0.01)
        evidence = f"weights change by {_percent(value)} per update (healthy: {healthy} %)"
        better = rates.better(value, row, cause.side)
        words = {"rate": f"{rates.highest:.3g}", "better_rate": f"{better:g}"}
    else:
        where = _where(figure, row.outside(figure.values, cause.side), extreme)
        evidence = f"{row.figure} {value:.3g}{where} (healthy: {row.healthy(cause.side)})"
        words = {"rate": f"{rates.highest:.3g}", "better_rate": "another one"}
    what, remedy = (row.below, row.if_below) if below else (row.above, row.if_above)
    stuck = ", and the loss does not fall" if cause.if_stuck else ""
    return f"{what.format(**words)}: {evidence}{stuck}. {remedy.format(**words)}."


def gap_message(gap: float, row: Range) -> str:
    """Return the message about a gap between training and validation."""
    evidence = (
        f"{row.figure} {gap:.3g}, large for {GAP_EPOCHS} epochs (healthy: {row.healthy('above')})"
    )
    return f"{row.above}: {evidence}. {row.if_above}."


def largest_momentum(model: keras.Model, only_new: bool) -> float | None:
    """Return the largest momentum of the batch normalisations that update their moving
    statistics, or None without one.

    Args:
        model: The network.
        only_new: Leave out those whose statistics are not the first values, 0 and 1, any
            more: a pretrained network has good ones before the first update.
    """
    momenta = [
        float(layer.momentum)
        for layer in keras_private.layers(model)
        if layer.trainable
        and hasattr(layer, "moving_variance")
        and isinstance(getattr(layer, "momentum", None), int | float)
        and not (only_new and _has_learned(layer))
    ]
    return max(momenta, default=None)


def _has_learned(layer: keras.layers.Layer) -> bool:
    mean, variance = map(
        keras.ops.convert_to_numpy, (layer.moving_mean.value, layer.moving_variance.value)
    )
    return bool(np.any(mean != 0) or np.any(variance != 1))


def stale_statistics(momentum: float | None, steps: int) -> str | None:
    """Return the message that moving statistics are out of date, or None if they are not.
    Batch normalisation uses them at inference, so such a network is worse there.

    Args:
        momentum: What `largest_momentum` returned before the training.
        steps: Train steps since then. The statistics hold `momentum ** steps` of their
            first values.
    """
    if momentum is None or (share := momentum**steps) <= STALE_SHARE:
        return None
    usual = " Use a momentum of 0.9, or train" if momentum > 0.9 else " Train"
    return (
        f"The moving statistics of the batch normalisation are out of date: {_percent(share)} of "
        f"them are still the first values (momentum {momentum:g}, {steps} updates; healthy: below "
        f"{100 * STALE_SHARE:g} %). Inference uses them, so it is worse than training.{usual} for "
        "more updates."
    )


def divergence(record: HealthRecord, weights: Sequence[str], limit: float | None) -> str | None:
    """Return a description of the divergence that `record` shows, or None.

    Args:
        record: Record of `weights`.
        limit: Gradient norm above which training has diverged, or None.
    """
    signs = []
    bad = np.flatnonzero(~np.isfinite(record.gradient_norms))
    if bad.size:
        signs.append(
            f"the gradient is not finite in {bad.size} of {len(weights)} weights, the first of "
            f"them {weights[bad[0]]}"
        )
    elif limit is not None and record.gradient_norm > limit:
        largest = weights[int(np.argmax(record.gradient_norms))]
        signs.append(
            f"the gradient norm is {record.gradient_norm:.3g} (limit: {limit:g}), most of it in "
            f"{largest}"
        )
    if not math.isfinite(record.loss):
        signs.append(f"the loss is {record.loss}")
    return f"training diverged in update {record.step}: {', and '.join(signs)}" if signs else None


def divergence_message(evidence: str, rates: Rates, first_loss: float) -> str:
    """Return the message about a divergence. `evidence` is the text of `divergence`,
    `first_loss` the loss of the first update.
    """
    if not math.isfinite(first_loss):
        return (
            f"The data or the initial weights are wrong, with a loss of {first_loss} in the first "
            f"update; {evidence}."
        )
    remedy = "Divide it by at least ten, warm up longer, or clip the gradients"
    return f"Learning rate {rates.highest:.3g} is probably too high; {evidence}. {remedy}."


def is_stuck(record: HealthRecord, first_loss: float, accuracies: Collection[float]) -> bool:
    """Return whether a network has learned little or nothing after `STUCK_UPDATES`.

    Args:
        record: Newest record.
        first_loss: Loss of the first update.
        accuracies: Training accuracies, if there are any.
    """
    if record.step < STUCK_UPDATES or any(value >= STUCK_ACCURACY for value in accuracies):
        return False
    return not record.loss <= STUCK_LOSS * first_loss


def highest_rate(rate: Callable[[int], float], steps: int) -> float:
    """Return the highest value of a schedule in `steps` updates. It samples the schedule
    more and more densely around that value.
    """
    first, last = 0, max(0, steps - 1)
    while True:
        samples = sorted({int(step) for step in np.linspace(first, last, 50)})
        values = [rate(step) for step in samples]
        peak = int(np.argmax(values))
        if len(samples) == last - first + 1:
            return values[peak]
        first, last = samples[max(0, peak - 1)], samples[min(len(samples) - 1, peak + 1)]


def _percent(share: float) -> str:
    return f"{float(f'{100 * share:.2g}'):,g} %"


def _where(figure: FigureValues, outside: np.ndarray, extreme: int) -> str:
    """Return the place of the extreme value, and the number of units that are outside."""
    if not figure.places:
        return ""
    groups = {place.group for place in figure.places}
    affected = {place.group for place, out in zip(figure.places, outside, strict=True) if out}
    units = [place.in_unit for place in figure.places]
    noun = "units" if all(units) else "units and layers" if any(units) else "layers"
    return f" at {figure.places[extreme].name}, outside in {len(affected)} of {len(groups)} {noun}"


def _round(value: float) -> float:
    """Round `value` down to 1, 2 or 5 times a power of ten."""
    if not 0 < value < math.inf:
        return value
    power = 10.0 ** math.floor(math.log10(value))
    return float(
        f"{max(step for step in (1, 2, 5) if step * power <= value * (1 + 1e-9)) * power:.1g}"
    )
