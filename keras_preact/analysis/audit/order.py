"""Checks of what stands where: on the identity path, in front of the weights, behind the last addition."""

import collections

import numpy as np

from keras_preact.analysis.audit.check import Evidence, Limits, Outcome
from keras_preact.analysis.audit.measure import Spread
from keras_preact.analysis.audit.report import Status
from keras_preact.analysis.audit.structure import Network, Unit, roles
from keras_preact.arrangements import ARRANGEMENTS

#: Orders of a branch that are the recommended ones: of the paper, and of transformers.
RECOMMENDED = ("full_preactivation", "pre_norm")


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
