"""keras-hub's pre-activation ResNetBackbone, and the image classifier around one, as
networks of ours, and back.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import keras
from keras import ops

from keras_preact import arrangements
from keras_preact.models.network import ResidualNetwork, Stage
from keras_preact.weights import layout, structure, transfer

#: Our blocks and theirs.
BLOCKS = MappingProxyType({"basic": "basic_block", "bottleneck": "bottleneck_block"})

LAYOUT = layout.Layout(
    network=MappingProxyType(
        {"stem_conv": "conv1_conv", "head_norm": "post_bn", "head_classifier": "predictions"}
    ),
    unit=MappingProxyType(
        {
            "branch/norm_0": "_pre_activation_bn",
            "branch/conv_1": "_1_conv",
            "branch/norm_1": "_1_bn",
            "branch/conv_2": "_2_conv",
            "branch/norm_2": "_2_bn",
            "branch/conv_3": "_3_conv",
            "projection/conv": "_0_conv",
        }
    ),
    unit_name=lambda stage, unit: f"stack{stage - 1}_block{unit - 1}",
    leaves=layout.KERAS_LEAVES,
)


def library() -> Any:
    """Import keras-hub.

    Raises:
        ImportError: where it is not installed.
    """
    try:
        import keras_hub
    except ImportError as error:
        raise ImportError(f"This needs {error.name}: pip install 'keras-preact[hub]'") from error
    return keras_hub


def recipe() -> dict[str, Any]:
    """Return the options of `ResidualNetwork` that make it compute what their backbone
    does.
    """
    return {
        "arrangement": arrangements.RAW_STEM,
        "stem": "7x7",
        "stride_on": "3x3",
        "normalization": "batch",
    }


def from_keras_hub(
    source: keras.Model,
    *,
    input_shape: Sequence[int | None] | None = None,
    classes: int | None = None,
    **options,
) -> ResidualNetwork:
    """Make a pre-activation ResNetBackbone of keras-hub, or a classifier around one,
    into a network that computes the same.

    Args:
        source: A `keras_hub.models.ResNetBackbone` with `use_pre_activation=True`, or
            an `ImageClassifier` of one. What its preprocessor does to images is not
            part of the network.
        input_shape: None: the source's. With other channels the stem's kernel is
            adapted, see `load`.
        classes: Of the classifier; where they are not the source's, it starts anew.
            None: the source's.
        **options: Of `ResidualNetwork`, such as `stacked=True` or `include_top=False`.

    Raises:
        ValueError: for a source of another kind.
        WeightsMismatch: for weights that do not fit each other.

    Example:

    >>> import keras_hub
    >>> import keras_preact as kp
    >>> theirs = keras_hub.models.ResNetBackbone(
    ...     [64], [7], [64, 128], [1, 2], [1, 2], "basic_block", use_pre_activation=True, image_shape=(32, 32, 3)
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
    _check_kind(backbone)
    top = source if source is not backbone else None
    given = recipe() | {
        "name": source.name,
        "data_format": backbone.data_format,
        "dtype": backbone.dtype_policy,
        "include_top": top is not None or classes is not None,
    }
    if top is not None:
        given |= {"pooling": top.pooling, "classifier_activation": top.activation}
    given |= options
    if input_shape is None:
        input_shape = structure.in_format(
            backbone.image_shape, backbone.data_format, given["data_format"]
        )
    rows = zip(
        backbone.stackwise_num_filters,
        backbone.stackwise_num_blocks,
        backbone.stackwise_num_strides,
        strict=True,
    )
    model = ResidualNetwork(
        [Stage(*row) for row in rows],
        block={theirs: ours for ours, theirs in BLOCKS.items()}[backbone.block_type],
        stem_filters=backbone.input_conv_filters[0],
        input_shape=input_shape,
        classes=classes or (1 if top is None else top.num_classes),
        **given,
    )
    read = [backbone] if top is None or not given["include_top"] else [backbone, top.output_dense]
    state = {name: ops.convert_to_numpy(weight.value) for name, weight in _weights(read).items()}
    entries = LAYOUT.entries(backbone.stackwise_num_blocks)
    transfer.load(model, state, entries, new_classifier=top is None and classes is not None)
    return model


def to_keras_hub(model: ResidualNetwork) -> keras.Model:
    """Make a network of ours into keras-hub's pre-activation ResNetBackbone, or a
    classifier around one.

    Args:
        model: From `from_keras_hub`, or of equal structure, such as
            `kp.models.resnet_imagenet(50, arrangement="full_preactivation_raw_stem")`;
            stacked or not.

    Returns:
        A `keras_hub.models.ResNetBackbone`; of a network with a classifier a
        `ResNetImageClassifier` around one.

    Raises:
        ValueError: for a network that does not compute what one of theirs does; the
            message holds what differs.

    Example:

    >>> import keras_preact as kp
    >>> ours = kp.models.resnet_imagenet((1, 1), arrangement="full_preactivation_raw_stem", input_shape=(32, 32, 3), classes=5)
    >>> type(kp.weights.to_keras_hub(ours)).__name__
    'ResNetImageClassifier'
    """
    hub = library()
    structure.check_computes_as(model, recipe(), "keras-hub's pre-activation ResNetBackbone")
    config, stages = model.get_config(), structure.stages(model)
    _check_fits(model)
    theirs = backbone = hub.models.ResNetBackbone(
        input_conv_filters=[config["stem_filters"]],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[row.filters for row in stages],
        stackwise_num_blocks=[row.units for row in stages],
        stackwise_num_strides=[row.strides for row in stages],
        block_type=BLOCKS[config["block"]],
        use_pre_activation=True,
        image_shape=tuple(config["input_shape"]),
        data_format=config["data_format"],
        dtype=keras.dtype_policies.get(config["dtype"]),
        name=f"{model.name}_backbone" if config["include_top"] else model.name,
    )
    read: list[keras.Layer] = [backbone]
    if config["include_top"]:
        theirs = hub.models.ResNetImageClassifier(
            backbone=backbone,
            num_classes=config["classes"],
            pooling=config["pooling"] or "avg",
            activation=config["classifier_activation"],
            head_dtype=keras.dtype_policies.get(config["dtype"]).variable_dtype,
            name=model.name,
        )
        read.append(theirs.output_dense)
    state = transfer.extract(model, LAYOUT.entries([row.units for row in stages]))
    for name, weight in _weights(read).items():
        weight.assign(state[name])
    return theirs


def _check_kind(backbone) -> None:
    kind = (
        backbone.use_pre_activation,
        backbone.block_type,
        list(backbone.input_conv_kernel_sizes),
    )
    if kind not in [(True, theirs, [7]) for theirs in BLOCKS.values()]:
        raise ValueError(
            "The backbone must have use_pre_activation=True, block_type 'basic_block' or "
            "'bottleneck_block' (the vd blocks of keras-hub do not build with pre-activation), "
            f"and one input convolution of 7x7. Received: use_pre_activation={kind[0]}, "
            f"block_type={kind[1]!r}, input_conv_kernel_sizes={kind[2]}"
        )


def _check_fits(model: ResidualNetwork) -> None:
    """Check that their backbone can have the sizes of a network, and its projections
    where it has them.
    """
    config, stages, names = model.get_config(), structure.stages(model), transfer.named(model)
    late = any(row.strided_unit == "last" and row.strides > 1 and row.units > 1 for row in stages)
    if config["block"] not in BLOCKS or stages[0].filters != 64 or late:
        raise ValueError(
            f"keras-hub's ResNetBackbone has blocks {' or '.join(BLOCKS)}, 64 filters in its "
            "first stage, and strides in the first unit of a stage. Received: "
            f"block={config['block']!r}, stages={stages}"
        )
    for s in range(1, len(stages) + 1):
        if (f"stage{s}_unit1/projection/conv/kernel" in names) != (
            config["block"] == "bottleneck" or s > 1
        ):
            raise ValueError(
                "keras-hub's ResNetBackbone has a projection in the first unit of every stage, "
                f"but for the first stage of basic blocks. Received: block={config['block']!r}, "
                f"stages={stages}, which differs in stage {s}"
            )
    if not config["include_top"] and config["pooling"]:
        raise ValueError(
            "keras-hub's ResNetBackbone returns maps, without pooling. Received: a network with "
            f"pooling={config['pooling']!r}"
        )


def _weights(layers: Sequence[keras.Layer]) -> dict[str, keras.Variable]:
    flat = [
        part
        for layer in layers
        for part in (layer.layers if isinstance(layer, keras.Model) else [layer])
    ]
    return {f"{layer.name}/{weight.name}": weight for layer in flat for weight in layer.weights}
