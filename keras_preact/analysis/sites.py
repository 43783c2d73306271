"""Where a graph has residual units, and running it while they are looked at."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact.analysis import _inputs
from keras_preact.backend import autodiff
from keras_preact.graph import Addition, Graph
from keras_preact.stacks import UnitStack
from keras_preact.units import ResidualUnit, Trace


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
        return self.layer is not None and not self.pattern.options.shortcut.layer_class.reads_input

    @property
    def pattern(self) -> ResidualUnit:
        """The unit, or the one of a stack."""
        return self.layer.pattern if self.is_stack else self.layer

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
        if self.layer is not None:
            units = (
                [self.layer.unit(i) for i in range(self.depth)] if self.is_stack else [self.layer]
            )
            return [
                lambda x, unit=unit: unit.trace(x, training=training).residual for unit in units
            ]
        addition = self.addition
        assert addition is not None

        def branch(x):
            own = values | {addition.start: x}
            graph.run_steps((graph.steps[i] for i in addition.residual_steps), own)
            return own[addition.residual]

        return [branch]

    def trace(self, x, look: Callable, *, residual_scale=None, perturbations=None, **options):
        """Run the unit or the stack; return its output, and what `look` returned for
        each unit.
        """
        axis = 1 if self.pattern.options.data_format == "channels_first" else -1
        outputs = []

        def seen(trace: Trace):
            outputs.append(trace.output)
            return look(trace, axis)

        if self.is_stack:
            found = self.layer.trace(
                x,
                look=seen,
                residual_scale=residual_scale,
                perturbations=perturbations,
                **options,
            )
            return outputs[-1], found
        if residual_scale is not None:
            residual_scale = residual_scale[0]
        found = seen(self.layer.trace(x, residual_scale=residual_scale, **options))
        return outputs[-1], ops.expand_dims(found, 0)

    def trace_addition(self, graph: Graph, values: dict[int, Any]) -> tuple[Trace, int]:
        """Return the parts of an addition's unit, and its channel axis."""
        assert self.addition is not None
        reader = next(
            graph.steps[i] for i in self.addition.residual_steps if graph.steps[i].has_kernel
        )
        parts = (reader.inputs[0], self.addition.shortcut, self.addition.residual)
        numbers = (*parts, self.addition.total, self.output)
        return Trace(*(values[number] for number in numbers)), reader.channel_axis


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
        self, look: Callable, *, inputs=None, added=None, residual_scale=None, detach_residual=False
    ):
        """Return all tensors by their numbers, and what `look` returned for each unit:
        a list with a tensor `(units, ...)` for each site.

        Args:
            look: A function of a unit's `Trace` and the axis of its channels. It
                returns one tensor.
            inputs: Others than the batch.
            added: What is added to x_{l+1}, by its number; for a stack `(depth,
                *shape)`.
            residual_scale: `(units,)`, what multiplies F(x_l) of each unit.
            detach_residual: Whether gradients flow through the shortcuts alone.
        """
        added = dict(added or {})
        found: dict[int, Any] = {}
        calls: dict[int, Callable] = {}
        changed: dict[int, Callable] = {}
        first = 0
        for site in self.sites:
            last = first + site.depth
            scale = None if residual_scale is None else residual_scale[first:last]
            first = last
            if site.addition is None:
                options = {"residual_scale": scale, "detach_residual": detach_residual}
                if site.is_stack:
                    options["perturbations"] = added.pop(site.output, None)
                calls[site.output] = self._call(site, look, found, options)
            else:
                changed[site.addition.residual] = _change(scale, detach_residual)
        values = self.graph.run(
            self.inputs if inputs is None else inputs, added, changed, calls=calls
        )
        for site in self.sites:
            if site.addition is not None:
                seen = look(*site.trace_addition(self.graph, values))
                found[site.step] = ops.expand_dims(seen, 0)
        return values, [found[site.step] for site in self.sites]

    def _call(self, site: Site, look: Callable, found: dict, options: dict) -> Callable:
        def call(x):
            y, found[site.step] = site.trace(x, look, training=self.graph.training, **options)
            return y

        return call

    def gradients(self, look: Callable, *, detach_residual=False, variables: Sequence = ()):
        """Return E, what `look` returned, the gradients of x_0 and of each site's
        x_{l+1}, and those of `variables`.

        What `look` returned and the gradients are lists of arrays with a first axis of
        units: one array for x_0, one for each site. For x_0, `look` is given a trace
        with nothing but the output.
        """
        start = self.sites[0].start
        specs = self.graph.specs
        batch = len(self.inputs[0])

        def zeros(number: int, units: tuple[int, ...]) -> np.ndarray:
            sizes = (batch if size is None else size for size in specs[number].shape)
            return np.zeros([*units, *sizes], "float32")

        numbers = [start, *(site.output for site in self.sites)]
        arrays = [zeros(start, ())]
        arrays += [zeros(s.output, (s.depth,) if s.is_stack else ()) for s in self.sites]

        def loss(*added):
            values, seen = self.run(
                look,
                added=dict(zip(numbers, added, strict=True)),
                detach_residual=detach_residual,
            )
            value = self.loss([values[number] for number in self.graph.outputs])
            first = look(Trace(None, None, None, None, values[start]), -1)
            return value, [ops.expand_dims(first, 0), *seen]

        value, seen, gradients, on_weights = autodiff.value_and_gradients(loss, arrays, variables)
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


def _change(scale, detach: bool) -> Callable:
    """Return what takes the place of F(x_l) of an addition."""

    def change(residual):
        if detach:
            residual = ops.stop_gradient(residual)
        return residual if scale is None else residual * ops.cast(scale[0], residual.dtype)

    return change
