"""Measurements of a network: signals at inference and in training, and gradients."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from keras_preact.analysis._inputs import before_activation
from keras_preact.analysis.additions import Addition, LayerUnit, Unit
from keras_preact.analysis.observed import Observed, norms, other_axes
from keras_preact.graph import Graph
from keras_preact.layers import streams
from keras_preact.units import Trace


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean of |mean| over channels or tokens, and root mean square of their standard
    deviations. Constant ones, such as channels of zero padding, do not count for the
    latter.
    """

    mean: float
    std: float

    @property
    def size(self) -> float:
        return math.hypot(self.mean, self.std)


@dataclasses.dataclass
class Measures:
    """Measurements of one forward pass.

    Args:
        change: `||shortcut - before|| / ||before||` per unit; infinite if only `before`
            is 0. For a bounded mix of streams, `start` takes the place of `shortcut`.
        factor: Least-squares factor from `before` to the shortcut, per unit.
        mean_square: Mean square of the sum, per unit.
        cut: Share of values that an activation on an identity path changes.
        outputs: Spread of a normalisation's output.
        inputs: Spread of a weight layer's input over channels.
        gains: Root mean square of a weight layer's output, over its input's. A softmax
            or sigmoid in the last layer is left out.
        dead: Share of an activation's channels that are 0 for the whole sample.
        output_size: Root mean square of the logits.
    """

    change: dict[str, float] = dataclasses.field(default_factory=dict)
    factor: dict[str, float] = dataclasses.field(default_factory=dict)
    mean_square: dict[str, float] = dataclasses.field(default_factory=dict)
    cut: dict[int, float] = dataclasses.field(default_factory=dict)
    outputs: dict[int, Spread] = dataclasses.field(default_factory=dict)
    inputs: dict[int, Spread] = dataclasses.field(default_factory=dict)
    gains: dict[int, float] = dataclasses.field(default_factory=dict)
    dead: dict[int, float] = dataclasses.field(default_factory=dict)
    output_size: float = float("nan")


def mix_of(graph: Graph, unit: Addition) -> streams.Constraint | None:
    """Return what the matrices can be that mix the residual streams on a unit's
    shortcut; None if it has one stream.
    """
    layers = [graph.steps[i].operation for i in unit.shortcut_steps]
    mixes = [each for each in layers if isinstance(each, streams.Coefficients)]
    return streams.CONSTRAINTS[mixes[0].constraint] if mixes else None


def measure(graph: Graph, units: Sequence[Addition], sample) -> Measures:
    """Run a graph on `sample`, without changing a variable."""
    measures = Measures()
    by_step = {unit.step: unit for unit in units}
    on_path = {i for unit in units if unit.keeps_shape for i in unit.path}
    is_channels_first = any(step.channel_axis == 1 for step in graph.steps)
    last = graph.producers.get(graph.origin(graph.outputs[0]))

    def spatial(x):
        return other_axes(x, 1 if is_channels_first and x.ndim == 4 else -1)

    needed_until = {end: unit.step for unit in units for end in (unit.before, unit.start)}
    # a new network in float16 may overflow at inference, where no batch statistics normalise
    with keras.StatelessScope(), np.errstate(invalid="ignore", over="ignore"):
        values = graph.values(sample)
        for i in graph.walk(values, until=needed_until):
            step = graph.steps[i]
            if unit := by_step.get(i):
                mix = mix_of(graph, unit)
                end = unit.start if mix and mix.is_bounded else unit.shortcut
                before, shortcut, total = (
                    _array(values[tensor]) for tensor in (unit.before, end, unit.total)
                )
                measures.mean_square[unit.name] = float(np.mean(total**2))
                if unit.keeps_shape:
                    finite = np.isfinite(before) & np.isfinite(shortcut)
                    before, shortcut = before[finite], shortcut[finite]
                    square = float(np.sum(before**2))
                    product = float(np.sum(shortcut * before))
                    measures.change[unit.name] = _relative(shortcut - before, before)
                    measures.factor[unit.name] = product / square if square else float("nan")
            roles = step.roles
            if not roles and not step.has_kernel and i != last:
                continue
            x, y = _array(values[step.inputs[0]]), _array(values[step.outputs[0]])
            if (step.has_kernel or i == last) and (logits_of := before_activation(step)):
                y = _array(logits_of(values[step.inputs[0]]))
            if step.has_kernel:
                measures.gains[i] = _relative(y, x) * np.sqrt(x.size / y.size)
                if np.issubdtype(x.dtype, np.floating):
                    measures.inputs[i] = _spread(x, spatial(x))
            if "norm" in roles:
                measures.outputs[i] = _spread(y, _normalized_axes(step, y))
            if roles == ("activation",):
                # A channel whose input is already 0, such as zero padding, is not dead.
                dead = np.all(y == 0, axis=spatial(y)) & np.any(x != 0, axis=spatial(x))
                measures.dead[i] = float(np.mean(dead))
                if i in on_path:
                    measures.cut[i] = float(np.mean(x != y))
            if i == last:
                measures.output_size = float(np.sqrt(np.mean(y**2)))
    return measures


def _array(tensor) -> np.ndarray:
    array = ops.convert_to_numpy(tensor)
    return array if np.issubdtype(array.dtype, np.integer) else array.astype("float64")


def _relative(difference: np.ndarray, whole: np.ndarray) -> float:
    """Return `||difference|| / ||whole||`."""
    above, below = float(np.linalg.norm(difference)), float(np.linalg.norm(whole))
    if below == 0:
        return 0.0 if above == 0 else float("inf")
    return above / below


def _normalized_axes(step, x: np.ndarray) -> tuple[int, ...]:
    axis = getattr(step.operation, "axis", -1)
    if step.is_per_token:
        return tuple(i % x.ndim for i in (axis if isinstance(axis, list | tuple) else [axis]))
    return other_axes(x, axis)


def _spread(x: np.ndarray, axes: tuple[int, ...]) -> Spread:
    variance = x.var(axes)
    nonzero = variance[variance > 0]
    std = float(np.sqrt(nonzero.mean())) if nonzero.size else 0.0
    return Spread(float(np.mean(np.abs(x.mean(axes)))), std)


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradient norms per unit, in order.

    Args:
        outputs: `||dE/dx_{l+1}||`, at the `output` of each unit of the graph.
        weights: `||dE/dW||` over all kernels of the branch.
        closed: Whether the branch adds only zeros and a weight that is no kernel has a
            gradient, which opens it: an alpha or a gamma of 0.
        loss: Name of the loss E.
    """

    outputs: list[float]
    weights: list[float]
    closed: list[bool]
    loss: str


def gradients(model: keras.Model, sample, labels) -> Gradients:
    """Measure the gradients of a loss at every unit's output and weights, in training
    mode.
    """
    observed = Observed(model, sample, labels)
    factors = {unit.step: _factors(observed, unit) for unit in observed.units}
    variables = [*observed.trainable_weights, *itertools.chain(*factors.values())]
    _, sizes, on_outputs, on_weights = observed.gradients(
        _largest, variables=list({id(each): each for each in variables}.values())
    )
    half_square = "half the squared norm of the output"
    loss = half_square if labels is None else "the cross-entropy of the labels"
    outputs: list[float] = []
    weights: list[float] = []
    closed: list[bool] = []
    rows = zip(on_outputs[1:], sizes[1:], strict=True)
    for unit in observed.units:
        unit_rows = [next(rows) for _ in unit.names]
        if unit.is_plain:
            continue  # it has no addition, so it is no residual unit
        of_kernels = [
            norms(on_weights[id(weight)], unit.depth)
            for name, weight in observed.weights(unit)
            if len(weight.shape) - unit.is_stack > 1
            and (isinstance(unit, Addition) or name.startswith("branch/"))
        ]
        outputs += [float(np.linalg.norm(on_output)) for on_output, _ in unit_rows]
        weights += np.linalg.norm([np.zeros(unit.depth), *of_kernels], axis=0).tolist()
        opened = sum(norms(on_weights[id(each)], unit.depth) for each in factors[unit.step])
        empty = np.array([not size for _, size in unit_rows])
        closed += (empty & (opened > 0)).tolist()
    return Gradients(outputs, weights, closed, loss)


def _largest(trace: Trace, axis: int):
    """Return the largest absolute value that the branch adds."""
    return ops.zeros(()) if trace.residual is None else ops.max(ops.abs(trace.residual))


def _factors(observed: Observed, unit: Unit) -> list[keras.Variable]:
    """Return the trainable weights of a unit that are neither kernels nor shifts."""
    if isinstance(unit, Addition):
        layers = [observed.graph.steps[i].operation for i in unit.branch]
    else:
        assert isinstance(unit, LayerUnit)
        layers = [unit.layer]
    return [
        weight
        for layer in layers
        if isinstance(layer, keras.Layer)
        for weight in layer.trainable_weights
        if len(weight.shape) - unit.is_stack < 2 and weight.name not in ("beta", "bias")
    ]
