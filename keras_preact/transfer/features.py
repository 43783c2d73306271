"""Feature extractors: a network up to the outputs of its stages, units, stem or head."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_preact.models.base import UnitNetwork
from keras_preact.models.segments import unit_names
from keras_preact.transfer import _places


def feature_extractor(
    model: UnitNetwork, outputs: str | int | Sequence[str | int] | None = None
) -> keras.Model:
    """Return a model that shares the network's layers and returns the features of some
    places in it.

    The features of stages and units are x_l, the output of their last unit. In a
    pre-activation network they are raw: normalisation and ReLU are in the next unit's
    branch, so a layer that reads them should start with its own. `"head"` is x_L after
    the network's last normalisation and ReLU. In the original arrangement, the ReLU
    follows the addition, and x_l is activated.

    The places, with the ratio of their height and width to the input's, in an ImageNet
    network and in a CIFAR network:

        stem     1/4                    1      what the first unit reads
        stage1   1/4                    1      x of the stage's last unit
        stage2   1/8                    1/2
        stage3   1/16                   1/4
        stage4   1/32                   -      1/16 or 1/8 with that output stride
        head     as the last stage             after the last normalisation and activation
        pool     -                      -      the embedding, `(batch, channels)`

    A unit such as `stage3_unit2` is a place too, also inside a stack. Uneven sizes are
    rounded up. The axis of the channels follows `data_format`. With
    `strided_unit="last"`, as in keras.applications, a stage ends with the unit that
    shrinks its map: stage1 is at 1/8, and its last unit but one at 1/4.

    Args:
        model: A network of residual units. It stays as it is; training one of the two
            trains the other.
        outputs: Names of places, or one. An integer counts stem and stages: 0 is the
            stem, 1 the first stage, -1 the last one. None: all stages.

    Returns:
        A model that returns a dictionary from the name of each place to its tensor. Use
        the names, not the order.

    Raises:
        ValueError: for a place that the network does not have; the message lists the
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
    counted = ["stem", *_places.stages(model)]
    requested = counted[1:] if outputs is None else outputs
    if isinstance(requested, str | int | np.integer):
        requested = [requested]
    names = [_name(model, place, counted) for place in requested]
    if not names:
        raise ValueError(f"`outputs` must name at least one place. Received: outputs={outputs!r}")
    tensors = _tensors(model, set(names))
    return keras.Model(
        model.input, {name: tensors[name] for name in names}, name=f"{model.name}_features"
    )


def _name(model: UnitNetwork, place: str | int, counted: list[str]) -> str:
    if isinstance(place, int | np.integer) and not isinstance(place, bool):
        if not -len(counted) <= place < len(counted):
            raise ValueError(
                f"An integer in `outputs` counts {', '.join(counted)}: it must be from "
                f"{-len(counted)} to {len(counted) - 1}. Received: {place}"
            )
        return counted[place]
    has_pool = any(layer.name == "head_pool" for layer in model.head)
    return _places.lookup(model, place, "outputs", ("pool",) if has_pool else ())


def _tensors(model: UnitNetwork, wanted: set[str]) -> dict[str, Any]:
    """Return the Keras tensors of all places. It includes the units of a stack only if
    one of them is wanted.
    """
    x = model.first_input
    tensors = {"stem": x}
    called_again = False  # whether a stack was called again, for the outputs of its units
    for segment, output in zip(model.segments, model.segment_outputs, strict=True):
        names = unit_names(segment)
        if wanted.intersection(names[:-1]):
            units = segment(x, return_outputs=True)
            tensors |= {name: units[i] for i, name in enumerate(names)}
            x, called_again = tensors[names[-1]], True
        else:
            x = segment(x) if called_again else output
        tensors[names[-1]] = tensors[_places.stage_of(names[-1])] = x
    for layer in model.head:
        if layer.name == "head_pool":
            tensors["pool"] = layer(x) if called_again else layer.output
        elif layer.name not in _places.AFTER_HEAD:
            x = layer(x) if called_again else layer.output
    return tensors | {"head": x}
