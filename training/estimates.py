"""Costs of a run, for `keras-preact train RECIPE --dry-run`: multiplications, memory,
learning rate, time.
"""

import collections
import dataclasses
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

import keras
from keras import KerasTensor
from rich import filesize

import keras_preact as kp
from keras_preact.graph import Graph, Step

from . import plans
from .config import Data
from .run import Run
from .terminal import duration

#: Shares of a run at which its learning rate is printed.
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of one image.

    Args:
        multiply_adds: Products with their sums in the matrix products and convolutions
            of a forward pass, also for padding. Other sums, activations and
            normalisations, a few percent, are not counted.
        kept: Bytes that a train step keeps for the gradient: inputs of weight layers,
            normalisations and products, and outputs of activations, in their dtypes and
            without what stacks recompute.
    """

    multiply_adds: int = 0
    kept: int = 0


def costs(layer: keras.Layer, image: KerasTensor) -> Costs:
    """Return the costs of a forward pass of one image through a layer, and of training
    on it.
    """
    graph = Graph(layer, image, training=True, opaque=(kp.UnitStack,))
    products, kept = 0, 0
    needed: set[int] = set()
    for step in graph.steps:
        if isinstance(step.operation, kp.UnitStack):
            stack, carry = step.operation, graph.specs[step.inputs[0]]
            unit = costs(stack.unit(0), KerasTensor((1, *carry.shape[1:]), carry.dtype))
            products += stack.depth * unit.multiply_adds
            kept += _kept_of_stack(stack, unit.kept, _bytes([carry]))
            continue
        count = _of_kernel if isinstance(step.operation, KERNELS) else PRODUCTS.get(step.kind)
        if count is not None:
            products += count(step, graph.specs)
        if step.kind not in KEEPS_NOTHING:
            needed.update(step.outputs if step.kind in ACTIVATIONS else step.inputs)
    return Costs(products, kept + _bytes(graph.specs[tensor] for tensor in needed))


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


def _size(spec: KerasTensor | keras.Variable) -> int:
    return math.prod(size or 1 for size in spec.shape)


def _bytes(specs: Iterable[KerasTensor | keras.Variable]) -> int:
    return sum(_size(spec) * _item_size(spec.dtype) for spec in specs)


def _item_size(dtype: object) -> int:
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


#: Layers of networks for images with one kernel, applied at each place of the output.
KERNELS = (keras.layers.Conv2D, keras.layers.DepthwiseConv2D, keras.layers.Dense)
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


def memory(model: keras.Model, kept: int) -> dict[str, int]:
    """Return an estimate of the bytes of a train step, by kind.

    Temporary copies, workspaces and the program of the backend are not included.

    Args:
        model: Compiled.
        kept: Bytes that are kept for the gradient.
    """
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return {
        "weights": _bytes(model.weights),
        "gradients": _bytes(model.trainable_variables),
        "optimizer": _bytes(model.optimizer.variables),
        "activations": kept,
    }


def describe(run: Run, executions: Sequence[float]) -> str:
    """Return a page that describes a run and its costs before it begins.

    Args:
        run: The run.
        executions: Seconds of executions of the train step. The first one compiles it.
    """
    model, config, plan, data = run.network, run.config, run.plan, run.data
    batch, devices = config.batch_size, run.distribution.replicas
    [image] = model.inputs
    cost = costs(model, KerasTensor((1, *image.shape[1:]), image.dtype))
    at_a_time = -(-batch // (plan.parts * devices))
    needed = memory(model, at_a_time * cost.kept)
    amounts = ", ".join(f"{name} {filesize.decimal(value)}" for name, value in needed.items())
    split = f" in {plan.parts} parts" if plan.parts > 1 else ""
    split += f" on {devices} devices" if devices > 1 else ""
    fixed = sum(map(_size, model.non_trainable_weights))
    sizes = {"to train": data.train, "held out": data.holdout, "to test": data.test}
    images = ", ".join(f"{part.size:,} {name}" for name, part in sizes.items() if part is not None)
    execution = statistics.median(executions[1:])
    compiling = max(executions[0] - execution, 0.0)
    seconds = execution * plan.parts / config.steps_per_execution
    rows = {
        "Model": _name(model),
        "Parameters": f"{run.parameters:,} trained, {fixed:,} fixed or moving statistics",
        "FLOPs": (
            f"{_short(2 * cost.multiply_adds)} per image in the forward pass "
            f"({_short(cost.multiply_adds)} multiply-adds, weight layers and attention only); "
            f"about {_short(6 * cost.multiply_adds * batch)} per update"
        ),
        "Data": (
            f"{data.name}: {images}; {len(data.classes)} classes; {run.size} x {run.size} pixels, "
            f"{data.channels} channel{'s' * (data.channels > 1)}"
        ),
        "Augmentation": _augmentation(config.data),
        "Updates": (
            f"{plan.iterations:,} with {batch:,} images each{split}: "
            f"{plan.iterations / plan.steps_per_epoch:,.4g} epochs of {plan.steps_per_epoch:,} "
            "updates"
        ),
        "Memory": (
            f"about {filesize.decimal(sum(needed.values()))} per device, without the backend's "
            f"workspaces: {amounts} ({at_a_time:,} images)"
        ),
        "Learning rate": _rates(plans.rate_at(run.rate), plan.iterations),
        "Time": (
            f"about {duration(plan.iterations * seconds)} ({seconds:.3g} s per update, "
            f"{batch / seconds:,.0f} images/s), and {duration(compiling)} to compile; measured in "
            "a few steps, without validation"
        ),
    }
    width = max(map(len, rows)) + 2
    lines = [
        textwrap.fill(text, 100, initial_indent=label.ljust(width), subsequent_indent=" " * width)
        for label, text in rows.items()
    ]
    return "\n".join(lines)


def _name(model: keras.Model) -> str:
    policies = collections.Counter(
        layer.dtype_policy.name for layer in model.layers if layer.weights
    )
    units = sum(part.depth if isinstance(part, kp.UnitStack) else 1 for part in model.segments)
    return f"{model.name}, {units} units, {policies.most_common(1)[0][0]}"


def _short(number: int) -> str:
    """Return a number with three digits and a prefix: 81.1 M."""
    size, prefix = filesize.pick_unit_and_suffix(number, ["", "k", "M", "G", "T", "P"], 1000)
    return f"{number / size:.3g} {prefix}"


def _augmentation(options: Data) -> str:
    padding = (
        f", padded by {options.border} pixels with: {options.padding}"
        if options.augmentation == "pad_crop_flip"
        else ""
    )
    parts = [options.augmentation + padding]
    if options.rand_augment is not None:
        count, magnitude = options.rand_augment
        parts.append(f"RandAugment, {count} operations of magnitude {magnitude}")
    parts += [
        f"{name} with alpha {alpha:g}"
        for name, alpha in (("mixup", options.mixup), ("CutMix", options.cutmix))
        if alpha
    ]
    return "; ".join(parts)


def _rates(rate: Callable[[int], float], iterations: int) -> str:
    """Return in words the learning rate at the parts of a run, and its highest one."""
    parts = [("at the start", 0)]
    parts += [(f"at {100 * share:g} %", round(share * (iterations - 1))) for share in SHARES]
    parts += [("at the end", iterations - 1)]
    highest = max(rate(step) for step in range(0, iterations, max(1, iterations // 200)))
    words = [f"{rate(step):.3g} {name}" for name, step in parts]
    return f"{', '.join(words)}; highest {highest:.3g}"
