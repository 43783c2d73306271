"""Run a network and read the traces of its residual units."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact._paths import below
from keras_preact.analysis import _inputs
from keras_preact.analysis.additions import Addition, LayerUnit, Unit, find_units, no_unit
from keras_preact.backend import autodiff
from keras_preact.graph import Graph
from keras_preact.stacks import UnitStack
from keras_preact.units import ResidualUnit, Trace


class Observed:
    """Runs a network on a batch and reads the traces of its residual units. The network
    stays unchanged.

    Args:
        model: Any Keras model with residual units.
        x: A batch; for a model with several inputs a list, or a dictionary by their names.
        labels: Class numbers, or what `loss` takes. None: no labels.
        loss: See `_inputs.loss_of`.
        training: Whether the model is called in training mode.
        logits: Name of an analysis of logits: the model runs without the softmax or sigmoid
            at its end. None: it runs as it is.

    Attributes:
        graph: Graph of the model, in which a unit or stack of this package is one step.
        units: Residual units in order. A stack counts as one.
        names: Names of all units, including the units of stacks.
        batch: The batch as the model takes it, of arrays, see `as_taken`.

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
        logits: str | None = None,
    ):
        self.model = model
        self.batch = _inputs.check_sample(model, x)
        self.graph = Graph(
            model,
            self.batch,
            training,
            opaque=(ResidualUnit, UnitStack),
        )
        self.units = find_units(self.graph)
        if not self.units:
            raise ValueError(no_unit(self.graph))
        self._copies: dict[int, list[ResidualUnit]] = {}
        self.calls = _inputs.logit_calls(self.graph, logits) if logits else {}
        self.loss = _inputs.loss_of(
            self.graph, _inputs.check_labels(labels, _inputs.size(self.batch)), loss
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for unit in self.units for name in unit.names)

    def run(
        self, look: Callable, *, inputs=None, added=None, residual_scale=None, detach_residual=False
    ):
        """Return all tensors by their numbers, and what `look` returned for each unit:
        a list with a tensor `(depth, ...)` for each of `units`.

        Args:
            look: A function of a unit's `Trace` and the axis of its channels. It
                returns one tensor.
            inputs: Inputs in place of the batch.
            added: Number of a tensor x_l to the values that are added to it; for the
                output of a stack, `(depth, *shape)`.
            residual_scale: Factors on F(x_l) of each unit, `(units,)`.
            detach_residual: Whether gradients flow through the shortcuts alone.
        """
        added = dict(added or {})
        results: dict[int, Any] = {}
        calls: dict[int, Callable] = dict(self.calls)
        scales: dict[int, Any] = {}
        first = 0
        for unit in self.units:
            last = first + unit.depth
            scale = None if residual_scale is None else residual_scale[first:last]
            scale = scale if scale is None or unit.is_stack else scale[0]
            first = last
            if isinstance(unit, LayerUnit):
                options = {"residual_scale": scale, "detach_residual": detach_residual}
                if unit.is_stack:
                    options["perturbations"] = added.pop(unit.output, None)
                calls[unit.step] = functools.partial(self._run_layer, unit, look, results, options)
            elif isinstance(unit, Addition):
                scales[unit.residual] = scale
        values = self.graph.values(self.batch if inputs is None else inputs)

        def change(tensors: Sequence[int]) -> None:
            for number in tensors:
                if number in scales:
                    values[number] = _changed(values[number], scales[number], detach_residual)
                if number in added:
                    # the network may compute in 16 bits; TensorFlow adds only equal dtypes
                    value = values[number]
                    values[number] = value + ops.convert_to_tensor(added[number], value.dtype)

        change(self.graph.inputs)
        for i in self.graph.walk(values, calls=calls):
            change(self.graph.steps[i].outputs)
        for unit in self.units:
            if isinstance(unit, Addition):
                result = look(*_trace_of_addition(self.graph, unit, values))
                results[unit.step] = ops.expand_dims(result, 0)
        return values, [results[unit.step] for unit in self.units]

    def _run_layer(self, unit: LayerUnit, look: Callable, results: dict, options: dict, x):
        """Run a unit or a stack and return its output. Write what `look` returns for
        each unit into `results`.
        """
        axis = 1 if unit.template.data_format == "channels_first" else -1
        outputs = []

        def seen(trace: Trace):
            outputs.append(trace.output)
            return look(trace, axis)

        options = options | {"training": self.graph.training}
        if isinstance(unit.layer, UnitStack):
            results[unit.step] = unit.layer.trace(x, look=seen, **options)
        else:
            results[unit.step] = ops.expand_dims(seen(unit.layer.trace(x, **options)), 0)
        return outputs[-1]

    def weights(self, unit: Unit) -> list[tuple[str, keras.Variable]]:
        """Return the trainable weights of a unit with their names within it."""
        if isinstance(unit, LayerUnit):
            return _weights_below(unit.layer)
        assert isinstance(unit, Addition)
        steps = (self.graph.steps[i] for i in unit.residual_steps)
        layers = [step.operation for step in steps if step.has_kernel]
        return [
            (f"weight_{i}/{name}", weight)
            for i, layer in enumerate(layers, 1)
            for name, weight in _weights_below(layer)
        ]

    @property
    def trainable_weights(self) -> list[keras.Variable]:
        """The trainable weights of all units. In a `LayerStack` they are those of copies."""
        weights = [weight for unit in self.units for _, weight in self.weights(unit)]
        return list({id(weight): weight for weight in weights}.values())

    def branches(
        self, unit: Unit, values: dict[int, Any], *, with_shortcut=False
    ) -> list[Callable]:
        """Return F of each unit, or F and its shortcut, as a function of x_l. `values`
        holds all tensors.
        """
        graph = self.graph
        if isinstance(unit, Addition):
            also = unit.shortcut_steps if with_shortcut else ()
            steps = sorted({*unit.residual_steps, *also})

            def added(x):
                found = graph.run(values | {unit.start: x}, steps)
                return found[unit.residual] + (found[unit.shortcut] if with_shortcut else 0)

            return [added]
        assert isinstance(unit, LayerUnit)
        part = "sum" if with_shortcut else "residual"
        return [
            lambda x, layer=layer: getattr(layer.trace(x, training=graph.training), part)
            for layer in self._layers(unit)
        ]

    def shortcuts(self, unit: Unit, values: dict[int, Any]) -> list[Callable]:
        """Return a function of x_l for each unit. It returns the linear map that the
        shortcut is at this x_l, of float32 tensors. `values` holds all tensors.
        """
        graph = self.graph
        if isinstance(unit, Addition):

            def path(vector):
                found = graph.run(values | {unit.start: vector}, unit.shortcut_steps)
                return ops.cast(found[unit.shortcut], "float32")

            return [lambda x: path]
        assert isinstance(unit, LayerUnit)

        def at(x, layer: ResidualUnit) -> Callable:
            dtype = layer.compute_dtype
            linear = layer.shortcut.linear(ops.cast(x, dtype), graph.training)
            return lambda vector: ops.cast(linear(ops.cast(vector, dtype)), "float32")

        return [functools.partial(at, layer=layer) for layer in self._layers(unit)]

    def _layers(self, unit: LayerUnit) -> list[ResidualUnit]:
        """Return the unit, or copies of the units of a stack, which are made once."""
        layer = unit.layer
        if not isinstance(layer, UnitStack):
            return [layer]
        if unit.step not in self._copies:
            self._copies[unit.step] = list(map(layer.unit, range(unit.depth)))
        return self._copies[unit.step]

    def same_random_numbers(self) -> contextlib.AbstractContextManager:
        """Return a context in which all passes draw the same masks, also those of copies."""
        steps = [step.operation for step in self.graph.steps]
        copies = [self._layers(unit) for unit in self.units if isinstance(unit, LayerUnit)]
        layers = [self.model, *steps, *itertools.chain(*copies)]
        return autodiff.same_random_numbers(
            *(layer for layer in layers if isinstance(layer, keras.Layer))
        )

    def gradients(
        self,
        look: Callable,
        *,
        detach_residual=False,
        variables: Sequence = (),
        loss: Callable | None = None,
    ):
        """Return E, what `look` returned for x_0 ... x_L, the gradients at x_0 ... x_L,
        and the gradients of `variables` by their ids. All but E are arrays.

        For x_0, `look` gets a trace that holds only the output. `loss`, a function of the
        list of outputs, replaces E.
        """
        loss_of = loss or self.loss
        start = self.units[0].start
        numbers = [start, *(unit.output for unit in self.units)]
        shapes = {number: tuple(self.graph.specs[number].shape[1:]) for number in numbers}
        if any(None in shape for shape in shapes.values()):  # the network takes images of any size
            with keras.StatelessScope():
                values = self.graph.run(self.graph.values(self.batch))
            shapes = {number: tuple(values[number].shape[1:]) for number in numbers}
        examples = _inputs.size(self.batch)
        stacks = [(), *((unit.depth,) * unit.is_stack for unit in self.units)]
        arrays = [
            np.zeros((*units, examples, *shapes[number]), "float32")
            for units, number in zip(stacks, numbers, strict=True)
        ]
        scale = _inputs.loss_scale(self.model, self.batch, loss_of, self.graph.training)

        def scaled(*added):
            values, seen = self.run(
                look,
                added=dict(zip(numbers, added, strict=True)),
                detach_residual=detach_residual,
            )
            value = loss_of([values[number] for number in self.graph.outputs])
            first = look(Trace(None, None, None, None, values[start]), -1)
            return scale * value, [ops.expand_dims(first, 0), *seen]

        value, seen, gradients, on_weights = autodiff.value_and_gradients(scaled, arrays, variables)
        by_unit: list[np.ndarray] = []
        for unit, gradient in zip([None, *self.units], gradients, strict=True):
            array = ops.convert_to_numpy(gradient) / scale
            by_unit += list(array) if unit is not None and unit.is_stack else [array]
        by_weight = {
            id(variable): ops.convert_to_numpy(gradient) / scale
            for variable, gradient in zip(variables, on_weights, strict=True)
        }
        rows = [row for rows in seen for row in ops.convert_to_numpy(rows)]
        return float(value) / scale, rows, by_unit, by_weight


def _weights_below(layer: keras.Layer) -> list[tuple[str, keras.Variable]]:
    """Return the trainable weights of a layer with their names within it."""
    return [(below(layer, weight), weight) for weight in layer.trainable_weights]


def _trace_of_addition(graph: Graph, unit: Addition, values: dict[int, Any]) -> tuple[Trace, int]:
    """Return the trace of a unit, and its channel axis."""
    reader = next(graph.steps[i] for i in unit.residual_steps if graph.steps[i].has_kernel)
    numbers = (reader.inputs[0], unit.shortcut, unit.residual, unit.total, unit.output)
    return Trace(*(values[number] for number in numbers)), reader.channel_axis


def _changed(residual, scale, detach: bool):
    """Return F(x_l) times `scale`, without its gradient if `detach`."""
    residual = ops.stop_gradient(residual) if detach else residual
    return residual if scale is None else residual * ops.cast(scale, residual.dtype)


def output_of(trace: Trace, axis: int):
    """Return the output of a unit in float32, for `Observed.run`."""
    return ops.cast(trace.output, "float32")


def pulled(function: Callable, x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Return `J(x)^T gradient`."""
    _, pull = autodiff.vjp(function, x)
    # Small gradients would be 0 in float16. A power of 2 adds no rounding.
    size = np.exp2(np.frexp(np.abs(gradient).max())[1])
    return ops.convert_to_numpy(pull((gradient / size).astype("float32"))) * size


def norms(gradient: np.ndarray, units: int) -> np.ndarray:
    """Return the norms of a gradient for each unit of a stacked weight, `(units,)`."""
    return np.linalg.norm(gradient.reshape(units, -1).astype("float64"), axis=1)


def other_axes(x, axis: int) -> tuple[int, ...]:
    """Return all axes of a tensor but one."""
    return tuple(i for i in range(len(x.shape)) if i != axis % len(x.shape))
