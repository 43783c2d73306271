"""The places of a network by name: stem, stages, units and head, whether or not its
units are stacked.
"""

from keras_preact import _checks
from keras_preact.models.base import UnitNetwork
from keras_preact.models.segments import Segment
from keras_preact.stacks import UnitStack

#: Layers of the head that stand behind its last activation.
BEHIND_HEAD = ("head_pool", "head_classifier", "head_predictions")


def check(model: object) -> None:
    if not isinstance(model, UnitNetwork):
        raise ValueError(
            "`model` must be a network of residual units, such as `kp.models` makes. Received: "
            f"{model!r}"
        )


def unit_names(segment: Segment) -> list[str]:
    return segment.unit_names if isinstance(segment, UnitStack) else [segment.name]


def stage_of(unit_name: str) -> str:
    """Return the stage of `stage3_unit2` (of a transformer's `layer3_mlp`, the layer)."""
    return unit_name.partition("_")[0]


def stages(model: UnitNetwork) -> dict[str, Segment]:
    """Return each stage with its last segment, in order."""
    return {stage_of(unit_names(segment)[-1]): segment for segment in model.segments}


def places(model: UnitNetwork) -> list[str]:
    """Return the names of all places in order: the stem, each stage behind its units,
    the head.
    """
    found = ["stem"]
    for stage in stages(model):
        found += [
            name
            for segment in model.segments
            for name in unit_names(segment)
            if stage_of(name) == stage
        ]
        found.append(stage)
    return [*found, "head"]


def lookup(model: UnitNetwork, name: object, argument: str, more: tuple[str, ...] = ()) -> str:
    """Return `name` if the network has such a place.

    Raises:
        ValueError: else; the message has the nearest ones.
    """
    known = [*places(model), *more]
    return _checks.lookup(dict(zip(known, known, strict=True)), name, argument)


def segment_of(model: UnitNetwork, name: str) -> Segment:
    """Return what holds the unit, or ends the stage, of that name."""
    ends = stages(model)
    return (
        ends[name]
        if name in ends
        else next(each for each in model.segments if name in unit_names(each))
    )


def last_layer(model: UnitNetwork, name: str) -> int:
    """Return the number, in `model.layers`, of the last layer that belongs to a place
    or stands in front of it.

    Raises:
        ValueError: for a unit that is not the last one of its stack.
    """
    names = [layer.name for layer in model.layers]
    if name == "stem":
        return names.index(model.segments[0].name) - 1
    if name == "head":
        return max(i for i, layer in enumerate(names) if layer not in BEHIND_HEAD)
    segment = segment_of(model, name)
    if name != stage_of(name) and name != unit_names(segment)[-1]:
        raise ValueError(
            f"{name} is inside of the stack {segment.name}, which is one layer: name its stage, "
            f"{stage_of(name)}, or give each unit a layer of its own with "
            f"`kp.models.unstack(model)`. Received: {name!r}"
        )
    return names.index(segment.name)
