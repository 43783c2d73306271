"""Checks of sizes: gradients, signals, weights, the sample and the logits."""

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
    if bad := tuple(
        name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)
    ):
        return Outcome(
            Status.FAIL,
            float("nan"),
            bad,
            f"The gradient is not finite. The loss is {loss}.",
            is_ranked=False,
        )
    if not any(norms):
        detail = f"The gradient is 0 in every unit: a later layer with zero weights blocks it. The loss is {loss}."
        return Outcome(Status.WARN, float("nan"), (), detail)
    groups: dict[tuple, list[int]] = {}
    for i, shape in enumerate(evidence.gradients.shapes):
        groups.setdefault(shape, []).append(i)
    several = [group for group in groups.values() if len(group) > 1] or [list(range(len(norms)))]
    ratios = {
        names[group[0]]: (norms[group[0]] / norms[group[-1]] if norms[group[-1]] else float("inf"))
        for group in several
    }
    ends = {names[group[0]]: names[group[-1]] for group in several}
    status, figure, locations = limits.worst(ratios)
    where = max(ratios, key=lambda name: limits.distance(ratios[name]))
    detail = f"The gradient norm of {of} at {where} is {ratios[where]:.3g} times that at {ends[where]} ({limits}). "
    detail += f"The loss is {loss}."
    return Outcome(status, figure, locations, detail)


def signal_gradients(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the gradients of x_l at the first and the last unit of each shape."""
    return _first_to_last(evidence, limits, evidence.gradients.outputs, "the signal")


def weight_gradients(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the kernel gradients of the first and the last unit of each shape."""
    return _first_to_last(evidence, limits, evidence.gradients.weights, "the branch weights")


def signal_growth(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the mean square of x_l at the first and the last unit of each shape."""
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
    detail = f"Up to {where}, the mean square of the signal grows {figure:.3g} times as much as the number of units "
    detail += f"of its shape ({limits})."
    return Outcome(status, figure, locations, detail)


def weight_scale(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the root mean square of each weight layer's output with that of its
    input.
    """
    network = evidence.network
    main = {i: gain for i, gain in evidence.training.gains.items() if i not in network.on_shortcuts}
    gains = {network.graph.steps[i].name: gain for i, gain in main.items() if gain != 0}
    zeros = len(main) - len(gains)
    status, figure, locations = limits.worst(gains)
    detail = f"Weight layers multiply the root mean square of their input by {min(gains.values()):.3g} to "
    detail += f"{max(gains.values()):.3g}, at worst by {figure:.3g} ({limits})."
    detail += f" Layers that return only zeros: {zeros}." if zeros else ""
    return Outcome(status, figure, locations, detail)


def _kernels(network: Network) -> Iterable[tuple[int, str, np.ndarray]]:
    """Yield step, name and values of every kernel; a shared layer counts once."""
    seen = set()
    for i in network.weights(range(len(network.graph.steps))):
        layer = network.graph.steps[i].operation
        if id(layer) not in seen:
            seen.add(id(layer))
            for weight in layer.weights:
                if len(weight.shape) > 1:
                    yield i, network.graph.steps[i].name, ops.convert_to_numpy(weight.value)


def distinct_weights(evidence: Evidence, limits: Limits) -> Outcome:
    """Find kernels with equal values."""
    first: dict[tuple, str] = {}
    copies: dict[str, str] = {}
    for _, name, values in _kernels(evidence.network):
        if values.size > 1 and values.min() != values.max():
            original = first.setdefault((values.shape, values.tobytes()), name)
            if original != name:
                copies[name] = original
    if not copies:
        return Outcome(Status.PASS, 0.0, (), "No two weight layers have equal kernels.")
    name, original = next(iter(copies.items()))
    detail = f"{name} has the same kernel as {original}. Layers whose kernel equals an earlier one: {len(copies)}."
    return Outcome(Status.FAIL, len(copies), tuple(copies), detail, is_ranked=False)


def live_weights(evidence: Evidence, limits: Limits) -> Outcome:
    """Find kernels that are not finite or constant, and branches with only zeros."""
    network = evidence.network
    broken: dict[str, str] = {}
    zeros = set()
    for i, name, values in _kernels(network):
        if not np.isfinite(values.astype("float64")).all():
            broken[name] = "values that are not finite"
        elif values.size > 1 and values.min() == values.max() != 0:
            broken[name] = "a constant kernel: all its values are equal"
        elif values.size > 1 and not values.any():
            zeros.add(i)
    for unit in network.units:
        weights = network.weights(unit.branch)
        if len(weights) > 1 and zeros.issuperset(weights):
            broken[unit.name] = "only zeros in its kernels, so none gets a gradient"
    if not broken:
        kept = f" Layers with only zeros: {len(zeros)}." if zeros else ""
        return Outcome(Status.PASS, 0.0, (), f"All kernels are finite and none is constant.{kept}")
    name, what = next(iter(broken.items()))
    return Outcome(Status.FAIL, len(broken), tuple(broken), f"{name} has {what}.", is_ranked=False)


def dead_channels(evidence: Evidence, limits: Limits) -> Outcome:
    """Measure the share of channels that are 0 for the whole sample."""
    steps = evidence.network.graph.steps
    dead = {steps[i].name: share for i, share in evidence.training.dead.items()}
    if not dead:
        return Outcome(Status.PASS, 0.0, (), "The network has no activation.")
    names = sorted(dead, key=lambda name: dead[name], reverse=True)
    worst = dead[names[0]]
    unhealthy = tuple(name for name in names if limits.status(dead[name]) != Status.PASS)
    detail = f"{names[0]} sets {worst:.0%} of its channels to 0 for the whole sample (healthy: up to {limits.healthy[1]:.0%})."
    return Outcome(
        limits.status(worst),
        worst,
        unhealthy,
        detail if worst else "All channels of all activations are in use.",
    )


def sample_scale(evidence: Evidence, limits: Limits) -> Outcome:
    """Measure the size of the first weight layers' input."""
    network = evidence.network
    graph = network.graph
    reading = [
        i
        for i in evidence.training.inputs
        if network.upstream(graph.steps[i].inputs[0])[1] in graph.inputs
    ]  # only preprocessing is before them
    if not reading:
        return Outcome(Status.PASS, float("nan"), (), "The inputs are token numbers.")
    scale = {
        graph.steps[i].name: math.hypot(*dataclasses.astuple(evidence.training.inputs[i]))
        for i in reading
    }
    status, figure, locations = limits.worst(scale)
    detail = f"The first layer's input has a size of {figure:.3g}, mean and standard deviation together ({limits})."
    return Outcome(status, figure, locations, detail)


def output_scale(evidence: Evidence, limits: Limits) -> Outcome:
    """Measure the size of the logits."""
    size = evidence.training.output_size
    status = limits.status(size)
    name = evidence.network.graph.steps[-1].name
    detail = f"The logits have a root mean square of {size:.3g} ({limits})."
    return Outcome(status, size, () if status == Status.PASS else (name,), detail)
