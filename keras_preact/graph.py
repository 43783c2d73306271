"""The operations of any Keras model as a flat graph."""

import collections
import contextlib
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import KerasTensor, ops

from keras_preact import sums
from keras_preact.backend import keras_private
from keras_preact.layers.spatial import BinomialPooling2D
from keras_preact.layers.streams import MeanOfStreams
from keras_preact.squeeze_excitation import SqueezeExcitation
from keras_preact.stacks import LayerStack

#: Parts of class names of layers without kernels, although some of their weights have several axes.
_NO_KERNEL = ("Coefficients", "Embedding", "Norm", "PReLU", "SqueezeExcitation")

#: Class names of layers and operations that are activations, in lower case.
_ACTIVATIONS = frozenset(
    name.replace("_", "") for name in [*dir(keras.activations), "prelu"] if name[0] != "_"
) - {"linear", "get", "serialize", "deserialize"}

#: Class names of layers and operations that return the values of their first input.
_KEEPING = ("Cast", "ExpandDims", "Flatten", "Identity", "Reshape", "Squeeze")

#: Class names of layers that pool each channel by itself. An `AttentionPooling` need not do so.
_POOLING = re.compile(r"(Global|Adaptive)?(Average|Max)Pooling[123]D")

#: Layers of this package that stay one step, like the poolings of Keras.
_WHOLE = (SqueezeExcitation, BinomialPooling2D, MeanOfStreams)

#: Beginnings of the dtypes that carry a signal and its gradient.
_SIGNALS = ("bfloat", "complex", "float")

#: Layers of Keras that are arithmetic: what they add, and with which factors, is in their call.
_ARITHMETIC = (keras.layers.Average, keras.layers.Lambda, keras.layers.Subtract)


@dataclasses.dataclass(frozen=True)
class Ref:
    """A tensor in the arguments of a step, by its number."""

    tensor: int


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation.

    Args:
        operation: A Keras operation or layer.
        name: Its name after the names of the layers that hold it:
            `stage1_unit2/conv_1`.
        args, kwargs: Arguments of the call, with a `Ref` for each tensor.
        inputs, outputs: Numbers of the tensors that it reads and returns.
    """

    operation: Any
    name: str
    args: tuple
    kwargs: dict
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def has_kernel(self) -> bool:
        """Whether it is a weight layer, which multiplies by a matrix or kernel. A
        scale, a shift or a table does not count.
        """
        if not isinstance(self.operation, keras.Layer) or any(
            word in self.kind for word in _NO_KERNEL
        ):
            return False
        return any(len(w.shape) > 1 for w in self.operation.weights)

    @property
    def kind(self) -> str:
        return type(self.operation).__name__

    @property
    def roles(self) -> tuple[str, ...]:
        """Any of `"weight"`, `"norm"`, `"activation"`, `"dropout"`."""
        if self.kind == "Activation" or self.has_kernel:
            function = getattr(self.operation, "activation", None)
            active = callable(function) and function is not keras.activations.linear
            return ("weight",) * self.has_kernel + ("activation",) * active
        if "Norm" in self.kind:
            is_preprocessing = isinstance(self.operation, keras.layers.Normalization)
            return () if is_preprocessing else ("norm",)
        if self.kind.replace("_", "").lower() in _ACTIVATIONS:
            return ("activation",)
        is_random = getattr(self.operation, "seed_generator", None) is not None
        return ("dropout",) if is_random else ()

    def reading(self, tensors: Sequence[int]) -> "Step":
        """Return the step with other inputs."""
        numbers = iter(tensors)
        args, kwargs = keras.tree.map_structure(
            lambda leaf: Ref(next(numbers)) if isinstance(leaf, Ref) else leaf,
            (self.args, self.kwargs),
        )
        return dataclasses.replace(self, args=args, kwargs=kwargs, inputs=(*tensors,))

    @property
    def is_per_token(self) -> bool:
        """Whether the layer normalises over the features of one token, as in transformers."""
        return "LayerNorm" in self.kind or "RMSNorm" in self.kind

    @property
    def channel_axis(self) -> int:
        return 1 if getattr(self.operation, "data_format", None) == "channels_first" else -1


class _Dominators:
    """The tensors that are on every path to others.

    Args:
        steps: Steps in order.
        roots: Tensors at which paths begin. What does not depend on them has no part in it.

    Attributes:
        nearest: Dictionary from each tensor to its immediate dominator, the nearest tensor
            that is on every path to it; None if there is none.
    """

    def __init__(self, steps: Iterable[Step], roots: Sequence[int]):
        self.nearest: dict[int, int | None] = dict.fromkeys(roots)
        self._height: dict[int | None, int] = {None: 0} | dict.fromkeys(roots, 1)
        for step in steps:
            if reached := [tensor for tensor in step.inputs if tensor in self.nearest]:
                dominator = self.common(reached)
                for tensor in step.outputs:
                    self.nearest[tensor] = dominator
                    self._height[tensor] = self._height[dominator] + 1

    def common(self, tensors: Iterable[int | None]) -> int | None:
        """Return the nearest tensor that is on every path to several ones, or is one."""
        return functools.reduce(self._common, tensors)

    def _common(self, a: int | None, b: int | None) -> int | None:
        while a != b:
            if self._height[a] < self._height[b]:
                a, b = b, a
            a = None if a is None else self.nearest[a]
        return a


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


class Graph:
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
        self.steps: list[Step] = []
        self.specs: list[KerasTensor] = []
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
        if plan := sums.grouped(self):
            self.steps = [self.steps[i].reading(tensors) for i, tensors in plan]
            for name in ("producers", "consumers", "dominators", "_views"):  # of the steps before
                self.__dict__.pop(name, None)

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

    def is_pair(self, tensors: Sequence[int]) -> bool:
        """Whether these are two tensors of one shape, as far as their sizes are known."""
        shapes = [self.specs[each].shape[1:] for each in tensors]
        return (
            len(shapes) == 2
            and len({*map(len, shapes)}) == 1
            and all(a == b or None in (a, b) for a, b in zip(*shapes, strict=True))
        )

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

    @functools.cached_property
    def producers(self) -> dict[int, int]:
        """Dictionary from each tensor to the step that returns it; inputs have none."""
        return {tensor: i for i, step in enumerate(self.steps) for tensor in step.outputs}

    def origin(self, tensor: int) -> int:
        """Return the tensor that a tensor has its values from: the one before casts,
        reshapes, identities and linear activations.
        """
        while (i := self.producers.get(tensor)) is not None and _keeps_values(self.steps[i]):
            tensor = self.steps[i].inputs[0]
        return tensor

    def pooled(self, tensor: int) -> tuple[int, bool]:
        """Return the tensor before the poolings that end in a tensor, and whether all of
        them are averages.
        """
        are_averages = True
        while (i := self.producers.get(tensor := self.origin(tensor))) is not None:
            pooling = _pooling(self.steps[i], self.specs)
            if pooling is None:
                break
            are_averages &= pooling == "average"
            tensor = self.steps[i].inputs[0]
        return tensor, are_averages

    @functools.cached_property
    def consumers(self) -> dict[int, list[int]]:
        """Dictionary from each tensor to the steps that read it."""
        readers: dict[int, list[int]] = {number: [] for number in range(len(self.specs))}
        for i, step in enumerate(self.steps):
            for tensor in dict.fromkeys(step.inputs):
                readers[tensor].append(i)
        return readers

    @functools.cached_property
    def dominators(self) -> dict[int, int | None]:
        """Dictionary from each tensor to its immediate dominator, the nearest tensor
        that is on every path to it; None if there is none.
        """
        return dict.fromkeys(range(len(self.specs))) | _Dominators(self.steps, self.inputs).nearest

    @functools.cached_property
    def _views(self) -> dict[int, _Dominators]:
        """Dictionary from each source of a signal to the dominators of what depends on it.

        A signal is a tensor of floating-point numbers. Its sources are inputs, the vectors
        of tokens, and masks as numbers. Gradients end there.
        """
        signals = {
            number for number, spec in enumerate(self.specs) if spec.dtype.startswith(_SIGNALS)
        }
        steps = [
            dataclasses.replace(
                step,
                inputs=tuple(each for each in step.inputs if each in signals),
                outputs=tuple(each for each in step.outputs if each in signals),
            )
            for step in self.steps
        ]
        sources = [each for each in self.inputs if each in signals]
        sources += [each for step in steps if not step.inputs for each in step.outputs]
        return {source: _Dominators(steps, (source,)) for source in sources}

    def parting(self, ends: Iterable[int]) -> tuple[int | None, list[tuple[int, tuple[int, ...]]]]:
        """Return where the paths to the terms of a sum part, None if they have no source in
        common, and the terms with the steps of their paths. The term that changes the start
        least comes first.

        The start is on every path from a common source: from the tokens, for an attention
        with a mask or with the output of an encoder, which are sources of their own. Among
        several starts it is the last one.
        """
        ends = dict.fromkeys(ends)
        views = [view for view in self._views.values() if view.nearest.keys() >= ends.keys()]
        starts = [start for view in views if (start := view.common(ends)) is not None]
        if not starts:
            return None, []
        start = max(starts, key=lambda tensor: self.producers.get(tensor, -1))
        paths = [(end, self.between(start, end)) for end in ends]
        return start, sorted(paths, key=lambda path: self.size(start, path[1]))

    def between(self, start: int, end: int) -> tuple[int, ...]:
        """Return the numbers of the steps on the paths from one tensor to another, in
        order.
        """
        reached = {start}
        forward = []
        for i, step in enumerate(self.steps):
            if not reached.isdisjoint(step.inputs):
                reached.update(step.outputs)
                forward.append(i)
        wanted, steps = {end}, []
        for i in reversed(forward):
            step = self.steps[i]
            if start not in step.outputs and not wanted.isdisjoint(step.outputs):
                wanted.update(step.inputs)
                steps.append(i)
        return tuple(reversed(steps))

    def weights_of(self, steps) -> int:
        return sum(self.steps[i].has_kernel for i in steps)

    def size(self, start: int, steps: Sequence[int]) -> tuple[int, ...]:
        """Return how much a path changes its start: the number of weight layers that none of
        its ways avoids, the positions of its largest kernel, and the numbers of all weight
        layers and of all steps.

        A gate has weights and is still no part of what it multiplies.
        """
        least = {start: 0}
        for i in steps:
            step = self.steps[i]
            before = min(least[tensor] for tensor in step.inputs if tensor in least)
            least |= dict.fromkeys(step.outputs, before + step.has_kernel)
        kernels = [getattr(self.steps[i].operation, "kernel_size", ()) for i in steps]
        return (
            [*least.values()][-1],
            max((math.prod(size) for size in kernels), default=0),
            self.weights_of(steps),
            len(steps),
        )


def _keeps_values(step: Step) -> bool:
    return step.kind in _KEEPING or (step.kind == "Activation" and not step.roles)


def _pooling(step: Step, specs: Sequence[KerasTensor]) -> str | None:
    """Return `"average"` or `"maximum"` for a step that pools each channel over places."""
    if step.kind in ("Mean", "Max"):  # operations
        rank = len(specs[step.inputs[0]].shape)
        axes = step.operation.axis
        axes = range(rank) if axes is None else np.atleast_1d(axes) % rank
        if {0, rank - 1} & set(axes):
            return None
    elif not _POOLING.fullmatch(step.kind):
        return None
    return "maximum" if "Max" in step.kind else "average"


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
