"""ResidualNetwork: a stem, stages of residual units and a head, as one functional Keras
model.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypedDict

import keras

from keras_preact import _checks, _layers, _spatial, arrangements, initializers, shortcuts
from keras_preact.downsampling import DOWNSAMPLINGS
from keras_preact.models import base, segments
from keras_preact.models.segments import Stage
from keras_preact.units import ResidualUnit


@dataclasses.dataclass(frozen=True)
class Stem:
    """What stands in front of the first unit: a weight layer, the arrangement's stem
    components, perhaps a pooling.

    Args:
        kernel_size: Of the convolution; None: a dense layer.
        strides: Its step.
        pooling: What a 3x3 max pooling at stride 2 pads with: `"infinity"`, minus
            infinity, or `"zeros"`; None: no pooling.
    """

    kernel_size: int | None
    strides: int = 1
    pooling: str | None = None

    @property
    def total_stride(self) -> int:
        return self.strides * (2 if self.pooling else 1)


#: Name to `Stem`: for small images, for ImageNet as published and as in TF-slim, for vectors.
STEMS: Mapping[str, Stem] = MappingProxyType(
    {
        "3x3": Stem(3),
        "7x7": Stem(7, strides=2, pooling="infinity"),
        "7x7_zero_padded": Stem(7, strides=2, pooling="zeros"),
        "dense": Stem(None),
    }
)


class NetworkOptions(TypedDict, total=False):
    """The options that every builder passes on to `ResidualNetwork`; see there and
    `ResidualUnit`.
    """

    arrangement: str | arrangements.Arrangement
    shortcut: str | shortcuts.Shortcut
    gate_bias: float | None
    shape_shortcut: str
    activate_shape_shortcut: bool
    stride_on: str
    downsampling: str
    squeeze_excitation: int | None
    normalization: str | keras.Layer
    activation: Any
    groups: int
    base_width: int
    dropout: float
    dropout_at: str
    stochastic_depth: float | None
    use_bias: bool | str
    bias_initializer: Any
    kernel_initializer: Any
    zero_init_last: bool
    standardize_weights: bool
    output_stride: int | None
    include_top: bool
    pooling: str | None
    classifier_activation: Any
    mean: float | Sequence[float] | None
    std: float | Sequence[float] | None
    data_format: str | None
    dtype: Any
    name: str | None
    stacked: bool | None
    execution: str
    remat: bool | int
    unroll: int


@keras.saving.register_keras_serializable("keras_preact")
class ResidualNetwork(base.UnitNetwork):
    """A network of residual units. The builders (`resnet_cifar`, ...) fill in its
    stages.

    Args:
        stages: `Stage(filters, units, strides)`, in order.
        stem: `"3x3"` (small images), `"7x7"` (stride 2 and a 3x3 max pooling:
            ImageNet), `"7x7_zero_padded"` (the same with zeros around what is pooled:
            TF-slim) or `"dense"` (vectors).
        stem_filters: Width of the stem.
        block: F's weights, see `ResidualUnit`.
        input_shape: Without the batch; for images in the order of `data_format`, with
            None for a size that is not fixed.
        classes: Outputs of the classifier.
        include_top: Whether there are a pooling and a classifier. Without, the output
            is the last activation.
        pooling: Without top: `"avg"`, `"max"` or None.
        classifier_activation: None for logits, or `"softmax"`, ...
        mean, std: In pixel values, a number or one for each channel: the network then
            starts with `(x - mean) / std` and takes raw pixels. None: no such layer.
        output_stride: How many pixels of the image make one of the last map, such as 8,
            16 or 32: strides beyond it become dilation. The weights stay those of the
            network without it, whose maps are every so-many-th pixel of these.
        data_format, dtype, name: As in Keras. Whatever the policy, logits are computed
            in the variables' dtype.
        stochastic_depth: The rate of the last unit; that of unit l of L is `l / L` of
            it. None for none.
        stacked: Whether the equal units of a stage, all but its first, are one
            `UnitStack`. None: in every stage if one has 16 of them. The same network
            with its weights stacked; `kp.models.stack` and `unstack` turn one into the
            other.
        execution, remat, unroll: Of the stacks, see `UnitStack`.
        **unit_options: Of every unit: arrangement, shortcut, gate_bias, shape_shortcut,
            activate_shape_shortcut, stride_on, downsampling, squeeze_excitation,
            normalization, activation, groups, base_width, dropout, dropout_at,
            use_bias, bias_initializer, kernel_initializer, zero_init_last,
            standardize_weights. The stem has those that concern it.

    Attributes: `segments`, `units`, `unit_outputs` and `logits`, see `UnitNetwork`;
        `stage_outputs`.

    The first activation of an arrangement that has one stands right behind the stem's
    weights, so that both paths of the first unit see it, and that unit has no own; its
    last one stands behind the last addition (appendix).

    Layers: `preprocessing`, `stem_conv`, `stem_norm`, `stem_activation`,
        `stage1_unit1`, `stage1_unit2` ... (`stage1_units`
    where stacked), `head_norm`, `head_activation`, `head_pool`, `head_classifier`,
    `head_predictions`, as far as they exist.

    Source: Sec. 3 and 4 and the appendix of arXiv 1603.05027, Sec. 4 of arXiv
        1512.03385.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        stem: str,
        stem_filters: int,
        block: str,
        input_shape: Sequence[int | None],
        classes: int,
        include_top: bool = True,
        pooling: str | None = None,
        classifier_activation=None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        data_format: str | None = None,
        dtype=None,
        name: str | None = None,
        stochastic_depth: float | None = None,
        output_stride: int | None = None,
        stacked: bool | None = None,
        execution: str = "auto",
        remat: bool | int = False,
        unroll: int = 1,
        **unit_options,
    ):
        stages = [stage if isinstance(stage, Stage) else Stage(*stage) for stage in stages]
        front = _checks.lookup(STEMS, stem, "stem")
        data_format = keras.config.image_data_format() if data_format is None else data_format
        policy = keras.config.dtype_policy() if dtype is None else keras.dtype_policies.get(dtype)
        _checks.positive_int(classes, "classes")
        _checks.one_of(pooling, (None, "avg", "max"), "pooling")
        # One unit checks the options, and turns them into what a config holds.
        narrowest = min((stage.filters for stage in stages), default=1)
        pattern = ResidualUnit(
            narrowest,
            block=block,
            data_format=data_format,
            stochastic_depth=stochastic_depth,
            dtype=policy,
            **unit_options,
        )
        unit = pattern.get_config()
        _checks.one_of(stacked, (None, True, False), "stacked")
        stacked = segments.stacks_pay(stages) if stacked is None else stacked
        arrangement = pattern.arrangement
        kernel = initializers.of_network(
            pattern.kernel_initializer, sum(stage.units for stage in stages)
        )
        normalization = _layers.Normalization(unit["normalization"])
        activation = keras.activations.get(unit["activation"])
        if classifier_activation is not None:
            classifier_activation = keras.activations.get(classifier_activation)
        total_stride = front.total_stride * math.prod(stage.strides for stage in stages)
        if output_stride is not None:
            total_stride = _check_output_stride(output_stride, front, stages)
        input_shape, channels = _check_input_shape(input_shape, front, total_stride, data_format)
        axis = _spatial.channel_axis(data_format, len(input_shape) + 1)

        def components(names, channels, prefix):
            return _layers.components(
                names,
                normalization,
                activation,
                axis=axis,
                channels=channels,
                name=prefix + "_{}",
                dtype=policy,
            )

        inputs = x = keras.Input(input_shape, dtype=policy.variable_dtype, name="inputs")
        if mean is not None or std is not None:
            x = base.preprocessing(
                mean, std, axis=axis, channels=channels, dtype=policy.variable_dtype
            )(x)
        behind = components(arrangement.stem, stem_filters, "stem")
        first = _layers.weight(
            stem_filters,
            front.kernel_size,
            strides=front.strides,
            data_format=data_format,
            use_bias=pattern.has_bias(behind),
            kernel_initializer=initializers.spawn(kernel, "stem"),
            bias_initializer=initializers.spawn(pattern.bias_initializer, "stem"),
            standardize=pattern.standardize_weights,
            name="stem_dense" if front.kernel_size is None else "stem_conv",
            dtype=policy,
        )
        x = _layers.run_chain([first, *behind], x)
        if front.pooling:
            smooth = DOWNSAMPLINGS[pattern.downsampling].pooling("stem", 2, data_format, policy)
            pool = _spatial.PaddedMaxPooling2D(
                3,
                1 if smooth else 2,
                zeros=front.pooling == "zeros",
                data_format=data_format,
                name="stem_pool",
                dtype=policy,
            )
            x = _layers.run_chain([pool, *smooth], x)

        stack_options = {"execution": execution, "remat": remat, "unroll": unroll}
        stage_stride = None if output_stride is None else output_stride // front.total_stride
        units = segments.make(
            pattern, stages, kernel, stack_options if stacked else None, stage_stride
        )
        first_input, segment_outputs = x, []
        for segment in units:
            x = segment(x)
            segment_outputs.append(x)

        head = components(arrangement.head, x.shape[axis], "head")
        if len(input_shape) == 3 and (include_top or pooling):
            pool = (
                keras.layers.GlobalMaxPooling2D
                if pooling == "max"
                else keras.layers.GlobalAveragePooling2D
            )
            head.append(pool(data_format=data_format, name="head_pool", dtype=policy))
        x = _layers.run_chain(head, x)
        logits = None
        if include_top:
            top = base.classifier(
                classes, classifier_activation, kernel=kernel, dtype=policy.variable_dtype
            )
            logits = top[0](x)
            x = _layers.run_chain(top[1:], logits)
            head += top

        super().__init__(inputs=inputs, outputs=x, name=name)
        arguments = {
            "stages": [list(dataclasses.astuple(stage)) for stage in stages],
            "stem": stem,
            "stem_filters": stem_filters,
            "input_shape": list(input_shape),
            "classes": classes,
            "include_top": include_top,
            "pooling": pooling,
            "classifier_activation": classifier_activation
            and keras.activations.serialize(classifier_activation),
            "mean": base.plain(mean),
            "std": base.plain(std),
            "output_stride": output_stride,
            "dtype": keras.dtype_policies.serialize(policy),
            "stacked": stacked,
            **stack_options,
        }
        own = ("name", "trainable", "dtype", "filters", "strides", "dilation", "dilated_strides")
        arguments |= {key: value for key, value in unit.items() if key not in own}
        self._parts = base.Parts(
            base.without_marks(arguments),
            tuple(units),
            tuple(head),
            first_input,
            tuple(segment_outputs),
            logits,
        )

    @property
    def stage_outputs(self) -> dict:
        """The map behind the last unit of each stage, a Keras tensor, by name:
        `stage1`, `stage2`, ...
        """
        # the last segment of a stage stays
        return {
            segment.name.split("_")[0]: output
            for segment, output in zip(self.segments, self._parts.segment_outputs, strict=True)
        }


def _check_output_stride(output_stride: int, stem: Stem, stages: Sequence[Stage]) -> int:
    """Return what the network's strides are with this `output_stride`."""
    possible = [stem.total_stride]
    for stage in stages:
        if stage.strides > 1:
            possible.append(possible[-1] * stage.strides)
    _checks.one_of(output_stride, possible, "output_stride")
    return output_stride


def _check_input_shape(
    shape, stem: Stem, total_stride: int, data_format: str
) -> tuple[tuple[int | None, ...], int]:
    """Return the input shape as a tuple, and its number of channels."""
    shape = tuple(shape)
    is_image = stem.kernel_size is not None
    order = (
        ("channels", "height", "width")
        if data_format == "channels_first"
        else ("height", "width", "channels")
    )
    wanted = order if is_image else ("features",)
    if len(shape) != len(wanted) or shape[wanted.index("channels") if is_image else 0] is None:
        raise ValueError(
            f"`input_shape` must be ({', '.join(wanted)}) with a known number of "
            f"{'channels' if is_image else 'features'}. Received: input_shape={shape}, "
            f"data_format={data_format!r}"
        )
    for size, what in zip(shape, wanted, strict=True):
        if size is not None:
            _checks.positive_int(size, f"input_shape ({what})")
        if what in ("height", "width") and size is not None and size < total_stride:
            raise ValueError(
                f"The strides of this network divide height and width by {total_stride}, so both "
                f"must be at least {total_stride}. Received: input_shape={shape}"
            )
    return shape, shape[wanted.index("channels") if is_image else 0]


def image_shape(
    shape: Sequence[int | None] | None, size: int, data_format: str | None
) -> tuple[int | None, ...]:
    """Return `shape`, or that of a square colour image of `size` in the order of
    `data_format` where it is None.
    """
    if shape is not None:
        return tuple(shape)
    return (
        (3, size, size)
        if (data_format or keras.config.image_data_format()) == "channels_first"
        else (size, size, 3)
    )


def widen(width: int, factor: float) -> int:
    """Return the width of a stage times `width_factor`."""
    widened = int(width * factor)
    if widened < 1:
        raise ValueError(
            f"`width_factor` leaves a stage of {width} no channel. Received: "
            f"width_factor={factor!r}"
        )
    return widened
