"""Multiplications of a forward pass, and what training keeps of it for the gradient, counted from a model's layers."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import keras
from keras import KerasTensor

import keras_preact as kp
from keras_preact.analysis.graph import Graph, Step


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of one image.

    Args:
        flops: Floating-point operations of the matrix products and convolutions of a forward pass: two for each product and
            its sum, zeros that pad an image included. Sums, activations and normalisations by themselves are not counted: a
            few percent.
        kept: Bytes that a train step keeps for the gradient: what goes into weight layers, normalisations and products, and
            what comes out of activations; in the dtypes that they have, and with what stacks compute again left out.
        unknown: Kinds of layers with weights whose products are not counted.
    """

    flops: int = 0
    kept: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def multiply_adds(self) -> int:
        """Products with their sums, the half of `flops`, which papers often give."""
        return self.flops // 2


def costs(model: keras.Model) -> Costs:
    """Count what a forward pass of one image, and training on it, take.

    Args:
        model: Of any Keras layers, with one input.

    Raises:
        ValueError: for a model that takes images of any size, or that cannot be traced.
    """
    [image] = model.inputs
    if None in image.shape[1:]:
        raise ValueError(f"Build the model for images of one size. Received: a model for {tuple(image.shape[1:])}")
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
    return Costs(flops, kept + sum(_bytes(graph.specs[tensor]) for tensor in needed), tuple(sorted(unknown)))


def _kept_of_stack(stack: kp.UnitStack, unit: int, carry: int) -> int:
    """Return the bytes that a stack keeps, from those of a unit's inside, its input included, and of its input alone."""
    segment = int(stack.remat)
    if not segment:
        return stack.depth * unit
    return -(-stack.depth // segment) * carry + min(segment, stack.depth) * unit


def _size(spec: KerasTensor) -> int:
    return math.prod(size or 1 for size in spec.shape)


def _bytes(spec: KerasTensor) -> int:
    return _size(spec) * item_size(spec.dtype)


def item_size(dtype: object) -> int:
    """Return the bytes of one value: its kind's name holds the bits, such as bfloat16; bool has none."""
    bits = re.search(r"\d+", keras.backend.standardize_dtype(dtype))
    return int(bits[0]) // 8 if bits else 1


Specs = Sequence[KerasTensor]


def _of_kernel(step: Step, specs: Specs) -> int:
    """A product for each element of the kernel at each place of the output."""
    out = specs[step.outputs[0]]
    return _size(out) // out.shape[step.channel_axis] * math.prod(step.operation.kernel.shape)


def _of_matmul(step: Step, specs: Specs) -> int:
    return _size(specs[step.outputs[0]]) * specs[step.inputs[0]].shape[-1]


def _of_einsum(step: Step, specs: Specs) -> int:
    """A product for each combination of all indices."""
    operands = step.operation.subscripts.split("->")[0].split(",")
    sizes = {
        letter: size or 1
        for letters, tensor in zip(operands, step.inputs, strict=True)
        for letter, size in zip(letters, specs[tensor].shape, strict=True)
    }
    return math.prod(sizes.values())


#: Layers with one kernel, which is applied at each place of the output.
KERNELS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.Dense,
)
#: Other kinds of operations that multiply matrices, and how many products one is for one image.
PRODUCTS: Mapping[str, Callable[[Step, Specs], int]] = {"Matmul": _of_matmul, "Einsum": _of_einsum}

#: Kinds of operations whose gradient needs what they return.
ACTIVATIONS = frozenset({"Activation", "ReLU", "Relu", "Sigmoid", "Softmax", "Tanh"})
#: Kinds of operations whose gradient needs no tensor.
KEEPS_NOTHING = frozenset(
    {
        *("Add", "Subtract", "Negative", "Positions", "Cast", "Pad", "ZeroPadding2D", "GetItem"),
        *("Reshape", "Flatten", "Transpose", "Moveaxis", "Squeeze", "ExpandDims", "Shape"),
        *("GlobalAveragePooling1D", "GlobalAveragePooling2D", "AveragePooling2D", "Mean"),
        *("Rescaling", "Normalization"),  # of images, which have no gradient
    }
)
