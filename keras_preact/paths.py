"""The steps of a graph, and what is on the paths between its tensors."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import KerasTensor

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

#: Beginnings of the dtypes that carry a signal and its gradient.
_SIGNALS = ("bfloat", "complex", "float")


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


class Paths:
    """Steps, and what is on the paths between their tensors.

    Args:
        steps: Operations, in an order in which they can run.
        specs: Shape and dtype of each tensor.
        inputs, outputs: Numbers of the tensors.
    """

    def __init__(
        self,
        steps: list[Step],
        specs: list[KerasTensor],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
    ):
        self.steps, self.specs = steps, specs
        self.inputs, self.outputs = inputs, outputs

    def is_pair(self, tensors: Sequence[int]) -> bool:
        """Whether these are two tensors of one shape, as far as their sizes are known."""
        shapes = [self.specs[each].shape[1:] for each in tensors]
        return (
            len(shapes) == 2
            and len({*map(len, shapes)}) == 1
            and all(a == b or None in (a, b) for a, b in zip(*shapes, strict=True))
        )

    def is_sum(self, step: Step) -> bool:
        """Whether a step adds two tensors of one shape."""
        return step.kind == "Add" and self.is_pair(step.inputs)

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
