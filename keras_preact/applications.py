"""keras.applications' ResNet50V2, ResNet101V2 and ResNet152V2 with the same arguments
and outputs, as `ResidualNetwork`s with stages, unit outputs, stacks and exports.

`preprocess_input` scales images from 0..255 to -1..1 before the network. With
`mean=127.5, std=127.5` the network does it itself.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.applications.resnet_v2 import decode_predictions, preprocess_input

from keras_preact.models.imagenet import DEPTHS
from keras_preact.models.network import ResidualNetwork, image_shape
from keras_preact.weights import keras_applications
from keras_preact.weights.family import stages

__all__ = ["ResNet50V2", "ResNet101V2", "ResNet152V2", "decode_predictions", "preprocess_input"]


def ResNet50V2(
    include_top: bool = True,
    weights: str | os.PathLike | None = "imagenet",
    input_tensor: Any = None,
    input_shape: Sequence[int | None] | None = None,
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | Callable | None = "softmax",
    name: str = "resnet50v2",
    **options,
) -> keras.Model:
    """Build keras.applications' ResNet50V2.

    Args:
        include_top: Whether the network has a pooling and a classifier.
        weights: `"imagenet"` (the weights of keras.applications, downloaded once), None
            (random), or a file for `kp.weights.from_keras_applications`.
        input_tensor: Keras tensor that the network reads.
        input_shape: Shape without the batch. None: 224 x 224 x 3, or any size without
            the top.
        pooling: Pooling without the top: `"avg"`, `"max"`, or None for maps.
        classes: Number of classes.
        classifier_activation: Activation of the classifier. None: logits.
        name: Name of the model.
        **options: Options of `ResidualNetwork`: `stacked=True`, `output_stride=8`,
            `mean=127.5, std=127.5`, ...

    Returns:
        A `ResidualNetwork`. With `input_tensor`, it is a layer of a functional model
        that starts at the source of that tensor.

    Raises:
        ValueError: for arguments that fit neither keras.applications nor
            `ResidualNetwork`.
        ConnectionError: if the weights cannot be downloaded.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.applications.ResNet50V2(weights=None, classes=5, input_shape=(64, 64, 3))
    >>> model.output_shape, model.units[-1].name, model.stage_outputs["stage3"].shape
    ((None, 5), 'stage4_unit3', (None, 2, 2, 1024))
    """
    return _build(50, **locals())


def ResNet101V2(
    include_top: bool = True,
    weights: str | os.PathLike | None = "imagenet",
    input_tensor: Any = None,
    input_shape: Sequence[int | None] | None = None,
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | Callable | None = "softmax",
    name: str = "resnet101v2",
    **options,
) -> keras.Model:
    """Build keras.applications' ResNet101V2. Arguments as in `ResNet50V2`."""
    return _build(101, **locals())


def ResNet152V2(
    include_top: bool = True,
    weights: str | os.PathLike | None = "imagenet",
    input_tensor: Any = None,
    input_shape: Sequence[int | None] | None = None,
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | Callable | None = "softmax",
    name: str = "resnet152v2",
    **options,
) -> keras.Model:
    """Build keras.applications' ResNet152V2. Arguments as in `ResNet50V2`."""
    return _build(152, **locals())


def _build(
    depth, *, include_top, weights, input_tensor, input_shape, pooling, classes, options, **settings
) -> keras.Model:
    if weights == "imagenet" and include_top and classes != 1000:
        raise ValueError(
            "The weights of 'imagenet' have 1000 classes: use weights=None, include_top=False, "
            "or pass a model with these weights and `classes` to "
            f"kp.weights.from_keras_applications. Received: classes={classes}"
        )
    if input_tensor is not None:
        if not isinstance(input_tensor, keras.KerasTensor):
            raise ValueError(
                "`input_tensor` must be a Keras tensor, such as keras.Input(...). Received: "
                f"{input_tensor!r}"
            )
        input_shape = input_tensor.shape[1:]
    size = 224 if include_top else None
    settings |= options | {
        "input_shape": image_shape(input_shape, size, options.get("data_format")),
        "include_top": include_top,
        "pooling": None if include_top else pooling,  # keras.applications ignores it with the top
    }
    if weights is None:
        family = keras_applications.FAMILY
        defaults = {"block": family.block("bottleneck", {}), "stem_filters": 64, "classes": classes}
        defaults |= family.options
        rows = family.stages(keras_applications.FILTERS, DEPTHS[depth][1])
        model = ResidualNetwork(rows, **defaults | settings)
    else:
        source = _imagenet(depth, include_top) if weights == "imagenet" else weights
        model = keras_applications.from_keras_applications(source, **settings)
        _check_fits(model, depth, classes, weights)
    if input_tensor is None:
        return model
    sources = keras.utils.get_source_inputs(input_tensor)
    return keras.Model(
        sources if len(sources) > 1 else sources[0], model(input_tensor), name=model.name
    )


def _imagenet(depth: int, include_top: bool) -> keras.Model:
    build = keras_applications.CLASSES[depth]
    try:
        return build(include_top=include_top)
    except ValueError:  # the file is damaged
        raise
    except Exception as error:  # Keras raises no narrower class
        raise ConnectionError(
            f"The download of keras.applications' weights of {build.__name__} failed: give a file "
            f"with them as `weights`, or use weights=None. Keras says: {error}"
        ) from error


def _check_fits(model: ResidualNetwork, depth: int, classes: int, weights) -> None:
    """Check that a file held the weights of this depth and number of classes."""
    config = model.get_config()
    units, wanted = tuple(stage.units for stage in stages(model)), tuple(DEPTHS[depth][1])
    if units != wanted or (config["include_top"] and config["classes"] != classes):
        raise ValueError(
            f"ResNet{depth}V2 needs weights for stages of {wanted} units and for {classes} "
            f"classes. Received: weights={str(weights)!r} for stages of {units} units and "
            f"{config['classes']} classes"
        )
