"""Checks of how large things are: gradients, signals, weights, what goes in and what comes out."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
from keras import ops

from keras_preact.analysis.audit.check import Evidence, Limits, Outcome
from keras_preact.analysis.audit.report import Status
from keras_preact.analysis.audit.structure import Network, Unit


def _first_to_last(evidence: Evidence, limits: Limits, norms: Sequence[float], of: str) -> Outcome:
    names = [unit.name for unit in evidence.network.units]
    loss = evidence.gradients.loss
    if bad := tuple(name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)):
        return Outcome(Status.FAIL, float("nan"), bad, f"The gradient of {loss} is not finite.")
    if not any(norms):
        detail = f"The gradient of {loss} is 0 in every unit: a zero layer behind them lets none through."
        return Outcome(Status.WARN, float("nan"), (), detail)
    groups: dict[tuple, list[int]] = {}
    for i, shape in enumerate(evidence.gradients.shapes):
        groups.setdefault(shape, []).append(i)
    several = [group for group in groups.values() if len(group) > 1] or [list(range(len(norms)))]
    ratios = {names[group[0]]: (norms[group[0]] / norms[group[-1]] if norms[group[-1]] else float("inf")) for group in several}
    ends = {names[group[0]]: names[group[-1]] for group in several}
    status, figure, locations = limits.worst(ratios)
    where = max(ratios, key=lambda name: limits.distance(ratios[name]))
    detail = f"{of} of {loss} at {where} over that at {ends[where]}: {ratios[where]:.3g}."
    return Outcome(status, figure, locations, detail)


def signal_gradients(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the gradients of x_l at the first and last units of one shape."""
    return _first_to_last(evidence, limits, evidence.gradients.outputs, "Norm of the gradient")


def weight_gradients(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the gradients of the kernels of the first and last units of one shape."""
    return _first_to_last(evidence, limits, evidence.gradients.weights, "Norm of the gradient of the branch's kernels")


def signal_growth(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the mean square of x_l of the first and last units of one shape."""
    network = evidence.network
    groups: dict[tuple, list[Unit]] = {}
    for unit in network.units:
        groups.setdefault(network.graph.specs[unit.addition.total].shape[1:], []).append(unit)
    size = evidence.training.mean_square
    growth = {}
    for units in groups.values():
        first, last = size[units[0].name], size[units[-1].name]
        growth[units[-1].name] = last / first / len(units) if first else float("inf")
    status, figure, locations = limits.worst(growth)
    where = max(growth, key=lambda name: limits.distance(growth[name]))
    detail = f"Up to {where}, the mean square of x_l grows {figure:.3g} times as much as the number of units of its shape."
    return Outcome(status, figure, locations, detail)


def weight_scale(evidence: Evidence, limits: Limits) -> Outcome:
    """Measure what each weight layer multiplies the size of its input by."""
    network = evidence.network
    main = {i: gain for i, gain in evidence.training.gains.items() if i not in network.on_shortcuts}
    gains = {network.graph.steps[i].name: gain for i, gain in main.items() if gain != 0}
    zeros = len(main) - len(gains)
    status, figure, locations = limits.worst(gains)
    detail = f"Root mean square of outputs over inputs from {min(gains.values()):.3g} to {max(gains.values()):.3g}"
    return Outcome(status, figure, locations, f"{detail}; {zeros} weight layers return zeros." if zeros else f"{detail}.")


def _kernels(network: Network) -> Iterable[tuple[int, str, np.ndarray]]:
    """Yield step, name and values of every kernel, of a shared layer once."""
    seen = set()
    for i in network.weights(range(len(network.graph.steps))):
        layer = network.graph.steps[i].operation
        if id(layer) not in seen:
            seen.add(id(layer))
            for weight in layer.weights:
                if len(weight.shape) > 1:
                    yield i, network.graph.steps[i].name, ops.convert_to_numpy(weight.value)


def distinct_weights(evidence: Evidence, limits: Limits) -> Outcome:
    """Look for kernels that hold the same values."""
    first: dict[tuple, str] = {}
    copies: dict[str, str] = {}
    for _, name, values in _kernels(evidence.network):
        if values.size > 1 and values.min() != values.max():
            original = first.setdefault((values.shape, values.tobytes()), name)
            if original != name:
                copies[name] = original
    if not copies:
        return Outcome(Status.PASS, 0.0, (), "No two weight layers hold the same values.")
    name, original = next(iter(copies.items()))
    detail = f"{len(copies)} kernels equal an earlier one, the first {name} that of {original}."
    return Outcome(Status.FAIL, len(copies), tuple(copies), detail)


def live_weights(evidence: Evidence, limits: Limits) -> Outcome:
    """Look for kernels that are not finite or constant, and for branches of zeros."""
    network = evidence.network
    broken: dict[str, str] = {}
    zeros = set()
    for i, name, values in _kernels(network):
        if not np.isfinite(values.astype("float64")).all():
            broken[name] = "not finite"
        elif values.size > 1 and values.min() == values.max() != 0:
            broken[name] = "constant"
        elif values.size > 1 and not values.any():
            zeros.add(i)
    for unit in network.units:
        weights = network.weights(unit.branch)
        if len(weights) > 1 and zeros.issuperset(weights):
            broken[unit.name] = "zero in all its kernels, so that none gets a gradient"
    if not broken:
        kept = f"; {len(zeros)} weight layers start at zero" if zeros else ""
        return Outcome(Status.PASS, 0.0, (), f"All kernels are finite, none is constant{kept}.")
    name, what = next(iter(broken.items()))
    return Outcome(Status.FAIL, len(broken), tuple(broken), f"{name} is {what}.")


def dead_channels(evidence: Evidence, limits: Limits) -> Outcome:
    """Count the channels that activations set to 0 for the whole sample."""
    steps = evidence.network.graph.steps
    dead = {steps[i].name: share for i, share in evidence.training.dead.items()}
    if not dead:
        return Outcome(Status.PASS, 0.0, (), "There is no activation.")
    names = sorted(dead, key=lambda name: dead[name], reverse=True)
    worst = dead[names[0]]
    unhealthy = tuple(name for name in names if limits.status(dead[name]) != Status.PASS)
    detail = f"At most {worst:.0%} of an activation's channels are 0 for the whole sample, at {names[0]}."
    return Outcome(limits.status(worst), worst, unhealthy, detail if worst else "Every channel of every activation is in use.")


def sample_scale(evidence: Evidence, limits: Limits) -> Outcome:
    """Measure the size of what the first weight layers read."""
    network = evidence.network
    graph = network.graph
    reading = [
        i for i in evidence.training.inputs if network.upstream(graph.steps[i].inputs[0])[1] in graph.inputs
    ]  # weight layers with nothing but preprocessing in front
    if not reading:
        return Outcome(Status.PASS, float("nan"), (), "The inputs are numbers of tokens.")
    scale = {graph.steps[i].name: math.hypot(*dataclasses.astuple(evidence.training.inputs[i])) for i in reading}
    status, figure, locations = limits.worst(scale)
    detail = f"What the first weight layer reads has a size (mean and standard deviation together) of {figure:.3g}."
    return Outcome(status, figure, locations, detail)


def output_scale(evidence: Evidence, limits: Limits) -> Outcome:
    """Measure the size of the logits."""
    size = evidence.training.output_size
    status = limits.status(size)
    name = evidence.network.graph.steps[-1].name
    return Outcome(status, size, () if status == Status.PASS else (name,), f"Root mean square of the logits: {size:.3g}.")
