"""The residual units of any network, the layers on their paths, and the order of the
layers.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable
from functools import cached_property

import keras

from keras_preact.arrangements import ARRANGEMENTS, TRANSFORMER_ARRANGEMENTS
from keras_preact.graph import Addition, Graph, Step

#: Class names of layers and operations that are activations, in lower case.
ACTIVATIONS = frozenset(
    name.replace("_", "") for name in dir(keras.activations) if name[0] != "_"
) - {"linear", "get", "serialize", "deserialize"}

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
        is_preprocessing = isinstance(operation, keras.layers.Normalization)
        return () if is_preprocessing else ("norm",)
    if kind.replace("_", "").lower() in ACTIVATIONS:
        return ("activation",)
    return ("dropout",) if getattr(operation, "seed_generator", None) is not None else ()


@dataclasses.dataclass(frozen=True)
class AuditedUnit:
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


class Anatomy:
    """The residual units of a graph, and the order of their layers."""

    def __init__(self, graph: Graph):
        self.graph = graph
        totals = {addition.total for addition in graph.additions}
        names = [self._name(addition) for addition in graph.additions]
        self.units: list[AuditedUnit] = []
        for i, (name, addition) in enumerate(zip(names, graph.additions, strict=True)):
            if names.count(name) > 1:
                name += f" (addition {names[: i + 1].count(name)})"
            before: int | None = addition.start
            while before is not None and before not in totals:
                before = graph.dominators[before]
            start = addition.start if before is None else before
            shared = graph.between(start, addition.start) if start != addition.start else ()
            self.units.append(
                AuditedUnit(
                    name=name,
                    addition=addition,
                    before=start,
                    is_first=before is None,
                    keeps_shape=graph.specs[start].shape[1:]
                    == graph.specs[addition.total].shape[1:],
                    path=(*shared, *addition.shortcut_steps),
                    shared=shared,
                    branch=tuple(
                        i for i in addition.residual_steps if i not in addition.shortcut_steps
                    ),
                )
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

    def order(self, steps: Iterable[int]) -> list[str]:
        """Return the roles of steps, without dropout."""
        return [role for role in self.roles(steps) if role != "dropout"]

    def weights(self, steps: Iterable[int]) -> list[int]:
        return [i for i in steps if self.graph.steps[i].has_kernel]

    @cached_property
    def depth(self) -> int:
        """Number of weight layers that are not on shortcuts."""
        return len(set(self.weights(range(len(self.graph.steps)))) - self.on_shortcuts)

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
        shapes = [self.graph.specs[unit.addition.total].shape for unit in self.units]
        if not norms or any(len(shape) != 3 for shape in shapes):
            return False
        return all(any(word in step.kind for word in PER_TOKEN) for step in norms)

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
            joins = len(step.inputs) > 1 and step.kind not in GATES
            if step.has_kernel or not step.inputs or joins:
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
        return [*fused, *self.order(steps)]

    def reading_weights(self, unit: AuditedUnit) -> list[int]:
        """Return the weight layers of a branch that need a normalisation before them: in
        a transformer, only those with no other weight layer before them.
        """
        weights = self.weights(unit.branch)
        if not self.per_token:
            return weights
        starts = {unit.addition.start, unit.before}
        return [
            i for i in weights if self.upstream(self.graph.steps[i].inputs[0], starts)[1] in starts
        ]

    def arrangement(self, unit: AuditedUnit) -> str | None:
        """Return a unit's name in `ARRANGEMENTS`, or in `TRANSFORMER_ARRANGEMENTS`."""
        shared, branch = self.order(unit.shared), self.order(unit.branch)
        if self.per_token:  # branches of transformers differ between their weights
            for name, row in TRANSFORMER_ARRANGEMENTS.items():
                start = branch[: len(row.first)]
                if shared == list(row.after_addition) and start == list(row.first):
                    return name
            return None
        order = [*shared, *branch]
        count = order.count("weight")
        # A unit of "bn_after_addition" that changes the shape looks like full pre-activation.
        for name in sorted(ARRANGEMENTS, key=lambda name: name != "full_preactivation"):
            row = ARRANGEMENTS[name]
            first = () if unit.is_first and row.first else row.first
            f = () if unit.is_first else row.after_addition
            wanted = [*f, *first, "weight", *(*row.between, "weight") * (count - 1), *row.last]
            if order == wanted and (not unit.keeps_shape or shared == list(f)):
                return name
        return None

    @cached_property
    def _typical(self) -> list[AuditedUnit]:
        """The units without the first and those that change the shape, if there are any."""
        return [u for u in self.units if u.keeps_shape and not u.is_first] or self.units

    @cached_property
    def usual_arrangement(self) -> str | None:
        """Arrangement of most units."""
        return collections.Counter(map(self.arrangement, self._typical)).most_common(1)[0][0]

    @cached_property
    def is_preactivation(self) -> bool:
        """Whether most branches start with a norm, and nothing follows most additions."""
        share = [
            self.roles(unit.branch)[:1] == ["norm"] and not self.roles(unit.shared)
            for unit in self._typical
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
