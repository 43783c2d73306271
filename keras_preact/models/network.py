"""ResidualNetwork: a stem, stages of residual units and a head, as one functional Keras
model.
"""

import dataclasses
import inspect
import itertools
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from keras_preact import _checks, arrangements, blocks, initializers, options
from keras_preact.layers import chains, spatial
from keras_preact.layers.whitening import Whitening2D, whitened_channels
from keras_preact.models import base, segments
from keras_preact.models.segments import Stage
from keras_preact.units import ResidualUnit


@dataclasses.dataclass(frozen=True)
class Stem:
    """The layers before the first unit: a weight layer, the arrangement's stem
    components, and for some stems a pooling.

    Args:
        kernel_size: Kernel size of the convolution; None: a dense layer.
        strides: Strides of the convolution.
        pooling: Padding of a 3x3 max pooling at stride 2: `"infinity"` (minus infinity)
            or `"zeros"`; None: no pooling.
        whitens: Whether the convolution is a `Whitening2D`. Its width follows from its
            input.
        sequence: Whether the input is `(length, channels)`. The stem turns it into a map
            of width 1.
        normalized: Whether a normalisation and an activation come before the components
            of the arrangement.
    """

    kernel_size: int | None
    strides: int = 1
    pooling: str | None = None
    whitens: bool = False
    sequence: bool = False
    normalized: bool = False

    @property
    def total_stride(self) -> int:
        return self.strides * (2 if self.pooling else 1)


#: `Stem` by name: for small images, for ImageNet as published, as in TF-slim and as in pytorchcv,
#: for sequences, for vectors, for short training.
STEMS: Mapping[str, Stem] = MappingProxyType(
    {
        "3x3": Stem(3),
        "7x7": Stem(7, strides=2, pooling="infinity"),
        "7x7_zero_padded": Stem(7, strides=2, pooling="zeros"),
        "7x7_normalized": Stem(7, strides=2, pooling="infinity", normalized=True),
        "sequence": Stem(3, sequence=True),
        "sequence_pooled": Stem(7, strides=2, pooling="infinity", sequence=True),
        "dense": Stem(None),
        "whitening": Stem(2, whitens=True),
    }
)


def option_names() -> set[str]:
    """Return the names of all options that a builder of a `ResidualNetwork` takes:
    the options of network, units, blocks and gates.

    Example:

    >>> import keras_preact as kp
    >>> {"stochastic_depth", "output_stride", "groups", "gate_bias"} <= kp.models.option_names()
    True
    """
    network = inspect.signature(ResidualNetwork).parameters
    block_options = set().union(*(blocks.options_of(block) for block in blocks.BLOCKS.values()))
    excluded = {"stages", "stem_filters", "unit_options"}
    return {*network, *_unit_options(), *block_options, "gate_bias"} - excluded


def _unit_options() -> list[str]:
    """Return the names of the options that all units of a network share."""
    excluded = ("filters", "strides", "name", "dtype", "trainable")
    return [name for name in inspect.signature(ResidualUnit).parameters if name not in excluded]


@keras.saving.register_keras_serializable("keras_preact")
class ResidualNetwork(base.UnitNetwork):
    """A network of residual units. The builders (`resnet_cifar`, ...) fill in its stages.

    Args:
        stages: `Stage(filters, units, strides)`, in order.
        stem: `"3x3"` (small images), `"7x7"` (stride 2 and a 3x3 max pooling:
            ImageNet), `"7x7_zero_padded"` (the same with zero padding of the pooling:
            TF-slim), `"7x7_normalized"` (the same with a normalisation and an activation
            before the pooling, also if the arrangement has none there: pytorchcv),
            `"sequence"` and `"sequence_pooled"` (as `"3x3"` and `"7x7"`, for inputs
            `(length, channels)` and blocks of one dimension), `"dense"` (vectors) or
            `"whitening"` (a 2x2 convolution that `adapt` computes from images and training
            does not change; no normalisation follows it).
        stem_filters: Width of the stem; `"whitening"` ignores it.
        block: The weights of F, see `ResidualUnit`.
        input_shape: Shape without the batch; for images in the order of `data_format`,
            with None for a size that is not fixed.
        classes: Outputs of the classifier.
        include_top: Whether the network has pooling and a classifier. If not, it returns
            the last activation, with `pooling` if that is set.
        pooling: `"avg"` or `"max"` over the last map. None: `"avg"` if `include_top`,
            else no pooling.
        classifier_activation: None for logits, or `"softmax"`, ...
        mean, std: Mean and standard deviation of the pixels, a number or one per
            channel: the network then starts with `(x - mean) / std` and takes raw pixels.
            None: no such layer.
        output_stride: Ratio of the image's size to the last map's, such as 8, 16 or 32.
            Strides beyond it become dilation. The weights are the same as for None; the
            maps for None are a subset of the pixels of these maps.
        data_format, dtype, name: See `keras.layers.Conv2D`. Logits are computed in the
            variables' dtype, whatever the policy.
        stochastic_depth: Rate of the last unit; unit l of L has `l / L` times this rate.
            None: no stochastic depth.
        stacked: Whether the equal units of a stage, all but its first, are one
            `UnitStack`. None: stacks in all stages if one stage has at least 16 equal
            units. `kp.models.stack` and `unstack` convert a network, with the same
            weights.
        execution, remat, unroll: Arguments of the stacks, see `UnitStack`.
        **unit_options: Options of every unit, see `ResidualUnit`; options of its block
            (`squeeze_excitation=16`, `groups=32`; see `kp.blocks`); and `gate_bias`, the
            initial bias of a shortcut with a gate. The stem uses the options that apply
            to it.

    Attributes: `segments`, `units`, `unit_names`, `unit_outputs` and `logits`, see
    `UnitNetwork`; `stage_outputs`.

    If the arrangement has a first activation, this activation comes right after the
    stem's weights, so that both paths of the first unit read it. That unit then has no
    first activation. The last activation comes after the last addition (appendix).

    Layers: `preprocessing`, `stem_conv`, `stem_norm`, `stem_activation`,
    `stage1_unit1`, `stage1_unit2` ... (`stage1_units` if stacked), `head_norm`,
    `head_activation`, `head_pool`, `head_classifier`, `head_predictions`, as far as
    they exist.

    Source: Sec. 3 and 4 and the appendix of arXiv 1603.05027, Sec. 4 of arXiv
        1512.03385.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        stem: str,
        stem_filters: int,
        block: Any,
        input_shape: Sequence[int | None],
        classes: int,
        include_top: bool = True,
        pooling: str | None = None,
        classifier_activation=None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        dtype=None,
        name: str | None = None,
        output_stride: int | None = None,
        stacked: bool | None = None,
        execution: str = "auto",
        remat: bool | int = False,
        unroll: int = 1,
        **unit_options,
    ):
        # ---- checks ----
        # numbers of NumPy become Python's, which Keras and JSON take
        classes, stem_filters, output_stride, input_shape, unit_options = _checks.plain(
            (classes, stem_filters, output_stride, tuple(input_shape), unit_options)
        )
        stages = [stage if isinstance(stage, Stage) else Stage(*stage) for stage in stages]
        front = _checks.lookup(STEMS, stem, "stem")
        _checks.positive_int(classes, "classes")
        _checks.one_of(pooling, (None, "avg", "max"), "pooling")
        _checks.one_of(stacked, (None, True, False), "stacked")
        policy = keras.config.dtype_policy() if dtype is None else keras.dtype_policies.get(dtype)
        # One unit checks the options, turns them into the form of a config, and is the template of
        # the others.
        unit_options = options.nested(block, unit_options)
        options.check_names(unit_options, _unit_options())
        narrowest = min((stage.filters for stage in stages), default=1)
        template = ResidualUnit(narrowest, dtype=policy, **unit_options)
        data_format = spatial.data_format_of(unit_options.get("data_format"))
        steps = [front.total_stride, *(stage.strides for stage in stages)]
        strides = list(itertools.accumulate(steps, operator.mul))
        if output_stride is not None:
            _checks.one_of(output_stride, dict.fromkeys(strides), "output_stride")
        input_shape, channels = _check_input_shape(
            input_shape, front, output_stride or strides[-1], data_format
        )
        axis = spatial.channel_axis(template.data_format, len(input_shape) + 1)
        kernel = initializers.of_network(
            template.kernel_initializer, sum(stage.units for stage in stages)
        )

        # ---- stem ----
        if front.whitens and front.kernel_size:
            stem_filters = whitened_channels(front.kernel_size, channels)
        stem_layers = [
            *([keras.layers.Reshape((-1, 1, channels), name="stem_map")] if front.sequence else []),
            *_stem_layers(front, stem_filters, template, kernel, axis),
        ]

        # ---- stages ----
        stacked = segments.stacks_pay(stages) if stacked is None else stacked
        stack_options = {"execution": execution, "remat": remat, "unroll": unroll}
        units = segments.make(
            template,
            stages,
            kernel,
            stack_options if stacked else None,
            output_stride and output_stride // front.total_stride,
        )

        # ---- head ----
        width = stages[-1].filters * template.block.expansion if stages else stem_filters
        head = template.components(template.arrangement.head, axis, width, "head_{}")
        if front.kernel_size and (include_top or pooling):
            head.append(_pooling(pooling, template))

        # ---- config ----
        unit_config = {
            key: value for key, value in template.get_config().items() if key in _unit_options()
        }
        arguments = {
            "stages": [list(dataclasses.astuple(stage)) for stage in stages],
            "stem": stem,
            "stem_filters": stem_filters,
            "classes": classes,
            "include_top": include_top,
            "pooling": pooling,
            "output_stride": output_stride,
            "stacked": stacked,
            **stack_options,
            **unit_config,
            "data_format": data_format,
        }
        super().__init__(
            input_shape,
            axis=axis,
            mean=mean,
            std=std,
            stem=stem_layers,
            segments=units,
            head=head,
            classes=classes if include_top else None,
            activation=classifier_activation,
            kernel=kernel,
            policy=policy,
            arguments=arguments,
            name=name,
        )

    def adapt(self, images) -> None:
        """Compute the kernel of a whitening stem from images, before training.

        Args:
            images: An array as the network takes it; a few thousand training images are
                enough.

        Raises:
            ValueError: for a network with another stem, and if `Whitening2D.adapt` raises
                one.

        Example:

        >>> import numpy as np
        >>> import keras_preact as kp
        >>> model = kp.models.fast_resnet(mean=127.5, std=64.0)
        >>> model.adapt(np.random.default_rng(0).integers(0, 256, (100, 32, 32, 3)))
        """
        x = np.asarray(images, "float32")
        for layer in self.layers:
            if isinstance(layer, Whitening2D):
                layer.adapt(keras.ops.convert_to_numpy(x))
                return
            if not isinstance(layer, keras.layers.InputLayer):
                x = layer(x)
        raise ValueError(
            f"Only a network with stem='whitening' can adapt. Received: {self.name!r} with "
            f"stem={self.get_config()['stem']!r}"
        )

    @property
    def stage_outputs(self) -> dict:
        """The map after the last unit of each stage, a Keras tensor, by name: `stage1`,
        `stage2`, ...
        """
        # of a stage's segments, the dictionary keeps the last
        return {
            segment.name.split("_")[0]: output
            for segment, output in zip(self.segments, self.segment_outputs, strict=True)
        }


def _stem_layers(
    stem: Stem, filters: int, template: ResidualUnit, kernel, axis: int
) -> list[keras.Layer]:
    """Return the layers from the pixels to the first unit."""
    # whitening normalises already
    names = [name for name in template.arrangement.stem if not (stem.whitens and name == "norm")]
    if stem.normalized:
        names = [*arrangements.NORM_ACTIVATION, *names]
    after = template.components(names, axis, filters, "stem_{}")
    settings: dict = {
        "data_format": template.data_format,
        "kernel_initializer": initializers.spawn(kernel, "stem"),
        "dtype": template.dtype_policy,
    }
    if stem.whitens and stem.kernel_size:
        return [Whitening2D(stem.kernel_size, name="stem_conv", **settings), *after]
    first = chains.weight(
        filters,
        (stem.kernel_size, 1) if stem.sequence and stem.kernel_size else stem.kernel_size,
        strides=stem.strides,
        use_bias=template.has_bias(after),
        bias_initializer=initializers.spawn(template.bias_initializer, "stem"),
        standardize=getattr(template.block, "standardize_weights", False),
        name="stem_dense" if stem.kernel_size is None else "stem_conv",
        **settings,
    )
    if not stem.pooling:
        return [first, *after]
    smooth = template.downsampling.pooling("stem", 2, template.data_format, template.dtype_policy)
    pool = spatial.PaddedMaxPooling2D(
        3,
        1 if smooth else 2,
        zeros=stem.pooling == "zeros",
        data_format=template.data_format,
        name="stem_pool",
        dtype=template.dtype_policy,
    )
    return [first, *after, pool, *smooth]


def _pooling(pooling: str | None, template: ResidualUnit) -> keras.Layer:
    """Return the layer that pools the last map to a vector."""
    layers = keras.layers
    pooling_class = layers.GlobalMaxPooling2D if pooling == "max" else layers.GlobalAveragePooling2D
    return pooling_class(
        data_format=template.data_format, name="head_pool", dtype=template.dtype_policy
    )


def _check_input_shape(
    shape, stem: Stem, total_stride: int, data_format: str
) -> tuple[tuple[int | None, ...], int]:
    """Return the input shape as a tuple, and its number of channels."""
    shape = tuple(shape)
    is_image = stem.kernel_size is not None
    axes: tuple[str, ...] = ("features",)
    if stem.sequence:
        if data_format != "channels_last":
            raise ValueError(
                "A network for sequences takes (length, channels): use "
                "data_format='channels_last', and transpose other sequences. Received: "
                f"input_shape={shape}, data_format={data_format!r}"
            )
        axes = ("length", "channels")
    elif is_image:
        axes = ("height", "width", "channels")
        if data_format == "channels_first":
            axes = ("channels", "height", "width")
    if len(shape) != len(axes) or shape[axes.index("channels") if is_image else 0] is None:
        raise ValueError(
            f"`input_shape` must be ({', '.join(axes)}) with a known number of "
            f"{'channels' if is_image else 'features'}. Received: input_shape={shape}, "
            f"data_format={data_format!r}"
        )
    for size, axis in zip(shape, axes, strict=True):
        if size is not None:
            _checks.positive_int(size, f"input_shape ({axis})")
        if axis in ("height", "width", "length") and size is not None and size < total_stride:
            raise ValueError(
                f"The strides of this network divide the {axis} by {total_stride}, so it must be "
                f"at least {total_stride}. Received: input_shape={shape}"
            )
    return shape, shape[axes.index("channels") if is_image else 0]


def image_shape(
    shape: Sequence[int | None] | None, size: int | None, data_format: str | None
) -> tuple[int | None, ...]:
    """Return `shape`, or if it is None the shape of a square colour image of `size`, in
    the order of `data_format`.

    Raises:
        ValueError: for images in the other order.
    """
    data_format = spatial.data_format_of(data_format)
    if shape is None:
        return (3, size, size) if data_format == "channels_first" else (size, size, 3)
    _checks.order_of_axes(shape, data_format)
    return tuple(shape)


def widen(width: int, factor: float) -> int:
    """Return the width of a stage times `width_factor`."""
    widened = int(width * factor)
    if widened < 1:
        raise ValueError(
            f"`width_factor` is too small: a stage of width {width} would have no channel. "
            f"Received: width_factor={factor!r}"
        )
    return widened
