"""Where a graph has residual units, and running it while they are looked at."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact import _autodiff
from keras_preact._observers import Observer
from keras_preact.analysis import _inputs
from keras_preact.analysis.graph import Addition, Graph
from keras_preact.stacks import UnitStack, written_out
from keras_preact.units import ResidualUnit


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a graph has residual units: a unit of this package, a stack of them, or an
    addition.

    Args:
        step: Number of the step.
        names: Of its units.
        start, output: Numbers of the tensors x_l and x_{l+1}.
        layer: The unit or the stack; None for an addition.
        addition: The addition; None for a layer.
    """

    step: int
    names: tuple[str, ...]
    start: int
    output: int
    layer: Any = None
    addition: Addition | None = None

    @property
    def depth(self) -> int:
        return len(self.names)

    @property
    def is_stack(self) -> bool:
        return isinstance(self.layer, UnitStack)

    @property
    def is_plain(self) -> bool:
        """Whether its units are those of a plain network, whose shortcut reads nothing."""
        unit = self.layer.pattern if isinstance(self.layer, UnitStack) else self.layer
        return unit is not None and not unit.shortcut_pattern.layer_class.reads_input

    def weights(self, graph: Graph) -> list[tuple[str, keras.Variable]]:
        """Return the trainable weights with their names below the unit."""
        if self.addition is None:
            return [
                (weight.path.split(f"{self.layer.name}/", 1)[-1], weight)
                for weight in self.layer.trainable_weights
            ]
        layers = [
            step.operation
            for i in self.addition.residual_steps
            if (step := graph.steps[i]).has_kernel
        ]
        return [
            (f"weight_{i}/{w.name}", w)
            for i, layer in enumerate(layers, 1)
            for w in layer.trainable_weights
        ]

    def branches(self, graph: Graph, values: dict[int, Any], training: bool) -> list[Callable]:
        """Return F of each unit, a function of x_l; `values` are those of all tensors."""
        if self.is_stack:
            return [_branch(self.layer.unit(i), training) for i in range(self.depth)]
        if self.layer is not None:
            return [_branch(self.layer, training)]
        addition = self.addition
        assert addition is not None

        def branch(x):
            own = values | {addition.start: x}
            graph.run_steps((graph.steps[i] for i in addition.residual_steps), own)
            return own[addition.residual]

        return [branch]

    def show(self, graph: Graph, values: dict[int, Any], observer: Observer):
        """Return what the observer sees of an addition, `(1, *shape)`."""
        assert self.addition is not None
        reader = next(
            graph.steps[i] for i in self.addition.residual_steps if graph.steps[i].has_kernel
        )
        seen = observer.look(
            activated=values[reader.inputs[0]],
            shortcut=values[self.addition.shortcut],
            residual=values[self.addition.residual],
            total=values[self.addition.total],
            output=values[self.output],
            axis=reader.channel_axis,
        )
        return ops.expand_dims(seen, 0)


def _branch(unit: ResidualUnit, training: bool) -> Callable:
    def branch(x):
        with Observer(lambda residual, **_: residual, None).active() as observer:
            unit(x, training=training)
        return observer.seen[0][0]

    return branch


def find_sites(graph: Graph) -> list[Site]:
    """Return the residual units of a graph that keeps this package's units as single
    steps.

    Raises:
        ValueError: where there is none.
    """
    sites = []
    for i, step in enumerate(graph.steps):
        if isinstance(step.operation, ResidualUnit | UnitStack):
            stack = isinstance(step.operation, UnitStack)
            names = step.operation.unit_names if stack else [step.name.rsplit("/", 1)[-1]]
            sites.append(
                Site(i, tuple(names), step.inputs[0], step.outputs[0], layer=step.operation)
            )
    opaque = {site.step for site in sites}
    additions = [each for each in graph.additions if opaque.isdisjoint(each.residual_steps)]
    after_addition: list[str] = []
    for addition, after in itertools.zip_longest(additions, additions[1:]):
        output = addition.total
        if after is None:  # the last unit's f is that of the one before
            output = graph.follow(output, after_addition)
        elif (
            after.shortcut == after.start
        ):  # what stands between an addition and an untouched shortcut is f
            steps = graph.between(output, after.start)
            output, after_addition = after.start, [graph.steps[i].kind for i in steps]
        sites.append(
            Site(
                addition.step,
                (graph.steps[addition.step].name,),
                addition.start,
                output,
                addition=addition,
            )
        )
    if not sites:
        raise ValueError(
            "The model has no residual unit: no two paths from one tensor are added, of which at "
            f"least one has weights. Received: {len(graph.steps)} operations, "
            f"{', '.join(step.name for step in graph.steps[:5])}, ..."
        )
    return sorted(sites, key=lambda site: site.step)


class Observed:
    """A network on a batch, ready to be run while its residual units are looked at. The
    network stays as it is.

    Args:
        model: Any Keras model with residual units.
        x: A batch, or a list for a model with several inputs.
        labels: Classes, or what `loss` takes; None for none.
        loss: See `_inputs.loss_of`.
        training: What the model is called with.

    Attributes:
        graph: With this package's units as single steps.
        sites: In order.
        inputs: The batch, a list of arrays.
        units: Names of all units.

    Raises:
        ValueError: for a batch or a model that does not fit.
    """

    def __init__(
        self,
        model: keras.Model,
        x,
        labels=None,
        loss: Callable | None = None,
        training: bool = True,
    ):
        self.inputs = _inputs.check_sample(model, x)
        several = isinstance(x, list | tuple)
        self.graph = Graph(
            model,
            self.inputs if several else self.inputs[0],
            training,
            opaque=(ResidualUnit, UnitStack),
        )
        self.sites = find_sites(self.graph)
        self.loss = _inputs.loss_of(
            self.graph, _inputs.check_labels(labels, len(self.inputs[0])), loss
        )

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(name for site in self.sites for name in site.names)

    def run(
        self,
        look: Callable,
        shape: tuple | None,
        *,
        inputs=None,
        added=None,
        factors=None,
        detached: bool = False,
    ):
        """Return all tensors by their numbers, and what `look` returned for each site,
        `(units, *shape)`.

        Args:
            look, shape, factors, detached: Of an `Observer`.
            inputs: Others than the batch.
            added: As for `Graph.run`.
        """
        observer = Observer(look, shape, factors=factors, detached=detached)
        changed = {
            site.addition.residual: observer.change
            for site in self.sites
            if site.addition is not None
        }
        with observer.active(), written_out():
            values = self.graph.run(self.inputs if inputs is None else inputs, added, changed)
        seen = iter(observer.seen)
        return values, [
            next(seen) if s.addition is None else s.show(self.graph, values, observer)
            for s in self.sites
        ]

    def gradients(
        self,
        look: Callable,
        shape: tuple | None,
        *,
        detached: bool = False,
        variables: Sequence = (),
    ):
        """Return E, what `look` returned, the gradients of x_0 and of each site's
        x_{l+1}, and those of `variables`.

        What `look` returned and the gradients are lists of arrays with a first axis of
        units: one array for x_0, one for each site. Of x_0, `look` is given the tensor
        as `output` alone.
        """
        start = self.sites[0].start
        specs = self.graph.specs
        batch = len(self.inputs[0])

        def zeros(number: int, units: tuple[int, ...]) -> np.ndarray:
            return np.zeros(
                [*units, *(batch if size is None else size for size in specs[number].shape)],
                "float32",
            )

        numbers = [start, *(site.output for site in self.sites)]
        arrays = [zeros(start, ())]
        arrays += [zeros(s.output, (s.depth,) if s.is_stack else ()) for s in self.sites]

        def loss(*added):
            values, seen = self.run(
                look, shape, added=dict(zip(numbers, added, strict=True)), detached=detached
            )
            value = self.loss([values[number] for number in self.graph.outputs])
            return value, [ops.expand_dims(look(output=values[start]), 0), *seen]

        value, seen, gradients, on_weights = _autodiff.value_and_gradients(loss, arrays, variables)
        units = [1, *(site.depth for site in self.sites)]
        arrays = [
            np.reshape(
                ops.convert_to_numpy(gradient), (n, *gradient.shape[-len(specs[number].shape) :])
            )
            for gradient, n, number in zip(gradients, units, numbers, strict=True)
        ]
        return (
            float(value),
            list(map(ops.convert_to_numpy, seen)),
            arrays,
            list(map(ops.convert_to_numpy, on_weights)),
        )
