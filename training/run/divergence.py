"""The message of a run with a loss or weights that are not finite."""

import numpy as np

import keras_preact as kp


def message(
    fault: str, place: str, learning_rate: float, health: kp.TrainingHealth | None = None
) -> str:
    """Return the likely mistake, the remedy, and the layer in which training went wrong.

    Args:
        fault: What is not finite, in words.
        place: The iteration in words.
        learning_rate: Learning rate option of the run.
        health: Callback of the run. Its last record, from before this fault, names
            the layer.
    """
    text = (
        f"Learning rate {learning_rate:g} is probably too high: {fault} in {place}. "
        "Lower --optimizer.learning-rate or lengthen --schedule.warmup."
    )
    if health is None or not health.history:
        return f"{text} With --health 1, the run names the layer that changes most."
    record = health.history[-1]
    broken = np.flatnonzero(~np.isfinite(record.update_norms))
    if broken.size:
        return f"{text} After update {record.step}, {health.weights[broken[-1]]} is not finite."
    ratios = np.nan_to_num(record.update_ratios)
    most = int(np.argmax(ratios))
    return (
        f"{text} In update {record.step}, the last one that was measured, "
        f"{health.weights[most]} changed most: by {100 * ratios[most]:.3g} % of its size."
    )
