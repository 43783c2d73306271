"""The operations of any Keras model as a flat graph."""

import collections
import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import keras
from keras import KerasTensor, ops

from keras_preact import sums
from keras_preact.backend import keras_private
from keras_preact.layers.spatial import BinomialPooling2D
from keras_preact.layers.streams import MeanOfStreams
from keras_preact.paths import Paths, Ref, Step
from keras_preact.squeeze_excitation import SqueezeExcitation
from keras_preact.stacks import LayerStack

#: Layers of this package that stay one step, like the poolings of Keras.
_WHOLE = (SqueezeExcitation, BinomialPooling2D, MeanOfStreams)

#: Layers of Keras that are arithmetic: what they add, and with which factors, is in their call.
_ARITHMETIC = (keras.layers.Average, keras.layers.Lambda, keras.layers.Subtract)


class _Difference(keras.Layer):
    """`a - b` as an addition, which is what residual units end in."""

    def call(self, a, b):
        return ops.add(a, ops.multiply(b, -1))


#: Operators of Keras' variables that take no Keras tensor, to the functions that do.
_OPERATORS: Mapping[str, Callable] = {
    "__add__": ops.add,
    "__sub__": ops.subtract,
    "__mul__": ops.multiply,
    "__truediv__": ops.true_divide,
    "__floordiv__": ops.floor_divide,
    "__pow__": ops.power,
    "__matmul__": ops.matmul,
}


@contextlib.contextmanager
def _variables_take_symbols() -> Iterator[None]:
    """Let `variable * x` be traced, as `x * variable` is. Keras 3.15 hands x to a function
    of the backend. With JAX, the same holds for `(1 - variable) * x`, because x looks like
    an array.
    """

    def absent(x):
        raise AttributeError("__jax_array__")

    def taking_symbols(name: str, function: Callable) -> Callable:
        of_values = getattr(keras.Variable, name)

        def operator(variable, other):
            is_symbol = isinstance(other, KerasTensor)
            return function(variable, other) if is_symbol else of_values(variable, other)

        return operator

    with contextlib.ExitStack() as patches:
        for name, function in _OPERATORS.items():
            patches.enter_context(
                mock.patch.object(keras.Variable, name, taking_symbols(name, function))
            )
        patches.enter_context(mock.patch.object(KerasTensor, "__jax_array__", property(absent)))
        yield


class Graph(Paths):
    """The operations of a model as a flat list of steps.

    Sums have two terms: `x + a + b` with weights in a and b is x, plus the sum of the others.
    Differences are sums with a factor of -1.

    Args:
        model: Any Keras model or layer that can be called with Keras tensors.
        inputs: Inputs of the model, an array or a structure; only shapes and dtypes
            matter.
        training: Argument of the model's call.
        opaque: Classes of layers that stay one step.
        every_kernel: Whether to split layers that hold weight layers into their steps
            too, if they can be traced. Otherwise such a layer, for example Keras'
            MultiHeadAttention, is one step.
        like: A graph of the same model. Its copies of stacked units are reused.

    Attributes:
        model: The model.
        steps: The operations, in an order in which they can run.
        inputs, outputs: Numbers of the tensors.
        batch: Number of examples.
        specs: Shape and dtype of each tensor.
        closed: Names of layers without kernels that cannot be traced. Each is one step.

    Raises:
        ValueError: for a model that cannot be traced, such as one that calls a
            backend's own functions beside its weights.
    """

    def __init__(
        self,
        model: keras.Layer,
        inputs,
        training: bool = False,
        opaque: tuple[type, ...] = (),
        like: "Graph | None" = None,
        every_kernel: bool = False,
    ):
        self.model = model
        self.training = training
        self.opaque = opaque
        self.every_kernel = every_kernel
        self._copies: dict[int, list] = {} if like is None else like._copies
        self._numbers: collections.Counter[str] = collections.Counter()
        super().__init__([], [], (), ())
        self.closed: list[str] = []
        self.batch = keras.tree.flatten(inputs)[0].shape[0]
        symbols = [
            KerasTensor((None, *x.shape[1:]), keras.backend.standardize_dtype(x.dtype))
            for x in keras.tree.flatten(inputs)
        ]
        self.inputs = tuple(self._new(symbol) for symbol in symbols)
        arguments = keras.tree.pack_sequence_as(inputs, [Ref(number) for number in self.inputs])
        outputs = self._inline(model, "", (arguments,), {})
        self.outputs = tuple(outputs)
        before = Paths(self.steps, self.specs, self.inputs, self.outputs)
        if plan := sums.grouped(before):
            self.steps = [before.steps[i].reading(tensors) for i, tensors in plan]

    def _new(self, spec: KerasTensor) -> int:
        self.specs.append(spec)
        return len(self.specs) - 1

    def _inline(self, layer: keras.Layer, prefix: str, args: tuple, kwargs: dict) -> list[int]:
        """Add the steps of a layer that is called with `args`; return its outputs."""
        if isinstance(layer, LayerStack):
            [x] = [arg for arg in keras.tree.flatten(args) if isinstance(arg, Ref)]
            if id(layer) not in self._copies:
                self._copies[id(layer)] = [layer.unit(i) for i in range(layer.depth)]
            for unit in self._copies[id(layer)]:
                output = KerasTensor(self.specs[x.tensor].shape, unit.compute_dtype)
                [number] = self._add(unit, f"{prefix}{unit.name}", (x,), {}, [output])
                x = Ref(number)
            return [x.tensor]
        nodes, symbols, refs, results, is_fresh = self._calls(layer, args, kwargs)
        numbers = {id(symbol): ref.tensor for symbol, ref in zip(symbols, refs, strict=True)}
        for node in nodes:
            node_args, node_kwargs = keras.tree.map_structure(
                lambda value, numbers=numbers: (
                    Ref(numbers[id(value)]) if isinstance(value, KerasTensor) else value
                ),
                (node.arguments.args, node.arguments.kwargs),
            )
            name = prefix + self._name(node.operation, is_fresh)
            outputs = self._add(node.operation, name, node_args, node_kwargs, node.outputs)
            numbers |= {
                id(symbol): number for symbol, number in zip(node.outputs, outputs, strict=True)
            }
        return [numbers[id(symbol)] for symbol in results]

    def _name(self, operation, is_fresh: bool) -> str:
        """Return the name of an operation. In Keras the numbers of traced operations
        grow with every call; here they are the same in every graph of a model.
        """
        if isinstance(operation, keras.Layer) or not is_fresh:
            return operation.name
        base_name = re.sub(r"_\d+$", "", operation.name)
        number = self._numbers[base_name]
        self._numbers[base_name] += 1
        return f"{base_name}_{number}" if number else base_name

    def _add(
        self, operation, name: str, args: tuple, kwargs: dict, outputs: list[KerasTensor]
    ) -> list[int]:
        if isinstance(operation, keras.Layer):
            # the graph has a `training` of its own
            kwargs = {key: value for key, value in kwargs.items() if key != "training"}
        inputs = tuple(
            leaf.tensor for leaf in keras.tree.flatten((args, kwargs)) if isinstance(leaf, Ref)
        )
        if type(operation).__name__ == "Subtract" and self.is_pair(inputs):
            return self._inline(_Difference(), f"{name}/", (*map(Ref, inputs),), {})
        is_composite = self._is_composite(operation, len(inputs))
        is_opaque = isinstance(operation, self.opaque)
        if is_composite or (self.every_kernel and _holds_kernels(operation) and not is_opaque):
            steps_before = len(self.steps)
            try:
                return self._inline(operation, f"{name}/", args, kwargs)
            except ValueError:
                if is_composite and _holds_kernels(operation):
                    raise  # its weight layers would be missing
                del self.steps[steps_before:]
                self.closed.append(name)
        if _takes_training(operation):
            kwargs = kwargs | {"training": self.training}
        outputs = self._with_sizes(operation, args, kwargs, outputs)
        numbers = [self._new(symbol) for symbol in outputs]
        self.steps.append(Step(operation, name, args, kwargs, inputs, tuple(numbers)))
        return numbers

    def _with_sizes(
        self, operation, args: tuple, kwargs: dict, outputs: list[KerasTensor]
    ) -> list[KerasTensor]:
        """Return the outputs of an operation with the sizes that follow from the inputs
        of the graph, where the model leaves them free.
        """
        if not any(None in symbol.shape[1:] for symbol in outputs):
            return outputs
        args, kwargs = keras.tree.map_structure(
            lambda leaf: self.specs[leaf.tensor] if isinstance(leaf, Ref) else leaf, (args, kwargs)
        )
        try:
            found = keras.tree.flatten(operation.compute_output_spec(*args, **kwargs))
        except Exception:  # of a layer that cannot say it; the sizes stay free
            return outputs
        return [KerasTensor(new.shape, x.dtype) for new, x in zip(found, outputs, strict=True)]

    def _is_composite(self, operation, inputs: int) -> bool:
        is_whole = isinstance(operation, (*_WHOLE, *self.opaque))
        if is_whole or not isinstance(operation, keras.Layer):
            return False
        if isinstance(operation, keras.Model | LayerStack):
            return True
        if isinstance(operation, _ARITHMETIC) or (
            isinstance(operation, keras.layers.Add) and inputs > 2
        ):
            return True
        if type(operation).__module__.startswith("keras.src.layers."):
            return False
        # A layer without variables is arithmetic, such as a shortcut. A layer with variables but
        # without inner layers is one step, such as a norm.
        return not operation.variables or any(
            layer is not operation for layer in keras_private.layers(operation)
        )

    def _calls(self, layer, args: tuple, kwargs: dict):
        """Return the calls inside `layer`, its inputs as Keras tensors, the `Ref` of
        each, its outputs as Keras tensors, and whether the layer was traced for this.
        """
        refs = [leaf for leaf in keras.tree.flatten((args, kwargs)) if isinstance(leaf, Ref)]
        functional = keras_private.functional(layer)
        if isinstance(functional, keras.Model) and getattr(functional, "inputs", None):
            nodes = _nodes(functional.inputs, functional.outputs)
            return nodes, functional.inputs, refs, functional.outputs, False
        specs = [self.specs[ref.tensor] for ref in refs]
        # The batch size is included: a call that reshapes by the shape of its input needs numbers.
        symbols = [
            KerasTensor((x.shape[0] or self.batch, *x.shape[1:]), x.dtype) if x.shape else x
            for x in specs
        ]
        fresh = iter(symbols)
        args, kwargs = keras.tree.map_structure(
            lambda leaf: next(fresh) if isinstance(leaf, Ref) else leaf, (args, kwargs)
        )
        training = {"training": self.training} if _takes_training(layer) else {}
        try:
            with _variables_take_symbols():
                outputs = keras.tree.flatten(layer.call(*args, **kwargs, **training))
            nodes = _nodes(symbols, outputs)
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            raise ValueError(
                f"The graph of {layer.name!r} ({type(layer).__name__}) cannot be traced: build it "
                "from Keras layers and keras.ops, without conditions on the values of tensors. "
                f"Received: {type(error).__name__}: {first_line}"
            ) from error
        for node in nodes:  # remove the traced calls from the records of the layers
            keras_private.forget_call(node)
        return nodes, symbols, refs, outputs, True

    def values(self, inputs) -> dict[int, Any]:
        """Return the inputs of the model as tensors by their numbers, to start `walk`
        with.
        """
        tensors = map(ops.convert_to_tensor, keras.tree.flatten(inputs))
        return dict(zip(self.inputs, tensors, strict=True))

    def walk(
        self,
        values: dict[int, Any],
        steps: Iterable[int] | None = None,
        *,
        calls: Mapping[int, Callable] | None = None,
        until: Mapping[int, int] | None = None,
    ) -> Iterator[int]:
        """Run steps one by one. Between two of them the caller may read and change
        `values`.

        Args:
            values: Number of a tensor to the tensor. Each step reads its inputs here
                and adds its outputs.
            steps: Numbers of the steps; None for all.
            calls: Number of a step to a function that replaces it and gets its first
                argument.
            until: Drop each tensor after its last use, but keep the outputs. A tensor
                in this mapping is kept at least until the step of its number has run.
                None: keep all tensors.

        Yields:
            The number of each step after it has run.
        """
        last = {} if until is None else self._last_uses(until)
        for i in range(len(self.steps)) if steps is None else steps:
            step = self.steps[i]
            args, kwargs = keras.tree.map_structure(
                lambda leaf: values[leaf.tensor] if isinstance(leaf, Ref) else leaf,
                (step.args, step.kwargs),
            )
            call = (calls or {}).get(i)
            results = step.operation(*args, **kwargs) if call is None else call(args[0])
            values.update(zip(step.outputs, keras.tree.flatten(results), strict=True))
            yield i
            if until is not None:
                for tensor in [tensor for tensor in values if last[tensor] <= i]:
                    del values[tensor]

    def run(
        self,
        values: dict[int, Any],
        steps: Iterable[int] | None = None,
        calls: Mapping[int, Callable] | None = None,
    ) -> dict[int, Any]:
        """Run steps as `walk` does, and return `values` with all tensors."""
        for _ in self.walk(values, steps, calls=calls):
            pass
        return values

    def _last_uses(self, until: Mapping[int, int]) -> dict[int, int]:
        """Return a dictionary from each tensor to the last step that needs it."""
        last = {
            tensor: max([*readers, until.get(tensor, -1)])
            for tensor, readers in self.consumers.items()
        }
        return last | dict.fromkeys(self.outputs, len(self.steps))


def has_own_kernel(layer) -> bool:
    """Whether a layer has a variable `kernel`. Recurrent cells do not count, because
    their inputs do not leave their loop.
    """
    has_kernel = isinstance(getattr(layer, "kernel", None), keras.Variable)
    return has_kernel and not hasattr(layer, "state_size")


def _holds_kernels(operation) -> bool:
    return isinstance(operation, keras.Layer) and any(
        has_own_kernel(layer) for layer in keras_private.sublayers(operation)
    )


def _takes_training(operation) -> bool:
    return (
        isinstance(operation, keras.Layer)
        and "training" in inspect.signature(operation.call).parameters
    )


def _nodes(inputs: list[KerasTensor], outputs: list[KerasTensor]) -> list:
    """Return the calls from inputs to outputs, in an order in which they can run.

    `keras.Function` finds them too, but refuses layers with the same name, such as the
    convolutions of two paths of a unit.

    Raises:
        ValueError: for outputs that need other tensors than the inputs.
    """
    given = {id(symbol) for symbol in inputs}

    def calls_before(symbols: Iterable[KerasTensor]) -> list:
        return [_call_of(symbol) for symbol in symbols if id(symbol) not in given]

    ordered: dict[int, Any] = {}  # by id: each call after the calls that it needs
    stack = calls_before(outputs)[::-1]
    while stack:
        needed = [node for node in calls_before(stack[-1].input_tensors) if id(node) not in ordered]
        if needed:
            stack += needed[::-1]
        else:
            node = stack.pop()
            ordered.setdefault(id(node), node)
    distance = dict.fromkeys(ordered, 0)  # longest chain of calls after each one
    for node in reversed(ordered.values()):
        for before in calls_before(node.input_tensors):
            distance[id(before)] = max(distance[id(before)], distance[id(node)] + 1)
    return sorted(ordered.values(), key=lambda node: -distance[id(node)])


def _call_of(symbol: KerasTensor):
    """Return the call that made a Keras tensor."""
    operation, index, _ = symbol._keras_history
    if operation is None or keras_private.calls(operation)[index].is_input:
        raise ValueError(f"The outputs must depend on the inputs alone. Received: {symbol}")
    return keras_private.calls(operation)[index]
