"""Convert weights from and to keras.applications' ResNet50V2, 101V2 and 152V2, and from
their files.
"""

import os
import pathlib
import re
import zipfile
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_preact import arrangements, blocks
from keras_preact.layers.spatial import reordered
from keras_preact.models.imagenet import DEPTHS
from keras_preact.models.network import ResidualNetwork
from keras_preact.weights import layout
from keras_preact.weights.family import Family, Sample, assign, some, stages, values_of

#: Every convolution without a normalisation after it has a bias.
FAMILY = Family(
    title="keras.applications' ResNetV2",
    assumes="The conversion assumes ReLU, an epsilon of 1.001e-5, and the strides and paddings of "
    "keras.applications.",
    network=layout.KERAS_NETWORK,
    unit_name=lambda stage, unit: f"conv{stage + 1}_block{unit}",
    unit=layout.unit_names("_preact_bn _1_conv _1_bn _2_conv _2_bn _3_conv _0_conv"),
    leaves=layout.KERAS_LEAVES,
    numbers=re.compile(r"conv(\d+)_block(\d+)_2_conv/"),
    options={
        "arrangement": arrangements.RAW_STEM,
        "stem": "7x7_zero_padded",
        "use_bias": "unless_norm",
        "normalization": keras.layers.BatchNormalization(momentum=0.99, epsilon=1.001e-5),
    },
    strided_unit="last",
    block_options={"stride_on": "3x3"},
)

#: Widths of the stages.
FILTERS = (64, 128, 256, 512)

#: Depth to the class of keras.applications.
CLASSES = {
    50: keras.applications.ResNet50V2,
    101: keras.applications.ResNet101V2,
    152: keras.applications.ResNet152V2,
}

_LAYERS = re.compile(
    r"conv1_(pad|conv)|pool1_(pad|pool)|conv\d+_block\d+_(preact_bn|preact_relu|0_conv|[123]_(conv|bn|relu|pad)|out)"
    r"|max_pooling2d(_\d+)?|post_(bn|relu)|avg_pool|max_pool|predictions"
)

#: Names and values of weights, and options of `ResidualNetwork` read from the source.
Read = tuple[dict[str, np.ndarray], dict[str, Any]]


def from_keras_applications(
    source: keras.Model | str | os.PathLike,
    *,
    input_shape: Sequence[int | None] | None = None,
    classes: int | None = None,
    check: Sample | None = None,
    **options,
) -> ResidualNetwork:
    """Convert a ResNetV2 of keras.applications to a network that computes the same.

    Layers are recognised by their names. The conversion assumes ReLU, an epsilon of
    1.001e-5, and the strides and paddings of keras.applications.

    Args:
        source: The model, a file of the model (`.keras`, `.h5`), or a file of its
            weights alone (`.weights.h5`, and the `.h5` that keras.applications
            downloads).
        input_shape: Shape of the images. None: the model's, or 224 x 224 for a file of
            weights. For other channels the stem's kernel is adapted, see `load`.
        classes: Number of classes. If it differs from the source's, the network gets a
            new classifier. None: the source's.
        check: Images, in the data format of the result, and the source's outputs for
            them. The result must return the same, which reveals wrong assumptions.
        **options: Options of `ResidualNetwork`, such as `stacked=True`,
            `output_stride=8` or `include_top=False`.

    Raises:
        ValueError: for a model or a file that is not of a ResNetV2, and if the outputs
            differ from those in `check`.
        WeightsMismatch: if the source's weights do not fit the network.

    Example:

    >>> import keras
    >>> import keras_preact as kp
    >>> options = {"weights": None, "include_top": False, "input_shape": (64, 64, 3)}
    >>> theirs = keras.applications.ResNet50V2(**options)
    >>> ours = kp.weights.from_keras_applications(theirs, pooling="avg")
    >>> ours.output_shape, len(ours.units)
    ((None, 2048), 16)
    """
    state, source_options = (
        _of_model(source) if isinstance(source, keras.Model) else _of_file(pathlib.Path(source))
    )
    if not FAMILY.matches(state):
        raise ValueError(
            "The source holds no ResNetV2 of keras.applications, with layers such as conv1_conv "
            f"and conv2_block1_2_conv. Received: {len(state)} weights, {some(state)}"
        )
    shape = source_options.pop("input_shape", None)
    if shape is not None:
        shape = reordered(shape, source_options["data_format"], "channels_last")
    return FAMILY.convert(
        state,
        input_shape=input_shape,
        classes=classes,
        check=check,
        # without a classifier the network returns its maps, as keras.applications' does by default
        options={"pooling": None} | source_options | options,
        shape=shape,
    )


def to_keras_applications(model: ResidualNetwork) -> keras.Model:
    """Convert a network to keras.applications' ResNet50V2, ResNet101V2 or ResNet152V2.

    Args:
        model: A network from `from_keras_applications` or `kp.applications`, or one of
            the same structure; stacked or not, trained or not.

    Returns:
        A model of keras.applications with the same name, in Keras' image data format
        and dtype policy.

    Raises:
        ValueError: for a network that does not compute what theirs does. The message
            holds the options that differ.

    Example:

    >>> import keras_preact as kp
    >>> ours = kp.applications.ResNet50V2(weights=None, include_top=False, input_shape=(64, 64, 3))
    >>> kp.weights.to_keras_applications(ours).get_layer("conv5_block3_out").output.shape
    (None, 2, 2, 2048)
    """
    state = FAMILY.extract(model)
    config, rows = model.get_config(), stages(model)
    block = blocks.get(config["block"]).name
    depths = (depth for depth in CLASSES if FAMILY.stages(FILTERS, DEPTHS[depth][1]) == rows)
    depth = next(depths, None)
    if config["include_top"] and config["pooling"] == "max":
        raise ValueError(
            "keras.applications' ResNetV2 have average pooling before a classifier. "
            "Received: pooling='max'"
        )
    if depth is None or (block, config["stem_filters"]) != ("bottleneck", 64):
        raise ValueError(
            "keras.applications has ResNetV2 of 50, 101 and 152 layers: a stem of 64 channels "
            "and stages of bottlenecks with 64, 128, 256 and 512 filters, with strides in the "
            f"last units of the first three. Received: a network with stages={rows}, "
            f"stem_filters={config['stem_filters']}, block={block!r}"
        )
    theirs = CLASSES[depth](
        weights=None,
        include_top=config["include_top"],
        # `input_shape` would have to be fixed, with at least 32 pixels. But `input_tensor` makes a
        # model with a list of inputs.
        input_tensor=keras.Input(reordered(config["input_shape"], config["data_format"], None)),
        pooling=config["pooling"],
        classes=config["classes"],
        classifier_activation=keras.activations.get(config["classifier_activation"]),
    )
    assign(theirs.layers, state)
    return keras.Model(theirs.inputs[0], theirs.outputs[0], name=model.name)


def _of_model(model: keras.Model) -> Read:
    layers = {
        layer.name: layer
        for layer in model.layers
        if not isinstance(layer, keras.layers.InputLayer)
    }
    if others := [name for name in layers if not _LAYERS.fullmatch(name)]:
        raise ValueError(
            "The model must be a ResNetV2 as keras.applications makes it, without other layers. "
            "Pass only this part of the model, such as model.get_layer('resnet50v2'). "
            f"Received: a model with {some(others)}"
        )
    state = values_of(model.layers)
    if not (stem := layers.get("conv1_conv")):
        return state, {}
    options = {
        "name": model.name,
        "data_format": stem.data_format,
        "dtype": stem.dtype_policy,
        "input_shape": model.input_shape[1:],
    }
    if classifier := layers.get("predictions"):
        return state, options | {"classifier_activation": classifier.activation}
    return state, options | {
        "pooling": "avg" if "avg_pool" in layers else "max" if "max_pool" in layers else None
    }


def _of_file(path: pathlib.Path) -> Read:
    import h5py

    if not path.exists():
        raise FileNotFoundError(f"There is no such file. Received: source={str(path)!r}")
    if h5py.is_hdf5(path):
        with h5py.File(path) as file:
            if "layer_names" in file.attrs:
                return _named_weights(file), {}
            if "layers" in file:
                return _numbered_weights(path, file["layers"]), {}
    elif not zipfile.is_zipfile(path):
        raise ValueError(
            "The file must be a .keras, .h5 or .weights.h5 of a ResNetV2. Received: "
            f"source={str(path)!r}"
        )
    return _of_model(keras.saving.load_model(path, compile=False))


def _named_weights(file) -> dict[str, np.ndarray]:
    """Read weights as Keras 2 wrote them, by layer."""
    return {
        f"{layer}/{name.rsplit('/', 1)[-1].split(':')[0]}": file[layer][name][()]
        for layer in file.attrs["layer_names"]
        for name in file[layer].attrs["weight_names"]
    }


def _numbered_weights(path: pathlib.Path, layers) -> dict[str, np.ndarray]:
    """Read weights as Keras 3 writes them, by the class of a layer and a number. Their
    names come from a model with the same order of layers.
    """
    count = sum(name == "conv2d" or name.startswith("conv2d_") for name in layers)
    convolutions = {
        1 + len(units) + 3 * sum(units): depth
        for depth, (_, units) in DEPTHS.items()
        if depth in CLASSES
    }
    if count not in convolutions:
        raise ValueError(
            "The file must hold the weights of a ResNetV2, which has "
            f"{', '.join(map(str, convolutions))} convolutions. Received: source={str(path)!r} "
            f"with {count}"
        )
    image = reordered((32, 32, layers["conv2d/vars/0"].shape[2]), "channels_last", None)
    kernel = layers.get("dense/vars/0")
    classes = {"include_top": False} if kernel is None else {"classes": kernel.shape[1]}
    model = CLASSES[convolutions[count]](weights=None, input_tensor=keras.Input(image), **classes)
    model.load_weights(path)
    return values_of(model.layers)
