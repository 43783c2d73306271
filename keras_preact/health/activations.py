"""Mean and standard deviation of the input of every weight layer of a network, at
inference.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_preact import preprocessing
from keras_preact._paths import below
from keras_preact._samples import as_taken
from keras_preact.backend import autodiff, keras_private
from keras_preact.backend.arrays import as_numpy
from keras_preact.graph import Graph, has_own_kernel
from keras_preact.health.weights import Places, WeightPlace
from keras_preact.stacks import LayerStack


class Activations:
    """Runs a model on a sample and measures the inputs of its weight layers: layers
    with a kernel, except recurrent cells.

    The model does not change, and batch normalisation uses its moving statistics. The
    units of a stack are measured separately, in the stack's loop.

    Args:
        model: A built model.
        sample: Input of the model, an array or a structure of arrays.

    Attributes:
        places: `WeightPlace` of each of the m layers, with the path of its kernel.

    Raises:
        ValueError: for a model whose graph cannot be traced.
    """

    def __init__(self, model: keras.Model, sample):
        self.model = model
        sample = as_taken(model, sample, "sample")
        self.arrays = [as_numpy(array) for array in keras.tree.flatten(sample)]
        self.graph = Graph(
            model,
            keras.tree.pack_sequence_as(sample, self.arrays),
            opaque=(LayerStack,),
            every_kernel=True,
        )
        #: The graph of the unit of each stack, by the stack's id.
        self.units: dict[int, Graph] = {}
        for step in self.graph.steps:
            if isinstance(step.operation, LayerStack):
                spec = self.graph.specs[step.inputs[0]]
                x = keras.KerasTensor((self.graph.batch, *spec.shape[1:]), spec.dtype)
                with contextlib.suppress(ValueError):  # it cannot be traced, and is not measured
                    unit = Graph(step.operation.template, x, every_kernel=True)
                    self.units[id(step.operation)] = unit
        find = Places(model)
        #: Stacks and the weight layers outside of them, with the places of each.
        self.layers: list[tuple[keras.Layer, list[WeightPlace]]] = []
        for layer in _weight_layers(model):
            if isinstance(layer, LayerStack):
                unit = layer.template
                inside = [below(unit, sublayer.kernel) for sublayer in _weight_layers(unit)]
                columns = [find.of(layer.variables[0], f"{layer.name}/{path}") for path in inside]
                layer_places = [place for row in zip(*columns, strict=True) for place in row]
            else:
                layer_places = find.of(layer.kernel)
            self.layers.append((layer, layer_places))
        self.places = [place for _, layer_places in self.layers for place in layer_places]
        self._compiled = autodiff.compiled(self._run)

    def wrong_input(self) -> str | None:
        """Return a message if the range of the sample is wrong after preprocessing, else
        None. The range is measured at weight layers without a trainable layer before
        them.
        """
        if len(self.arrays) != 1:
            return None
        [x] = self.arrays
        values = {self.graph.inputs[0]: ops.convert_to_tensor(x)}
        for i, step in enumerate(self.graph.steps):
            if not step.inputs or not values.keys() >= set(step.inputs):
                continue
            if not has_own_kernel(step.operation):
                if not getattr(step.operation, "trainable_variables", None):
                    self.graph.run(values, [i])
                continue
            z = as_numpy(values[step.inputs[0]])
            is_plain = step.inputs[0] in self.graph.inputs
            if z.dtype.kind != "f" or z.shape[0] != len(x):
                continue
            z = np.moveaxis(z.astype("float32"), step.channel_axis, -1)
            wrong = preprocessing.wrong_scale(x.astype("float32"), z, is_plain=is_plain)
            if wrong is not None:
                before = "" if is_plain else "after preprocessing "
                return (
                    f"The input has the wrong range: {before}the sample has a mean of "
                    f"{wrong[0]:.3g} and a standard deviation of {wrong[1]:.3g} (healthy: about 0 "
                    "and 1). Pass the pixels that the preprocessing expects, or normalise them."
                )
        return None

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        """Return means and standard deviations, `(m,)` each; NaN for a layer that the
        model does not call.
        """
        values = [ops.convert_to_tensor(weight.value) for weight in self.model.weights]
        with autodiff.without_gradients():
            figures = ops.convert_to_numpy(self._compiled(*self.arrays, *values))
        return figures[:, 0], figures[:, 1]

    def _run(self, *tensors):
        arrays, weights = tensors[: len(self.arrays)], tensors[len(self.arrays) :]
        with keras.StatelessScope(list(zip(self.model.weights, weights, strict=True))):
            _, statistics = self._measured(self.graph, arrays)
        return ops.concatenate(
            [
                statistics.get(id(layer), _nothing(len(layer_places)))
                for layer, layer_places in self.layers
            ]
        )

    def _measured(self, graph: Graph, inputs: Sequence) -> tuple[list, dict[int, Any]]:
        """Run a graph; return its outputs, and for each weight layer or stack, by its
        id, the mean and standard deviation of its input, `(layers, 2)`.
        """
        values = graph.values(inputs)
        statistics: dict[int, Any] = {}
        calls = {
            i: functools.partial(self._measured_stack, step.operation, statistics)
            for i, step in enumerate(graph.steps)
            if id(step.operation) in self.units
        }
        for i in graph.walk(values, calls=calls, until={}):
            layer = graph.steps[i].operation
            if has_own_kernel(layer) and id(layer) not in statistics:
                x = ops.cast(values[graph.steps[i].inputs[0]], "float32")
                statistics[id(layer)] = ops.reshape(ops.stack([ops.mean(x), ops.std(x)]), (1, 2))
        return [values[number] for number in graph.outputs], statistics

    def _measured_stack(self, stack: LayerStack, statistics: dict[int, Any], x):
        """Run a stack; return its output, and add its figures to `statistics`."""
        layers = _weight_layers(stack.template)

        def step(unit, x, own):
            [y], inside = self._measured(self.units[id(stack)], [x])
            if "factor" in own:  # the graph has the template's
                y = stack._apply(unit, x, own, training=False)
            return y, ops.concatenate([inside.get(id(layer), _nothing(1)) for layer in layers])

        x = ops.convert_to_tensor(x, stack.compute_dtype)
        spec = keras.KerasTensor((len(layers), 2), "float32")
        y, figures = stack.run(step, x, outputs=spec, training=False)
        # if a stack is called twice, keep the first
        statistics.setdefault(id(stack), ops.reshape(figures, (stack.depth * len(layers), 2)))
        return y


def _weight_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Return the weight layers in a layer, in the order of their weights. A stack counts
    as one.
    """
    order = {id(variable): i for i, variable in enumerate(layer.variables)}
    first: dict[keras.Layer, int] = {}
    for each in keras_private.layers(layer):
        variable = each.kernel if has_own_kernel(each) else None
        if isinstance(each, LayerStack) and _weight_layers(each.template):
            variable = each.variables[0]
        if id(variable) in order:  # variables of a stack's template are not the layer's
            first[each] = order[id(variable)]
    return sorted(first, key=first.__getitem__)


def _nothing(count: int):
    return ops.full((count, 2), float("nan"))
