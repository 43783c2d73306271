"""The paper's networks for CIFAR, and networks based on them: for sequences, wide residual
networks, and a network for short training.
"""

from collections.abc import Sequence
from typing import Any, Unpack

from keras_preact import _checks, shortcuts
from keras_preact.blocks import Block
from keras_preact.blocks import get as get_block
from keras_preact.models.network import ResidualNetwork, Stage, fixed, image_shape, widen
from keras_preact.models.network_options import NetworkOptions

WIDTHS = (16, 32, 64)
STRIDES = (1, 2, 2)
FAST_WIDTHS = (64, 256, 256)


def resnet_cifar(
    depth: int,
    *,
    block: str | Block | None = None,
    width_factor: float = 1,
    classes: int = 10,
    input_shape: Sequence[int | None] | None = None,
    **options: Unpack[NetworkOptions],
) -> ResidualNetwork:
    """Build the residual network for CIFAR: a 3x3 convolution, three stages at 32, 16
    and 8 pixels, pooling, classifier.

    Args:
        depth: Weight layers: `6n+2` with basic blocks (20, 32, 44, 56, 110, 1202),
            `9n+2` with bottlenecks (164, 1001).
        block: `"basic"`, `"bottleneck"` or `"single"` (1-layer skips, `3n+2`). None:
            the paper's choice, bottlenecks from depth 164 on and basic blocks below, if
            the depth fits both.
        width_factor: Multiplies all widths: 16 (stem), 16, 32, 64.
        classes: Outputs of the classifier.
        input_shape: 32 x 32 x 3 by default, in the order of `data_format`; a size may
            be None.
        **options: Options of `ResidualNetwork` and `ResidualUnit`. `shape_shortcut="auto"` is a
            projection for bottlenecks and the shortcut `"conv1x1"`, otherwise zero padding
            (option A).

    Raises:
        ValueError: for a depth that fits no n (the message names the two nearest), and
            if `ResidualUnit` raises one.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, arrangement="original", input_shape=(None, None, 1))
    >>> len(model.units), model.units[0].name
    (9, 'stage1_unit1')

    Source: Sec. 4 and the appendix of arXiv 1603.05027; Sec. 4.2 of arXiv 1512.03385.
    """
    options.setdefault("name", f"cifar_resnet{depth}")
    return _three_stages(
        "resnet_cifar",
        depth,
        block,
        width_factor,
        classes=classes,
        input_shape=image_shape(input_shape, 32, options.get("data_format")),
        **fixed("resnet_cifar", options, stem="3x3"),
    )


def resnet_1d(
    depth: int,
    *,
    input_shape: Sequence[int | None],
    classes: int,
    block: str | Block | None = None,
    width_factor: float = 1,
    stem: str = "sequence",
    **options: Unpack[NetworkOptions],
) -> ResidualNetwork:
    """Build the network of `resnet_cifar` for sequences: convolutions of 3 steps in place
    of 3x3 pixels, three stages at the whole, half and quarter length.

    Args:
        depth, block, width_factor, classes: Arguments of `resnet_cifar`.
        input_shape: `(length, channels)`, such as the samples of a signal and its leads; the
            length may be None.
        stem: `"sequence"`, or `"sequence_pooled"` for long ones: a convolution of 7 steps
            and a max pooling, which leave a quarter of the length.
        **options: Options of `resnet_cifar`. The maps within the network are `(batch, length, 1,
            channels)`, so that all functions of this package work on them.

    Raises:
        ValueError: if `resnet_cifar` raises one.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.resnet_1d(20, input_shape=(None, 12), classes=5)
    >>> model.output_shape, tuple(model.units[0].block.kinds)
    ((None, 5), ('3x1 conv', '3x1 conv'))
    """
    options = {"name": f"resnet{depth}_1d", "dimensions": 1} | options
    # sequences have the channels last, whatever Keras' setting
    options["data_format"] = options.get("data_format") or "channels_last"
    return _three_stages(
        "resnet_1d",
        depth,
        block,
        width_factor,
        stem=stem,
        classes=classes,
        input_shape=input_shape,
        **options,
    )


def _three_stages(
    builder: str, depth: int, block: str | Block | None, width_factor: float, **options: Any
) -> ResidualNetwork:
    """Return a network of three stages of equal units, with the paper's blocks and
    shape-changing shortcuts unless the options say otherwise.
    """
    if block is None:
        block, units = _paper_block(depth)
    else:
        block = get_block(block)
        [units] = _units_per_stage(depth, (block,)).values()
    if options.get("shape_shortcut", "auto") == "auto":
        projects = (
            get_block(block).expansion > 1
            or shortcuts.get(options.get("shortcut", "identity")).projects
        )
        options["shape_shortcut"] = "projection" if projects else "zero_pad"
    stages = _stages(width_factor, units)
    options = fixed(builder, options, stem_filters=stages[0].filters)
    return ResidualNetwork(stages, block=block, **options)


def _stages(width_factor: float, units: int) -> list[Stage]:
    return [
        Stage(widen(width, width_factor), units, strides)
        for width, strides in zip(WIDTHS, STRIDES, strict=True)
    ]


def wide_resnet(
    depth: int,
    width_factor: float,
    *,
    classes: int = 10,
    input_shape: Sequence[int | None] | None = None,
    **options: Unpack[NetworkOptions],
) -> ResidualNetwork:
    """Build a wide residual network, WRN-depth-width_factor: the CIFAR network with
    wider stages and projections.

    Args:
        depth: `6n+4` (16, 22, 28, 40). The three projections count as layers.
        width_factor: Multiplies the widths 16, 32, 64 of the stages; the stem stays at
            16.
        classes, input_shape, **options: Arguments of `resnet_cifar`; `dropout` is
            between the two convolutions.

    Raises:
        ValueError: for a depth that fits no n (the message names the two nearest), and
            if `ResidualUnit` raises one.

    Example:

    >>> import keras_preact as kp
    >>> kp.models.wide_resnet(16, 4, dropout=0.3).output_shape
    (None, 10)

    Source: arXiv 1605.07146, Table 1.
    """
    shape = image_shape(input_shape, 32, options.get("data_format"))
    units = _units_per_stage(depth, ("basic",), extra=4)["basic"]
    stages = _stages(width_factor, units)
    options.setdefault("name", f"wide_resnet{depth}_{width_factor:g}")
    return ResidualNetwork(
        stages,
        classes=classes,
        input_shape=shape,
        **fixed("wide_resnet", options, stem="3x3", stem_filters=WIDTHS[0], block="basic"),
    )


def fast_resnet(
    units: int = 1,
    *,
    width_factor: float = 1,
    classes: int = 10,
    input_shape: Sequence[int | None] | None = None,
    **options: Unpack[NetworkOptions],
) -> ResidualNetwork:
    """Build a wide and shallow pre-activation network for training in minutes: a
    whitening 2x2 convolution, three stages that begin by halving the map, pooling,
    classifier.

    Call `adapt` with training images before the training: it computes the whitening.

    Args:
        units: Basic units in each stage. With 1 there are 8 weight layers.
        width_factor: Multiplies the widths 64, 256, 256 of the stages.
        classes, input_shape, **options: Arguments of `resnet_cifar`.
            `downsampling="max"` is the default.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.models.fast_resnet()
    >>> [tuple(x.shape[1:]) for x in model.stage_outputs.values()]
    [(16, 16, 64), (8, 8, 256), (4, 4, 256)]

    Source: widths, stem and max pooling of arXiv 2404.00498, Sec. 3.1 and 3.2; that
        network has no shortcuts, and normalisation after the weights.
    """
    shape = image_shape(input_shape, 32, options.get("data_format"))
    options.setdefault("name", f"fast_resnet{6 * units + 2}")
    options.setdefault("downsampling", "max")
    return ResidualNetwork(
        [Stage(widen(width, width_factor), units, 2) for width in FAST_WIDTHS],
        classes=classes,
        input_shape=shape,
        **fixed("fast_resnet", options, stem="whitening", stem_filters=0, block="basic"),
    )


def _units_per_stage(depth: int, blocks: Sequence[str | Block], extra: int = 2) -> dict[str, int]:
    """Return n by name for each of `blocks` that `depth` fits. If it fits none, raise a
    ValueError with the rules and the nearest depths.
    """
    named = {block.name: block for block in map(get_block, blocks)}
    if features := [name for name, block in named.items() if block.strided is None]:
        raise ValueError(
            f"A network for images has convolutional blocks. Received: block={features[0]!r}"
        )
    # layers that one more unit in each of the three stages adds
    steps = {name: 3 * len(block.channels(WIDTHS[0])) for name, block in named.items()}
    _checks.positive_int(depth, "depth")
    fits = {
        block: (depth - extra) // step
        for block, step in steps.items()
        if depth > extra and (depth - extra) % step == 0
    }
    if fits:
        return fits
    below = [depth - (depth - extra) % step for step in steps.values() if depth - extra >= step]
    above = [max(depth + -(depth - extra) % step, step + extra) for step in steps.values()]
    further = [depth + step for depth, step in zip(above, steps.values(), strict=True)]
    nearest = [max(below), min(above)] if below else sorted({*above, *further})
    rules = " or ".join(f"{step}n+{extra} for block={block!r}" for block, step in steps.items())
    raise ValueError(
        f"`depth` must be {rules}; the nearest are {nearest[0]} and {nearest[1]}. Received: "
        f"depth={depth}"
    )


def _paper_block(depth: int) -> tuple[str, int]:
    """Return the block that the paper would use at `depth`, and n: some depths, 110 and
    164 among them, fit both.
    """
    fits = _units_per_stage(depth, ("basic", "bottleneck"))
    block = (
        "bottleneck" if "bottleneck" in fits and (depth >= 164 or "basic" not in fits) else "basic"
    )
    return block, fits[block]
