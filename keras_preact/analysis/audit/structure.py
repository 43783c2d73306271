"""What an audit reads off a graph: the units of a network, what stands on their paths, and in which order."""

import collections
import dataclasses
import math
from collections.abc import Iterable
from functools import cached_property

import keras

from keras_preact.analysis.graph import Addition, Graph, Step
from keras_preact.arrangements import ARRANGEMENTS, TRANSFORMER_ARRANGEMENTS

#: Names of activations, as of classes of layers and operations in lower case.
ACTIVATIONS = frozenset(name.replace("_", "") for name in dir(keras.activations) if name[0] != "_") - {
    "linear",
    "get",
    "serialize",
    "deserialize",
}

#: Normalisations that work on each example, or each token of it, by itself: those of transformers.
PER_TOKEN = ("LayerNorm", "RMSNorm")

#: What an activation or a normalisation passes through on its way to a weight layer, although it has several inputs.
GATES = ("Multiply", "Concatenate")


def roles(step: Step) -> tuple[str, ...]:
    """Return what a step is for a unit: `"weight"`, `"norm"`, `"activation"`, `"dropout"`, several of these, or nothing."""
    operation, kind = step.operation, step.kind
    if kind == "Activation" or step.has_kernel:
        function = getattr(operation, "activation", None)
        active = callable(function) and function is not keras.activations.linear
        return ("weight",) * step.has_kernel + ("activation",) * active
    if "Norm" in kind:
        return () if isinstance(operation, keras.layers.Normalization) else ("norm",)  # that one is of the data
    if kind.replace("_", "").lower() in ACTIVATIONS:
        return ("activation",)
    return ("dropout",) if getattr(operation, "seed_generator", None) is not None else ()


@dataclasses.dataclass(frozen=True)
class Unit:
    """A residual unit of any model.

    Args:
        name: The layer that it is, or that of its addition.
        addition: Its place in the graph.
        before: The tensor that the identity path starts from: the sum of the unit before; of the first unit, its own start.
        is_first: Whether no unit stands in front of it.
        keeps_shape: Whether the sum has the shape of `before`: the shortcut should then be the identity.
        path: Steps from `before` to what is added, the identity path.
        shared: Steps from `before` to where the paths split.
        branch: Steps from there to the other tensor that is added, without those that the identity path has as well.
    """

    name: str
    addition: Addition
    before: int
    is_first: bool
    keeps_shape: bool
    path: tuple[int, ...]
    shared: tuple[int, ...]
    branch: tuple[int, ...]


class Network:
    """The units of a graph, and the order of what stands in them."""

    def __init__(self, graph: Graph):
        self.graph = graph
        totals = {addition.total for addition in graph.additions}
        self.units: list[Unit] = []
        for addition in graph.additions:
            before: int | None = addition.start
            while before is not None and before not in totals:
                before = graph.dominators[before]
            start = addition.start if before is None else before
            shared = graph.between(start, addition.start) if start != addition.start else ()
            self.units.append(
                Unit(
                    self._name(addition),
                    addition,
                    start,
                    before is None,
                    graph.specs[start].shape[1:] == graph.specs[addition.total].shape[1:],
                    (*shared, *addition.shortcut_steps),
                    shared,
                    tuple(i for i in addition.residual_steps if i not in addition.shortcut_steps),
                )
            )
        repeated = {name for name, count in collections.Counter(unit.name for unit in self.units).items() if count > 1}
        seen: collections.Counter = collections.Counter()
        for i, unit in enumerate(self.units):
            if unit.name in repeated:
                seen[unit.name] += 1
                self.units[i] = dataclasses.replace(unit, name=f"{unit.name} (addition {seen[unit.name]})")

    def _name(self, addition: Addition) -> str:
        names = [self.graph.steps[i].name.split("/") for i in (*addition.residual_steps, addition.step)]
        common = []
        for parts in zip(*(name[:-1] for name in names), strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        return "/".join(common) or self.graph.steps[addition.step].name

    def roles(self, steps: Iterable[int]) -> list[str]:
        return [role for i in steps for role in roles(self.graph.steps[i])]

    def weights(self, steps: Iterable[int]) -> list[int]:
        return [i for i in steps if self.graph.steps[i].has_kernel]

    @cached_property
    def depth(self) -> int:
        """Number of weight layers, without those on shortcuts."""
        return len([i for i in self.weights(range(len(self.graph.steps))) if i not in self.on_shortcuts])

    @cached_property
    def on_shortcuts(self) -> frozenset[int]:
        """Steps on shortcuts: projections, gates."""
        return frozenset(i for unit in self.units for i in unit.addition.shortcut_steps)

    @cached_property
    def per_token(self) -> bool:
        """Whether it is a transformer: sequences, with a normalisation that works on each token."""
        inside = [self.graph.steps[i] for unit in self.units for i in (*unit.shared, *unit.branch)]
        norms = [step for step in inside if "norm" in roles(step)]
        sequences = all(len(self.graph.specs[unit.addition.total].shape) == 3 for unit in self.units)
        return sequences and bool(norms) and all(any(word in step.kind for word in PER_TOKEN) for step in norms)

    def upstream(self, tensor: int, stops: Iterable[int] = ()) -> tuple[list[int], int]:
        """Follow a tensor back to a weight layer, an addition or one of the tensors `stops`.

        Returns:
            The steps on the way, the nearest to `tensor` last, and the tensor in front of them.
        """
        steps: list[int] = []
        stops = set(stops)
        while tensor not in stops and (i := self.graph.producers.get(tensor)) is not None:
            step = self.graph.steps[i]
            if step.has_kernel or not step.inputs or (len(step.inputs) > 1 and step.kind not in GATES):
                break
            steps.append(i)
            tensor = max(step.inputs, key=self._size)
        return steps[::-1], tensor

    def _size(self, tensor: int) -> int:
        return math.prod(size or 1 for size in self.graph.specs[tensor].shape)

    def order_before(self, weight: int, stops: Iterable[int] = ()) -> list[str]:
        """Return the roles of what stands in front of a weight layer: behind the last one, the last addition, or `stops`."""
        steps, end = self.upstream(self.graph.steps[weight].inputs[0], stops)
        producer = self.graph.producers.get(end)
        fused = [] if producer is None or end in stops else roles(self.graph.steps[producer])[1:]
        return [role for role in (*fused, *self.roles(steps)) if role != "dropout"]

    def first_weights(self, unit: Unit) -> list[int]:
        """Return the weight layers of a branch that read the unit's input, with no other one in between."""
        starts = {unit.addition.start, unit.before}
        return [i for i in self.weights(unit.branch) if self.upstream(self.graph.steps[i].inputs[0], starts)[1] in starts]

    def arrangement(self, unit: Unit) -> str | None:
        """Return the row of `ARRANGEMENTS` that a unit has, in a transformer that of `TRANSFORMER_ARRANGEMENTS`."""
        shared, branch = ([role for role in self.roles(steps) if role != "dropout"] for steps in (unit.shared, unit.branch))
        if self.per_token:  # whose branches differ in what stands between the weights
            return next(
                (
                    name
                    for name, row in TRANSFORMER_ARRANGEMENTS.items()
                    if shared == list(row.after_addition) and branch[: len(row.first)] == list(row.first)
                ),
                None,
            )
        order = [*shared, *branch]
        count = order.count("weight")
        # where the shape changes, a unit of "bn_after_addition" looks like one of full pre-activation
        for name, row in sorted(ARRANGEMENTS.items(), key=lambda item: item[0] != "full_preactivation"):
            first = () if unit.is_first and row.first else row.first
            f = () if unit.is_first else row.after_addition
            wanted = [*f, *first, "weight", *(*row.between, "weight") * (count - 1), *row.last]
            if order == wanted and (not unit.keeps_shape or shared == list(f)):
                return name
        return None

    @cached_property
    def usual_arrangement(self) -> str | None:
        """The arrangement of most units: of those that keep the shape and are not the first, if there are any."""
        typical = [unit for unit in self.units if unit.keeps_shape and not unit.is_first] or self.units
        return collections.Counter(map(self.arrangement, typical)).most_common(1)[0][0]

    @cached_property
    def is_preactivation(self) -> bool:
        """Whether most units have a normalisation at the start of the branch and nothing behind the addition."""
        typical = [unit for unit in self.units if unit.keeps_shape and not unit.is_first] or self.units
        share = [self.roles(unit.branch)[:1] == ["norm"] and not self.roles(unit.shared) for unit in typical]
        return 2 * sum(share) > len(share)

    @cached_property
    def head(self) -> list[int]:
        """Steps from the last sum to the first weight behind it, or to the network's output."""
        steps: list[int] = []
        tensor = self.units[-1].addition.total
        while readers := self.graph.consumers[tensor]:
            step = self.graph.steps[readers[0]]
            if step.has_kernel:
                break
            steps.append(readers[0])
            tensor = step.outputs[0]
        return steps
