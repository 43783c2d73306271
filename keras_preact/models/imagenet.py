"""The paper's networks for ImageNet."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Unpack

from keras_preact import _checks, blocks
from keras_preact.models.network import ResidualNetwork, Stage, fixed, image_shape, widen
from keras_preact.models.network_options import NetworkOptions

#: Block and units of the four stages by depth. 18 to 152: arXiv 1512.03385, Table 1; 200:
#: arXiv 1603.05027, Sec. 4.
DEPTHS: Mapping[int, tuple[str, tuple[int, ...]]] = MappingProxyType(
    {
        18: ("basic", (2, 2, 2, 2)),
        34: ("basic", (3, 4, 6, 3)),
        50: ("bottleneck", (3, 4, 6, 3)),
        101: ("bottleneck", (3, 4, 23, 3)),
        152: ("bottleneck", (3, 8, 36, 3)),
        200: ("bottleneck", (3, 24, 36, 3)),
    }
)


def resnet_imagenet(
    depth: int | Sequence[int],
    *,
    block: str | blocks.Block | None = None,
    width_factor: float = 1,
    stem: str = "7x7",
    strided_unit: str = "first",
    classes: int = 1000,
    input_shape: Sequence[int | None] | None = None,
    **options: Unpack[NetworkOptions],
) -> ResidualNetwork:
    """Build the residual network for ImageNet: a 7x7 convolution, max pooling, stages
    from 56 pixels on, pooling, classifier.

    Args:
        depth: 18, 34, 50, 101, 152 or 200; or the units of every stage, such as `(3, 4,
            6, 3)`.
        block: `"basic"` or `"bottleneck"`. None: the usual block at that depth; bottleneck
            for explicit stages.
        width_factor: Multiplies the widths 64, 128, 256, 512 of the stages.
        stem: `"7x7"`, `"7x7_zero_padded"` as in TF-slim, `"7x7_normalized"` as in
            pytorchcv, or three 3x3 convolutions: `"deep"` as in ResNet-D (with
            `downsampling="average"`) or `"tiered"` as in timm's ResNet-T. `"3x3"` is for
            images of 32 x 32 pixels.
        strided_unit: Which unit of a stage shrinks the map: `"first"` in stages 2, 3
            and 4, or `"last"` in stages 1, 2 and 3, as in TF-slim and
            keras.applications.
        classes: Outputs of the classifier.
        input_shape: 224 x 224 x 3 by default, in the order of `data_format`; a size may
            be None.
        **options: Options of `ResidualNetwork` and `ResidualUnit`. `stride_on` is `"3x3"` by
            default, as in fb.resnet.torch; `groups=32, base_width=4` makes a ResNeXt.

    Raises:
        ValueError: for a depth that is not listed (the message names the two nearest),
            and if `ResidualUnit` raises one.

    Example:

    >>> import keras_preact as kp
    >>> kp.models.resnet_imagenet(18, classes=5, input_shape=(64, 64, 3)).output_shape
    (None, 5)

    Source: Sec. 4.2 of arXiv 1603.05027 and Table 1 of arXiv 1512.03385.
    """
    shape = image_shape(input_shape, 224, options.get("data_format"))
    if not isinstance(depth, Sequence):
        _checks.positive_int(depth, "depth")
        if depth not in DEPTHS:
            near = sorted(sorted(DEPTHS, key=lambda known: abs(known - depth))[:2])
            raise ValueError(
                f"`depth` must be one of {', '.join(map(str, DEPTHS))} or the units of every "
                f"stage, such as (3, 4, 6, 3); the nearest are {near[0]} and {near[1]}. Received: "
                f"depth={depth}"
            )
        usual_block, stage_depths = DEPTHS[depth]
        name = f"imagenet_resnet{depth}"
    else:
        usual_block, stage_depths = "bottleneck", tuple(depth)
        name = "imagenet_resnet_" + "_".join(map(str, stage_depths))
    made = blocks.get(block or usual_block)
    if isinstance(made, blocks.Bottleneck) and made.stride_on is None:
        made = dataclasses.replace(made, stride_on=options.pop("stride_on", "3x3"))
    options.setdefault("name", name)
    unstrided = 0 if strided_unit == "first" else len(stage_depths) - 1
    return ResidualNetwork(
        [
            Stage(widen(64 * 2**s, width_factor), units, 1 if s == unstrided else 2, strided_unit)
            for s, units in enumerate(stage_depths)
        ],
        stem=stem,
        block=made,
        classes=classes,
        input_shape=shape,
        **fixed("resnet_imagenet", options, stem_filters=64),
    )
