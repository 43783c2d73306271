"""The segments of a network: its residual units, by themselves or as stacks, and the way from one to the other."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keras import ops

from keras_preact import initializers
from keras_preact.stacks import UnitStack
from keras_preact.units import ResidualUnit

if TYPE_CHECKING:
    from keras_preact.models.network import ResidualNetwork

Segment = ResidualUnit | UnitStack

#: Equal units in a stage from which on a network is made of stacks, unless told otherwise.
STACKED_FROM = 16


@dataclasses.dataclass(frozen=True)
class Stage:
    """Units of equal width behind one another.

    Args:
        filters: Of each unit, see `ResidualUnit`.
        units: How many.
        strides: Step of the first one.
    """

    filters: int
    units: int
    strides: int = 1


def stacks_pay(stages: Sequence[Stage]) -> bool:
    """Whether a network of these stages is made of stacks unless told otherwise."""
    return max((stage.units - 1 for stage in stages), default=0) >= STACKED_FROM


def make(pattern: ResidualUnit, stages: Sequence[Stage], kernel, stack_options: dict | None) -> list[Segment]:
    """Make the units of all stages; with `stack_options`, as stacks where they are equal: all of a stage but the first."""
    last_rate, total = pattern.stochastic_depth, sum(stage.units for stage in stages)
    segments: list[Segment] = []
    before = 0
    for s, stage in enumerate(stages, 1):
        names = [f"stage{s}_unit{u}" for u in range(1, stage.units + 1)]
        rates: list = [None if last_rate is None else last_rate * (before + u) / total for u in range(1, stage.units + 1)]
        own = [
            {"filters": stage.filters, "kernel_initializer": initializers.spawn(kernel, name), "stochastic_depth": rate}
            for name, rate in zip(names, rates, strict=True)
        ]
        arrangement = pattern.arrangement if segments else pattern.arrangement.without_first()
        segments.append(pattern.at(names[0], strides=stage.strides, arrangement=arrangement, **own[0]))
        if stack_options is None:
            segments += [pattern.at(name, **changes) for name, changes in zip(names[1:], own[1:], strict=True)]
        elif stage.units > 1:
            # a stack draws its units' values itself, from the network's initialisers and their names
            changes = {"name": names[1], "kernel_initializer": kernel}
            unit = type(pattern).from_config(pattern.get_config() | own[1] | changes)
            drops = None if last_rate is None else rates[1:]
            segments.append(UnitStack(unit, stage.units - 1, stochastic_depth=drops, name=f"stage{s}_units", **stack_options))
        before += stage.units
    return segments


def units_of(segment: Segment) -> list[ResidualUnit]:
    """Return the unit, or copies of those of a stack."""
    return [segment.unit(i) for i in range(segment.depth)] if isinstance(segment, UnitStack) else [segment]


def stack(model: "ResidualNetwork") -> "ResidualNetwork":
    """Return the network with the equal units of each stage as one `UnitStack`, with copies of its weights and seeds.

    Raises:
        ValueError: where some units of a stage are frozen and others are not.

    Example:

    >>> import keras_preact as kp
    >>> stacked = kp.models.stack(kp.models.resnet_cifar(20, input_shape=(8, 8, 1)))
    >>> [segment.name for segment in stacked.segments][:3]
    ['stage1_unit1', 'stage1_units', 'stage2_unit1']
    """
    return _with_stacks(model, True)


def unstack(model: "ResidualNetwork") -> "ResidualNetwork":
    """Return the network with every unit a layer of its own, with copies of its weights and seeds.

    Example:

    >>> import keras_preact as kp
    >>> single = kp.models.unstack(kp.models.resnet_cifar(20, stacked=True, input_shape=(8, 8, 1)))
    >>> [segment.name for segment in single.segments][:3]
    ['stage1_unit1', 'stage1_unit2', 'stage1_unit3']
    """
    return _with_stacks(model, False)


def _with_stacks(model: "ResidualNetwork", stacked: bool) -> "ResidualNetwork":
    if "stacked" not in model.get_config():
        raise ValueError(f"Units of one configuration make stacks; a ResidualNetwork has them. Received: {model!r}")
    twin = type(model).from_config(model.get_config() | {"stacked": stacked, "frozen_layers": []})
    segments = {id(segment) for segment in model.segments}
    for layer in model.layers:
        if id(layer) not in segments:
            own = twin.get_layer(layer.name)
            own.trainable = layer.trainable
            own.set_weights(layer.get_weights())
    units = iter(model.units)
    for segment in twin.segments:
        if isinstance(segment, UnitStack):
            segment.load_units([next(units) for _ in range(segment.depth)])
        else:
            unit = next(units)
            for variable, original in zip(segment.variables, unit.variables, strict=True):
                variable.assign(ops.copy(original.value))  # on JAX `fit` gives the arrays of what it trains away
            segment.trainable = unit.trainable
    return twin
