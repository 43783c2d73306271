"""ResidualUnit: `x_{l+1} = f(h(x_l) + F(x_l))` with any arrangement, shortcut and
branch.
"""

import math

import keras

from keras_preact import (
    _checks,
    _layers,
    _observers,
    _spatial,
    arrangements,
    blocks,
    initializers,
    shortcuts,
)
from keras_preact.blocks import BLOCKS
from keras_preact.downsampling import DOWNSAMPLINGS
from keras_preact.squeeze_excitation import SqueezeExcitation

SHAPE_SHORTCUTS = ("auto", "projection", "zero_pad")
STRIDE_PLACES = ("first", "3x3")
#: Of `use_bias`: no bias where a normalisation stands right behind the weight, which would take it
#: away again.
UNLESS_NORM = "unless_norm"
DROPOUT_PLACES = ("between_weights", "before_addition")


@keras.saving.register_keras_serializable("keras_preact")
class ResidualUnit(keras.Layer):
    """A residual unit, `x_{l+1} = f(h(x_l) + F(x_l))`.

    Args:
        filters: Width of the unit's 3x3 convolution (or dense layers). A bottleneck
            returns `4 * filters` channels, any other block `filters`.
        block: F's weights: `"basic"` (3x3, 3x3), `"bottleneck"` (1x1, 3x3, 1x1),
            `"dense"` (two dense layers, for vectors) or `"single"` (one 3x3: the
            1-layer skip of Table 3). Of a transformer's layer: `"attention"`
            (multi-head self-attention over tokens), `"mlp"` (two dense layers, four
            times as wide between them) and `"swiglu"` (the gated `(silu(x W_1) * x W_2)
            W_3`); with the arrangements `"pre_norm"` and `"post_norm"`, and a
            normalisation other than `"batch"`.
        strides: Step of the unit; above 1 it changes the shape.
        arrangement: Where normalisation and activation stand: a name from
            `kp.ARRANGEMENTS` or `kp.arrangements.TRANSFORMER_ARRANGEMENTS`, or an
            `Arrangement`.
        shortcut: h: a name from `kp.SHORTCUTS` or an object such as
            `kp.shortcuts.ConstantScaling(0.5, 0.5)`.
        gate_bias: b_g at the start, for the shortcuts with a gate; None for their own
            default.
        shape_shortcut: What makes x fit where the unit changes the shape:
            `"projection"` (1x1 convolution), `"zero_pad"` (option A), or `"auto"`, a
            projection. h then acts on its result; the shortcut `"conv1x1"` is its own
            projection.
        activate_shape_shortcut: Whether the path that changes the shape starts from the
            activated input, as the branch does (appendix), or from the raw one. A unit
            that keeps the shape always takes the raw x.
        stride_on: `"first"` weight or `"3x3"`: which convolution of a bottleneck has
            the stride.
        dilation: Of the 3x3 convolutions: the unit works on a map that is so many times
            finer than its weights are for.
        dilated_strides: Strides that are left out and become dilation instead, behind
            the weight that would have them. The weights are those of a unit with
            `strides`; its output is every `dilated_strides`-th place of this unit's.
        downsampling: How strides above 1 shrink the map: a name from
            `kp.downsampling.DOWNSAMPLINGS`. `"strided"` convolutions; `"average"`
            pooling in front of the projection (ResNet-D); `"blur"` (anti-aliased).
        squeeze_excitation: The reduction, such as 16, of squeeze-and-excitation at the
            end of F; None for none.
        normalization: `"batch"`, `"layer"`, `"group"`, `"rms"`, `"none"`, or a Keras
            layer as a pattern, such as
            `keras.layers.BatchNormalization(momentum=0.99)`.
        activation: Any Keras activation; `"swiglu"` has its own, silu.
        groups, base_width: Of a bottleneck's 3x3 convolution, as in ResNeXt: it has
            `int(filters * base_width / 64) * groups` channels.
        hidden: Width between the dense layers of a block that has two. None: `filters`,
            of an `"mlp"` `4 * filters`, of a `"swiglu"` 8/3 of them, rounded up to a
            multiple of 8.
        num_heads: Of attention; each has `filters / num_heads` features.
        causal: Whether a token's attention sees those up to itself alone.
        dropout: Rate of the dropout on the branch; 0 for none.
        dropout_at: `"between_weights"`, after the activation and in front of each
            weight but the first (wide residual networks), or `"before_addition"`, at
            the end of F.
        stochastic_depth: Share of the examples for which F is left out in training
            (arXiv 1603.09382); the others' F is divided by `1 - stochastic_depth`. At
            inference F is as it is. None: for none.
        use_bias: Whether the branch's and the projection's weights have a bias;
            `"unless_norm"`: those without a normalisation right behind them.
        bias_initializer: Of those; each draws its own values.
        kernel_initializer: Of all kernels; each weight draws its own values. None: He
            with fan_out, as released.
        zero_init_last: Whether F starts at 0, and so the unit as its shortcut: gamma of
            the normalisation at F's end, or where none stands there, as in
            pre-activation, F's last kernel (arXiv 1706.02677, Sec. 5.1).
        standardize_weights: Whether convolutions use standardised kernels (arXiv
            1903.10520), which belong to normalisations that do not look at the batch,
            such as `"group"`.
        data_format: `"channels_last"` or `"channels_first"`; None for Keras' setting.
        **kwargs: `name`, `dtype` (a policy such as `"mixed_bfloat16"`), `trainable`.

    Input: `(batch, height, width, channels)`, or `(batch, ..., features)` for a dense
        block, `(batch, tokens, features)` for
    attention. Output: the same with `ceil(height / strides)`, `ceil(width / strides)`
    and `filters * expansion` channels.

    A weight's path says where it stands: `branch/conv_1/kernel`, `branch/norm_1/gamma`
    (norm_0 in front of the first weight, norm_i behind the i-th),
    `after_addition/norm/gamma`, `shortcut/conv/kernel`, `gate/conv/bias`,
    `projection/conv/kernel`; for vectors and tokens `branch/dense_1/kernel`,
    `branch/attention_1/query/kernel` (and `key`, `value`, `output`),
    `branch/gated_1/dense_1/kernel` and, of its gate, `branch/gated_1/gate_1/kernel`.
    Weights of equal meaning have equal names in every arrangement.

    Raises:
        ValueError: for unknown names (with the nearest ones), options that contradict
            each other, an input that does not fit.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> unit = kp.ResidualUnit(16, block="bottleneck", strides=2, arrangement="full_preactivation")
    >>> tuple(unit(np.zeros((2, 32, 32, 16), "float32")).shape)
    (2, 16, 16, 64)

    Source: Eq. 1 and 2, Fig. 4, Table 1 and the appendix of arXiv 1603.05027.
    """

    def __init__(
        self,
        filters: int,
        *,
        block: str = "basic",
        strides: int = 1,
        arrangement: str | arrangements.Arrangement = "full_preactivation",
        shortcut: str | shortcuts.Shortcut = "identity",
        gate_bias: float | None = None,
        shape_shortcut: str = "auto",
        activate_shape_shortcut: bool = True,
        stride_on: str = "first",
        dilation: int = 1,
        dilated_strides: int = 1,
        downsampling: str = "strided",
        squeeze_excitation: int | None = None,
        normalization: str | keras.Layer = "batch",
        activation="relu",
        groups: int = 1,
        base_width: int = 64,
        hidden: int | None = None,
        num_heads: int = 1,
        causal: bool = False,
        dropout: float = 0.0,
        dropout_at: str = "between_weights",
        stochastic_depth: float | None = None,
        use_bias: bool | str = False,
        bias_initializer="zeros",
        kernel_initializer=None,
        zero_init_last: bool = False,
        standardize_weights: bool = False,
        data_format: str | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        for value, argument in (
            (filters, "filters"),
            (strides, "strides"),
            (dilation, "dilation"),
            (dilated_strides, "dilated_strides"),
            (1 if squeeze_excitation is None else squeeze_excitation, "squeeze_excitation"),
            (groups, "groups"),
            (base_width, "base_width"),
            (num_heads, "num_heads"),
            (1 if hidden is None else hidden, "hidden"),
        ):
            _checks.positive_int(value, argument)
        _checks.fraction(dropout, "dropout")
        if stochastic_depth is not None:
            _checks.fraction(stochastic_depth, "stochastic_depth")
        _checks.one_of(shape_shortcut, SHAPE_SHORTCUTS, "shape_shortcut")
        _checks.one_of(stride_on, STRIDE_PLACES, "stride_on")
        _checks.one_of(dropout_at, DROPOUT_PLACES, "dropout_at")
        _checks.one_of(use_bias, (True, False, UNLESS_NORM), "use_bias")
        self.downsampling_row = _checks.lookup(DOWNSAMPLINGS, downsampling, "downsampling")
        self.branch_block = _checks.lookup(BLOCKS, block, "block")
        self.filters = filters
        self.block = block
        self.strides = strides
        self.arrangement = arrangements.get(arrangement)
        self.shortcut_pattern = _layers.Pattern.of(shortcuts.get(shortcut, gate_bias))
        self.shape_shortcut = shape_shortcut
        self.activate_shape_shortcut = activate_shape_shortcut
        self.stride_on = stride_on
        self.dilation = dilation
        self.dilated_strides = dilated_strides
        self.downsampling = downsampling
        self.squeeze_excitation = squeeze_excitation
        self.normalization = _layers.Normalization(normalization)
        self.activation = keras.activations.get(self.branch_block.activation or activation)
        self.groups = groups
        self.base_width = base_width
        self.hidden = hidden
        self.num_heads = num_heads
        self.causal = causal
        self.dropout = dropout
        self.dropout_at = dropout_at
        self.stochastic_depth = stochastic_depth
        self.use_bias = use_bias
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_initializer = (
            initializers.released_he()
            if kernel_initializer is None
            else keras.initializers.get(kernel_initializer)
        )
        self.zero_init_last = zero_init_last
        self.standardize_weights = standardize_weights
        self.data_format = keras.config.image_data_format() if data_format is None else data_format
        _checks.one_of(self.data_format, ("channels_last", "channels_first"), "data_format")
        if self.branch_block.is_dense:
            # the format is of images; vectors, in a grid as well, have their features last
            self.data_format = "channels_last"
        own = self.branch_block.activation
        if own and keras.activations.get(activation) not in (
            self.activation,
            keras.activations.relu,
        ):  # relu: the default
            raise ValueError(
                f"block={block!r} has the activation {own!r}: leave `activation` out. Received: "
                f"activation={activation!r}"
            )
        blocks.check_options(self)

    def at(self, name: str, **changes) -> "ResidualUnit":
        """Return a new unit like this one for another place in a network.

        Args:
            name: Its name. Where initialisers and dropout are seeded, its seeds follow
                from theirs and this name.
            **changes: Arguments that differ, such as `strides=1`.

        A unit's own copy keeps its seeds: two units made with one seeded initialiser
        start alike unless `at` made them.
        """
        config = self.get_config() | {
            "name": name,
            "kernel_initializer": initializers.spawn(self.kernel_initializer, name),
            "bias_initializer": initializers.spawn(self.bias_initializer, name),
            "shortcut": self.shortcut_pattern.at(name).make(),
        }
        return type(self).from_config(config | changes)

    @property
    def width(self) -> int:
        """Width inside the branch: `hidden`, or `filters`, widened by the block or by
        `groups` and `base_width`.
        """
        if self.hidden is not None:
            return self.hidden
        multiple = self.branch_block.multiple
        channels = int(self.filters * self.base_width / 64) * self.groups
        return math.ceil(channels * self.branch_block.hidden / multiple) * multiple

    @property
    def channels_out(self) -> int:
        return self.filters * self.branch_block.expansion

    def build(self, input_shape):
        axis, channels = self._check_input(input_shape)
        changes_shape = self.strides * self.dilated_strides > 1 or channels != self.channels_out
        kind = self.shortcut_pattern.layer_class
        shortcut_projects = changes_shape and kind.projects and self.shape_shortcut != "zero_pad"
        self._activate_both = changes_shape and self.activate_shape_shortcut

        with keras.name_scope("branch"):
            self.first = self._components(self.arrangement.first, axis, channels, "_0")
            shape = _layers.build_chain(self.first, input_shape)
            self.rest = self._weights_and_between(axis)
            shape = _layers.build_chain(self.rest, shape)
            self.drop = None
            if self.stochastic_depth is not None:
                self.drop = _layers.StochasticDepth(self.stochastic_depth, dtype=self.dtype_policy)

        with keras.name_scope("projection"):
            needed = changes_shape and kind.reads_input and not shortcut_projects
            pooled = self.downsampling_row.pooling(
                "projection", self.strides, self.data_format, self.dtype_policy
            )
            self.shape_change = pooled if changes_shape and kind.reads_input else []
            strides = 1 if pooled else self.strides
            if needed:
                self.shape_change = [*pooled, *self._shape_change(axis, strides)]
            changed = _layers.build_chain(self.shape_change, input_shape)

        settings: dict = {
            "name": kind.place,
            "dtype": self.dtype_policy,
            "data_format": self.data_format,
        }
        if self.shortcut_pattern.config.get("kernel_initializer") is None:
            settings["kernel_initializer"] = self._kernel("shortcut")
        if shortcut_projects:
            settings |= {"filters": self.channels_out, "strides": strides}
        self.shortcut = self.shortcut_pattern.make(**settings)
        self.shortcut.build(changed if shortcut_projects else shape)

        with keras.name_scope("after_addition"):
            self.after_addition = self._components(
                self.arrangement.after_addition, axis, self.channels_out
            )
            _layers.build_chain(self.after_addition, shape)
        if not self.trainable:
            for layer in (
                *self.first,
                *self.rest,
                *self.shape_change,
                self.shortcut,
                *self.after_addition,
            ):
                # made just now, they follow the unit: a frozen norm keeps its moving statistics
                layer.trainable = False

    def _check_input(self, shape) -> tuple[int, int]:
        """Return the channel axis and the channel count of an input of `shape`."""
        wanted, ranks = self.branch_block.inputs
        axis = (
            -1
            if self.branch_block.is_dense
            else _spatial.channel_axis(self.data_format, len(shape))
        )
        if len(shape) not in ranks or shape[axis] is None:
            raise ValueError(
                f"A unit with block={self.block!r} and data_format={self.data_format!r} takes "
                f"{wanted} with a known number of channels. Received: shape={tuple(shape)}"
            )
        return axis, shape[axis]

    def _kernel(self, place: str) -> keras.initializers.Initializer:
        return initializers.spawn(self.kernel_initializer, place)

    def _components(
        self, names, axis: int, channels: int, suffix: str = "", **settings
    ) -> list[keras.Layer]:
        return _layers.components(
            names,
            self.normalization,
            self.activation,
            axis=axis,
            channels=channels,
            name="{}" + suffix,
            dtype=self.dtype_policy,
            **settings,
        )

    def _weights_and_between(self, axis: int) -> list[keras.Layer]:
        """F behind its first activation: every weight and the components behind it."""
        kernels = self.branch_block.kernels
        strided = kernels.index(3) if self.stride_on == "3x3" and 3 in kernels else 0
        pooled = self.downsampling_row.pooling(
            "branch", self.strides, self.data_format, self.dtype_policy
        )
        layers: list[keras.Layer] = []
        for i, kernel_size in enumerate(kernels, 1):
            is_last = i == len(kernels)
            filters = self.channels_out if is_last else self.width
            names = self.arrangement.last if is_last else self.arrangement.between
            zero = self.zero_init_last and is_last
            behind = self._components(
                names, axis, filters, f"_{i}", gamma_initializer="zeros" if zero else None
            )
            settings: dict = {"use_bias": self.has_bias(behind)}
            if i - 1 == strided and not pooled:
                settings["strides"] = self.strides
            if kernel_size == 3:
                settings |= {
                    "groups": self.groups,
                    "dilation": self.dilation * (self.dilated_strides if i - 1 > strided else 1),
                }
            if zero and not _layers.has_gamma(behind):
                settings["kernel_initializer"] = "zeros"
            chain = [
                self._branch_weight(i, filters, _layers.weight_name(kernel_size), **settings),
                *behind,
            ]
            if self.branch_block.gated and not is_last:
                gate = self._branch_weight(i, filters, "gate", use_bias=bool(self.use_bias))
                chain = [_layers.Gated(chain, gate, name=f"gated_{i}", dtype=self.dtype_policy)]
            layers += [*chain, *(pooled if i - 1 == strided else [])]
            if is_last and self.squeeze_excitation is not None:
                layers.append(self._squeeze_excitation(self.squeeze_excitation))
            if self.dropout and is_last == (self.dropout_at == "before_addition"):
                layers.append(
                    keras.layers.Dropout(self.dropout, name=f"dropout_{i}", dtype=self.dtype_policy)
                )
        return layers

    def has_bias(self, behind: list[keras.Layer]) -> bool:
        """Whether a weight has a bias with the layers of `behind` behind it."""
        if self.use_bias == UNLESS_NORM:
            return not (behind and _layers.is_norm(behind[0]))
        return bool(self.use_bias)

    def _branch_weight(self, i: int, filters: int, word: str, **settings) -> keras.Layer:
        """Make weight `i`, counted from 1, of the branch."""
        kernels = self.branch_block.kernels
        kernel = self._kernel(name := f"{word}_{i}")
        if (
            not self.branch_block.attends
        ):  # attention is two weights behind one another, and asks for its own
            kernel = initializers.of_branch(kernel, i, len(kernels))
        return self._weight(
            name,
            filters,
            kernels[i - 1],
            **{"kernel_initializer": kernel, "num_heads": self.num_heads, "causal": self.causal}
            | settings,
        )

    def _weight(
        self, name: str, filters: int, kernel_size: _layers.KernelSize, **kwargs
    ) -> keras.Layer:
        return _layers.weight(
            filters,
            kernel_size,
            name=name,
            bias_initializer=initializers.spawn(self.bias_initializer, name, "bias"),
            standardize=self.standardize_weights,
            data_format=self.data_format,
            dtype=self.dtype_policy,
            **kwargs,
        )

    def _squeeze_excitation(self, reduction: int) -> keras.Layer:
        return SqueezeExcitation(
            reduction,
            kernel_initializer=self._kernel("squeeze_excitation"),
            data_format=self.data_format,
            name="squeeze_excitation",
            dtype=self.dtype_policy,
        )

    def _shape_change(self, axis: int, strides: int) -> list[keras.Layer]:
        if self.shape_shortcut == "zero_pad":
            return [
                shortcuts.ZeroPad(
                    self.channels_out,
                    strides,
                    self.data_format,
                    name="zero_pad",
                    dtype=self.dtype_policy,
                )
            ]
        dense = self.branch_block.is_dense
        behind = self._components(self.arrangement.projection, axis, self.channels_out)
        projection = self._weight(
            "dense" if dense else "conv",
            self.channels_out,
            None if dense else 1,
            kernel_initializer=self._kernel("projection"),
            strides=strides,
            use_bias=self.has_bias(behind),
        )
        return [projection, *behind]

    def call(
        self, x, drop_rate=None, training=None
    ):  # `stateless_call` on JAX passes `training` to nothing else
        """Apply the unit; `drop_rate`, a scalar, takes the place of `stochastic_depth`
        where that is not None.
        """
        activated = _layers.run_chain(self.first, x, training)
        residual = _layers.run_chain(self.rest, activated, training)
        if self.drop is not None:
            residual = self.drop(residual, drop_rate, training=training)
        start = _layers.run_chain(
            self.shape_change, activated if self._activate_both else x, training
        )
        observer = _observers.active()
        if observer is None:
            return _layers.run_chain(
                self.after_addition, self.shortcut(start, residual, training=training), training
            )
        shortcut, residual = self.shortcut.paths(start, observer.change(residual), training)
        total = shortcuts.add(shortcut, residual)
        output = _layers.run_chain(self.after_addition, total, training)
        axis = _spatial.channel_axis(self.data_format, len(x.shape))
        observer.see(
            activated=activated,
            shortcut=shortcut,
            residual=residual,
            total=total,
            output=output,
            axis=axis,
        )
        return output

    def compute_output_shape(self, input_shape):
        self._check_input(input_shape)
        return _spatial.strided_shape(
            input_shape, self.strides, self.data_format, self.channels_out
        )

    def get_config(self):
        return super().get_config() | {
            "filters": self.filters,
            "block": self.block,
            "strides": self.strides,
            "arrangement": arrangements.serialize(self.arrangement),
            "shortcut": self.shortcut_pattern.serialize(),
            "shape_shortcut": self.shape_shortcut,
            "activate_shape_shortcut": self.activate_shape_shortcut,
            "stride_on": self.stride_on,
            "dilation": self.dilation,
            "dilated_strides": self.dilated_strides,
            "downsampling": self.downsampling,
            "squeeze_excitation": self.squeeze_excitation,
            "normalization": self.normalization.serialize(),
            "activation": keras.activations.serialize(self.activation),
            "groups": self.groups,
            "base_width": self.base_width,
            "hidden": self.hidden,
            "num_heads": self.num_heads,
            "causal": self.causal,
            "dropout": self.dropout,
            "dropout_at": self.dropout_at,
            "stochastic_depth": self.stochastic_depth,
            "use_bias": self.use_bias,
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "zero_init_last": self.zero_init_last,
            "standardize_weights": self.standardize_weights,
            "data_format": self.data_format,
        }
