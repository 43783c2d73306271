"""The residual units of any Keras model: the additions of its graph in which two paths
from one tensor meet.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from keras_preact.graph import Graph
from keras_preact.models.segments import Segment, template_of
from keras_preact.paths import Step
from keras_preact.stacks import UnitStack
from keras_preact.units import ResidualUnit


@dataclasses.dataclass(frozen=True)
class Unit:
    """A residual unit of a graph, or a stack of them.

    Args:
        step: Number of the step that is a layer of this package, or the addition.
        names: Name of the unit, or names of the units of a stack.
        start, output: Numbers of the tensors x_l and x_{l+1}.
    """

    step: int
    names: tuple[str, ...]
    start: int
    output: int

    @property
    def depth(self) -> int:
        return len(self.names)

    @property
    def is_stack(self) -> bool:
        return False

    @property
    def is_plain(self) -> bool:
        """Whether it belongs to a plain network, which has no shortcuts."""
        return False


@dataclasses.dataclass(frozen=True)
class LayerUnit(Unit):
    """A unit or a stack of this package, which the graph keeps as one step."""

    layer: Segment

    @property
    def is_stack(self) -> bool:
        return isinstance(self.layer, UnitStack)

    @property
    def template(self) -> ResidualUnit:
        return template_of(self.layer)

    @property
    def is_plain(self) -> bool:
        return not self.template.h.reads_input


@dataclasses.dataclass(frozen=True)
class Addition(Unit):
    """Two paths that start at one tensor and are added.

    `output` is the sum, or the output of the activation or normalisation after it if
    the next unit's shortcut starts there and has no steps.

    Args:
        shortcut, residual: Tensors that are added. The shortcut is the path that changes
            its start less, see `Graph.size`.
        shortcut_steps, residual_steps: Numbers of the steps of the two paths, in order.
        total: The sum.
        before: Start of the identity path: the sum of the previous unit; `start` if
            there is none.
        is_first: Whether there is no previous unit.
        shared: Steps from `before` to `start`.
        keeps_shape: Whether the sum has the shape of `before`, so that the shortcut
            should be the identity.
    """

    shortcut: int
    residual: int
    shortcut_steps: tuple[int, ...]
    residual_steps: tuple[int, ...]
    total: int
    before: int = -1
    is_first: bool = True
    shared: tuple[int, ...] = ()
    keeps_shape: bool = True

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def path(self) -> tuple[int, ...]:
        """Steps of the identity path, from `before` to the addition."""
        return (*self.shared, *self.shortcut_steps)

    @property
    def branch(self) -> tuple[int, ...]:
        """Steps of the residual path that are not on the shortcut."""
        return tuple(i for i in self.residual_steps if i not in self.shortcut_steps)


def find_units(graph: Graph) -> list[Unit]:
    """Return the residual units of a graph in order, without units inside another's
    branch or shortcut.
    """
    layers = [
        LayerUnit(i, names, step.inputs[0], step.outputs[0], step.operation)
        for i, step in enumerate(graph.steps)
        if (names := _names(step))
    ]
    layer_steps = {unit.step for unit in layers}
    additions = list(_additions(graph))
    inside = {i for unit in additions for i in (*unit.residual_steps, *unit.shortcut_steps)}
    outermost = [
        unit
        for unit in additions
        if unit.step not in inside and layer_steps.isdisjoint(unit.residual_steps)
    ]
    units = [*layers, *_with_mappings(graph, _linked(graph, outermost))]
    return sorted(units, key=lambda unit: unit.step)


def no_unit(graph: Graph) -> str:
    """Return the error for a model in which `find_units` finds none."""
    names = [step.name for step in graph.steps]
    closed = (
        f" These layers cannot be traced, and may hide some: {', '.join(graph.closed)}."
        if graph.closed
        else ""
    )
    return (
        f"The model {graph.model.name!r} has no residual unit: no two paths from one tensor are "
        f"added, with weights in at least one.{closed} Received: {len(names)} operations, "
        f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
    )


def _additions(graph: Graph) -> Iterator[Addition]:
    """Yield the additions of two paths that start at one tensor, at least one of them
    with weights.
    """
    for i, step in enumerate(graph.steps):
        if not graph.is_sum(step):
            continue
        start, paths = graph.parting(step.inputs)
        if start is None or len(paths) == 1:  # x + x
            continue
        [total], [(shortcut, shortcut_steps), (residual, residual_steps)] = step.outputs, paths
        if graph.weights_of(residual_steps):
            ends = (start, total, shortcut, residual)
            yield Addition(i, (step.name,), *ends, shortcut_steps, residual_steps, total)


def _linked(graph: Graph, units: list[Addition]) -> list[Addition]:
    """Return the units with their fields about the path from the previous unit."""
    totals = {unit.total for unit in units}
    linked = []
    for unit in units:
        before: int | None = unit.start
        while before is not None and before not in totals:
            before = graph.dominators[before]
        start = unit.start if before is None else before
        linked.append(
            dataclasses.replace(
                unit,
                before=start,
                is_first=before is None,
                shared=graph.between(start, unit.start),
                keeps_shape=graph.specs[start].shape[1:] == graph.specs[unit.total].shape[1:],
            )
        )
    return linked


def _with_mappings(graph: Graph, units: list[Addition]) -> Iterator[Addition]:
    """Yield the units with the output of f as `output`. f consists of the steps
    between an addition and the next unit, if the next shortcut has no steps and f
    has no weight layers. The last unit has the f of the unit before it.
    """
    kinds: list[str] = []
    for unit, after in itertools.zip_longest(units, units[1:]):
        output = unit.total
        if after is None:
            output = _follow(graph, output, kinds)
        elif (
            after.before == output
            and after.shortcut == after.start
            and not graph.weights_of(after.shared)
        ):
            output, kinds = after.start, [graph.steps[i].kind for i in after.shared]
        yield dataclasses.replace(unit, output=output)


def _follow(graph: Graph, tensor: int, kinds: list[str]) -> int:
    """Return the tensor after steps of these kinds, in this order; `tensor` itself
    if other steps follow it.
    """
    reached = tensor
    for kind in kinds:
        steps = [graph.steps[i] for i in graph.consumers[reached]]
        if [step.kind for step in steps] != [kind]:
            return tensor
        reached = steps[0].outputs[0]
    return reached


def _names(step: Step) -> tuple[str, ...]:
    """Return the names of the units of this package in a step, if there are any."""
    if isinstance(step.operation, UnitStack):
        return tuple(step.operation.unit_names)
    return (step.name.rsplit("/", 1)[-1],) if isinstance(step.operation, ResidualUnit) else ()
