"""Feature extractors: a network up to the outputs of its stages, units, stem or head."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_preact.models.base import UnitNetwork
from keras_preact.transfer import _places


def feature_extractor(
    model: UnitNetwork, outputs: Sequence[str | int] | None = None
) -> keras.Model:
    """Return a model that shares the network's layers and returns the features of the
    places that are asked for.

    The features of stages and units are x_l, what the addition of their last unit
    leaves: in a pre-activation network it is raw, and the normalisation and ReLU that
    the next unit's branch starts with are not applied. A layer that reads them should
    start with its own, as the network does; `"head"` is x_L behind the network's last
    ones. In the original arrangement, where the ReLU stands behind the addition, x_l is
    activated.

    Places, with their height and width as shares of the input's, for an ImageNet
    network and for a CIFAR network:

        stem     1/4                    1      what the first unit reads
        stage1   1/4                    1      x of the stage's last unit
        stage2   1/8                    1/2
        stage3   1/16                   1/4
        stage4   1/32                   -      1/16 with `output_stride=16`, 1/8 with `output_stride=8`, as stages before it
        head     as the last stage             behind the last normalisation and activation
        pool     -                      -      the embedding, `(batch, channels)`

    and `stage3_unit2`, a unit, also inside a stack. A size is rounded up where it is
    not even, and the channels stand where `data_format` has them. With
    `strided_unit="last"`, as in keras.applications, a stage ends with the unit that
    shrinks its map: stage1 is at 1/8 then, and the unit in front of its last one at
    1/4.

    Args:
        model: A network of residual units. It stays as it is; what trains one of the
            two trains the other.
        outputs: Names of places. An integer counts stem and stages: 0 is the stem, 1
            the first stage, -1 the last one. None: all stages.

    Returns:
        A model whose output is a dictionary of tensors by the names of their places;
        take them by name, not by order.

    Raises:
        ValueError: for a place that the network does not have; the message has the
            nearest ones.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, input_shape=(32, 32, 3))
    >>> features = kp.transfer.feature_extractor(model, ["stage1", -1, "stage3_unit1", "pool"])
    >>> maps = features(np.zeros((2, 32, 32, 3), "float32"))
    >>> {name: tuple(maps[name].shape) for name in ("stage1", "stage3", "pool")}
    {'stage1': (2, 32, 32, 16), 'stage3': (2, 8, 8, 64), 'pool': (2, 64)}
    """
    _places.check(model)
    ends = list(_places.stages(model))
    has_pool = any(layer.name == "head_pool" for layer in model._parts.head)
    names = [
        _name(model, place, ["stem", *ends], has_pool)
        for place in (ends if outputs is None else outputs)
    ]
    if not names:
        raise ValueError(f"`outputs` must name at least one place. Received: outputs={outputs!r}")
    tensors = _tensors(model, set(names))
    return keras.Model(
        model.input, {name: tensors[name] for name in names}, name=f"{model.name}_features"
    )


def _name(model: UnitNetwork, place: str | int, counted: list[str], has_pool: bool) -> str:
    if isinstance(place, int) and not isinstance(place, bool):
        if not -len(counted) <= place < len(counted):
            raise ValueError(
                f"An integer in `outputs` counts {', '.join(counted)}: it must be from "
                f"{-len(counted)} to {len(counted) - 1}. Received: {place}"
            )
        return counted[place]
    return _places.lookup(model, place, "outputs", ("pool",) if has_pool else ())


def _tensors(model: UnitNetwork, wanted: set[str]) -> dict[str, Any]:
    """Return the Keras tensors of all places but units in stacks, and of these where
    one of their stack is wanted.
    """
    parts = model._parts
    x, again = (
        parts.first_input,
        False,
    )  # again: behind a stack that was called once more, for the outputs of its units
    found = {"stem": x}
    for segment, output in zip(parts.segments, parts.segment_outputs, strict=True):
        names = _places.unit_names(segment)
        if wanted.intersection(names[:-1]):
            units = segment(x, return_outputs=True)
            found |= {name: units[i] for i, name in enumerate(names)}
            x, again = found[names[-1]], True
        else:
            x = segment(x) if again else output
        found[names[-1]] = found[_places.stage_of(names[-1])] = x
    for layer in parts.head:
        if layer.name not in _places.BEHIND_HEAD:
            x = layer(x) if again else layer.output
    found["head"] = x
    for layer in parts.head:
        if layer.name == "head_pool":
            found["pool"] = layer(x) if again else layer.output
    return found
