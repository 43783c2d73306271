"""Multiplications of a forward pass, and memory for its gradient, counted from a
model's layers.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import keras
from keras import KerasTensor

import keras_preact as kp
from keras_preact.graph import Graph, Step


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of one image.

    Args:
        flops: Floating-point operations of the matrix products and convolutions of a
            forward pass: two per product and its sum, also for padding. Other sums,
            activations and normalisations, a few percent, are not counted.
        kept: Bytes that a train step keeps for the gradient: inputs of weight layers,
            normalisations and products, and outputs of activations, in their dtypes and
            without what stacks recompute.
        unknown: Kinds of layers with weights whose products are not counted.
    """

    flops: int = 0
    kept: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def multiply_adds(self) -> int:
        """Products with their sums, half of `flops`: the number that papers often give."""
        return self.flops // 2


def costs(model: keras.Model) -> Costs:
    """Return the costs of a forward pass of one image, and of training on it.

    Args:
        model: Model of any Keras layers, with one input.

    Raises:
        ValueError: for a model of images of any size, or one that cannot be traced.
    """
    [image] = model.inputs
    if None in image.shape[1:]:
        raise ValueError(
            "Build the model for images of one size. Received: a model for "
            f"{tuple(image.shape[1:])}"
        )
    return _of(model, KerasTensor((1, *image.shape[1:]), image.dtype))


def _of(layer: keras.Layer, image: KerasTensor) -> Costs:
    graph = Graph(layer, image, training=True, opaque=(kp.UnitStack,))
    flops, kept = 0, 0
    unknown: set[str] = set()
    needed: set[int] = set()
    for step in graph.steps:
        if isinstance(step.operation, kp.UnitStack):
            stack, carry = step.operation, graph.specs[step.inputs[0]]
            unit = _of(stack.unit(0), KerasTensor((1, *carry.shape[1:]), carry.dtype))
            flops += stack.depth * unit.flops
            kept += _kept_of_stack(stack, unit.kept, _bytes(carry))
            unknown.update(unit.unknown)
            continue
        products = _of_kernel if isinstance(step.operation, KERNELS) else PRODUCTS.get(step.kind)
        if products is not None:
            flops += 2 * products(step, graph.specs)
        elif step.has_kernel and step.kind not in KEEPS_NOTHING:
            unknown.add(step.kind)
        if step.kind not in KEEPS_NOTHING:
            needed.update(step.outputs if step.kind in ACTIVATIONS else step.inputs)
    return Costs(
        flops, kept + sum(_bytes(graph.specs[tensor]) for tensor in needed), tuple(sorted(unknown))
    )


def _kept_of_stack(stack: kp.UnitStack, unit: int, carry: int) -> int:
    """Return the bytes that a stack keeps.

    Args:
        stack: The stack.
        unit: Bytes of a unit, its input included.
        carry: Bytes of its input.
    """
    segment = int(stack.remat)
    if not segment:
        return stack.depth * unit
    return -(-stack.depth // segment) * carry + min(segment, stack.depth) * unit


def _size(spec: KerasTensor) -> int:
    return math.prod(size or 1 for size in spec.shape)


def _bytes(spec: KerasTensor) -> int:
    return _size(spec) * item_size(spec.dtype)


def item_size(dtype: object) -> int:
    """Return the bytes of one value, from the bits in the name of its dtype; bool has
    none.
    """
    bits = re.search(r"\d+", keras.backend.standardize_dtype(dtype))
    return int(bits[0]) // 8 if bits else 1


Specs = Sequence[KerasTensor]


def _of_kernel(step: Step, specs: Specs) -> int:
    """Return one product per element of the kernel and place of the output."""
    out = specs[step.outputs[0]]
    return _size(out) // out.shape[step.channel_axis] * math.prod(step.operation.kernel.shape)


def _of_matmul(step: Step, specs: Specs) -> int:
    return _size(specs[step.outputs[0]]) * specs[step.inputs[0]].shape[-1]


def _of_einsum(step: Step, specs: Specs) -> int:
    """Return one product per combination of all indices."""
    operands = step.operation.subscripts.split("->")[0].split(",")
    sizes = {
        letter: size or 1
        for letters, tensor in zip(operands, step.inputs, strict=True)
        for letter, size in zip(letters, specs[tensor].shape, strict=True)
    }
    return math.prod(sizes.values())


#: Layers with one kernel, applied at each place of the output.
KERNELS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.Dense,
)
#: Other operations that multiply matrices, to their number of products for one image.
PRODUCTS: Mapping[str, Callable[[Step, Specs], int]] = {"Matmul": _of_matmul, "Einsum": _of_einsum}

#: Operations whose gradient needs their output.
ACTIVATIONS = frozenset({"Activation", "ReLU", "Relu", "Sigmoid", "Softmax", "Tanh"})
#: Operations whose gradient needs no tensor.
KEEPS_NOTHING = frozenset(
    {
        *("Add", "Subtract", "Negative", "Positions", "Cast", "Pad", "ZeroPadding2D", "GetItem"),
        *("Reshape", "Flatten", "Transpose", "Moveaxis", "Squeeze", "ExpandDims", "Shape"),
        *("GlobalAveragePooling1D", "GlobalAveragePooling2D", "AveragePooling2D", "Mean"),
        *("Rescaling", "Normalization"),  # of images, which have no gradient
    }
)
