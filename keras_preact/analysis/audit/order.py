"""Checks of the order of layers: on the identity path, before weights, and after the
last addition.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from keras_preact.analysis.additions import Addition
from keras_preact.analysis.audit.check import Check, count, largest_first
from keras_preact.analysis.audit.measure import Spread, mix_of
from keras_preact.analysis.audit.network import Network
from keras_preact.analysis.audit.report import AuditFinding, Status, listed, shown
from keras_preact.arrangements import ARRANGEMENTS

#: Recommended orders of a branch: in residual networks and in transformers.
RECOMMENDED = ("full_preactivation", "pre_norm", "peri_norm")

#: What to do if the shortcuts of a network start after an activation by design.
FULL_PREACTIVATION = (
    "Use full pre-activation: a normalisation and an activation before each weight layer, and a "
    "last pair in the head."
)

#: What to do if a transformer normalises its sums by design.
PRE_NORM = "Use pre-norm: a normalisation at the start of each branch, and a last one in the head."

STREAMS_PAPER = "arXiv 2512.24880"

#: What to do if nothing bounds how a network mixes its residual streams.
BOUNDED_MIX = (
    "Make the matrices that mix the residual streams doubly stochastic: "
    "kp.shortcuts.HyperConnections(constraint='sinkhorn'), or 'permutations'."
)

#: Largest healthy mean of a normalised input.
MEAN_LIMIT = 0.5

#: Largest healthy epsilon of a normalisation; Keras has 1e-3, the paper 1e-5.
EPSILON_LIMIT = 0.01

_IN_WORDS = {
    "weight": "a weight layer",
    "norm": "a normalisation",
    "activation": "an activation",
    "dropout": "dropout",
}


_SCALING = "a scaling"


def _layers_on_path(network: Network, unit: Addition) -> tuple[str, ...]:
    """Name what is on the identity path of a unit, apart from a mix of streams."""
    path = network.on_path(unit)
    kinds = [network.graph.steps[i].kind for i in path]
    roles = network.roles(path)
    if "weight" in roles and "Multiply" in kinds:
        return ("a gate",)
    names = [name for role, name in _IN_WORDS.items() if role in roles]
    if {"Multiply", "Divide", "TrueDivide"} & set(kinds):
        names.append(_SCALING)
    mixed = mix_of(network.graph, unit) is not None
    return tuple(names or dict.fromkeys(kinds) or ([] if mixed else ["another tensor"]))


def _path_in_words(on_path: Mapping[str, Sequence[str]], factors: Mapping[str, float]) -> str:
    """Return what is on identity paths in words, with the factors of pure scalings."""
    words = {names: listed(names, len(names)) for names in on_path.values()}
    if scaled := [factors[unit] for unit, names in on_path.items() if names == (_SCALING,)]:
        ends = (f"{factor:.3g}" for factor in (min(scaled), max(scaled)))
        words[_SCALING,] += f" by {' to '.join(dict.fromkeys(ends))}"
    return ", or ".join(words.values())


def _by_design(network: Network, on_path: Iterable[tuple[str, ...]]) -> list[str]:
    """Return what to do if the layers on identity paths belong to a design that trains;
    an empty list if they are mistakes.

    Networks with an activation, or transformers with a normalisation, after every
    addition are such designs. Beside a normalisation in the branch, both are mistakes.
    """
    is_post_norm = network.usual_arrangement == "post_norm"
    if _activated_twice(network) and not is_post_norm:
        return []
    # as in DeepNorm: the normalisation of each sum keeps factors from multiplying over units
    found = [{*names} - {_SCALING} if is_post_norm else {*names} for names in on_path]
    designs = {_IN_WORDS["activation"]: FULL_PREACTIVATION}
    designs |= {_IN_WORDS["norm"]: PRE_NORM} if network.per_token else {}
    if any(len(names) > 1 or not names <= designs.keys() for names in found):
        return []
    return [advice for name, advice in designs.items() if {name} in found]


def identity_path(check: Check, network: Network) -> AuditFinding:
    """Compare what each unit adds on its identity path with the previous sum."""
    units = {unit.name: unit for unit in network.units if unit.keeps_shape}
    every, exempt = count(len(units), "unit"), len(network.units) - len(units)
    change = {
        name: max(network.inference.change[name], network.training.change[name]) for name in units
    }
    ranked = largest_first(change)
    mixes = {name: mix for name in ranked if (mix := mix_of(network.graph, units[name]))}
    free = [name for name, mix in mixes.items() if not mix.is_bounded]
    on_path = {
        name: layers
        for name in check.limits.unhealthy(change, ranked)
        if (layers := _layers_on_path(network, units[name]))
    }
    designed = _by_design(network, on_path.values())
    details, advices = [], designed
    if broken := list(on_path):
        found = _path_in_words(on_path, network.inference.factor)
        details.append(f"In {len(broken)} of {every}, the identity path has {found}.")
        if path := [network.graph.steps[i].name for i in network.on_path(units[broken[0]])]:
            details.append(f"In {broken[0]}: {listed(path, 3)}.")
            others = f" Do the same in {listed(broken[1:], 3)}." if broken[1:] else ""
            advices = designed or [f"Remove {listed(path, 3)} from the shortcut.{others}"]
    elif len(mixes) < len(units) or not units:
        unchanged = len(units) - len(mixes)
        details.append(f"The identity path leaves its input unchanged in {unchanged} of {every}.")
    if free:
        details.append(
            f"In {len(free)} of {every}, a free matrix mixes the residual streams, and nothing "
            "bounds the product of these matrices; kp.analysis.composite_gain measures it."
        )
        advices = [*advices, BOUNDED_MIX]
    elif mixes:
        details.append(
            f"In {len(mixes)} of {every}, a doubly stochastic matrix mixes the residual streams. "
            "The product of such matrices is one too, so it enlarges neither signals nor "
            f"gradients at any depth ({STREAMS_PAPER})."
        )
    if exempt:
        details.append(f"Units that change the shape are exempt: {exempt}.")
    is_mistake = bool(broken) and not designed
    status = Status.FAIL if is_mistake else Status.WARN if broken or free else Status.PASS
    where = [*broken, *free]
    figure = change[where[0]] if where else max(change.values(), default=0.0)
    return check.finding(status, figure, where, " ".join(details), " ".join(advices))


def _activated_twice(network: Network) -> list[Addition]:
    """Return the units with a shortcut that starts after an activation, although the
    branch starts with its own normalisation and activation: a mistake in every design.
    """
    return [
        unit
        for unit in network.units
        if network.order(unit.shared)[-1:] == ["activation"]
        and network.order(unit.branch)[:2] == ["norm", "activation"]
    ]


def activation_after_addition(check: Check, network: Network) -> AuditFinding:
    """Measure the share of a sum's values that an activation changes before the next
    addition.
    """
    cut = network.inference.cut
    # For each unit, the activation that changes the most values.
    activations = {
        unit.name: max(shared, key=lambda i: cut[i])
        for unit in network.units
        if unit.keeps_shape and (shared := [i for i in unit.shared if i in cut])
    }
    shares = {name: cut[i] for name, i in activations.items()}
    if not shares:
        return check.passed("No activation is between two additions.")
    names = largest_first(shares)
    units = [unit for unit in network.units if unit.name in shares]
    mean = float(np.mean(list(shares.values())))
    changed = shown(mean, check.unit)
    detail = (
        f"In {count(len(shares), 'unit')}, the shortcut starts after an activation (such as "
        f"{network.graph.steps[activations[names[0]]].name}), which changes {changed} of the "
        "values on average. Such networks train, but in the paper full pre-activation has a lower "
        "error, and the gain grows with the depth: from 6.61 to 6.37 % with 110 weight layers, "
        f"from 7.61 to 4.92 % with 1,001 (Table 3). This one has {network.depth}."
    )
    if mistakes := [
        activations[u.name] for u in _activated_twice(network) if u.name in activations
    ]:
        where = [network.graph.steps[i].name for i in mistakes]
        return check.finding(
            Status.FAIL,
            mean,
            where,
            f"{detail} The branches after {listed(where, 3)} start with a normalisation and an "
            "activation of their own.",
            f"Remove {listed(where, 3)}.",
            is_ranked=False,
        )
    are_pairs = all(network.order(unit.shared) == ["norm", "activation"] for unit in units)
    advice = _start_earlier(network, units) if are_pairs else ""
    return check.finding(Status.WARN, mean, names, detail, advice)


def _start_earlier(network: Network, units: Iterable[Addition]) -> str:
    """Name the layers that the shortcuts of `units` should start before."""
    first = [network.graph.steps[network.on_path(unit)[0]].name for unit in units]
    which = "each" if len(first) > 1 else "the"
    return f"Start {which} shortcut at the addition, before {listed(first, 3)}."


def branch_order(check: Check, network: Network) -> AuditFinding:
    """Find weights without a normalisation and an activation of their branch right
    before them.
    """
    # For each unit, `missing` has the first weight with nothing right before it. If there is none,
    # `shared` has the first weight with a normalisation and an activation that also feed the
    # shortcut. `wrong` has the first weight of either kind.
    missing: list[str] = []
    shared: dict[str, Addition] = {}
    wrong: list[str] = []

    def is_fine(weight: int, stops: Iterable[int] = ()) -> bool:
        order = network.order_before(weight, stops)
        return "norm" in order if network.per_token else order[-2:] == ["norm", "activation"]

    for unit in network.units:
        # The first activation is in the stem; a unit that changes the shape may share it between
        # both paths.
        stops = {unit.start} if unit.keeps_shape and not unit.is_first else ()
        bad = [i for i in network.reading_weights(unit) if not is_fine(i, stops)]
        if not bad:
            continue
        wrong.append(network.graph.steps[bad[0]].name)
        if alone := [i for i in bad if not is_fine(i)]:
            missing.append(network.graph.steps[alone[0]].name)
        else:
            shared[wrong[-1]] = unit
    usual, total = network.usual_arrangement, len(network.units)
    reading = f"are read as {usual!r}" if usual else "have no known arrangement"
    detail = f"Most units {reading}."
    if not wrong:
        return check.passed(detail)
    needed = "normalisation" if network.per_token else "normalisation and activation"
    every = f"of {count(total, 'unit')}"
    advice = ""
    if missing:
        detail = (
            f"In {len(missing)} {every}, a weight layer has no {needed} right before it (first: "
            f"{missing[0]}). {detail}"
        )
    if shared:
        detail = (
            f"In {len(shared)} {every}, the shortcut starts after the {needed} of a weight layer "
            f"(first: {next(iter(shared))}). {detail}"
        )
        advice = _start_earlier(network, shared.values()) + f" {check.advice}" * bool(missing)
    is_mixed = usual in RECOMMENDED or 2 * len(wrong) < total
    status = Status.FAIL if is_mixed else Status.WARN
    share = len(wrong) / total
    return check.finding(status, share, wrong, detail, advice, is_ranked=False)


def normalized_input(check: Check, network: Network) -> AuditFinding:
    """Measure the output of the normalisation before each weight, or the weight's input
    if there is none.
    """
    measured, limits = network.training, check.limits
    steps = network.graph.steps
    spreads: dict[str, Spread] = {}
    missing: list[str] = []
    # Whether each unit lacks a norm before weights that read a weight layer (True), or before other
    # weights (False).
    lacks: dict[bool, dict[str, bool]] = {True: {}, False: {}}
    for unit in network.units:
        projections = [] if unit.keeps_shape else network.weights(unit.shortcut_steps)
        for i in (*network.reading_weights(unit), *projections):
            before, end = network.upstream(steps[i].inputs[0])
            norms = [j for j in before if "norm" in steps[j].roles]
            spreads[steps[i].name] = measured.outputs[norms[-1]] if norms else measured.inputs[i]
            if not norms:
                missing.append(steps[i].name)
            if i not in projections and not unit.is_first:
                producer = network.graph.producers.get(end)
                by_unit = lacks[producer is not None and steps[producer].has_kernel]
                by_unit[unit.name] = by_unit.get(unit.name, False) or not norms
    if not spreads:
        detail = "No branch reads its unit's input through a weight layer."
        return check.passed(detail, math.nan)
    std = {name: spread.std for name, spread in spreads.items()}
    mean = {name: spread.mean for name, spread in spreads.items()}
    # A small input that nothing normalises does no harm.
    judged = {
        name: max(value, limits.healthy[0]) if name in missing else value
        for name, value in std.items()
    }
    names = limits.worst_first(judged)
    where = limits.worst_first(std)[0]
    statuses, locations = [limits.status(judged[names[0]])], limits.unhealthy(judged, names)
    detail = (
        f"Standard deviations are {min(std.values()):.3g} to {max(std.values()):.3g} "
        f"({check.healthy}; worst: {where}), means up to {max(mean.values()):.3g} (healthy: up to "
        f"{MEAN_LIMIT:g})."
    )
    if damped := _damped(network):
        statuses.append(Status.FAIL)
        locations = (*damped, *locations)
        detail = (
            f"Normalisations with an epsilon above {EPSILON_LIMIT:g}: {len(damped)} (first: "
            f"{next(iter(damped))}, {next(iter(damped.values())):g}). {detail}"
        )
    if shifted := [name for name in largest_first(mean) if mean[name] > MEAN_LIMIT]:
        statuses.append(Status.WARN)
        locations = (*locations, *shifted)
    if missing:
        # It is a mistake if few units lack a normalisation. If most units, the first one or a
        # projection lack it, it is the design.
        is_mistake = any(
            0 < 2 * sum(by_unit.values()) <= len(by_unit) for by_unit in lacks.values()
        )
        statuses.append(Status.FAIL if is_mistake else Status.WARN)
        locations = (*missing, *locations)
        lacking = f"{len(missing)} of {len(std)}"
        detail = f"Weight layers without a normalisation before them: {lacking}. {detail}"
    worst = max(statuses, key=list(Status).index)
    return check.finding(worst, std[where], locations, detail, is_ranked=not missing)


def _damped(network: Network) -> dict[str, float]:
    """Return normalisations with an epsilon too large to normalise small inputs."""
    norms = [step for step in network.graph.steps if "norm" in step.roles]
    epsilons = {step.name: getattr(step.operation, "epsilon", None) or 0.0 for step in norms}
    return {name: epsilon for name, epsilon in epsilons.items() if epsilon > EPSILON_LIMIT}


def final_activation(check: Check, network: Network) -> AuditFinding:
    """Compare the layers after the last addition with those that the arrangement needs, or
    with those before the units' weights if it is unknown; find doubled norms.
    """
    head, weight = network.downstream(network.units[-1].total)
    steps = [network.graph.steps[i] for i in head]
    names = [step.name for step in steps if set(step.roles) & {"norm", "activation"}]
    order = [
        role
        for step in steps
        if step.kind != "Softmax"  # it returns the classes
        for role in step.roles
        if role in ("norm", "activation")
    ]
    row = ARRANGEMENTS.get(network.usual_arrangement or "")
    wanted: list[str] | None
    if network.per_token:
        wanted = ["norm"]
    elif row is not None:
        wanted = [*row.after_addition, *row.head]
    else:
        # The classifier reads the last sum, as one more unit would.
        wanted = network.usual_start
        if wanted is None and order == ["norm", "activation"]:
            wanted = order  # enough for any unit
    needed = "unknown, because the units differ before their first weight layer"
    if wanted is not None:
        needed = _in_words(wanted) or "none"
    doubled = _doubled(network)
    present = _in_words(order) or "no normalisation and no activation"
    detail = f"After the last addition: {present}. Needed: {needed}."
    if doubled:
        detail = f"A normalisation directly follows another one: {', '.join(doubled)}. {detail}"
    figure = order.count("norm")
    if wanted is None:
        return check.finding(Status.WARN, figure, doubled or names, detail, is_ranked=False)
    if any(order.count(role) < wanted.count(role) for role in wanted):
        if weight is not None and _is_normalized_after(network, weight):
            layer = network.graph.steps[weight].name
            return check.passed(f"{detail} They follow {layer}, which reads the sum.", figure)
        return check.finding(Status.FAIL, figure, [network.units[-1].name], detail)
    if wanted[:1] == ["norm"] and order[:1] == ["activation"]:
        return check.finding(
            Status.FAIL, figure, names[:1], detail, f"Remove {names[0]}, right after the addition."
        )
    if doubled or (wanted and figure > wanted.count("norm")):
        return check.finding(Status.WARN, figure, doubled or names, detail, is_ranked=False)
    return check.passed(detail, figure)


def _is_normalized_after(network: Network, weight: int) -> bool:
    """Tell whether a normalisation, then an activation separate a weight layer from the
    next one.
    """
    _, reader = network.downstream(network.graph.steps[weight].outputs[0])
    return reader is not None and network.order_before(reader) == ["norm", "activation"]


def _in_words(order: list[str]) -> str:
    return ", then ".join(_IN_WORDS[role] for role in order)


def _doubled(network: Network) -> list[str]:
    """Return the names of normalisations directly after another one."""
    return [
        step.name
        for step in network.graph.steps
        if "norm" in step.roles
        and network.order(network.upstream(step.inputs[0])[0])[-1:] == ["norm"]
    ]
