"""Convert weights from and to keras-hub's pre-activation ResNetBackbone, and image
classifiers around one.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import keras

from keras_preact import arrangements, blocks
from keras_preact.layers.spatial import reordered
from keras_preact.models import named_weights
from keras_preact.models.network import ResidualNetwork
from keras_preact.weights import layout
from keras_preact.weights.family import Family, Sample, assign, stages, values_of

#: Our names of blocks to keras-hub's.
BLOCKS = {"basic": "basic_block", "bottleneck": "bottleneck_block"}

FAMILY = Family(
    title="keras-hub's pre-activation ResNetBackbone",
    assumes="The conversion assumes ReLU, an epsilon of 1e-5, and strides on the 3x3 convolutions.",
    network=layout.KERAS_NETWORK,
    unit_name=lambda stage, unit: f"stack{stage - 1}_block{unit - 1}",
    unit=layout.unit_names("_pre_activation_bn _1_conv _1_bn _2_conv _2_bn _3_conv _0_conv"),
    leaves=layout.KERAS_LEAVES,
    numbers=re.compile(r"stack(\d+)_block(\d+)_"),
    options={
        "arrangement": arrangements.RAW_STEM,
        "stem": "7x7",
        "normalization": "batch",
    },
    block_options={"stride_on": "3x3"},
)


def library() -> Any:
    """Import keras-hub.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        import keras_hub
    except ImportError as error:
        raise ImportError(f"This needs {error.name}: pip install 'keras-preact[hub]'") from error
    return keras_hub


def from_keras_hub(
    source: keras.Model,
    *,
    input_shape: Sequence[int | None] | None = None,
    classes: int | None = None,
    check: Sample | None = None,
    **options,
) -> ResidualNetwork:
    """Convert a pre-activation ResNetBackbone of keras-hub, or a classifier around one.

    The conversion assumes ReLU, an epsilon of 1e-5, and strides on the 3x3
    convolutions.

    Args:
        source: A `keras_hub.models.ResNetBackbone` with `use_pre_activation=True`, or
            an `ImageClassifier` of one. Its preprocessor does not become part of the
            network.
        input_shape: Shape of the images. None: the source's. For other channels the
            stem's kernel is adapted, see `load`.
        classes: Number of classes. If it differs from the source's, the network gets a
            new classifier. None: the source's.
        check: Images, in the data format of the result, and the source's outputs for
            them. The result must return the same, which reveals wrong assumptions.
        **options: Options of `ResidualNetwork`, such as `stacked=True` or
            `include_top=False`.

    Raises:
        ValueError: for a source of another kind, and if the outputs differ from those
            in `check`.
        WeightsMismatch: if the source's weights do not fit the network.

    Example:

    >>> import keras_hub
    >>> import keras_preact as kp
    >>> theirs = keras_hub.models.ResNetBackbone(
    ...     [64], [7], [64, 128], [1, 2], [1, 2], "basic_block",
    ...     use_pre_activation=True, image_shape=(32, 32, 3),
    ... )
    >>> kp.weights.from_keras_hub(theirs).output_shape
    (None, 4, 4, 128)
    """
    hub = library()
    backbone = getattr(source, "backbone", source)
    if not isinstance(backbone, hub.models.ResNetBackbone):
        raise ValueError(
            "`source` must be a keras_hub.models.ResNetBackbone, or an ImageClassifier of one. "
            f"Received: source={source!r}"
        )
    _check_backbone(backbone)
    layers, head_options = [*backbone.layers], {}
    if source is not backbone:
        layers.append(source.output_dense)
        head_options = {"pooling": source.pooling, "classifier_activation": source.activation}
    family = dataclasses.replace(FAMILY, strides=tuple(backbone.stackwise_num_strides))
    return family.convert(
        values_of(layers),
        input_shape=input_shape,
        classes=classes,
        check=check,
        options={
            "name": source.name,
            "data_format": backbone.data_format,
            "dtype": backbone.dtype_policy,
            "pooling": None,
            **head_options,
            **options,
        },
        shape=reordered(backbone.image_shape, backbone.data_format, "channels_last"),
    )


def to_keras_hub(model: ResidualNetwork) -> keras.Model:
    """Convert a network to keras-hub's pre-activation ResNetBackbone, or a classifier
    around one.

    Args:
        model: A network from `from_keras_hub`, or one of the same structure, such as
            `kp.models.resnet_imagenet(50, arrangement="full_preactivation_raw_stem")`;
            stacked or not.

    Returns:
        A `keras_hub.models.ResNetBackbone`, or a `ResNetImageClassifier` around one if
        the network has a classifier.

    Raises:
        ValueError: for a network that does not compute what theirs does. The message
            holds the differences.

    Example:

    >>> import keras_preact as kp
    >>> ours = kp.models.resnet_imagenet(
    ...     (1, 1), arrangement="full_preactivation_raw_stem", input_shape=(32, 32, 3), classes=5
    ... )
    >>> type(kp.weights.to_keras_hub(ours)).__name__
    'ResNetImageClassifier'
    """
    hub = library()
    state = FAMILY.extract(model)
    _check_fits(model)
    config, rows = model.get_config(), stages(model)
    theirs = backbone = hub.models.ResNetBackbone(
        input_conv_filters=[config["stem_filters"]],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[row.filters for row in rows],
        stackwise_num_blocks=[row.units for row in rows],
        stackwise_num_strides=[row.strides for row in rows],
        block_type=BLOCKS[blocks.get(config["block"]).name],
        use_pre_activation=True,
        image_shape=tuple(config["input_shape"]),
        data_format=config["data_format"],
        dtype=keras.dtype_policies.get(config["dtype"]),
        name=f"{model.name}_backbone" if config["include_top"] else model.name,
    )
    layers = [*backbone.layers]
    if config["include_top"]:
        theirs = hub.models.ResNetImageClassifier(
            backbone=backbone,
            num_classes=config["classes"],
            pooling=config["pooling"] or "avg",
            activation=config["classifier_activation"],
            head_dtype=keras.dtype_policies.get(config["dtype"]).variable_dtype,
            name=model.name,
        )
        layers.append(theirs.output_dense)
    assign(layers, state)
    return theirs


def _check_backbone(backbone) -> None:
    pre_activation, block = backbone.use_pre_activation, backbone.block_type
    kernel_sizes = list(backbone.input_conv_kernel_sizes)
    if not pre_activation or block not in BLOCKS.values() or kernel_sizes != [7]:
        raise ValueError(
            "The backbone must have use_pre_activation=True, block_type 'basic_block' or "
            "'bottleneck_block' (the vd blocks of keras-hub do not build with pre-activation), "
            f"and one input convolution of 7x7. Received: use_pre_activation={pre_activation}, "
            f"block_type={block!r}, input_conv_kernel_sizes={kernel_sizes}"
        )


def _check_fits(model: ResidualNetwork) -> None:
    """Check that a ResNetBackbone can have a network's sizes and projections."""
    config, rows, names = model.get_config(), stages(model), named_weights.named(model)
    block = blocks.get(config["block"]).name
    late = any(row.strided_unit == "last" and row.strides > 1 and row.units > 1 for row in rows)
    if block not in BLOCKS or rows[0].filters != 64 or late:
        raise ValueError(
            f"keras-hub's ResNetBackbone has blocks {' or '.join(BLOCKS)}, 64 filters in its "
            "first stage, and strides in the first unit of a stage. Received: "
            f"block={block!r}, stages={rows}"
        )
    for s in range(1, len(rows) + 1):
        if (f"stage{s}_unit1/projection/conv/kernel" in names) != (block == "bottleneck" or s > 1):
            raise ValueError(
                "keras-hub's ResNetBackbone has a projection in the first unit of every stage, "
                f"except in the first stage of basic blocks. Received: block={block!r}, "
                f"stages={rows}, which differs in stage {s}"
            )
    if not config["include_top"] and config["pooling"]:
        raise ValueError(
            "keras-hub's ResNetBackbone returns maps, without pooling. Received: a network with "
            f"pooling={config['pooling']!r}"
        )
