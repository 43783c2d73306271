"""Where a classifier looks: Grad-CAM."""

import keras
import numpy as np
from keras import ops

from keras_preact.analysis import _inputs
from keras_preact.backend import autodiff
from keras_preact.backend.arrays import as_numpy
from keras_preact.graph import Graph


def grad_cam(model: keras.Model, images, classes=None, *, layer: str | None = None) -> np.ndarray:
    """Return what each place of an image contributes to a class: the maps of Grad-CAM.

    They are weighted sums over the channels of the network's last map. The weight of a
    channel is the mean, over its positions, of the gradient of the class's logit.
    Negative sums become 0.

    Args:
        model: A classifier: any Keras model with one input and an output of shape
            `(batch, classes)`. It may contain other models and stacks of units.
        images: Images `(batch, height, width, channels)`, or with the channels first,
            as the model takes them.
        classes: A class number per image; 0 or 1 for a binary classifier, with one
            output. None: the classes that the model predicts, the most probable ones if
            an image has several.
        layer: Name of the layer, unit or model that returns the map. If several have
            this name, put the name of the one that contains it before it:
            `stage2_unit1/conv_1`. None: the last map that is on every path to the
            output.

    Returns:
        `(batch, height, width)`, float32, not negative, as large as the images.

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
    if len(arrays) > 1 or arrays[0].ndim != 4:
        raise ValueError(
            "Grad-CAM needs a model with one input of images, an array of 4 axes. Received: "
            f"`images` of shape {', '.join(str(array.shape) for array in arrays)}"
        )
    graph = Graph(model, arrays[0])
    calls = _inputs.logit_calls(graph, "Grad-CAM")
    output = graph.outputs[0]
    tensor = _last_map(graph) if layer is None else _output_of(graph, layer)
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
        size = arrays[0].shape[1:3]
    sums = (maps * gradients.mean(axis=(1, 2), keepdims=True)).sum(axis=-1, keepdims=True)
    resized = ops.image.resize(np.maximum(sums, 0), size, data_format="channels_last")
    return ops.convert_to_numpy(resized)[..., 0]


def _last_map(graph: Graph) -> int:
    """Return the last tensor of 4 axes that is on every path to the output."""
    tensor: int | None = graph.outputs[0]
    while tensor is not None and len(graph.specs[tensor].shape) != 4:
        tensor = graph.dominators[tensor]
    if tensor is None or tensor in graph.inputs:
        raise ValueError(
            "Every path to the output must go through a map (batch, height, width, channels). "
            "Received: a network without such a map. Name a layer"
        )
    return tensor


def _output_of(graph: Graph, layer: str) -> int:
    """Return the output of a layer, a unit or a model inside the model."""
    steps = [step for step in graph.steps if f"/{layer}/" in f"/{step.name}/"]
    scopes = {f"/{step.name}/".partition(f"/{layer}/")[0].strip("/") for step in steps}
    if len(scopes) != 1:
        where = f"in {', '.join(sorted(scopes))}" if scopes else "which it does not have"
        raise ValueError(
            f"`layer` must be one layer of the model. Received: layer={layer!r}, {where}"
        )
    tensor = steps[-1].outputs[0]
    if len(graph.specs[tensor].shape) != 4:
        raise ValueError(
            f"The output of `layer` must be a map. Received: layer={layer!r} with outputs of shape "
            f"{graph.specs[tensor].shape}"
        )
    return tensor
