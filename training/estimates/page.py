"""The page that a dry run prints."""

import collections
import dataclasses
import math
import textwrap
from collections.abc import Callable, Mapping

import keras

import keras_preact as kp

from ..plans import Plan
from ..terminal import duration
from .costs import costs
from .memory import memory

#: Shares of a run at which its learning rate is printed.
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of the first execution, which compiles, and the median of those after it."""

    first: float
    step: float

    @property
    def compiling(self) -> float:
        return max(self.first - self.step, 0.0)


def describe_run(
    model: keras.Model,
    *,
    data: Mapping[str, str],
    batch_size: int,
    plan: Plan,
    rate: Callable[[int], float],
    timing: Timing,
    devices: int = 1,
    together: int = 1,
) -> str:
    """Return a page that describes a run and its costs.

    Args:
        model: Compiled.
        data: Label to text on the images, such as `{"Data": "cifar10, 50,000 images"}`.
        batch_size: Images in an update.
        plan: Length of the run.
        rate: Number of updates done to the learning rate of the next one.
        timing: Timing of the train step.
        devices: Devices that share a batch.
        together: Steps of one of the timed executions.
    """
    parts, iterations = plan.parts, plan.iterations
    cost = costs(model)
    at_a_time = -(-batch_size // (parts * devices))
    needed = memory(model, cost, at_a_time)
    amounts = ", ".join(f"{name} {_bytes(value)}" for name, value in needed.items())
    split = f" in {parts} parts" if parts > 1 else ""
    split += f" on {devices} devices" if devices > 1 else ""
    unknown = f"; without {', '.join(cost.unknown)}" if cost.unknown else ""
    trained = _count(model.trainable_variables)
    fixed = _count(model.non_trainable_weights)
    rows = {
        "Model": _name(model),
        "Parameters": f"{trained:,} trained, {fixed:,} fixed or moving statistics",
        "FLOPs": (
            f"{_short(cost.flops)} per image in the forward pass ({_short(cost.multiply_adds)} "
            "multiply-adds, weight layers and attention only); about "
            f"{_short(3 * cost.flops * batch_size)} per update{unknown}"
        ),
        **data,
        "Updates": (
            f"{iterations:,} with {batch_size:,} images each{split}: "
            f"{iterations / plan.steps_per_epoch:,.4g} epochs of {plan.steps_per_epoch:,} updates"
        ),
        "Memory": (
            f"about {_bytes(sum(needed.values()))} per device, without the backend's workspaces: "
            f"{amounts} ({at_a_time:,} images)"
        ),
        "Learning rate": _rates(rate, iterations),
        "Time": _time(timing, together / parts, batch_size, iterations),
    }
    width = max(map(len, rows)) + 2
    lines = [
        textwrap.fill(text, 100, initial_indent=label.ljust(width), subsequent_indent=" " * width)
        for label, text in rows.items()
    ]
    return "\n".join(lines)


def _rates(rate: Callable[[int], float], iterations: int) -> str:
    """Return in words the learning rate at the parts of a run, and its highest one."""
    parts = [("at the start", 0)]
    parts += [(f"at {100 * share:g} %", round(share * (iterations - 1))) for share in SHARES]
    parts += [("at the end", iterations - 1)]
    highest = max(rate(step) for step in range(0, iterations, max(1, iterations // 200)))
    words = [f"{rate(step):.3g} {name}" for name, step in parts]
    return f"{', '.join(words)}; highest {highest:.3g}"


def _name(model: keras.Model) -> str:
    policies = collections.Counter(
        layer.dtype_policy.name for layer in model.layers if layer.weights
    )
    segments = getattr(model, "segments", ())
    units = sum(segment.depth if isinstance(segment, kp.UnitStack) else 1 for segment in segments)
    parts = [
        model.name,
        *([f"{units} units"] if units else []),
        *(name for name, _ in policies.most_common(1)),
    ]
    return ", ".join(parts)


def _time(timing: Timing, updates: float, batch_size: int, iterations: int) -> str:
    seconds = timing.step / updates
    return (
        f"about {duration(iterations * seconds)} ({seconds:.3g} s per update, "
        f"{batch_size / seconds:,.0f} images/s), and {duration(timing.compiling)} to compile; "
        "measured in a few steps, without validation"
    )


def _count(variables) -> int:
    return sum(math.prod(variable.shape) for variable in variables)


def _short(number: float) -> str:
    """Return a number with three digits and a prefix: 81.1 M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number} B"
