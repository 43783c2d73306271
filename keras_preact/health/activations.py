"""Mean and standard deviation of the input of every weight layer of a network, at
inference.
"""

import contextlib
from collections.abc import Iterator

import keras
import numpy as np
from keras import ops

from keras_preact import _autodiff
from keras_preact._observers import Observer
from keras_preact.health.weights import Place, owners, places
from keras_preact.stacks import UnitStack


class Activations:
    """Runs a model on a sample and measures the inputs of its weight layers: layers
    with a kernel, except recurrent cells.

    The model does not change, and batch normalisation uses its moving statistics. The
    units of a stack are measured one by one, in the loop that runs them.

    Args:
        model: A built model.
        sample: Input of the model, an array or a structure of arrays.

    Attributes:
        places: The layer of each of the m figures, by the path of its kernel.
    """

    def __init__(self, model: keras.Model, sample):
        self.model = model
        self.structure = sample
        self.arrays = [np.asarray(array) for array in keras.tree.flatten(sample)]
        owner = owners(model)
        #: Stacks and the weight layers outside of them, with the places of each.
        self.layers: list[tuple[keras.Layer, list[Place]]] = []
        order = {id(weight): i for i, weight in enumerate(model.weights)}
        layers = [
            layer
            for layer in model._flatten_layers()
            if isinstance(layer, UnitStack) or _is_weight_layer(layer)
        ]
        for layer in sorted(layers, key=lambda layer: order[id(_first_weight(layer))]):
            if isinstance(layer, UnitStack):
                columns = [places(f"{layer.name}/{path}", layer) for path in _paths_in_unit(layer)]
                self.layers.append(
                    (layer, [place for unit in zip(*columns, strict=True) for place in unit])
                )
            else:
                self.layers.append((layer, places(layer.kernel.path, owner.get(id(layer.kernel)))))
        self.places = [place for _, own in self.layers for place in own]
        self._compiled = _autodiff.compiled(self._run)

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        """Return means and standard deviations, `(m,)` each; NaN for a layer that the
        model does not call.
        """
        values = [ops.convert_to_tensor(weight.value) for weight in self.model.weights]
        with _autodiff.without_gradients():
            figures = ops.convert_to_numpy(self._compiled(*self.arrays, *values))
        return figures[:, 0], figures[:, 1]

    def _run(self, *tensors):
        arrays, values = tensors[: len(self.arrays)], tensors[len(self.arrays) :]
        inputs = keras.tree.pack_sequence_as(
            self.structure, [ops.convert_to_tensor(array) for array in arrays]
        )
        found: dict[int, list] = {}
        with contextlib.ExitStack() as taps:
            taps.enter_context(
                keras.StatelessScope(list(zip(self.model.weights, values, strict=True)))
            )
            for layer, _ in self.layers:
                measured = _measured_stack if isinstance(layer, UnitStack) else _measured
                taps.enter_context(_instead_of_call(layer, measured(layer, found)))
            self.model(inputs, training=False)
        return ops.concatenate(
            [
                found.get(id(layer), ops.full((len(own), 2), float("nan")))
                for layer, own in self.layers
            ]
        )


def _is_weight_layer(layer: keras.Layer) -> bool:
    is_cell = hasattr(
        layer, "state_size"
    )  # of a recurrent layer: the cell's input does not leave its loop
    return isinstance(getattr(layer, "kernel", None), keras.Variable) and not is_cell


def _first_weight(layer: keras.Layer) -> keras.Variable:
    return layer.weights[0] if isinstance(layer, UnitStack) else layer.kernel


def _weight_layers(unit: keras.Layer) -> list[keras.Layer]:
    order = {id(variable): i for i, variable in enumerate(unit.variables)}
    layers = [layer for layer in unit._flatten_layers() if _is_weight_layer(layer)]
    return sorted(layers, key=lambda layer: order[id(layer.kernel)])


def _paths_in_unit(stack: UnitStack) -> list[str]:
    """Return the paths of the kernels of a stack's unit, below the unit's name."""
    unit = stack.pattern
    return [layer.kernel.path.split(f"{unit.name}/", 1)[1] for layer in _weight_layers(unit)]


@contextlib.contextmanager
def _instead_of_call(layer: keras.Layer, call) -> Iterator[None]:
    vars(layer)["call"] = call
    try:
        yield
    finally:
        del vars(layer)["call"]


def _measured(layer: keras.Layer, found: dict):
    plain = layer.call

    def call(x, *args, **kwargs):
        if id(layer) not in found:  # of several calls the first counts
            values = ops.cast(x, "float32")
            found[id(layer)] = ops.reshape(ops.stack([ops.mean(values), ops.std(values)]), (1, 2))
        return plain(x, *args, **kwargs)

    return call


def _measured_stack(stack: UnitStack, found: dict):
    """Return a `call` of `stack` that looks at the weight layers of each of its units."""
    plain = stack.call
    layers = _weight_layers(stack.pattern)

    def call(x, **options):
        inside: dict = {}
        observer = Observer(
            lambda **_: ops.concatenate([inside.pop(id(layer)) for layer in layers]),
            (len(layers), 2),
        )
        with contextlib.ExitStack() as taps:
            for layer in layers:
                taps.enter_context(_instead_of_call(layer, _measured(layer, inside)))
            taps.enter_context(observer.active())
            y = plain(x, **options)
        found[id(stack)] = ops.reshape(observer.seen[0], (stack.depth * len(layers), 2))
        return y

    return call
