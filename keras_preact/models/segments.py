"""The segments of a network: its residual units, by themselves or as stacks."""

import dataclasses
from collections.abc import Sequence

from keras_preact import _checks, initializers
from keras_preact.stacks import UnitStack
from keras_preact.units import ResidualUnit

Segment = ResidualUnit | UnitStack

#: Equal units in a stage from which on a network is made of stacks, unless told otherwise.
STACKED_FROM = 16


@dataclasses.dataclass(frozen=True)
class Stage:
    """Units of equal width, one after the other.

    Args:
        filters: Width of each unit, see `ResidualUnit`.
        units: Number of units.
        strides: Step of the unit that has it.
        strided_unit: Which one: `"first"`, or `"last"` as in TF-slim, where its
            shortcut takes every `strides`-th pixel of the raw x, without weights.
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
        pattern: A unit with what all have in common.
        stages: The stages, in order.
        kernel: The network's kernel initialiser.
        stack_options: Arguments of the stacks that hold a stage's equal units; None for
            single units.
        output_stride: Product of the stages' strides from which on they become
            dilation; None: never.
    """
    last_rate, total = pattern.stochastic_depth, sum(stage.units for stage in stages)
    grids = _grids(pattern, stages, output_stride)
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


def _grids(pattern: ResidualUnit, stages: Sequence[Stage], output_stride: int | None) -> list[dict]:
    """Return strides and, if some become dilation, the block of every unit."""
    block = pattern.block
    grids: list[dict] = []
    stride = dilation = 1
    for stage in stages:
        for place in range(stage.units):
            step = stage.strides if place == stage.strided_place else 1
            dilates = output_stride is not None and stride * step > output_stride
            grid: dict = {"strides": 1 if dilates else step}
            if dilation > 1 or dilates:
                grid["block"] = dataclasses.replace(
                    block, dilation=dilation, dilated_strides=step if dilates else 1
                )
            grids.append(grid)
            if dilates:
                dilation *= step
            else:
                stride *= step
    return grids


def unit_names(segment: Segment) -> list[str]:
    """Return the name of the unit, or those of a stack's."""
    return segment.unit_names if isinstance(segment, UnitStack) else [segment.name]


def units_of(segment: Segment) -> list[ResidualUnit]:
    """Return the unit, or copies of those of a stack."""
    if isinstance(segment, UnitStack):
        return [segment.unit(i) for i in range(segment.depth)]
    return [segment]
