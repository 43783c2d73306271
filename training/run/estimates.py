"""Costs of a run, for `keras-preact train RECIPE --dry-run`: multiplications, memory,
learning rate, time.
"""

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence

import keras
from keras import KerasTensor
from rich import filesize

import keras_preact as kp
from keras_preact.graph import Graph
from keras_preact.paths import Step

from .. import backends
from ..cli.terminal import duration
from ..config import Data
from ..directory import models
from . import messages, plans
from .run import Run

#: Shares of a run at which its learning rate is printed.
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)


def multiply_adds(layer: keras.Layer, image: KerasTensor) -> int:
    """Return the number of multiply-adds in a forward pass of one image through a layer.

    Matrix products and convolutions are counted, including products with padding. Other
    sums, activations and normalisations, a few percent, are not counted.
    """
    graph = Graph(layer, image, training=False, opaque=(kp.LayerStack,))
    total = 0
    for step in graph.steps:
        if isinstance(step.operation, kp.LayerStack):
            stack, carry = step.operation, graph.specs[step.inputs[0]]
            unit = KerasTensor((1, *carry.shape[1:]), carry.dtype)
            total += stack.depth * multiply_adds(stack.unit(0), unit)
        elif isinstance(step.operation, KERNELS):
            total += _of_kernel(step, graph.specs)
        elif step.kind in PRODUCTS:
            total += PRODUCTS[step.kind](step, graph.specs)
    return total


def _size(spec: KerasTensor) -> int:
    return math.prod(size or 1 for size in spec.shape)


Specs = Sequence[KerasTensor]


def _of_kernel(step: Step, specs: Specs) -> int:
    """Return one product per element of the kernel and position of the output."""
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


#: Layers of networks for images with one kernel, applied at each position of the output.
KERNELS = (keras.layers.Conv2D, keras.layers.DepthwiseConv2D, keras.layers.Dense)
#: Functions that return the products for one image of other operations, by kind of operation.
PRODUCTS: Mapping[str, Callable[[Step, Specs], int]] = {"Matmul": _of_matmul, "Einsum": _of_einsum}


def describe(run: Run, executions: Sequence[float]) -> str:
    """Return a page that describes a run and its costs before it begins.

    Args:
        run: The run.
        executions: Seconds of executions of the train step. The first one compiles it.
    """
    model, config, plan, data = run.network, run.config, run.plan, run.data
    batch, devices = config.batch_size, run.distribution.replicas
    [image] = model.inputs
    products = multiply_adds(model, KerasTensor((1, *image.shape[1:]), image.dtype))
    division = f" in {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    division += f" on {devices} devices" if devices > 1 else ""
    fixed = model.count_params() - run.parameters
    peak, owner = backends.peak_on_device(), "of a device"
    if peak is None:
        peak, owner = backends.peak_resident(), "of this process, including all that it has loaded"
    sizes = {"to train": data.train, "held out": data.holdout, "to test": data.test}
    images = ", ".join(
        f"{split.size:,} {name}" for name, split in sizes.items() if split is not None
    )
    execution = statistics.median(executions[1:])
    compiling = max(executions[0] - execution, 0.0)
    seconds = execution * plan.micro_batches / config.steps_per_execution
    rows = {
        "Model": _name(model),
        "Parameters": f"{run.parameters:,} trained, {fixed:,} fixed or moving statistics",
        "FLOPs": (
            f"{_short(2 * products)} per image in the forward pass "
            f"({_short(products)} multiply-adds, weight layers and attention only); "
            f"about {_short(6 * products * batch)} per update"
        ),
        "Data": (
            f"{data.name}: {images}; {len(data.classes):,} classes; {run.size} x {run.size} "
            f"pixels, {data.channels} channel{'s' * (data.channels > 1)}"
        ),
        "Classes": "; ".join(line.removesuffix(".") for line in messages.about_images(run)),
        "Augmentation": _augmentation(config.data),
        "Updates": (
            f"{plan.iterations:,} with {batch:,} images each{division}: "
            f"{plan.iterations / plan.steps_per_epoch:,.4g} epochs of {plan.steps_per_epoch:,} "
            "updates"
        ),
        "Memory": f"at most {filesize.decimal(peak)} {owner}; measured in a few steps",
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
    names = getattr(model, "unit_names", None)  # a network of a person may have none
    size = f"{len(model.layers)} layers" if names is None else f"{len(names)} units"
    return f"{model.name}, {size}, {models.precision(model)}"


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
    if options.augmentation != "none" and options.flip == "none":
        parts.append("no flips")
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
    """Return in words the learning rate at points of a run, and the highest rate."""
    points = [("at the start", 0)]
    points += [(f"at {100 * share:g} %", round(share * (iterations - 1))) for share in SHARES]
    points += [("at the end", iterations - 1)]
    highest = max(rate(step) for step in range(0, iterations, max(1, iterations // 200)))
    words = [f"{rate(step):.3g} {name}" for name, step in points]
    return f"{', '.join(words)}; highest {highest:.3g}"
