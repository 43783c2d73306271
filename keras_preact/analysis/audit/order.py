"""Checks of the order of layers: on the identity path, before weights, after the last
addition.
"""

from collections.abc import Iterable

import numpy as np

from keras_preact.analysis.audit.check import Evidence, Limits, Outcome, count
from keras_preact.analysis.audit.measure import Spread
from keras_preact.analysis.audit.report import Status, listed
from keras_preact.analysis.audit.structure import Network, Unit, roles
from keras_preact.arrangements import ARRANGEMENTS

#: Recommended orders of a branch: in residual networks and in transformers.
RECOMMENDED = ("full_preactivation", "pre_norm")


def _found_on_path(network: Network, unit: Unit, factor: float) -> str:
    """Name the layers on the identity path of a unit."""
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
    """Whether the identity path has activations only."""
    return set(network.roles(unit.path)) == {"activation"}


def identity_path(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare what each unit adds on its identity path with the previous sum."""
    network = evidence.network
    change = {
        unit.name: max(evidence.inference.change[unit.name], evidence.training.change[unit.name])
        for unit in network.units
        if unit.keeps_shape
    }
    exempt = len(network.units) - len(change)
    left = f" Units that change the shape are exempt: {exempt}." if exempt else ""
    if not change:
        return Outcome(Status.PASS, 0.0, (), f"No unit keeps the shape.{left}")
    broken = {name: value for name, value in change.items() if limits.status(value) != Status.PASS}
    names = tuple(sorted(broken, key=lambda name: broken[name], reverse=True))
    worst = max(change.values())
    if not broken:
        kept = f"The identity path leaves its input unchanged in {len(change)} of {count(len(change), 'unit')}."
        return Outcome(Status.PASS, worst, (), kept + left)
    units = {unit.name: unit for unit in network.units}
    found = dict.fromkeys(
        _found_on_path(network, units[name], evidence.inference.factor[name]) for name in names
    )
    detail = f"In {len(broken)} of {count(len(change), 'unit')}, the identity path has {', or '.join(found)}."
    if path := [network.graph.steps[i].name for i in units[names[0]].path]:
        detail += f" In {names[0]}: {listed(path, 3)}."
    detail += left
    advice = f"Take {listed(path, 3)} off the shortcut" if path else ""
    if advice and len(names) > 1:
        advice += f", and likewise the layers on the shortcuts of {listed(names[1:], 3)}"
    advice += "." if advice else ""
    if all(_is_activated(network, units[name]) for name in names):
        status = Status.WARN if network.depth < POST_ACTIVATION_DEPTHS[1] else Status.FAIL
        return Outcome(status, worst, names, detail, advice)
    return Outcome(Status.FAIL, worst, names, detail, advice)


#: Numbers of weight layers below which post-activation trains well, and below which it trains at
#: all.
POST_ACTIVATION_DEPTHS = (50, 200)


def activation_after_addition(evidence: Evidence, limits: Limits) -> Outcome:
    """Measure the share of a sum's values that an activation changes before the next
    addition.
    """
    network = evidence.network
    cut: dict[str, float] = {}
    activations: dict[str, str] = {}
    for unit in network.units:
        shares = {i: evidence.inference.cut[i] for i in unit.shared if i in evidence.inference.cut}
        if unit.keeps_shape and shares:
            cut[unit.name] = max(shares.values())
            activations[unit.name] = network.graph.steps[max(shares, key=lambda i: shares[i])].name
    if not cut:
        return Outcome(Status.PASS, 0.0, (), "No activation is between two additions.")
    names = tuple(sorted(cut, key=lambda name: cut[name], reverse=True))
    units = [unit for name in names for unit in network.units if unit.name == name]
    is_preactivation = all(
        _without_dropout(network.roles(unit.shared)) == ["norm", "activation"] for unit in units
    )
    mean = float(np.mean(list(cut.values())))
    fine, most = POST_ACTIVATION_DEPTHS
    status = Status.WARN if network.depth < most else Status.FAIL
    detail = (
        f"In {count(len(cut), 'unit')}, the shortcut starts after an activation (such as "
        f"{activations[names[0]]}), which changes {mean:.1%} of the values on average. With fewer "
        f"than {fine} weight layers such networks still train well; from {most} on they hardly "
        f"train. This one has {network.depth}."
    )
    return Outcome(
        status, mean, names, detail, _start_earlier(network, units) if is_preactivation else ""
    )


def _without_dropout(order: list[str]) -> list[str]:
    return [role for role in order if role != "dropout"]


def _start_earlier(network: Network, units: list[Unit]) -> str:
    """Name the layers that the shortcuts of `units` should start before."""
    first = [network.graph.steps[unit.shared[0]].name for unit in units]
    return f"Start {'each' if len(first) > 1 else 'the'} shortcut at the addition, before {listed(first, 3)}."


def branch_order(evidence: Evidence, limits: Limits) -> Outcome:
    """Find weights without a normalisation and an activation of their branch right
    before them.
    """
    network = evidence.network
    steps = network.graph.steps
    missing: dict[str, Unit] = {}  # first weight of a unit that has none right before it
    shared: dict[
        str, Unit
    ] = {}  # first weight of a unit whose normalisation and activation also feed the shortcut
    wrong: dict[str, Unit] = {}  # first weight of either kind

    def is_fine(weight: int, stops: Iterable[int] = ()) -> bool:
        order = network.order_before(weight, stops)
        return "norm" in order if network.per_token else order[-2:] == ["norm", "activation"]

    for unit in network.units:
        # The first activation is in the stem; a unit that changes the shape may share it between
        # both paths.
        own = unit.keeps_shape and not unit.is_first
        weights = network.first_weights(unit) if network.per_token else network.weights(unit.branch)
        bad = [i for i in weights if not is_fine(i, {unit.addition.start} if own else ())]
        if not bad:
            continue
        wrong[steps[bad[0]].name] = unit
        if alone := [i for i in bad if not is_fine(i)]:
            missing[steps[alone[0]].name] = unit
        else:
            shared[steps[bad[0]].name] = unit
    named = network.usual_arrangement
    share = len(wrong) / len(network.units)
    rows = (
        f"Most units are read as {named!r}." if named else "Most units have no known arrangement."
    )
    if not wrong:
        return Outcome(Status.PASS, 0.0, (), rows)
    needed, feed = (
        ("normalisation", "feeds")
        if network.per_token
        else ("normalisation and activation", "feed")
    )
    every = f"of {count(len(network.units), 'unit')}"
    parts, remedies = [], []
    if shared:
        parts.append(
            f"In {len(shared)} {every}, the {needed} before a weight layer also {feed} the "
            f"shortcut (first: before {next(iter(shared))})."
        )
        remedies.append(_start_earlier(network, list(shared.values())))
    if missing:
        parts.append(
            f"In {len(missing)} {every}, a weight layer has no {needed} right before it (first: "
            f"{next(iter(missing))})."
        )
        then = "" if network.per_token else ", then an activation,"
        remedies.append(f"Put a normalisation{then} right before {listed(list(missing), 3)}.")
    advice = " ".join(remedies) if shared else ""
    detail = " ".join([*parts, rows])
    mixed = named in RECOMMENDED or 2 * len(wrong) < len(network.units)
    status = Status.FAIL if mixed else Status.WARN
    return Outcome(status, share, tuple(wrong), detail, advice, is_ranked=False)


def normalized_input(evidence: Evidence, limits: Limits) -> Outcome:
    """Measure the output of the normalisation before each weight, or the weight's input
    without one.
    """
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
        return Outcome(
            Status.PASS,
            float("nan"),
            (),
            "No branch reads its unit's input through a weight layer.",
        )
    std = {name: spread.std for name, spread in spreads.items()}
    # a small input that nothing normalises does no harm
    low = [
        value if name not in missing else max(value, limits.healthy[0])
        for name, value in std.items()
    ]
    status, _, locations = limits.worst(dict(zip(std, low, strict=True)))
    where = max(std, key=lambda name: limits.distance(std[name]))
    mean = {name: spread.mean for name, spread in spreads.items()}
    detail = f"Standard deviations are {min(std.values()):.3g} to {max(std.values()):.3g} ({limits}; worst: {where}), "
    detail += f"means up to {max(mean.values()):.3g} (healthy: up to {MEAN_LIMIT:g})."
    if shifted := sorted(
        (name for name in mean if mean[name] > MEAN_LIMIT),
        key=lambda name: mean[name],
        reverse=True,
    ):
        status, locations = _worse(status, Status.WARN), (*locations, *shifted)
    if missing:
        # a mistake if few units lack it; the design if most do, or the first, or a projection
        inside = {
            unit.name
            for name, unit in missing.items()
            if not unit.is_first and name not in projections
        }
        is_mistake = 0 < 2 * len(inside) <= len(network.units)
        status, locations = (
            _worse(status, Status.FAIL if is_mistake else Status.WARN),
            (*missing, *locations),
        )
        detail = f"Weight layers without a normalisation before them: {len(missing)} of {len(std)}. {detail}"
    return Outcome(
        status, std[where], tuple(dict.fromkeys(locations)), detail, is_ranked=not missing
    )


def _worse(*statuses: Status) -> Status:
    return max(statuses, key=list(Status).index)


#: Largest healthy mean of a normalised input.
MEAN_LIMIT = 0.5


def dropout_places(evidence: Evidence, limits: Limits) -> Outcome:
    """Call the random layers on the identity paths twice."""
    network = evidence.network
    steps = network.graph.steps
    random = {
        i: value for i, value in evidence.training.random.items() if value > limits.healthy[1]
    }
    in_branch = sum("dropout" in roles(steps[i]) for unit in network.units for i in unit.branch)
    safe = f" Dropout layers in branches, where they are safe: {in_branch}." if in_branch else ""
    if not random:
        return Outcome(Status.PASS, 0.0, (), f"No identity path is random.{safe}")
    names = {unit.name: random[i] for unit in network.units for i in unit.path if i in random}
    after = sum(any(i in random for i in unit.shared) for unit in network.units)
    places = {"on the shortcut": len(names) - after, "after the previous addition": after}
    where = ", ".join(f"{place}: {number}" for place, number in places.items() if number)
    layer = steps[max(random, key=lambda i: random[i])].name
    detail = f"In {count(len(names), 'unit')}, the identity path has dropout (such as {layer}; {where}).{safe}"
    return Outcome(
        Status.FAIL,
        max(names.values()),
        tuple(sorted(names, key=lambda name: names[name], reverse=True)),
        detail,
    )


def final_activation(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the layers after the last addition with what the units need; find doubled
    norms.
    """
    network = evidence.network
    names = [
        network.graph.steps[i].name
        for i in network.head
        if set(roles(network.graph.steps[i])) & {"norm", "activation"}
    ]
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
    found = _in_words(order) or "no normalisation and no activation"
    detail = f"After the last addition the network has {found}. Its units need {_in_words(wanted) or 'none'}."
    if doubled:
        detail = f"A normalisation directly follows another one: {', '.join(doubled)}. {detail}"
    figure = float(order.count("norm"))
    if any(order.count(role) < wanted.count(role) for role in wanted):
        return Outcome(Status.FAIL, figure, (last,), detail)
    if doubled or (wanted and order.count("norm") > wanted.count("norm")):
        return Outcome(Status.WARN, figure, tuple(doubled or names), detail, is_ranked=False)
    return Outcome(Status.PASS, figure, (), detail)


def _in_words(order: list[str]) -> str:
    return ", then ".join(_ON_PATH[role] for role in order)


def _doubled(network: Network) -> list[str]:
    """Return the names of normalisations directly after another one."""
    doubled = []
    for i, step in enumerate(network.graph.steps):
        if "norm" in roles(network.graph.steps[i]):
            before = [
                role
                for role in network.roles(network.upstream(step.inputs[0])[0])
                if role != "dropout"
            ]
            if before[-1:] == ["norm"]:
                doubled.append(step.name)
    return doubled
