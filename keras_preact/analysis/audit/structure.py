"""The structure of a network: its residual units, the layers on their paths, and the
order of the layers.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable
from functools import cached_property

import keras

from keras_preact.analysis.graph import Addition, Graph, Step
from keras_preact.arrangements import ARRANGEMENTS, TRANSFORMER_ARRANGEMENTS

#: Activations: the class names of their layers and operations, in lower case.
ACTIVATIONS = frozenset(
    name.replace("_", "") for name in dir(keras.activations) if name[0] != "_"
) - {
    "linear",
    "get",
    "serialize",
    "deserialize",
}

#: Normalisations over the features of one token, as in transformers.
PER_TOKEN = ("LayerNorm", "RMSNorm")

#: Steps with several inputs that may be between a normalisation and its weight layer.
GATES = ("Multiply", "Concatenate")


def roles(step: Step) -> tuple[str, ...]:
    """Return the roles of a step: any of `"weight"`, `"norm"`, `"activation"`,
    `"dropout"`.
    """
    operation, kind = step.operation, step.kind
    if kind == "Activation" or step.has_kernel:
        function = getattr(operation, "activation", None)
        active = callable(function) and function is not keras.activations.linear
        return ("weight",) * step.has_kernel + ("activation",) * active
    if "Norm" in kind:
        return (
            () if isinstance(operation, keras.layers.Normalization) else ("norm",)
        )  # preprocessing
    if kind.replace("_", "").lower() in ACTIVATIONS:
        return ("activation",)
    return ("dropout",) if getattr(operation, "seed_generator", None) is not None else ()


@dataclasses.dataclass(frozen=True)
class Unit:
    """A residual unit of any model.

    Args:
        name: Name of the layer that contains the unit, or of the unit's addition.
        addition: Addition in the graph.
        before: Tensor at the start of the identity path: the sum of the previous unit,
            or the unit's own input if it is the first.
        is_first: Whether it is the network's first unit.
        keeps_shape: Whether the sum has the shape of `before`, so that the shortcut
            should be the identity.
        path: Steps of the identity path, from `before` to the addition.
        shared: Steps from `before` to the point where the paths split.
        branch: Steps from there to the addition that are not on the identity path.
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
    """The residual units of a graph, and the order of their layers."""

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
        repeated = {
            name
            for name, count in collections.Counter(unit.name for unit in self.units).items()
            if count > 1
        }
        seen: collections.Counter = collections.Counter()
        for i, unit in enumerate(self.units):
            if unit.name in repeated:
                seen[unit.name] += 1
                self.units[i] = dataclasses.replace(
                    unit, name=f"{unit.name} (addition {seen[unit.name]})"
                )

    def _name(self, addition: Addition) -> str:
        names = [
            self.graph.steps[i].name.split("/") for i in (*addition.residual_steps, addition.step)
        ]
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
        """Number of weight layers that are not on shortcuts."""
        return len(
            [i for i in self.weights(range(len(self.graph.steps))) if i not in self.on_shortcuts]
        )

    @cached_property
    def on_shortcuts(self) -> frozenset[int]:
        """Steps on shortcuts, such as projections and gates."""
        return frozenset(i for unit in self.units for i in unit.addition.shortcut_steps)

    @cached_property
    def per_token(self) -> bool:
        """Whether it is a transformer: it has sequences, and every norm works per
        token.
        """
        inside = [self.graph.steps[i] for unit in self.units for i in (*unit.shared, *unit.branch)]
        norms = [step for step in inside if "norm" in roles(step)]
        sequences = all(
            len(self.graph.specs[unit.addition.total].shape) == 3 for unit in self.units
        )
        return (
            sequences
            and bool(norms)
            and all(any(word in step.kind for word in PER_TOKEN) for step in norms)
        )

    def upstream(self, tensor: int, stops: Iterable[int] = ()) -> tuple[list[int], int]:
        """Follow a tensor back to a weight layer, an addition or one of the tensors
        `stops`.

        Returns:
            The steps on the way, in forward order, and the tensor before them.
        """
        steps: list[int] = []
        stops = set(stops)
        while tensor not in stops and (i := self.graph.producers.get(tensor)) is not None:
            step = self.graph.steps[i]
            if (
                step.has_kernel
                or not step.inputs
                or (len(step.inputs) > 1 and step.kind not in GATES)
            ):
                break
            steps.append(i)
            tensor = max(step.inputs, key=self._size)
        return steps[::-1], tensor

    def _size(self, tensor: int) -> int:
        return math.prod(size or 1 for size in self.graph.specs[tensor].shape)

    def order_before(self, weight: int, stops: Iterable[int] = ()) -> list[str]:
        """Return the roles between a weight layer and the previous weight, addition or
        `stops`.
        """
        steps, end = self.upstream(self.graph.steps[weight].inputs[0], stops)
        producer = self.graph.producers.get(end)
        fused = [] if producer is None or end in stops else roles(self.graph.steps[producer])[1:]
        return [role for role in (*fused, *self.roles(steps)) if role != "dropout"]

    def first_weights(self, unit: Unit) -> list[int]:
        """Return the first weight layers of a branch: those with no other one before
        them.
        """
        starts = {unit.addition.start, unit.before}
        return [
            i
            for i in self.weights(unit.branch)
            if self.upstream(self.graph.steps[i].inputs[0], starts)[1] in starts
        ]

    def arrangement(self, unit: Unit) -> str | None:
        """Return a unit's name in `ARRANGEMENTS`, or in `TRANSFORMER_ARRANGEMENTS`."""
        shared, branch = (
            [role for role in self.roles(steps) if role != "dropout"]
            for steps in (unit.shared, unit.branch)
        )
        if self.per_token:  # branches of transformers differ between their weights
            return next(
                (
                    name
                    for name, row in TRANSFORMER_ARRANGEMENTS.items()
                    if shared == list(row.after_addition)
                    and branch[: len(row.first)] == list(row.first)
                ),
                None,
            )
        order = [*shared, *branch]
        count = order.count("weight")
        # a unit of "bn_after_addition" that changes the shape looks like full pre-activation
        for name, row in sorted(
            ARRANGEMENTS.items(), key=lambda item: item[0] != "full_preactivation"
        ):
            first = () if unit.is_first and row.first else row.first
            f = () if unit.is_first else row.after_addition
            wanted = [*f, *first, "weight", *(*row.between, "weight") * (count - 1), *row.last]
            if order == wanted and (not unit.keeps_shape or shared == list(f)):
                return name
        return None

    @cached_property
    def usual_arrangement(self) -> str | None:
        """Arrangement of most units, without the first and those that change the shape."""
        typical = [
            unit for unit in self.units if unit.keeps_shape and not unit.is_first
        ] or self.units
        return collections.Counter(map(self.arrangement, typical)).most_common(1)[0][0]

    @cached_property
    def is_preactivation(self) -> bool:
        """Whether most branches start with a norm, and nothing follows most additions."""
        typical = [
            unit for unit in self.units if unit.keeps_shape and not unit.is_first
        ] or self.units
        share = [
            self.roles(unit.branch)[:1] == ["norm"] and not self.roles(unit.shared)
            for unit in typical
        ]
        return 2 * sum(share) > len(share)

    @cached_property
    def head(self) -> list[int]:
        """Steps from the last sum to the next weight, or to the network's output."""
        steps: list[int] = []
        tensor = self.units[-1].addition.total
        while readers := self.graph.consumers[tensor]:
            step = self.graph.steps[readers[0]]
            if step.has_kernel:
                break
            steps.append(readers[0])
            tensor = step.outputs[0]
        return steps
