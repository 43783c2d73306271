"""A network as the checks see it: its residual units, the layers on their paths, the
order of the layers, and what was measured.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable
from functools import cached_property

from keras_preact.analysis.additions import Addition, find_units
from keras_preact.analysis.audit.measure import Gradients, Measures, mix_of
from keras_preact.arrangements import ARRANGEMENTS, TRANSFORMER_ARRANGEMENTS
from keras_preact.compiled import Problem
from keras_preact.graph import Graph
from keras_preact.layers.streams import Coefficients

#: Steps with several inputs that may be between a normalisation and its weight layer.
GATES = ("Multiply", "Concatenate")


def named_units(graph: Graph) -> list[Addition]:
    """Return the residual units of a graph. Each is named after the layer that contains
    it, or after its addition.
    """
    additions = [unit for unit in find_units(graph) if isinstance(unit, Addition)]
    names = [_name(graph, unit) for unit in additions]
    units = []
    for i, (name, unit) in enumerate(zip(names, additions, strict=True)):
        if names.count(name) > 1:
            name += f" (addition {names[: i + 1].count(name)})"
        units.append(dataclasses.replace(unit, names=(name,)))
    return units


def _name(graph: Graph, unit: Addition) -> str:
    names = (graph.steps[i].name for i in (*unit.residual_steps, unit.step))
    scopes = zip(*(name.split("/")[:-1] for name in names), strict=False)
    common = itertools.takewhile(lambda scope: len(set(scope)) == 1, scopes)
    return "/".join(scope[0] for scope in common) or unit.name


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A network as the checks see it.

    Args:
        graph: Its graph in training mode.
        units: `named_units` of the graph.
        inference, training: Measurements of a forward pass in both modes.
        gradients: Measurements of a backward pass.
        is_noise: Whether the sample is noise, in place of images of the person.
        problems: What is wrong with the loss and the metrics; None if there are none.
    """

    graph: Graph
    units: list[Addition]
    inference: Measures
    training: Measures
    gradients: Gradients
    is_noise: bool
    problems: list[Problem] | None

    @cached_property
    def of_each_shape(self) -> list[list[int]]:
        """Numbers of the units that return each shape, in order."""
        shapes = [self.graph.specs[unit.total].shape[1:] for unit in self.units]
        return [
            [i for i, shape in enumerate(shapes) if shape == group]
            for group in dict.fromkeys(shapes)
        ]

    def roles(self, steps: Iterable[int]) -> list[str]:
        return [role for i in steps for role in self.graph.steps[i].roles]

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
        return frozenset(i for unit in self.units for i in unit.shortcut_steps)

    @cached_property
    def per_token(self) -> bool:
        """Whether it is a transformer: it has sequences, and every norm works per
        token.
        """
        inside = [self.graph.steps[i] for unit in self.units for i in (*unit.shared, *unit.branch)]
        norms = [step for step in inside if "norm" in step.roles]
        shapes = [self.graph.specs[unit.total].shape for unit in self.units]
        if not norms or any(len(shape) != 3 for shape in shapes):
            return False
        return all(step.is_per_token for step in norms)

    def on_path(self, unit: Addition) -> tuple[int, ...]:
        """Return the steps of a unit's identity path, except those that split, mix and
        join residual streams.
        """
        if mix_of(self.graph, unit) is None:
            return unit.path
        return tuple(i for i in unit.shared if self.graph.steps[i].roles)

    @cached_property
    def _mixes(self) -> frozenset[int]:
        """The additions that mix residual streams."""
        steps = self.graph.steps
        weighted = {
            tensor
            for step in steps
            if isinstance(step.operation, Coefficients)
            for tensor in step.outputs
        }
        mixes = set()
        for i, step in enumerate(steps):
            inputs = [tensor in weighted for tensor in step.inputs]
            if step.kind == "Add" and all(inputs):
                mixes.add(i)
            elif step.kind != "Multiply" or not any(inputs):
                continue
            weighted.update(step.outputs)
        return frozenset(mixes)

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
            joins = len(step.inputs) > 1 and step.kind not in GATES and i not in self._mixes
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
        fused = [] if producer is None or end in stops else self.graph.steps[producer].roles[1:]
        return [*fused, *self.order(steps)]

    def reading_weights(self, unit: Addition) -> list[int]:
        """Return the weight layers of a branch that need a normalisation before them.

        In a transformer, only weight layers with no other one before them need it.
        """
        weights = self.weights(unit.branch)
        if not self.per_token:
            return weights
        starts = {unit.start, unit.before}
        return [
            i for i in weights if self.upstream(self.graph.steps[i].inputs[0], starts)[1] in starts
        ]

    def arrangement(self, unit: Addition) -> str | None:
        """Return a unit's name in `ARRANGEMENTS`, or in `TRANSFORMER_ARRANGEMENTS`."""
        shared, branch = self.order(unit.shared), self.order(unit.branch)
        if self.per_token:  # branches of transformers differ between their weights
            rows = TRANSFORMER_ARRANGEMENTS.items()
            for name, row in sorted(rows, key=lambda each: -len(each[1].last)):
                start, end = branch[: len(row.first)], branch[len(branch) - len(row.last) :]
                found = tuple(map(tuple, (shared, start, end)))
                if found == (row.after_addition, row.first, row.last):
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
    def _typical(self) -> list[Addition]:
        """Units that keep the shape, without the first; all units if there are none."""
        return [u for u in self.units if u.keeps_shape and not u.is_first] or self.units

    @cached_property
    def usual_arrangement(self) -> str | None:
        """Arrangement of most units."""
        return collections.Counter(map(self.arrangement, self._typical)).most_common(1)[0][0]

    @cached_property
    def usual_start(self) -> list[str] | None:
        """Roles between an addition and the next weight of most units, without dropout;
        None if the units differ. Of equal roles, only the last counts: the normalisation
        and activation of a branch replace an activation right after the addition.
        """
        starts = collections.Counter(
            (
                *self.order(unit.shared),
                *itertools.takewhile(lambda role: role != "weight", self.order(unit.branch)),
            )
            for unit in self._typical
        )
        [(start, units)] = starts.most_common(1)
        return [*dict.fromkeys(start[::-1])][::-1] if 2 * units > starts.total() else None

    def downstream(self, tensor: int) -> tuple[list[int], int | None]:
        """Follow a tensor to the next weight layer, or to the network's output.

        Returns:
            The steps on the way, and the weight layer, if there is one.
        """
        steps: list[int] = []
        while readers := self.graph.consumers[tensor]:
            if self.graph.steps[readers[0]].has_kernel:
                return steps, readers[0]
            steps.append(readers[0])
            tensor = self.graph.steps[readers[0]].outputs[0]
        return steps, None
