"""ResidualNetwork: a stem, stages of residual units and a head, as one functional Keras model."""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypedDict

import keras
import numpy as np

from keras_preact import _checks, _layers, arrangements, initializers, shortcuts
from keras_preact.units import ResidualUnit


@dataclasses.dataclass(frozen=True)
class Stage:
    """Units of equal width behind one another.

    Args:
        filters: Of each unit, see `ResidualUnit`.
        units: How many.
        strides: Step of the first one.
    """

    filters: int
    units: int
    strides: int = 1


@dataclasses.dataclass(frozen=True)
class Stem:
    """What stands in front of the first unit: a weight layer, the arrangement's stem components, perhaps a pooling."""

    kernel_size: int | None
    strides: int = 1
    pooling: bool = False

    @property
    def total_stride(self) -> int:
        return self.strides * (2 if self.pooling else 1)


#: Name to `Stem`: for small images, for ImageNet, for vectors.
STEMS: Mapping[str, Stem] = MappingProxyType({"3x3": Stem(3), "7x7": Stem(7, strides=2, pooling=True), "dense": Stem(None)})


class NetworkOptions(TypedDict, total=False):
    """The options that every builder passes on to `ResidualNetwork`; see there and `ResidualUnit`."""

    arrangement: str | arrangements.Arrangement
    shortcut: str | shortcuts.Shortcut
    gate_bias: float | None
    shape_shortcut: str
    activate_shape_shortcut: bool
    stride_on: str
    normalization: str | keras.Layer
    activation: Any
    groups: int
    base_width: int
    dropout: float
    dropout_at: str
    use_bias: bool
    kernel_initializer: Any
    include_top: bool
    pooling: str | None
    classifier_activation: Any
    mean: float | Sequence[float] | None
    std: float | Sequence[float] | None
    data_format: str | None
    dtype: Any
    name: str | None


@dataclasses.dataclass(frozen=True)
class _Frozen:
    """Holds what a model must keep without tracking it as a part of its state."""

    arguments: dict
    unit_outputs: tuple
    logits: Any


@keras.saving.register_keras_serializable("keras_preact")
class ResidualNetwork(keras.Model):
    """A network of residual units. The builders (`resnet_cifar`, ...) fill in its stages.

    Args:
        stages: `Stage(filters, units, strides)`, in order.
        stem: `"3x3"` (small images), `"7x7"` (stride 2 and a 3x3 max pooling: ImageNet) or `"dense"` (vectors).
        stem_filters: Width of the stem.
        block: F's weights, see `ResidualUnit`.
        input_shape: Without the batch; for images in the order of `data_format`, with None for a size that is not fixed.
        classes: Outputs of the classifier.
        include_top: Whether there are a pooling and a classifier. Without, the output is the last activation.
        pooling: Without top: `"avg"`, `"max"` or None.
        classifier_activation: None for logits, or `"softmax"`, ...
        mean, std: In pixel values, a number or one for each channel: the network then starts with `(x - mean) / std`
            and takes raw pixels. None: no such layer.
        data_format, dtype, name: As in Keras. Whatever the policy, logits are computed in the variables' dtype.
        **unit_options: Of every unit: arrangement, shortcut, gate_bias, shape_shortcut, activate_shape_shortcut, stride_on,
            normalization, activation, groups, base_width, dropout, dropout_at, use_bias, kernel_initializer.

    Attributes:
        units: The residual units in order.
        unit_outputs: x_1 ... x_L as Keras tensors: `keras.Model(model.input, model.unit_outputs)` computes them.
        logits: The classifier's output in front of its activation, a Keras tensor; None without top.

    The first activation of an arrangement that has one stands right behind the stem's weights, so that both paths of the first
    unit see it, and that unit has no own; its last one stands behind the last addition (appendix).

    Layers: `preprocessing`, `stem_conv`, `stem_norm`, `stem_activation`, `stage1_unit1` ..., `head_norm`, `head_activation`,
    `head_pool`, `head_classifier`, `head_predictions`, as far as there are such.

    Source: Sec. 3 and 4 and the appendix of arXiv 1603.05027, Sec. 4 of arXiv 1512.03385.
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
        unit = ResidualUnit(narrowest, block=block, data_format=data_format, dtype=policy, **unit_options).get_config()
        arrangement = arrangements.get(unit["arrangement"])
        kernel = keras.initializers.get(unit["kernel_initializer"])
        normalization = _layers.Normalization(unit["normalization"])
        activation = keras.activations.get(unit["activation"])
        if classifier_activation is not None:
            classifier_activation = keras.activations.get(classifier_activation)
        total_stride = front.total_stride * math.prod(stage.strides for stage in stages)
        input_shape, channels = _check_input_shape(input_shape, front, total_stride, data_format)
        axis = _layers.channel_axis(data_format, len(input_shape) + 1)

        def components(names, channels, prefix):
            return _layers.components(
                names, normalization, activation, axis=axis, channels=channels, name=prefix + "_{}", dtype=policy
            )

        inputs = x = keras.Input(input_shape, dtype=policy.variable_dtype, name="inputs")
        if mean is not None or std is not None:
            x = _preprocessing(mean, std, axis=axis, channels=channels, dtype=policy.variable_dtype)(x)
        first = _layers.weight(
            stem_filters,
            front.kernel_size,
            strides=front.strides,
            data_format=data_format,
            use_bias=unit["use_bias"],
            kernel_initializer=initializers.spawn(kernel, "stem"),
            name="stem_dense" if front.kernel_size is None else "stem_conv",
            dtype=policy,
        )
        x = _layers.run_chain([first, *components(arrangement.stem, stem_filters, "stem")], x)
        if front.pooling:
            x = _layers.PaddedMaxPooling2D(3, 2, data_format=data_format, name="stem_pool", dtype=policy)(x)

        units: list[ResidualUnit] = []
        unit_outputs = []
        for s, stage in enumerate(stages, 1):
            for u in range(1, stage.units + 1):
                config = unit | {
                    "name": f"stage{s}_unit{u}",
                    "filters": stage.filters,
                    "strides": stage.strides if u == 1 else 1,
                    "kernel_initializer": initializers.spawn(kernel, s, u),
                }
                if not units:
                    config["arrangement"] = arrangement.without_first()
                units.append(ResidualUnit.from_config(config))
                x = units[-1](x)
                unit_outputs.append(x)

        x = _layers.run_chain(components(arrangement.head, x.shape[axis], "head"), x)
        logits = None
        is_image = len(input_shape) == 3
        if is_image and (include_top or pooling):
            pool = keras.layers.GlobalMaxPooling2D if pooling == "max" else keras.layers.GlobalAveragePooling2D
            x = pool(data_format=data_format, name="head_pool", dtype=policy)(x)
        if include_top:
            x = logits = keras.layers.Dense(
                classes,
                kernel_initializer=initializers.spawn(initializers.released_linear(initializers.seed_of(kernel)), "head"),
                name="head_classifier",
                dtype=policy.variable_dtype,
            )(x)
            if classifier_activation is not None:
                x = keras.layers.Activation(classifier_activation, name="head_predictions", dtype=policy.variable_dtype)(x)

        super().__init__(inputs=inputs, outputs=x, name=name)
        self._units = units
        arguments = {
            "stages": [[stage.filters, stage.units, stage.strides] for stage in stages],
            "stem": stem,
            "stem_filters": stem_filters,
            "input_shape": list(input_shape),
            "classes": classes,
            "include_top": include_top,
            "pooling": pooling,
            "classifier_activation": classifier_activation and keras.activations.serialize(classifier_activation),
            "mean": _plain(mean),
            "std": _plain(std),
            "dtype": keras.dtype_policies.serialize(policy),
        }
        own = ("name", "trainable", "dtype", "filters", "strides")
        arguments |= {key: value for key, value in unit.items() if key not in own}
        self._frozen = _Frozen(_without_marks(arguments), tuple(unit_outputs), logits)

    @property
    def units(self) -> list[ResidualUnit]:
        return list(self._units)

    @property
    def unit_outputs(self) -> list:
        return list(self._frozen.unit_outputs)

    @property
    def logits(self):
        return self._frozen.logits

    def get_config(self):
        frozen_layers = [layer.name for layer in self.layers if not layer.trainable]
        return copy.deepcopy(self._frozen.arguments) | {"name": self.name, "frozen_layers": frozen_layers}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        frozen_layers = config.pop("frozen_layers", ())
        model = cls(**config)
        for name in frozen_layers:
            model.get_layer(name).trainable = False
        return model


def _check_input_shape(shape, stem: Stem, total_stride: int, data_format: str) -> tuple[tuple[int | None, ...], int]:
    """Return the input shape as a tuple, and its number of channels."""
    shape = tuple(shape)
    is_image = stem.kernel_size is not None
    order = ("channels", "height", "width") if data_format == "channels_first" else ("height", "width", "channels")
    wanted = order if is_image else ("features",)
    if len(shape) != len(wanted) or shape[wanted.index("channels") if is_image else 0] is None:
        raise ValueError(
            f"`input_shape` must be ({', '.join(wanted)}) with a known number of {'channels' if is_image else 'features'}. "
            f"Received: input_shape={shape}, data_format={data_format!r}"
        )
    for size, what in zip(shape, wanted, strict=True):
        if size is not None:
            _checks.positive_int(size, f"input_shape ({what})")
        if what in ("height", "width") and size is not None and size < total_stride:
            raise ValueError(
                f"The strides of this network divide height and width by {total_stride}, so both must be at least "
                f"{total_stride}. Received: input_shape={shape}"
            )
    return shape, shape[wanted.index("channels") if is_image else 0]


def _without_marks(config):
    """Return a config without the marks of shared objects that Keras adds while it loads a file: they are that file's."""
    if isinstance(config, dict):
        return {key: _without_marks(value) for key, value in config.items() if key != "shared_object_id"}
    return [_without_marks(value) for value in config] if isinstance(config, list) else config


def _plain(value):
    """Return a number or a list of numbers as JSON can hold it; None stays."""
    return None if value is None else np.asarray(value, "float64").tolist()


def _preprocessing(mean, std, *, axis: int, channels: int, dtype: str) -> keras.Layer:
    """Make the layer that turns pixels into `(x - mean) / std`."""
    mean = np.zeros(()) if mean is None else np.asarray(mean, "float64")
    std = np.ones(()) if std is None else np.asarray(std, "float64")
    for value, argument in ((mean, "mean"), (std, "std")):
        if value.shape not in ((), (1,), (channels,)):
            raise ValueError(f"`{argument}` must be a number or {channels}, one a channel. Received: {argument}={value}")
    if not (std > 0).all():
        raise ValueError(f"`std` must be positive. Received: std={std}")
    mean, variance = (np.broadcast_to(value, (channels,)).tolist() for value in (mean, std**2))
    return keras.layers.Normalization(axis=axis, mean=mean, variance=variance, name="preprocessing", dtype=dtype)


def image_shape(shape: Sequence[int | None] | None, size: int, data_format: str | None) -> tuple[int | None, ...]:
    """Return `shape`, or that of a square colour image of `size` in the order of `data_format` where it is None."""
    if shape is not None:
        return tuple(shape)
    return (3, size, size) if (data_format or keras.config.image_data_format()) == "channels_first" else (size, size, 3)


def widen(width: int, factor: float) -> int:
    """Return the width of a stage times `width_factor`."""
    widened = int(width * factor)
    if widened < 1:
        raise ValueError(f"`width_factor` leaves a stage of {width} no channel. Received: width_factor={factor!r}")
    return widened
