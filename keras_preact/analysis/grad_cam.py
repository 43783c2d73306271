"""Where a classifier looks: Grad-CAM."""

from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_preact.analysis import _inputs
from keras_preact.backend import autodiff
from keras_preact.graph import Graph, Step


def grad_cam(model: keras.Model, images, classes=None, *, layer: str | None = None) -> np.ndarray:
    """Return what each place of an image contributes to a class: the maps of Grad-CAM.

    The channels of the last map of the network are added, each times the mean of the
    gradient of the class's logit over that channel; negative sums become 0.

    Args:
        model: A classifier: any Keras model with one input and an output of shape
            `(batch, classes)`. Models within it and stacks of units are looked into.
        images: Images `(batch, height, width, channels)`, or with the channels first, as
            the model takes them.
        classes: A class number per image. None: those that the model predicts.
        layer: Name of the layer, unit or model whose output is the map. If several have
            it, join it to the name of what they are in: `stage2_unit1/conv_1`. None: the
            last map that all of the network goes through.

    Returns:
        `(batch, height, width)`, float32, not negative, as large as the images.

    Raises:
        ValueError: for a model that is not such a classifier, a layer that it does not
            have or whose output is no map, and classes that the output does not have.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.create_model("cifar_resnet20_preact")
    >>> kp.analysis.grad_cam(model, np.zeros((2, 32, 32, 3)), [3, 5]).shape
    (2, 32, 32)

    Source: Eq. 1 and 2 of arXiv 1610.02391.
    """
    arrays = _inputs.check_sample(model, images, "images")
    if len(arrays) > 1 or arrays[0].ndim != 4:
        raise ValueError(
            "Grad-CAM is for a model of one input of images, an array of 4 axes. Received: "
            f"`images` of shape {', '.join(str(array.shape) for array in arrays)}"
        )
    graph = Graph(model, arrays[0])
    outputs = [graph.specs[output].shape for output in graph.outputs]
    if len(outputs) > 1 or len(outputs[0]) != 2:
        raise ValueError(
            "Grad-CAM is for a model with one output of shape (batch, classes). Received: "
            f"outputs of shape {outputs}"
        )
    output = graph.outputs[0]
    tensor = _last_map(graph) if layer is None else _output_of(graph, layer)
    logits_of = _before_softmax(graph.steps[graph.producers[output]])
    calls = {graph.producers[output]: logits_of} if logits_of else {}
    values = graph.run(graph.values(arrays[0]), calls=calls)
    classes = _inputs.check_labels(classes, len(arrays[0]))
    if classes is None:
        classes = ops.convert_to_numpy(values[output]).argmax(axis=1)
    _inputs.check_classes(classes, graph)

    steps = graph.between(tensor, output)
    logits, pull = autodiff.vjp(
        lambda x: graph.run(values | {tensor: x}, steps, calls)[output], values[tensor]
    )
    wanted = np.eye(logits.shape[1])[classes]
    maps, gradients = (
        ops.convert_to_numpy(ops.cast(each, "float32"))
        for each in (values[tensor], pull(ops.cast(wanted, logits.dtype)))
    )
    if any(step.channel_axis == 1 for step in graph.steps):
        maps, gradients = (np.moveaxis(each, 1, -1) for each in (maps, gradients))
        size = arrays[0].shape[2:]
    else:
        size = arrays[0].shape[1:3]
    added = (maps * gradients.mean(axis=(1, 2), keepdims=True)).sum(axis=-1, keepdims=True)
    large = ops.image.resize(np.maximum(added, 0), size, data_format="channels_last")
    return ops.convert_to_numpy(large)[..., 0]


def _last_map(graph: Graph) -> int:
    """Return the last tensor of 4 axes that is on every path to the output."""
    tensor: int | None = graph.outputs[0]
    while tensor is not None and len(graph.specs[tensor].shape) != 4:
        tensor = graph.dominators[tensor]
    if tensor is None or tensor in graph.inputs:
        raise ValueError(
            "All of the network must go through a map (batch, height, width, channels). "
            "Received: one without. Name a layer"
        )
    return tensor


def _output_of(graph: Graph, layer: str) -> int:
    """Return the output of a layer, of a unit, or of a model in the model."""
    steps = [step for step in graph.steps if f"/{layer}/" in f"/{step.name}/"]
    places = {f"/{step.name}/".partition(f"/{layer}/")[0].strip("/") for step in steps}
    if len(places) != 1:
        found = f"in {', '.join(sorted(places))}" if places else "which it does not have"
        raise ValueError(
            f"`layer` must be one layer of the model. Received: layer={layer!r}, {found}"
        )
    tensor = steps[-1].outputs[0]
    if len(graph.specs[tensor].shape) != 4:
        raise ValueError(
            f"The output of `layer` must be a map. Received: layer={layer!r} with outputs of shape "
            f"{graph.specs[tensor].shape}"
        )
    return tensor


def _before_softmax(step: Step) -> Callable | None:
    """Return the function from the input of a softmax, or of a dense layer that ends in
    one, to what the softmax gets; None for another step.
    """
    layer = step.operation
    if not _inputs.is_softmax(step):
        return None
    if isinstance(layer, keras.layers.Dense):
        return lambda x: ops.matmul(x, layer.kernel) + (layer.bias if layer.use_bias else 0)
    return None if step.has_kernel else lambda x: x
