"""The segments of a network: single residual units and stacks of units."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_preact import _checks, initializers
from keras_preact.layers.streams import CopyStreams, MeanOfStreams
from keras_preact.stacks import UnitStack
from keras_preact.units import ResidualUnit

Segment = ResidualUnit | UnitStack

#: A network with this many equal units in a stage uses stacks by default.
STACKED_FROM = 16


@dataclasses.dataclass(frozen=True)
class Stage:
    """Units of equal width, one after the other.

    Args:
        filters: Width of each unit, see `ResidualUnit`.
        units: Number of units.
        strides: Strides of the strided unit; the other units have strides of 1.
        strided_unit: Which unit is strided: `"first"`, or `"last"` as in TF-slim. A
            strided last unit has a shortcut that takes every `strides`-th pixel of the
            raw x, without weights.
    """

    filters: int
    units: int
    strides: int = 1
    strided_unit: str = "first"

    def __post_init__(self):
        for field in ("filters", "units", "strides"):
            value = getattr(self, field)
            _checks.positive_int(value, f"{field} of a stage")
            object.__setattr__(self, field, _checks.plain(value))
        _checks.one_of(self.strided_unit, ("first", "last"), "strided_unit")

    @property
    def strided_place(self) -> int:
        """Index of the unit that has the strides."""
        return self.units - 1 if self.strided_unit == "last" else 0


def stacks_pay(stages: Sequence[Stage]) -> bool:
    """Whether a network of these stages uses stacks by default."""
    return max(stage.units - 1 for stage in stages) >= STACKED_FROM


def make(
    template: ResidualUnit,
    stages: Sequence[Stage],
    kernel,
    stack_options: dict | None,
    output_stride: int | None = None,
) -> list[Segment]:
    """Make the units of all stages.

    Args:
        template: A unit with the options that all units share.
        stages: The stages, in order.
        kernel: The network's kernel initialiser.
        stack_options: Arguments of the stacks that hold a stage's equal units; None for
            single units.
        output_stride: Largest product of the stages' strides; further strides become
            dilation. None: no limit.
    """
    segments: list[Segment] = []
    rows = zip(stages, _changes(template, stages, kernel, output_stride), strict=True)
    for s, (stage, changes) in enumerate(rows, 1):
        # Make all units, also the units that a stack replaces. An initialiser without a seed draws
        # one when it is made; otherwise the weights after a stack would differ from earlier runs.
        units: list[Segment] = [template.at(**unit_options) for unit_options in changes]
        subsamples = stage.strides > 1 and stage.strided_place > 0
        equal = slice(1, -1 if subsamples else None)
        if stack_options is not None and units[equal]:
            # a stack draws the values of its units itself, from the network's initialisers and
            # the names of the units
            unit_options = changes[1] | {"kernel_initializer": kernel}
            rates = factors = None
            if template.stochastic_depth is not None:
                rates = [unit["stochastic_depth"] for unit in changes[equal]]
            if template.h.differs:
                factors = [unit["shortcut"].factor for unit in changes[equal]]
            units[equal] = [
                UnitStack(
                    template.changed(**unit_options),
                    len(changes[equal]),
                    stochastic_depth=rates,
                    shortcut_factors=factors,
                    name=f"stage{s}_units",
                    **stack_options,
                )
            ]
        segments += units
    return segments


def _changes(
    template: ResidualUnit, stages: Sequence[Stage], kernel, output_stride: int | None
) -> Iterator[list[dict]]:
    """Yield for each stage the options that differ between its units, as arguments of
    `ResidualUnit.at`.
    """
    total = sum(stage.units for stage in stages)
    done, stride, dilation = 0, 1, 1
    for s, stage in enumerate(stages, 1):
        changes = []
        for i in range(stage.units):
            step = stage.strides if i == stage.strided_place else 1
            dilates = output_stride is not None and stride * step > output_stride
            name = f"stage{s}_unit{i + 1}"
            done += 1
            unit_options: dict[str, Any] = {
                "name": name,
                "filters": stage.filters,
                "kernel_initializer": initializers.spawn(kernel, name),
                "strides": 1 if dilates else step,
                "shortcut": template.h.of_unit(done, total),
            }
            if template.stochastic_depth is not None:
                unit_options["stochastic_depth"] = template.stochastic_depth * done / total
            if dilates or dilation > 1:
                unit_options["block"] = dataclasses.replace(
                    template.block, dilation=dilation, dilated_strides=step if dilates else 1
                )
            if done == 1:
                unit_options["arrangement"] = template.arrangement.of_first_unit()
            if step > 1 and i > 0:  # the last unit, which subsamples as in TF-slim
                unit_options |= {"shape_shortcut": "zero_pad", "activate_shape_shortcut": False}
            changes.append(unit_options)
            stride, dilation = (stride, dilation * step) if dilates else (stride * step, dilation)
        yield changes


def stream_layers(segments: Sequence[Segment]) -> tuple[list[keras.Layer], list[keras.Layer]]:
    """Return the layers before and after the units, if these have several residual
    streams: copies into streams, and their mean.
    """
    unit = template_of(segments[0])
    if unit.h.streams == 1:
        return [], []
    shared: dict = {"data_format": unit.data_format, "dtype": unit.dtype_policy}
    copies = CopyStreams(unit.h.streams, name="stem_streams", **shared)
    return [copies], [MeanOfStreams(unit.h.streams, name="head_streams", **shared)]


def template_of(segment: Segment) -> ResidualUnit:
    """Return the unit, or the template of a stack."""
    return segment.template if isinstance(segment, UnitStack) else segment


def unit_names(segment: Segment) -> list[str]:
    """Return the name of the unit, or the names of a stack's units."""
    return segment.unit_names if isinstance(segment, UnitStack) else [segment.name]


def copies_of(segment: Segment) -> list[ResidualUnit]:
    """Return a copy of the unit, or of each unit of a stack."""
    if isinstance(segment, UnitStack):
        return [segment.unit(i) for i in range(segment.depth)]
    copy = segment.changed()
    copy.build_from_config(segment.get_build_config())
    for variable, own in zip(copy.variables, segment.variables, strict=True):
        variable.assign(own.value)
    return [copy]
