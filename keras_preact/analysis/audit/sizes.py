"""Checks of sizes: gradients, signals, weights, the sample and the logits, and whether the loss
expects logits.
"""

import itertools
import math
from collections.abc import Container, Iterable, Sequence

import numpy as np
from keras import ops

from keras_preact.analysis.audit.check import Check
from keras_preact.analysis.audit.measure import Spread
from keras_preact.analysis.audit.network import Network
from keras_preact.analysis.audit.report import AuditFinding, Status, shown
from keras_preact.backend.arrays import as_numpy
from keras_preact.preprocessing import LARGEST_SIZE


def _judged(check: Check, values: dict[str, float], detail: str) -> AuditFinding:
    """Return the finding for named values. In `detail`, `{figure}` is the worst value,
    and `{where}` its name.
    """
    worst = check.limits.worst_first(values)
    figure = values[worst[0]]
    figure_in_words = shown(figure, check.unit)
    detail = detail.format(figure=figure_in_words, where=worst[0], limits=check.healthy)
    locations = check.limits.unhealthy(values, worst)
    return check.finding(check.limits.status(figure), figure, locations, detail)


def _first_to_last(
    check: Check,
    network: Network,
    norms: Sequence[float],
    what: str,
    left_out: Container[int] = (),
) -> AuditFinding:
    """Compare the gradient norms of the first and the last unit of each shape."""
    names = [unit.name for unit in network.units]
    loss = f"The loss is {network.gradients.loss}."
    if bad := [name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)]:
        detail = f"The gradient is not finite. {loss}"
        return check.finding(Status.FAIL, math.nan, bad, detail, is_ranked=False)
    if not any(norms):
        detail = "The gradient is 0 in every unit: a later layer with zero weights blocks it."
        return check.finding(Status.WARN, math.nan, (), f"{detail} {loss}")
    shapes = [[i for i in group if i not in left_out] for group in network.of_each_shape]
    groups = [group for group in shapes if len(group) > 1] or [[*itertools.chain(*shapes)]]
    ends = [(group[0], group[-1]) for group in groups]
    ratios = {names[i]: norms[i] / norms[j] if norms[j] else math.inf for i, j in ends}
    where = check.limits.worst_first(ratios)[0]
    last = {names[i]: names[j] for i, j in ends}[where]
    return _judged(
        check,
        ratios,
        f"The gradient norm of {what} at {{where}} is {{figure}} times that at {last} "
        f"({{limits}}). {loss}",
    )


def signal_gradients(check: Check, network: Network) -> AuditFinding:
    """Compare the gradients of x_l at the first and the last unit of each shape."""
    return _first_to_last(check, network, network.gradients.outputs, "the signal")


def weight_gradients(check: Check, network: Network) -> AuditFinding:
    """Compare the kernel gradients of the first and the last unit of each shape, of the
    units whose branches are not closed.
    """
    closed = {i for i, is_closed in enumerate(network.gradients.closed) if is_closed}
    if len(closed) == len(network.units):
        return check.passed(
            "The branches start closed: each is multiplied by weights that are 0, and these have "
            "gradients. The kernels get theirs after the first update.",
            math.nan,
        )
    norms = network.gradients.weights
    return _first_to_last(check, network, norms, "the branch weights", closed)


def signal_growth(check: Check, network: Network) -> AuditFinding:
    """Compare the mean square of x_l at the first and the last unit of each shape."""
    units, size = network.units, network.training.mean_square
    growth = {}
    for group in network.of_each_shape:
        first, last = (size[units[i].name] for i in (group[0], group[-1]))
        growth[units[group[-1]].name] = last / first / len(group) if first else math.inf
    return _judged(
        check,
        growth,
        "Up to {where}, the mean square of the signal grows {figure} times as much as the number "
        "of units of its shape ({limits}).",
    )


def weight_scale(check: Check, network: Network) -> AuditFinding:
    """Compare the root mean square of each weight layer's output with its input's."""
    main = {i: gain for i, gain in network.training.gains.items() if i not in network.on_shortcuts}
    gains = {network.graph.steps[i].name: gain for i, gain in main.items() if gain != 0}
    zeros = len(main) - len(gains)
    if not gains:
        return check.finding(Status.WARN, 0.0, (), "All weight layers return only zeros.")
    return _judged(
        check,
        gains,
        f"Weight layers multiply the root mean square of their input by {min(gains.values()):.3g} "
        f"to {max(gains.values()):.3g}, at worst by {{figure}} ({{limits}})."
        + (f" Layers that return only zeros: {zeros}." if zeros else ""),
    )


def _kernels(network: Network) -> Iterable[tuple[int, str, np.ndarray]]:
    """Yield step, name and values of every weight with more than one axis. A shared
    layer counts once.
    """
    seen = set()
    for i in network.weights(range(len(network.graph.steps))):
        layer = network.graph.steps[i].operation
        if id(layer) not in seen:
            seen.add(id(layer))
            for weight in layer.weights:
                if len(weight.shape) > 1:
                    yield i, network.graph.steps[i].name, ops.convert_to_numpy(weight.value)


def distinct_weights(check: Check, network: Network) -> AuditFinding:
    """Find kernels with equal values."""
    first: dict[tuple, str] = {}
    copies: dict[str, str] = {}
    for _, name, values in _kernels(network):
        if values.size > 1 and values.min() != values.max():
            original = first.setdefault((values.shape, values.tobytes()), name)
            if original != name:
                copies[name] = original
    if not copies:
        return check.passed("No two weight layers have equal kernels.")
    name, original = next(iter(copies.items()))
    detail = (
        f"{name} has the same kernel as {original}. Layers whose kernel equals an earlier one: "
        f"{len(copies)}."
    )
    return check.finding(Status.FAIL, len(copies), copies, detail, is_ranked=False)


def live_weights(check: Check, network: Network) -> AuditFinding:
    """Find kernels that are constant or not finite, and branches with only zeros."""
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
        also = f" Layers with only zeros: {len(zeros)}." if zeros else ""
        return check.passed(f"All kernels are finite and none is constant.{also}")
    name, what = next(iter(broken.items()))
    return check.finding(Status.FAIL, len(broken), broken, f"{name} has {what}.", is_ranked=False)


def dead_channels(check: Check, network: Network) -> AuditFinding:
    """Measure the share of channels that are 0 for the whole sample."""
    steps = network.graph.steps
    dead = {steps[i].name: share for i, share in network.training.dead.items()}
    if not dead:
        return check.passed("The network has no activation.")
    detail = "{where} sets {figure} of its channels to 0 for the whole sample ({limits})."
    return _judged(check, dead, detail)


def sample_scale(check: Check, network: Network) -> AuditFinding:
    """Compare the first weight layers' input with mean 0 and standard deviation 1."""
    steps = network.graph.steps
    spreads = {
        steps[i].name: spread
        for i, spread in network.training.inputs.items()
        # only preprocessing is between the network's input and these layers
        if network.upstream(steps[i].inputs[0])[1] in network.graph.inputs
    }
    if not spreads:
        return check.passed("The inputs are token numbers.", math.nan)
    statuses = {name: _status_of_input(check, spread) for name, spread in spreads.items()}
    where = max(statuses, key=lambda name: list(Status).index(statuses[name]))
    spread = spreads[where]
    detail = (
        f"After preprocessing, the input has a mean of {spread.mean:.3g} and a standard deviation "
        f"of {spread.std:.3g} (expected: near 0 and 1)."
    )
    wrong = [name for name, status in statuses.items() if status != Status.PASS]
    if not spread.std:
        detail += " All values of a channel are equal: pass another sample."
    return check.finding(statuses[where], spread.std, wrong, detail)


def _status_of_input(check: Check, spread: Spread) -> Status:
    if spread.size > LARGEST_SIZE:
        # centred pixels that are not scaled, as the first ImageNet networks take them
        return Status.WARN if 2 * spread.mean < spread.std else Status.FAIL
    return check.limits.status(spread.std) if spread.std else Status.WARN


def output_scale(check: Check, network: Network) -> AuditFinding:
    """Measure the size of the logits."""
    name = network.graph.steps[-1].name
    detail = "The logits have a root mean square of {figure} ({limits})."
    return _judged(check, {name: network.training.output_size}, detail)


def moving_statistics(check: Check, network: Network) -> AuditFinding:
    """Compare the outputs of batch normalisations at inference with those in training."""
    steps = network.graph.steps
    norms = {
        i: steps[i].operation
        for i in network.training.outputs
        if hasattr(steps[i].operation, "moving_variance")
    }
    if not norms:
        return check.passed("No normalisation has moving statistics.", math.nan)
    if not any(as_numpy(norm.moving_mean).any() for norm in norms.values()):
        return check.passed("The network has not been trained: they are the first ones.", math.nan)
    if network.is_noise:
        return check.passed("They are not those of noise: pass a sample to judge them.", math.nan)
    at_inference = network.inference.outputs
    ratios = {
        steps[i].name: at_inference[i].size / network.training.outputs[i].size
        for i in norms
        if network.training.outputs[i].size
    }
    detail = (
        "At inference, with the moving statistics, the output of {where} is {figure} times as "
        "large as with those of the sample ({limits})."
    )
    return _judged(check, ratios, detail)


def loss_and_metrics(check: Check, network: Network) -> AuditFinding:
    """Compare what the loss and the metrics expect with what the model returns."""
    problems = network.problems
    if problems is None:
        return check.passed("The model is not compiled.", math.nan)
    if not problems:
        return check.passed("They take what the model returns.")
    is_loss = any(problem.of == "loss" for problem in problems)
    return check.finding(
        Status.FAIL if is_loss else Status.WARN,
        len(problems),
        [problem.output for problem in problems],
        " ".join(problem.text for problem in problems),
    )
