"""The checks of an audit as a table: what is measured, from where on it warns and fails, why, and what to do about it."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from keras import ops

from keras_preact.analysis.audit.measure import Gradients, Measures, Spread
from keras_preact.analysis.audit.report import Finding, Status
from keras_preact.analysis.audit.structure import Network, Unit, roles
from keras_preact.arrangements import ARRANGEMENTS

#: Orders of a branch that are the recommended ones: of the paper, and of transformers.
RECOMMENDED = ("full_preactivation", "pre_norm")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything that was measured on a network."""

    network: Network
    inference: Measures
    training: Measures
    gradients: Gradients


@dataclasses.dataclass(frozen=True)
class Limits:
    """Ranges of a figure: outside of `healthy` a check warns, outside of `bearable` it fails."""

    healthy: tuple[float, float]
    bearable: tuple[float, float]

    def status(self, value: float) -> Status:
        if not math.isfinite(value) or not self.bearable[0] <= value <= self.bearable[1]:
            return Status.FAIL
        return Status.PASS if self.healthy[0] <= value <= self.healthy[1] else Status.WARN

    def distance(self, value: float) -> float:
        """Return how far a value is from the middle of the healthy range, as the logarithm of a factor; for sorting."""
        if not math.isfinite(value) or value <= 0:
            return 0.0 if value == self.healthy[0] else float("inf")
        low, high = (max(limit, 1e-12) for limit in self.healthy)
        return abs(math.log(value / math.sqrt(low * high)))

    def worst(self, values: dict[str, float]) -> tuple[Status, float, tuple[str, ...]]:
        """Return the worst status and value, and the names of what is not healthy, the worst first."""
        names = sorted(values, key=lambda name: self.distance(values[name]), reverse=True)
        unhealthy = tuple(name for name in names if self.status(values[name]) != Status.PASS)
        return self.status(values[names[0]]), values[names[0]], unhealthy


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a check found."""

    status: Status
    figure: float
    locations: tuple[str, ...]
    detail: str


@dataclasses.dataclass(frozen=True)
class Check:
    """A row of `CHECKS`.

    Args:
        name: Its name.
        run: The function.
        unit: What its figure is.
        limits: Of the figure.
        meaning, advice, source: As in `Finding`.
    """

    name: str
    run: Callable[[Evidence, Limits], Outcome]
    unit: str
    limits: Limits
    meaning: str
    advice: str
    source: str

    def finding(self, evidence: Evidence) -> Finding:
        found = self.run(evidence, self.limits)
        return Finding(
            self.name,
            found.status,
            float(found.figure),
            self.unit,
            found.locations,
            found.detail,
            self.meaning,
            self.advice,
            self.source,
        )


def _what_stands_on(network: Network, unit: Unit, factor: float) -> str:
    """Say what changes the identity path of a unit."""
    kinds = [network.graph.steps[i].kind for i in unit.path]
    found = network.roles(unit.path)
    if "weight" in found and "Multiply" in kinds:
        return "a gate"
    names = [name for role, name in _ON_PATH.items() if role in found]
    if not names and {"Multiply", "Divide", "TrueDivide"} & set(kinds):
        return f"a scaling by {factor:.3g}"
    return " and ".join(names) or " and ".join(dict.fromkeys(kinds)) or "another tensor"


_ON_PATH = {
    "weight": "a weight layer",
    "norm": "a normalisation",
    "activation": "an activation",
    "dropout": "dropout",
}


def _is_activated(network: Network, unit: Unit) -> bool:
    """Whether nothing but an activation stands on the identity path."""
    return set(network.roles(unit.path)) == {"activation"}


def identity_path(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare what every shortcut that keeps the shape adds with the sum of the unit before."""
    network = evidence.network
    change = {
        unit.name: max(evidence.inference.change[unit.name], evidence.training.change[unit.name])
        for unit in network.units
        if unit.keeps_shape
    }
    exempt = len(network.units) - len(change)
    left = f"; {exempt} change the shape and are exempt" if exempt else ""
    if not change:
        return Outcome(Status.PASS, 0.0, (), f"No unit keeps the shape{left}.")
    broken = {name: value for name, value in change.items() if limits.status(value) != Status.PASS}
    names = tuple(sorted(broken, key=lambda name: broken[name], reverse=True))
    worst = max(change.values())
    clean = f"{len(change) - len(broken)} of {len(change)} units add what the unit before returned{left}"
    if not broken:
        return Outcome(Status.PASS, worst, (), f"{clean}.")
    units = {unit.name: unit for unit in network.units}
    what = collections.Counter(_what_stands_on(network, units[name], evidence.inference.factor[name]) for name in names)
    detail = f"{clean}. On the identity path of the others stands {', '.join(what)}."
    if all(_is_activated(network, units[name]) for name in names):
        status = Status.WARN if network.depth < POST_ACTIVATION_DEPTHS[1] else Status.FAIL
        return Outcome(status, worst, names, detail)
    return Outcome(Status.FAIL, worst, names, detail)


#: Weight layers up to which post-activation works fine, and up to which it works at all.
POST_ACTIVATION_DEPTHS = (50, 200)


def activation_after_addition(evidence: Evidence, limits: Limits) -> Outcome:
    """Measure the share of the sums' values that activations between additions cut."""
    network = evidence.network
    cut = {}
    for unit in network.units:
        shares = [evidence.inference.cut[i] for i in unit.shared if i in evidence.inference.cut]
        if unit.keeps_shape and shares:
            cut[unit.name] = max(shares)
    if not cut:
        return Outcome(Status.PASS, 0.0, (), "No activation stands between additions.")
    names = tuple(sorted(cut, key=lambda name: cut[name], reverse=True))
    mean = float(np.mean(list(cut.values())))
    fine, most = POST_ACTIVATION_DEPTHS
    status = Status.WARN if network.depth < most else Status.FAIL
    detail = (
        f"{len(cut)} units add an activated sum: on average {mean:.1%} of its values are cut or changed. The network has "
        f"{network.depth} weight layers; this works fine below {fine} and hardly from {most} on."
    )
    return Outcome(status, mean, names, detail)


def branch_order(evidence: Evidence, limits: Limits) -> Outcome:
    """Look for normalisation and activation in front of every weight of every branch."""
    network = evidence.network
    steps = network.graph.steps
    wrong: dict[str, str] = {}
    for unit in network.units:
        # The first activation stands in the stem, and where the shape changes it may serve both paths.
        own = unit.keeps_shape and not unit.is_first
        weights = network.first_weights(unit) if network.per_token else network.weights(unit.branch)
        for i in weights:
            order = network.order_before(i, {unit.addition.start} if own else ())
            if "norm" not in order if network.per_token else order[-2:] != ["norm", "activation"]:
                wrong[steps[i].name] = unit.name
                break
    named = network.usual_arrangement
    share = len(wrong) / len(network.units)
    rows = f"Most units are of the arrangement {named!r}" if named else "Most units have an order that has no name"
    if not wrong:
        return Outcome(Status.PASS, 0.0, (), f"{rows}.")
    first = next(iter(wrong))
    detail = f"{rows}; {len(wrong)} of {len(network.units)} units are not pre-activated, the first at {first}."
    mixed = named in RECOMMENDED or 2 * len(wrong) < len(network.units)
    return Outcome(Status.FAIL if mixed else Status.WARN, share, tuple(wrong), detail)


def normalized_input(evidence: Evidence, limits: Limits) -> Outcome:
    """Measure what the normalisation in front of each weight returns, or the weight reads where there is none."""
    network, measured = evidence.network, evidence.training
    steps = network.graph.steps
    spreads: dict[str, Spread] = {}
    missing: dict[str, Unit] = {}
    projections: set[str] = set()
    for unit in network.units:
        weights = network.first_weights(unit) if network.per_token else network.weights(unit.branch)
        own = [] if unit.keeps_shape else network.weights(unit.addition.shortcut_steps)
        projections.update(steps[i].name for i in own)
        for i in (*weights, *own):
            before, _ = network.upstream(steps[i].inputs[0])
            norms = [j for j in before if "norm" in roles(steps[j])]
            spreads[steps[i].name] = measured.outputs[norms[-1]] if norms else measured.inputs[i]
            if not norms:
                missing[steps[i].name] = unit
    if not spreads:
        return Outcome(Status.PASS, float("nan"), (), "No branch reads its unit's input through a weight layer.")
    std = {name: spread.std for name, spread in spreads.items()}
    # a small input that nothing normalises does no harm
    low = [value if name not in missing else max(value, limits.healthy[0]) for name, value in std.items()]
    status, _, locations = limits.worst(dict(zip(std, low, strict=True)))
    where = max(std, key=lambda name: limits.distance(std[name]))
    mean = {name: spread.mean for name, spread in spreads.items()}
    detail = f"Standard deviations from {min(std.values()):.3g} to {max(std.values()):.3g}, the worst at {where}; "
    detail += f"means up to {max(mean.values()):.3g}."
    if shifted := sorted((name for name in mean if mean[name] > MEAN_LIMIT), key=lambda name: mean[name], reverse=True):
        status, locations = _worse(status, Status.WARN), (*locations, *shifted)
    if missing:
        # in one unit of many it is a mistake; in most, in the first, or on a projection, the design
        inside = {unit.name for name, unit in missing.items() if not unit.is_first and name not in projections}
        is_mistake = 0 < 2 * len(inside) <= len(network.units)
        status, locations = _worse(status, Status.FAIL if is_mistake else Status.WARN), (*missing, *locations)
        detail += (
            f" {len(missing)} of {len(std)} weight layers have no normalisation between them and the last weight or addition."
        )
    return Outcome(status, std[where], tuple(dict.fromkeys(locations)), detail)


def _worse(*statuses: Status) -> Status:
    return max(statuses, key=list(Status).index)


#: What the mean of a normalised input may be.
MEAN_LIMIT = 0.5


def dropout_places(evidence: Evidence, limits: Limits) -> Outcome:
    """Apply what is random on the identity paths twice."""
    network = evidence.network
    steps = network.graph.steps
    random = {i: value for i, value in evidence.training.random.items() if value > limits.healthy[1]}
    in_branch = sum("dropout" in roles(steps[i]) for unit in network.units for i in unit.branch)
    safe = f"{in_branch} dropouts stand in branches, where they are safe" if in_branch else "There is no dropout in a branch"
    if not random:
        return Outcome(Status.PASS, 0.0, (), f"{safe}; what the identity paths carry is the same twice.")
    names = {unit.name: random[i] for unit in network.units for i in unit.path if i in random}
    after = sum(any(i in random for i in unit.shared) for unit in network.units)
    detail = (
        f"Two passes in training differ on the identity paths of {len(names)} units: on the shortcut of {len(names) - after}, "
    )
    detail += f"behind an addition in front of {after}. {safe}."
    return Outcome(Status.FAIL, max(names.values()), tuple(sorted(names, key=lambda name: names[name], reverse=True)), detail)


def final_activation(evidence: Evidence, limits: Limits) -> Outcome:
    """Look at what stands between the last addition and the pooling, and for normalisations back to back."""
    network = evidence.network
    names = [network.graph.steps[i].name for i in network.head if set(roles(network.graph.steps[i])) & {"norm", "activation"}]
    order = [role for role in network.roles(network.head) if role in ("norm", "activation")]
    if returns := [i for i in network.head if network.graph.steps[i].kind == "Softmax"]:
        order = order[: -len(returns)]
    last = network.units[-1].name
    row = ARRANGEMENTS.get(network.usual_arrangement or "")
    if network.per_token:
        wanted = ["norm"]
    elif row is not None:
        wanted = [*row.after_addition, *row.head]
    else:
        wanted = ["norm", "activation"] if network.is_preactivation else []
    doubled = _doubled(network)
    stands = " - ".join(order) or "nothing"
    asked = " - ".join(wanted) or "nothing"
    detail = f"Between the last addition and the pooling or classifier: {stands}; the units ask for {asked}."
    if doubled:
        detail += f" Two normalisations stand back to back at {', '.join(doubled)}."
    figure = float(order.count("norm"))
    if any(order.count(role) < wanted.count(role) for role in wanted):
        return Outcome(Status.FAIL, figure, (last,), detail)
    if doubled or (wanted and order.count("norm") > wanted.count("norm")):
        return Outcome(Status.WARN, figure, tuple(doubled or names), detail)
    return Outcome(Status.PASS, figure, (), detail)


def _doubled(network: Network) -> list[str]:
    """Return the names of the normalisations that read what another one returned."""
    doubled = []
    for i, step in enumerate(network.graph.steps):
        if "norm" in roles(network.graph.steps[i]):
            before = [role for role in network.roles(network.upstream(step.inputs[0])[0]) if role != "dropout"]
            if before[-1:] == ["norm"]:
                doubled.append(step.name)
    return doubled


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


INFINITY = float("inf")
PAPER = "arXiv 1603.05027"

#: The checks in their order. The limits are rules of thumb, but for those of what is exact.
CHECKS: tuple[Check, ...] = (
    Check(
        "identity path",
        identity_path,
        "largest ||h(x) - x|| / ||x||",
        Limits((0, 1e-5), (0, 1e-5)),  # rounding, where a layer casts
        "Factors on the shortcut are multiplied over all units: signals and gradients shrink or grow with the depth.",
        "Leave x as it is between additions: no scaling, gate, convolution, dropout, normalisation or activation.",
        f"Eq. 6 to 8 and Table 1 of {PAPER}",
    ),
    Check(
        "activation after addition",
        activation_after_addition,
        "mean share of values cut",
        Limits((0, 0), (0, 1)),
        "f is not the identity: gradients are blocked wherever the sum is negative, more so the deeper the network.",
        "Put normalisation and activation in front of the weights, and a last pair into the head: full pre-activation.",
        f"Sec. 4 and Fig. 4 of {PAPER}",
    ),
    Check(
        "branch order",
        branch_order,
        "share of units not pre-activated",
        Limits((0, 0), (0, 1)),
        "Full pre-activation, norm - activation - weight, is the order that trains best and regularises most.",
        "Put a normalisation, then an activation, in front of every weight of the branch (in a transformer: a normalisation).",
        f"Fig. 4 and Table 2 of {PAPER}",
    ),
    Check(
        "normalised input",
        normalized_input,
        "worst standard deviation",
        Limits((0.5, 2), (0.1, 10)),
        "A weight layer that reads sums as they are sees values that grow with the depth.",
        "Put a normalisation between each weight layer and the weight or addition in front of it.",
        f"Sec. 4.2 of {PAPER}",
    ),
    Check(
        "dropout",
        dropout_places,
        "relative difference of two passes",
        Limits((0, 1e-6), (0, 1e-6)),
        "Dropout on the identity path scales the signal by its rate once a unit, as a random shortcut factor.",
        "Move it into the branch: behind an activation in front of a weight, or in front of the addition.",
        f"Sec. 3.1 of {PAPER} (dropout shortcut: fails to converge)",
    ),
    Check(
        "final activation",
        final_activation,
        "normalisations behind the last addition",
        Limits((0, 1), (0, 1)),
        "Without it the classifier reads the sum of all branches as it is: training ends in NaN. Twice does nothing.",
        "Put one normalisation and activation between the last addition and the pooling; no two normalisations in a row.",
        f"appendix of {PAPER}",
    ),
    Check(
        "gradient of the signal",
        signal_gradients,
        "first unit over last of its shape",
        Limits((0.1, 10), (1e-3, 1e3)),
        "Gradients that shrink leave the first units untrained; gradients that grow make steps too large there.",
        "Clean the identity path, normalise the branches, scale their last weights (kp.initializers.DepthScaledHe()).",
        f"Eq. 5 of {PAPER}",
    ),
    Check(
        "gradient of the weights",
        weight_gradients,
        "first unit over last of its shape",
        Limits((0.1, 10), (1e-3, 1e3)),
        "One learning rate serves all units only where their gradients are of one size.",
        "As for the gradient of the signal; a warm-up of the learning rate where the ratio is that of the depth.",
        f"Eq. 5 of {PAPER}",
    ),
    Check(
        "signal growth",
        signal_growth,
        "growth of mean x^2 / units",
        # Branches of one size add up to a growth as the number of units; a factor 2 a unit passes these limits after 7 and 14.
        Limits((0, 10), (0, 1e3)),
        "Additions of normalised branches let the signal grow as the depth; faster growth is exponential and overflows.",
        "Normalise the branches; without normalisation, scale their last weights, as kp.models.FIXUP does.",
        f"Eq. 4 of {PAPER}",
    ),
    Check(
        "weight scale",
        weight_scale,
        "worst gain of a weight layer",
        # He's gain is sqrt(2), up to 2.8 where a bottleneck narrows by 4 under fan_out.
        Limits((1e-2, 10), (1e-4, 100)),
        "A weight layer should about keep the size of its input; normalisation hides a wrong scale until weights must move.",
        "He's initialisation (the variance 2 / fan), or an orthogonal one for very deep networks.",
        "arXiv 1502.01852; appendix of arXiv 1603.05027",
    ),
    Check(
        "distinct weights",
        distinct_weights,
        "kernels that equal another one",
        Limits((0, 0), (0, 0)),
        "Layers that start equal were given one seed: a Keras initialiser returns the same values each time it is called.",
        "Give every layer an initialiser with a seed of its own, or none.",
        "arXiv 1502.01852, which draws each weight by itself",
    ),
    Check(
        "live weights",
        live_weights,
        "broken kernels or units",
        Limits((0, 0), (0, 0)),
        "NaN spreads, constant kernels give all channels the same gradient, and a branch of zeros alone gets none.",
        "Initialise again; where a branch should start at zero, only its last weight does.",
        "arXiv 1901.09321 (a branch that starts at zero)",
    ),
    Check(
        "dead channels",
        dead_channels,
        "largest share of channels at 0",
        Limits((0, 0.1), (0, 0.5)),
        "A channel that is 0 for every example passes no gradient.",
        "Lower the learning rate or the biases; an activation that is not flat below 0, such as GELU.",
        "arXiv 1903.06733",
    ),
    Check(
        "sample scale",
        sample_scale,
        "size of what the network reads",
        Limits((0.1, 10), (0, INFINITY)),
        "Raw pixels, 0 to 255, make the first layer's gradients hundreds of times larger than the others'.",
        "Subtract the mean and divide by the standard deviation: builders take `mean` and `std`, or a Normalization layer.",
        f"Sec. 5 of {PAPER} (data preprocessing of the CIFAR networks)",
    ),
    Check(
        "output scale",
        output_scale,
        "root mean square of the logits",
        Limits((0, 10), (0, 100)),
        "Large logits saturate the softmax: the first losses are huge, and most gradients 0.",
        "Normalise in front of the classifier, and start its weights within 1 / sqrt(fan_in).",
        "arXiv 1901.09321",
    ),
)
