"""ResidualUnit: `x_{l+1} = f(h(x_l) + F(x_l))` with any arrangement, shortcut and branch."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_preact import _checks, arrangements, blocks, initializers, shortcuts
from keras_preact.downsampling import DOWNSAMPLINGS
from keras_preact.layers import chains, spatial
from keras_preact.squeeze_excitation import SqueezeExcitation

#: A value of `use_bias`: a normalisation right after a weight would remove its bias again.
UNLESS_NORM = "unless_norm"


class Trace(NamedTuple):
    """The parts of a residual unit on an input, by the paper's names.

    Attributes:
        activated: What the first weight of F reads.
        shortcut: What the shortcut adds, h(x_l); None in a plain network.
        residual: What the branch adds, F(x_l).
        sum: h(x_l) + F(x_l).
        output: f of the sum: x_{l+1}.
    """

    activated: Any
    shortcut: Any
    residual: Any
    sum: Any
    output: Any


def _option(
    default: Any = dataclasses.MISSING,
    check: Callable[[Any, str], object] | None = None,
    get: Callable[[Any], Any] | None = None,
    serialize: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a field of `UnitOptions`.

    Args:
        default: Its default.
        check: Raises a ValueError for a bad value, with its name.
        get: Turns what users write, or a config holds, into the value.
        serialize: Turns the value into what a config holds.
    """
    return dataclasses.field(
        default=default, metadata={"check": check, "get": get, "serialize": serialize}
    )


def _one_of(*allowed: object) -> Callable[[Any, str], None]:
    return lambda value, name: _checks.one_of(value, allowed, name)


def _shortcut(shortcut: Any) -> chains.Pattern:
    if isinstance(shortcut, chains.Pattern):
        return shortcut
    return chains.Pattern.of(shortcuts.get(shortcut))


def _kernel_initializer(initializer: Any) -> keras.initializers.Initializer:
    return (
        initializers.released_he() if initializer is None else keras.initializers.get(initializer)
    )


def _rate(rate: float | None, name: str) -> None:
    if rate is not None:
        _checks.fraction(rate, name)


@dataclasses.dataclass(frozen=True)
class UnitOptions:
    """The options of a residual unit; `ResidualUnit` describes them.

    From a field follow the argument of `ResidualUnit`, its place in the serialised
    config, the argument of every network builder and `--model.options` of the command
    line.
    """

    filters: int = _option(check=_checks.positive_int)
    block: Any = _option("basic", get=blocks.get, serialize=blocks.serialize)
    strides: int = _option(1, check=_checks.positive_int)
    arrangement: Any = _option(
        "full_preactivation", get=arrangements.get, serialize=arrangements.serialize
    )
    shortcut: Any = _option(
        "identity", get=_shortcut, serialize=lambda pattern: pattern.serialize()
    )
    shape_shortcut: str = _option("auto", check=_one_of("auto", "projection", "zero_pad"))
    activate_shape_shortcut: bool = _option(True)
    downsampling: str = _option(
        "strided", check=lambda value, name: _checks.lookup(DOWNSAMPLINGS, value, name)
    )
    normalization: Any = _option(
        "batch", get=chains.Normalization.get, serialize=lambda kind: kind.serialize()
    )
    activation: Any = _option(
        "relu", get=keras.activations.get, serialize=keras.activations.serialize
    )
    dropout: float = _option(0.0, check=_checks.fraction)
    dropout_at: str = _option(
        "between_weights", check=_one_of("between_weights", "before_addition")
    )
    stochastic_depth: float | None = _option(None, check=_rate)
    use_bias: bool | str = _option(False, check=_one_of(True, False, UNLESS_NORM))
    bias_initializer: Any = _option(
        "zeros", get=keras.initializers.get, serialize=keras.initializers.serialize
    )
    kernel_initializer: Any = _option(
        None, get=_kernel_initializer, serialize=keras.initializers.serialize
    )
    zero_init_last: bool = _option(False)
    data_format: str = _option(
        None, get=spatial.data_format_of, check=_one_of("channels_last", "channels_first")
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if get := field.metadata["get"]:
                value = get(value)
                object.__setattr__(self, field.name, value)
            if check := field.metadata["check"]:
                check(value, field.name)
        self._check_block()
        if self.zero_init_last and self.arrangement.last[-1:] == ("activation",):
            raise ValueError(
                "zero_init_last=True would keep F at 0 for ever: the activation at its end has no "
                f"gradient there. Received: arrangement with last={self.arrangement.last}"
            )

    def _check_block(self) -> None:
        block = self.block
        channels = block.channels(self.filters)
        if self.dropout and self.dropout_at == "between_weights" and len(channels) == 1:
            raise ValueError(
                f"block={block.name!r} has one weight and nothing between weights: use "
                f"dropout_at='before_addition'. Received: dropout={self.dropout}, "
                f"dropout_at={self.dropout_at!r}"
            )
        if block.activation:
            # relu is the default
            if self.activation not in map(keras.activations.get, (block.activation, "relu")):
                raise ValueError(
                    f"block={block.name!r} has the activation {block.activation!r}: leave "
                    "`activation` out. Received: "
                    f"activation={keras.activations.serialize(self.activation)!r}"
                )
            object.__setattr__(self, "activation", keras.activations.get(block.activation))
        if block.strided is None:
            object.__setattr__(self, "data_format", "channels_last")  # features are the last axis
            if (self.strides, self.downsampling) != (1, "strided"):
                raise ValueError(
                    f"block={block.name!r} works on features and has no strides and no "
                    f"downsampling. Received: strides={self.strides}, "
                    f"downsampling={self.downsampling!r}"
                )
            return
        if self.strides > 1 and block.dilation > 1:
            raise ValueError(
                "A unit on a dilated grid has its strides as dilation too: give dilated_strides "
                f"in place of strides. Received: strides={self.strides}, dilation={block.dilation}"
            )
        if block.dilated_strides > 1 and self.downsampling != "strided":
            raise ValueError(
                "Only downsampling='strided' can become dilation: pooled maps have no values in "
                f"between. Received: downsampling={self.downsampling!r}, "
                f"dilated_strides={block.dilated_strides}"
            )

    def get_config(self) -> dict:
        return {
            field.name: (field.metadata["serialize"] or (lambda value: value))(
                getattr(self, field.name)
            )
            for field in dataclasses.fields(self)
        }

    @classmethod
    def check_names(cls, options: dict) -> None:
        """Refuse options that a unit does not have.

        Raises:
            ValueError: the message names the nearest ones, or the block that has it.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options.keys() - set(names):
            having = [
                f"kp.blocks.{kind.__name__}({name}=...)"
                for kind in blocks.BLOCKS.values()
                if name in blocks.options_of(kind)
            ]
            if having:
                raise ValueError(
                    f"A residual unit has no option {name!r}. It is an option of a block: "
                    f"block={' or '.join(having)}."
                )
            raise ValueError(_checks.unknown_option(name, names))


@keras.saving.register_keras_serializable("keras_preact")
class ResidualUnit(keras.Layer):
    """A residual unit, `x_{l+1} = f(h(x_l) + F(x_l))`.

    Args:
        filters: Width of the unit's 3x3 convolution (or dense layers). A bottleneck
            returns `4 * filters` channels, any other block `filters`.
        block: The weights of F: a name from `kp.BLOCKS` or an object with options, such
            as `kp.blocks.Bottleneck(groups=32, base_width=4)`. `"basic"` (3x3, 3x3),
            `"bottleneck"` (1x1, 3x3, 1x1), `"single"` (one 3x3: the 1-layer skip of
            Table 3) and `"dense"` (two dense layers, for vectors); for a transformer
            `"attention"`, `"mlp"` and `"swiglu"`, with the arrangements `"pre_norm"`
            and `"post_norm"`, and a normalisation other than `"batch"`.
        strides: Step of the unit; above 1 it changes the shape.
        arrangement: Where normalisation and activation are: a name from
            `kp.ARRANGEMENTS` or `kp.arrangements.TRANSFORMER_ARRANGEMENTS`, or an
            `Arrangement`.
        shortcut: h: a name from `kp.SHORTCUTS`, or an object such as
            `kp.shortcuts.ConstantScaling(0.5, 0.5)`.
        shape_shortcut: How x is made to fit if the unit changes the shape:
            `"projection"` (1x1 convolution), `"zero_pad"` (option A), or `"auto"`, a
            projection. h then acts on its result; the shortcut `"conv1x1"` is its own
            projection.
        activate_shape_shortcut: Whether the path that changes the shape starts from the
            activated input, as the branch does (appendix), or from the raw one. A unit
            that keeps the shape always takes the raw x.
        downsampling: How strides above 1 shrink the map: a name from
            `kp.downsampling.DOWNSAMPLINGS`. `"strided"` convolutions; `"average"`
            pooling before the projection (ResNet-D); `"blur"` (anti-aliased); `"max"`,
            which convolves every pixel and takes the largest of 2 x 2, on both paths.
        normalization: `"batch"`, `"layer"`, `"group"`, `"rms"`, `"none"`, or a Keras
            layer as a pattern, such as
            `keras.layers.BatchNormalization(momentum=0.99)`.
        activation: Any Keras activation; `"swiglu"` has its own, silu.
        dropout: Rate of the dropout on the branch; 0 for none.
        dropout_at: `"between_weights"`, after the activation and before each weight but
            the first (wide residual networks), or `"before_addition"`, at the end of F.
        stochastic_depth: Share of the examples for which F is left out in training
            (arXiv 1603.09382); the others' F is divided by `1 - stochastic_depth`. At
            inference F is unchanged. None for none.
        use_bias: Whether the weights of the branch and the projection have a bias;
            `"unless_norm"`: those without a normalisation right after them.
        bias_initializer: Initialiser of these biases; each draws its own values.
        kernel_initializer: Initialiser of all kernels; each weight draws its own
            values. None: He with fan_out, as released.
        zero_init_last: Whether F starts at 0, and so the unit as its shortcut: gamma of
            the normalisation at the end of F, or without one, as in pre-activation, the
            last kernel of F (arXiv 1706.02677, Sec. 5.1).
        data_format: `"channels_last"` or `"channels_first"`; None for Keras' setting.
        name, dtype, trainable: As in Keras; dtype is a policy such as
            `"mixed_bfloat16"`.

    Input: `(batch, height, width, channels)`; `(batch, ..., features)` for dense
        blocks; `(batch, tokens, features)` for attention.

    Output: the same with `ceil(height / strides)`, `ceil(width / strides)` and
        `filters * expansion` channels.

    A weight's path says where it is: `branch/conv_1/kernel`, `branch/norm_1/gamma`
    (norm_0 before the first weight, norm_i after the i-th), `after_addition/norm/gamma`,
    `shortcut/conv/kernel`, `gate/conv/bias`, `projection/conv/kernel`; for vectors and
    tokens `branch/dense_1/kernel`, `branch/attention_1/query/kernel` (and `key`,
    `value`, `output`), `branch/gated_1/dense_1/kernel` and, for its gate,
    `branch/gated_1/gate_1/kernel`. Weights of equal meaning have equal names in every
    arrangement.

    Raises:
        ValueError: for unknown names (with the nearest ones), options that contradict
            each other, an input that does not fit.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> unit = kp.ResidualUnit(16, block="bottleneck", strides=2)
    >>> tuple(unit(np.zeros((2, 32, 32, 16), "float32")).shape)
    (2, 16, 16, 64)

    Source: Eq. 1 and 2, Fig. 4, Table 1 and the appendix of arXiv 1603.05027.
    """

    def __init__(self, filters: int, *, name=None, dtype=None, trainable=True, **options: Any):
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        UnitOptions.check_names(options)
        self.options = UnitOptions(filters, **options)

    def at(self, name: str, **changes: Any) -> "ResidualUnit":
        """Return a new unit like this one for another place in a network.

        Args:
            name: Its name. If initialisers and dropout are seeded, its seeds follow
                from theirs and this name.
            **changes: Arguments that differ, such as `strides=1`.

        Two units made with one seeded initialiser start alike unless `at` made them.
        """
        config = self.get_config() | {
            "name": name,
            "kernel_initializer": initializers.spawn(self.options.kernel_initializer, name),
            "bias_initializer": initializers.spawn(self.options.bias_initializer, name),
            "shortcut": self.options.shortcut.at(name),
        }
        return type(self).from_config(config | changes)

    @property
    def channels_out(self) -> int:
        return self.options.filters * self.options.block.expansion

    def trace(
        self, x, *, drop_rate=None, residual_scale=None, detach_residual=False, training=None
    ) -> Trace:
        """Apply the unit and return its parts.

        Args:
            x: x_l.
            drop_rate: A scalar in place of the option `stochastic_depth`, if that is
                not None.
            residual_scale: A scalar that multiplies F(x_l): 0 leaves the unit's
                shortcut (a lesion).
            detach_residual: Whether F(x_l) takes no part in gradients, which then flow
                through the shortcut alone.
            training: As in Keras.

        Returns:
            `Trace(activated, shortcut, residual, sum, output)`.
        """
        if not keras.backend.is_keras_tensor(x):
            x = ops.convert_to_tensor(x, self.compute_dtype)
        if not self.built:
            self.build(tuple(x.shape))
        run = functools.partial(chains.run_chain, training=training)
        activated = run(self.first, x)
        residual = run(self.rest, activated)
        if self.drop is not None:
            residual = self.drop(residual, drop_rate, training=training)
        if detach_residual:
            residual = ops.stop_gradient(residual)
        if residual_scale is not None:
            residual = residual * ops.cast(residual_scale, residual.dtype)
        fitted = run(self.shape_change, activated if self._activate_both else x)
        shortcut, residual = self.shortcut.paths(fitted, residual, training)
        total = shortcuts.add(shortcut, residual)
        return Trace(activated, shortcut, residual, total, run(self.after_addition, total))

    def call(self, x, drop_rate=None, training=None):
        return self.trace(x, drop_rate=drop_rate, training=training).output

    def build(self, input_shape):
        options = self.options
        axis, channels = self._check_input(input_shape)
        dilated = getattr(options.block, "dilated_strides", 1)
        changes_shape = options.strides * dilated > 1 or channels != self.channels_out
        kind = options.shortcut.layer_class
        shortcut_projects = changes_shape and kind.projects and options.shape_shortcut != "zero_pad"
        self._activate_both = changes_shape and options.activate_shape_shortcut

        with keras.name_scope("branch"):
            self.first = self._components(options.arrangement.first, axis, channels, "_0")
            shape = chains.build_chain(self.first, input_shape)
            self.rest = self._weights_and_between(axis)
            shape = chains.build_chain(self.rest, shape)
            self.drop = None
            if options.stochastic_depth is not None:
                self.drop = chains.StochasticDepth(
                    options.stochastic_depth, dtype=self.dtype_policy
                )

        with keras.name_scope("projection"):
            pooled = self._pooling("projection") if changes_shape and kind.reads_input else []
            strides = 1 if pooled else options.strides
            self.shape_change = list(pooled)
            if changes_shape and kind.reads_input and not shortcut_projects:
                self.shape_change += self._shape_change(axis, strides)
            changed = chains.build_chain(self.shape_change, input_shape)

        settings: dict = {
            "name": kind.place,
            "dtype": self.dtype_policy,
            "data_format": options.data_format,
        }
        if options.shortcut.config.get("kernel_initializer") is None:
            settings["kernel_initializer"] = self._kernel("shortcut")
        if shortcut_projects:
            settings |= {"filters": self.channels_out, "strides": strides}
        self.shortcut = options.shortcut.make(**settings)
        self.shortcut.build(changed if shortcut_projects else shape)

        with keras.name_scope("after_addition"):
            self.after_addition = self._components(
                options.arrangement.after_addition, axis, self.channels_out
            )
            chains.build_chain(self.after_addition, shape)
        if not self.trainable:
            # made just now, they follow the unit: a frozen norm keeps its moving statistics
            for layer in (
                *self.first,
                *self.rest,
                *self.shape_change,
                self.shortcut,
                *self.after_addition,
            ):
                layer.trainable = False

    def _check_input(self, shape) -> tuple[int, int]:
        """Return the channel axis and the channel count of an input of `shape`."""
        block, data_format = self.options.block, self.options.data_format
        axis = spatial.channel_axis(data_format, len(shape))
        if len(shape) not in block.ranks or shape[axis] is None:
            raise ValueError(
                f"A unit with block={block.name!r} and data_format={data_format!r} takes "
                f"{block.inputs} with a known number of channels. Received: shape={tuple(shape)}"
            )
        return axis, shape[axis]

    def _kernel(self, place: str) -> keras.initializers.Initializer:
        return initializers.spawn(self.options.kernel_initializer, place)

    def _components(
        self, names, axis: int, channels: int, suffix: str = "", **settings
    ) -> list[keras.Layer]:
        return chains.components(
            names,
            self.options.normalization,
            self.options.activation,
            axis=axis,
            channels=channels,
            name="{}" + suffix,
            dtype=self.dtype_policy,
            **settings,
        )

    def _pooling(self, place: str) -> list[keras.Layer]:
        options = self.options
        return DOWNSAMPLINGS[options.downsampling].pooling(
            place, options.strides, options.data_format, self.dtype_policy
        )

    def _weights_and_between(self, axis: int) -> list[keras.Layer]:
        """Return F after its first activation: every weight and the components after
        it.
        """
        options, block = self.options, self.options.block
        maxima = self._pooling("weight") if block.strided is not None else []
        pooled = self._pooling("branch") if block.strided is not None else []
        widths = block.channels(options.filters)
        layers: list[keras.Layer] = []
        for i, channels in enumerate(widths, 1):
            is_last, is_strided = i == len(widths), i - 1 == block.strided
            names = options.arrangement.last if is_last else options.arrangement.between
            zero = options.zero_init_last and is_last
            after = self._components(
                names, axis, channels, f"_{i}", gamma_initializer="zeros" if zero else None
            )
            settings: dict = {"use_bias": self.has_bias(after)}
            if is_strided and not (maxima or pooled):
                settings["strides"] = options.strides
            if zero and not chains.has_gamma(after):
                settings["kernel_initializer"] = keras.initializers.Zeros()
            weight = self._branch_weight(i, channels, block.word, **settings)
            chain = [weight, *(maxima if is_strided else []), *after]
            if block.gated and not is_last:
                gate = self._branch_weight(i, channels, "gate", use_bias=bool(options.use_bias))
                chain = [chains.Gated(chain, gate, name=f"gated_{i}", dtype=self.dtype_policy)]
            layers += [*chain, *(pooled if is_strided else [])]
            if is_last and getattr(block, "squeeze_excitation", None) is not None:
                layers.append(self._squeeze_excitation(block.squeeze_excitation))
            if options.dropout and is_last == (options.dropout_at == "before_addition"):
                layers.append(
                    keras.layers.Dropout(
                        options.dropout, name=f"dropout_{i}", dtype=self.dtype_policy
                    )
                )
        return layers

    def has_bias(self, after: list[keras.Layer]) -> bool:
        """Whether a weight has a bias with the layers of `after` after it."""
        if self.options.use_bias == UNLESS_NORM:
            return not (after and chains.is_norm(after[0]))
        return bool(self.options.use_bias)

    def _branch_weight(self, i: int, channels: int, word: str, **settings) -> keras.Layer:
        name = f"{word}_{i}"
        return self.options.block.weight(
            i,
            channels,
            name=name,
            **{"kernel_initializer": self._kernel(name), **self._weight_settings(name), **settings},
        )

    def _weight_settings(self, name: str) -> dict:
        return {
            "bias_initializer": initializers.spawn(self.options.bias_initializer, name, "bias"),
            "data_format": self.options.data_format,
            "dtype": self.dtype_policy,
        }

    def _squeeze_excitation(self, reduction: int) -> keras.Layer:
        return SqueezeExcitation(
            reduction,
            kernel_initializer=self._kernel("squeeze_excitation"),
            data_format=self.options.data_format,
            name="squeeze_excitation",
            dtype=self.dtype_policy,
        )

    def _shape_change(self, axis: int, strides: int) -> list[keras.Layer]:
        options = self.options
        if options.shape_shortcut == "zero_pad":
            return [
                shortcuts.ZeroPad(
                    self.channels_out,
                    strides,
                    options.data_format,
                    name="zero_pad",
                    dtype=self.dtype_policy,
                )
            ]
        after = self._components(options.arrangement.projection, axis, self.channels_out)
        projection = options.block.projection(
            self.channels_out,
            kernel_initializer=self._kernel("projection"),
            strides=strides,
            use_bias=self.has_bias(after),
            **self._weight_settings("conv" if options.block.strided is not None else "dense"),
        )
        return [projection, *after]

    def compute_output_shape(self, input_shape):
        self._check_input(input_shape)
        return spatial.strided_shape(
            input_shape, self.options.strides, self.options.data_format, self.channels_out
        )

    def get_config(self):
        return super().get_config() | self.options.get_config()


def _signature() -> inspect.Signature:
    """Return the signature of `ResidualUnit`, with every option."""
    kind = inspect.Parameter.KEYWORD_ONLY
    options = inspect.signature(UnitOptions).parameters.values()
    return inspect.Signature(
        [
            *(p if p.name == "filters" else p.replace(kind=kind) for p in options),
            inspect.Parameter("name", kind, default=None),
            inspect.Parameter("dtype", kind, default=None),
            inspect.Parameter("trainable", kind, default=True),
        ]
    )


ResidualUnit.__signature__ = _signature()
