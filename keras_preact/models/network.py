"""ResidualNetwork: a stem, stages of residual units and a head, as one functional Keras
model.
"""

import dataclasses
import inspect
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_preact import _checks, blocks, initializers, options, stacks
from keras_preact.layers import spatial
from keras_preact.layers.whitening import Whitening2D
from keras_preact.models import base, segments
from keras_preact.models.segments import Stage
from keras_preact.models.stem import STEMS
from keras_preact.units import ResidualUnit


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
            `"deep"` (as `"7x7"`, with three 3x3 convolutions, of which the first has
            the stride and the first two are half as wide: ResNet-D), `"tiered"` (the
            same with 3/8, 1/2 and the whole width: timm's ResNet-T),
            `"sequence"` and `"sequence_pooled"` (as `"3x3"` and `"7x7"`, for inputs
            `(length, channels)` and blocks of one dimension), `"dense"` (vectors) or
            `"whitening"` (a 2x2 convolution that `adapt` computes from images and training
            does not change; no normalisation follows it).
        stem_filters: Width of the stem's last weight; `"whitening"` ignores it.
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
            units, or if one of the next options asks for them. `kp.models.stack` and
            `unstack` convert a network, with the same weights.
        execution, remat, unroll: Arguments of the stacks, see `UnitStack`.
        **unit_options: Options of every unit, see `ResidualUnit`; options of its block
            (`squeeze_excitation=16`, `groups=32`; see `kp.blocks`); and `gate_bias`, the
            initial bias of a shortcut with a gate. The stem uses the options that apply
            to it. The classifier has no `kernel_regularizer`.

    Attributes: `segments`, `units`, `unit_names`, `unit_outputs` and `logits`, see
    `UnitNetwork`; `stage_outputs`.

    If the arrangement has a first activation, this activation comes right after the
    stem's weights, so that both paths of the first unit read it. That unit then has no
    first activation. The last activation comes after the last addition (appendix).

    Layers: `preprocessing`, `stem_conv` (in a deep stem also `stem_norm_1`,
    `stem_activation_1`, `stem_conv_2` ...), `stem_norm`, `stem_activation`,
    `stem_pool`, `stem_streams`, `stage1_unit1`, `stage1_unit2` ... (`stage1_units` if
    stacked), `head_streams`, `head_norm`, `head_activation`, `head_pool`,
    `head_classifier`, `head_predictions`, as far as they exist.

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
        # numbers of NumPy become Python's, which Keras and JSON take
        classes, stem_filters, output_stride, input_shape, unit_options = _checks.plain(
            (classes, stem_filters, output_stride, tuple(input_shape), unit_options)
        )
        stages = [stage if isinstance(stage, Stage) else Stage(*stage) for stage in stages]
        if not stages:
            raise ValueError("A network needs at least one stage. Received: stages=[]")
        front = _checks.lookup(STEMS, stem, "stem")
        _checks.positive_int(classes, "classes")
        _checks.one_of(pooling, (None, "avg", "max"), "pooling")
        _checks.flag(include_top, "include_top")
        _checks.one_of(stacked, (None, True, False), "stacked")
        policy = keras.config.dtype_policy() if dtype is None else keras.dtype_policies.get(dtype)
        template = _template(stages, policy, options.nested(block, unit_options))
        data_format = spatial.data_format_of(unit_options.get("data_format"))
        total_stride = _total_stride(front.total_stride, stages, output_stride)
        channels = front.check_input(input_shape, total_stride, data_format)
        stem_filters = front.width(stem_filters, channels)
        axis = spatial.channel_axis(template.data_format, len(input_shape) + 1)
        kernel = initializers.of_network(
            template.kernel_initializer, sum(stage.units for stage in stages)
        )
        stem_layers = front.layers(stem_filters, channels, template, kernel, axis)
        stack_options = {"execution": execution, "remat": remat, "unroll": unroll}
        stacks.check_options(**stack_options)
        asked = stacks.check_effect(stacked, stack_options)
        if stacked is None:
            stacked = bool(asked) or segments.stacks_pay(stages)
        units = segments.make(
            template,
            stages,
            kernel,
            stack_options if stacked else None,
            output_stride and output_stride // front.total_stride,
        )
        width = stages[-1].filters * template.block.expansion
        head = template.components.make(template.arrangement.head, axis, width, "head_{}")
        if front.kernel_size and (include_top or pooling):
            head.append(_pooling(pooling, template))
        unit_config = template.get_config()
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
            **{name: unit_config[name] for name in _unit_options()},
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
            f"stem={self.arguments['stem']!r}"
        )

    @classmethod
    def from_config(cls, config, custom_objects=None):
        if not config.get("stacked", True):
            # `unstack` takes them apart; earlier versions kept options that had no effect
            config = {**config, **stacks.OPTIONS}
        return super().from_config(config, custom_objects)

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


def _template(
    stages: Sequence[Stage], policy: keras.DTypePolicy, unit_options: Mapping[str, Any]
) -> ResidualUnit:
    """Return a unit that has checked the options of all units, and holds them."""
    options.check_names(unit_options, _unit_options())
    narrowest = min(stage.filters for stage in stages)
    return ResidualUnit(narrowest, dtype=policy, **unit_options)


def _total_stride(of_stem: int, stages: Sequence[Stage], output_stride: int | None) -> int:
    """Return the product of all strides, or `output_stride`. Raise a ValueError unless
    this is such a product for the stem and the first stages.
    """
    strides = list(
        itertools.accumulate([of_stem, *(stage.strides for stage in stages)], operator.mul)
    )
    if output_stride is None:
        return strides[-1]
    _checks.one_of(output_stride, dict.fromkeys(strides), "output_stride")
    return output_stride


def _pooling(pooling: str | None, template: ResidualUnit) -> keras.Layer:
    """Return the layer that pools the last map to a vector."""
    layers = keras.layers
    pooling_class = layers.GlobalMaxPooling2D if pooling == "max" else layers.GlobalAveragePooling2D
    return pooling_class(
        data_format=template.data_format, name="head_pool", dtype=template.dtype_policy
    )


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


def fixed(builder: str, options: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Return the options of a network with those that its builder chooses.

    Raises:
        ValueError: if `options` has another value for one of `own`.
    """
    for name, value in own.items():
        if options.get(name, value) != value:
            raise ValueError(
                f"kp.models.{builder} has {name}={value!r}. Use kp.models.ResidualNetwork for "
                f"other networks. Received: {name}={options[name]!r}"
            )
    return {**options, **own}


def widen(width: int, factor: float) -> int:
    """Return the width of a stage times `width_factor`."""
    _checks.finite(factor, "width_factor")
    widened = int(width * factor)
    if widened < 1:
        raise ValueError(
            f"`width_factor` is too small: a stage of width {width} would have no channel. "
            f"Received: width_factor={factor!r}"
        )
    return widened
