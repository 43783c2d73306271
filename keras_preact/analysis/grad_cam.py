"""Where a classifier looks: Grad-CAM."""

from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from keras_preact.analysis import _inputs
from keras_preact.backend import autodiff
from keras_preact.backend.arrays import as_numpy
from keras_preact.graph import Graph


def grad_cam(model: keras.Model, images, classes=None, *, layer: str | None = None) -> np.ndarray:
    """Return what each place of an image contributes to a class: the maps of Grad-CAM. It
    also takes sequences and volumes.

    They are weighted sums over the channels of the network's last map. The weight of a
    channel is the mean, over its positions, of the gradient of the class's logit.
    Negative sums become 0.

    Args:
        model: A classifier: any Keras model with one input and an output of shape
            `(batch, classes)`. It may contain other models and stacks of units.
        images: Images `(batch, height, width, channels)`, sequences `(batch, length,
            channels)` or volumes, with one more axis than images; or with the channels
            first, as the model takes them.
        classes: A class number per image; 0 or 1 for a binary classifier, with one
            output. None: the classes that the model predicts, the most probable ones if
            an image has several.
        layer: Name of the layer, unit or model that returns the map. If several have
            this name, put the name of the one that contains it before it:
            `stage2_unit1/conv_1`. None: the last map that is on every path to the
            output.

    Returns:
        `(batch, height, width)`, float32, not negative, as large as the images. For
        sequences and volumes, the shape of `images` without the channels.

    Raises:
        ValueError: for a model that is not such a classifier, a layer that it does not
            have or that returns no map, and classes that the output does not have.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.create_model("cifar_resnet20_preact")
    >>> kp.analysis.grad_cam(model, np.zeros((2, 32, 32, 3)), [3, 5]).shape
    (2, 32, 32)

    Source: Eq. 1 and 2 of arXiv 1610.02391.
    """
    arrays = keras.tree.flatten(_inputs.check_sample(model, images, "images"))
    _inputs.watch(model, images)
    if len(arrays) > 1 or not 3 <= arrays[0].ndim <= 5:
        raise ValueError(
            "Grad-CAM needs a model with one input: sequences, images or volumes, an array of 3, 4 "
            "or 5 axes. Received: `images` of shape "
            f"{', '.join(str(array.shape) for array in arrays)}"
        )
    rank = arrays[0].ndim
    graph = Graph(model, arrays[0])
    calls = _inputs.logit_calls(graph, "Grad-CAM")
    output = graph.outputs[0]
    tensor = _last_map(graph, rank) if layer is None else _output_of(graph, layer, rank)
    values = graph.run(graph.values(arrays[0]), calls=calls)
    _, weights = _inputs.class_weights(graph, as_numpy(values[output]), classes)

    steps = graph.between(tensor, output)
    logits, pull = autodiff.vjp(
        lambda x: graph.run(values | {tensor: x}, steps, calls)[output], values[tensor]
    )
    maps, gradients = (
        ops.convert_to_numpy(ops.cast(result, "float32"))
        for result in (values[tensor], pull(ops.cast(weights, logits.dtype)))
    )
    if any(step.channel_axis == 1 for step in graph.steps):
        maps, gradients = (np.moveaxis(array, 1, -1) for array in (maps, gradients))
        size = arrays[0].shape[2:]
    else:
        size = arrays[0].shape[1:-1]
    places = tuple(range(1, maps.ndim - 1))
    sums = (maps * gradients.mean(axis=places, keepdims=True)).sum(axis=-1)
    return _resized(np.maximum(sums, 0), size)


def _resized(maps: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Return maps `(batch, *size)`, interpolated linearly between the centres of the places,
    as images are resized. A map of a sequence may have another axis, of size 1.
    """
    maps = maps.reshape(maps.shape[: 1 + len(size)])
    for axis, new in enumerate(size, start=1):
        old: int = maps.shape[axis]
        places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        below = places.astype("int64")
        share = (places - below).astype("float32").reshape([-1] + [1] * (maps.ndim - 1 - axis))
        low, high = (maps.take(each, axis) for each in (below, np.minimum(below + 1, old - 1)))
        maps = low * (1 - share) + high * share
    return maps


def _is_map(shape: Sequence[int | None], rank: int) -> bool:
    """Return whether a tensor has the places of an input with `rank` axes. `resnet_1d`
    computes sequences as `(batch, length, 1, channels)`.
    """
    return len(shape) == rank or (rank == 3 and len(shape) == 4 and shape[2] == 1)


def _last_map(graph: Graph, rank: int) -> int:
    """Return the last map that is on every path to the output."""
    tensor: int | None = graph.outputs[0]
    while tensor is not None and not _is_map(graph.specs[tensor].shape, rank):
        tensor = graph.dominators[tensor]
    if tensor is None or tensor in graph.inputs:
        raise ValueError(
            "Every path to the output must go through a map with as many axes as `images`. "
            "Received: a network without such a map. Name a layer"
        )
    return tensor


def _output_of(graph: Graph, layer: str, rank: int) -> int:
    """Return the output of a layer, a unit or a model inside the model."""
    steps = [step for step in graph.steps if f"/{layer}/" in f"/{step.name}/"]
    scopes = {f"/{step.name}/".partition(f"/{layer}/")[0].strip("/") for step in steps}
    if len(scopes) != 1:
        where = f"in {', '.join(sorted(scopes))}" if scopes else "which it does not have"
        raise ValueError(
            f"`layer` must be one layer of the model. Received: layer={layer!r}, {where}"
        )
    tensor = steps[-1].outputs[0]
    if not _is_map(graph.specs[tensor].shape, rank):
        raise ValueError(
            f"The output of `layer` must be a map. Received: layer={layer!r} with outputs of shape "
            f"{graph.specs[tensor].shape}"
        )
    return tensor
