"""Look up the places in a network by name: stem, units, stages and head."""

from keras_preact import _checks
from keras_preact.models.base import UnitNetwork, check_network
from keras_preact.models.segments import Segment, unit_names

#: Layers of the head after its last activation.
AFTER_HEAD = ("head_pool", "head_classifier", "head_predictions")


def stage_of(unit_name: str) -> str:
    """Return the stage of `stage3_unit2` (for a transformer's `layer3_mlp`, the layer)."""
    return unit_name.partition("_")[0]


def ends(model: UnitNetwork) -> dict[str, Segment]:
    """Return the last segment of each unit and stage, by name and in order."""
    check_network(model)
    last_segments: dict[str, Segment] = {}
    for segment in model.segments:
        names = unit_names(segment)
        stage = stage_of(names[-1])
        last_segments.pop(stage, None)  # moves the stage after its last unit
        last_segments |= {**dict.fromkeys(names, segment), stage: segment}
    return last_segments


def stages(model: UnitNetwork) -> list[str]:
    return [name for name in ends(model) if name == stage_of(name)]


def lookup(model: UnitNetwork, name: object, argument: str, more: tuple[str, ...] = ()) -> str:
    """Return `name` if it names a place in the network.

    Raises:
        ValueError: for another name; the message lists the nearest ones.
    """
    known = ["stem", *ends(model), "head", *more]
    return _checks.lookup(dict(zip(known, known, strict=True)), name, argument)


def last_layer(model: UnitNetwork, name: object, argument: str) -> int:
    """Return the index in `model.layers` of the last layer of a place.

    Raises:
        ValueError: for an unknown place, and for a unit that is not the last unit of
            its stack.
    """
    place = lookup(model, name, argument)
    names = [layer.name for layer in model.layers]
    if place == "stem":
        return names.index(model.segments[0].name) - 1
    if place == "head":
        return max(i for i, layer in enumerate(names) if layer not in AFTER_HEAD)
    segment = ends(model)[place]
    if place not in (stage_of(place), unit_names(segment)[-1]):
        raise ValueError(
            f"{place} is inside the stack {segment.name}, which is one layer. Name its stage, "
            f"{stage_of(place)}, or give each unit its own layer with "
            f"`kp.models.unstack(model)`. Received: {name!r}"
        )
    return names.index(segment.name)
