"""The segments of a network: its residual units, by themselves or as stacks, and the
way from one to the other.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keras import ops

from keras_preact import _checks, initializers
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
        strides: Step of the one that has it.
        strided_unit: Which: `"first"`, or `"last"` as in TF-slim, where it takes every
            `strides`-th pixel of the raw x as its shortcut, without weights.
    """

    filters: int
    units: int
    strides: int = 1
    strided_unit: str = "first"

    def __post_init__(self):
        _checks.one_of(self.strided_unit, ("first", "last"), "strided_unit")

    @property
    def strided_place(self) -> int:
        """The unit, counted from 0, that has the strides."""
        return self.units - 1 if self.strided_unit == "last" else 0


def stacks_pay(stages: Sequence[Stage]) -> bool:
    """Whether a network of these stages is made of stacks unless told otherwise."""
    return max((stage.units - 1 for stage in stages), default=0) >= STACKED_FROM


def make(
    pattern: ResidualUnit,
    stages: Sequence[Stage],
    kernel,
    stack_options: dict | None,
    output_stride: int | None = None,
) -> list[Segment]:
    """Make the units of all stages.

    Args:
        pattern: A unit with what all have alike.
        stages: In order.
        kernel: The network's kernel initialiser.
        stack_options: Of stacks, which then hold a stage's equal units; None for single
            ones.
        output_stride: Product of the stages' strides from which on they become
            dilation; None: never.
    """
    last_rate, total = pattern.stochastic_depth, sum(stage.units for stage in stages)
    grids = _grids(stages, output_stride)
    segments: list[Segment] = []
    before = 0
    for s, stage in enumerate(stages, 1):
        names = [f"stage{s}_unit{u}" for u in range(1, stage.units + 1)]
        rates: list = [
            None if last_rate is None else last_rate * (before + u) / total
            for u in range(1, stage.units + 1)
        ]
        own: list[dict] = [
            {
                "filters": stage.filters,
                "kernel_initializer": initializers.spawn(kernel, name),
                "stochastic_depth": rate,
                **grid,
            }
            for name, rate, grid in zip(
                names, rates, grids[before : before + stage.units], strict=True
            )
        ]
        if not segments:
            own[0]["arrangement"] = pattern.arrangement.of_first_unit()
        if subsamples := stage.strides > 1 and stage.strided_place > 0:
            own[-1] |= {"shape_shortcut": "zero_pad", "activate_shape_shortcut": False}
        single = [pattern.at(name, **changes) for name, changes in zip(names, own, strict=True)]
        stop = stage.units - 1 if subsamples else stage.units
        if stack_options is None or stop < 2:
            segments += single
        else:
            # a stack draws its units' values itself, from the network's initialisers and their
            # names
            changes = own[1] | {"name": names[1], "kernel_initializer": kernel}
            unit = type(pattern).from_config(pattern.get_config() | changes)
            drops = None if last_rate is None else rates[1:stop]
            stack = UnitStack(
                unit, stop - 1, stochastic_depth=drops, name=f"stage{s}_units", **stack_options
            )
            segments += [single[0], stack, *single[stop:]]
        before += stage.units
    return segments


def _grids(stages: Sequence[Stage], output_stride: int | None) -> list[dict]:
    """Return strides and dilation of every unit."""
    grids: list[dict] = []
    stride = dilation = 1
    for stage in stages:
        for place in range(stage.units):
            step = stage.strides if place == stage.strided_place else 1
            if output_stride is None or stride * step <= output_stride:
                grids.append({"strides": step, "dilation": dilation, "dilated_strides": 1})
                stride *= step
            else:
                grids.append({"strides": 1, "dilation": dilation, "dilated_strides": step})
                dilation *= step
    return grids


def units_of(segment: Segment) -> list[ResidualUnit]:
    """Return the unit, or copies of those of a stack."""
    return (
        [segment.unit(i) for i in range(segment.depth)]
        if isinstance(segment, UnitStack)
        else [segment]
    )


def stack(model: "ResidualNetwork") -> "ResidualNetwork":
    """Return the network with the equal units of each stage as one `UnitStack`, with
    copies of its weights and seeds.

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
    """Return the network with every unit a layer of its own, with copies of its weights
    and seeds.

    Example:

    >>> import keras_preact as kp
    >>> single = kp.models.unstack(kp.models.resnet_cifar(20, stacked=True, input_shape=(8, 8, 1)))
    >>> [segment.name for segment in single.segments][:3]
    ['stage1_unit1', 'stage1_unit2', 'stage1_unit3']
    """
    return _with_stacks(model, False)


def _with_stacks(model: "ResidualNetwork", stacked: bool) -> "ResidualNetwork":
    if "stacked" not in model.get_config():
        raise ValueError(
            "Units of one configuration make stacks; a ResidualNetwork has them. Received: "
            f"{model!r}"
        )
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
                variable.assign(
                    ops.copy(original.value)
                )  # on JAX `fit` gives the arrays of what it trains away
            segment.trainable = unit.trainable
    return twin
