"""ResidualUnit: `x_{l+1} = f(h(x_l) + F(x_l))` with any arrangement, shortcut and branch."""

import inspect
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_preact import (
    _checks,
    arrangements,
    blocks,
    descriptions,
    initializers,
    options,
    shortcuts,
)
from keras_preact import downsampling as downsamplings
from keras_preact._inside import HoldsLayers
from keras_preact._objects import in_config
from keras_preact.backend import keras_private
from keras_preact.layers import chains, spatial, streams
from keras_preact.layers.components import Components, Weights


@keras.saving.register_keras_serializable("keras_preact")
class ResidualUnit(HoldsLayers):
    """A residual unit, `x_{l+1} = f(h(x_l) + F(x_l))`.

    `block`, `arrangement` and `shortcut` say what F, f and h are; `describe()` lists
    their layers in order.

    Args:
        filters: Sets the widths: the unit returns `filters` channels, a bottleneck
            `4 * filters`. The blocks say how wide the inside is.
        block: The weights of F: a name from `kp.BLOCKS` or an object with options, such
            as `kp.blocks.Bottleneck(groups=32, base_width=4)`. The names are `"basic"`
            (3x3, 3x3), `"bottleneck"` (1x1, 3x3, 1x1), `"single"` (one 3x3: the 1-layer
            skip of Table 3) and `"dense"` (two dense layers, for vectors). For a
            transformer they are `"attention"`, `"mlp"` and `"swiglu"`; use these with
            the arrangements `"pre_norm"`, `"post_norm"` and `"peri_norm"`, and a
            normalisation other than `"batch"`.
        strides: Stride of the unit. A unit changes the shape if its strides are above
            1, if its block has dilation instead of strides, or if it returns another
            number of channels than it gets.
        arrangement: Order of normalisation, activation and weights: a name from
            `kp.ARRANGEMENTS` or `kp.arrangements.TRANSFORMER_ARRANGEMENTS`, or an
            `Arrangement`.
        shortcut: h: a name from `kp.SHORTCUTS`, or an object such as
            `kp.shortcuts.ConstantScaling(0.5, 0.5)`.
        shape_shortcut: How x gets the shape of F(x) if the unit changes the shape:
            `"projection"` (1x1 convolution), `"zero_pad"` (option A), or `"auto"`: the
            network's choice, in a unit by itself a projection. h is then applied to the
            result. The shortcut `"conv1x1"` is its own projection, unless zeros are
            padded.
        activate_shape_shortcut: Whether the path that changes the shape starts from the
            activated input, as the branch does (appendix), or from the raw one. A unit
            that keeps the shape always takes the raw x.
        downsampling: How strides above 1 shrink the map: a name from
            `kp.downsampling.DOWNSAMPLINGS`, or a `Downsampling`. `"strided"`: strided
            convolutions.
            `"average"`: average pooling before the projection (ResNet-D). `"blur"`:
            anti-aliased. `"max"`: max pooling over 2 x 2 pixels on both paths; the
            convolution in the branch runs at every pixel before it.
        normalization: `"batch"`, `"layer"`, `"group"`, `"rms"`, `"none"`, or a Keras
            layer as a template, such as
            `keras.layers.BatchNormalization(momentum=0.99)`.
        activation: Any Keras activation, a function, or a layer such as
            `keras.layers.PReLU(shared_axes=[1, 2])` as a template: each place has a copy
            with its own weights. The block `"swiglu"` has its own, silu.
        dropout: Rate of the dropout on the branch; 0 for none.
        dropout_at: `"between_weights"`, after the activation and before each weight but
            the first (wide residual networks), or `"before_addition"`, at the end of F.
        dropout_varies: Whether `kp.set_dropout` and `kp.DropoutSchedule` can change the
            rate in training. It then starts with `dropout`, which may be 0.
        stochastic_depth: Probability that F is dropped for an example in training
            (arXiv 1603.09382). If F is kept, it is divided by `1 - stochastic_depth`.
            At inference F is unchanged. None: no stochastic depth.
        use_bias: Whether the weights of the branch and the projection have a bias;
            `"unless_norm"`: only weights without a normalisation right after them.
        bias_initializer: Initialiser of these biases; each draws its own values.
        kernel_initializer: Initialiser of all kernels; each weight draws its own
            values. None: He with fan_out, as in the released code.
        kernel_regularizer: Regulariser of the kernels of the branch, the projection and
            the shortcut.
        zero_init_last: Whether F starts at 0, so that the unit starts as its shortcut.
            The gamma of the normalisation at the end of F starts at 0. If there is no
            such gamma, as in pre-activation, the last kernel of F does; for attention
            it is the kernel after the heads (arXiv 1706.02677, Sec. 5.1).
        data_format: `"channels_last"` or `"channels_first"`; None for Keras' setting.
        seed: Seed of the initial values, if the initialisers have none, and of the masks
            of all dropouts. Units made by `at` have seeds of their own.
        name, dtype, trainable: Arguments of every Keras layer; dtype is a policy such
            as `"mixed_bfloat16"`.

    Input: `(batch, height, width, channels)`; `(batch, ..., features)` for dense
        blocks; `(batch, tokens, features)` for attention.

    Output: the same with `ceil(height / strides)`, `ceil(width / strides)` and
        `filters * expansion` channels. With several residual streams, input and output
        have that many times the channels (`kp.shortcuts.HyperConnections`).

    The layers exist after `build`, because they depend on the number of input channels.

    Attributes:
        h: The argument `shortcut`, as a `kp.shortcuts.Shortcut`.
        shortcut: The layers of h, after `build`.
        first, rest, drop: The layers of F: before the first weight, the others, and
            stochastic depth.
        shape_change: The layers before h that give x the shape of F(x).
        after_addition: The layers of f.

    A weight's path says where it is: `branch/conv_1/kernel`, `branch/norm_1/gamma`
    (norm_0 before the first weight, norm_i after the i-th),
    `after_addition/norm/gamma`, `shortcut/conv/kernel`, `gate/conv/bias`,
    `projection/conv/kernel`. Units for vectors and tokens have `branch/dense_1/kernel`,
    `branch/attention_1/query/kernel` (and `key`, `value`, `output`),
    `branch/gated_1/dense_1/kernel` and, for its gate, `branch/gated_1/gate_1/kernel`.
    Weights with the same meaning have the same names in every arrangement.

    Raises:
        ValueError: for unknown names (with the nearest ones), options that contradict
            each other, or an input that does not fit.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> unit = kp.ResidualUnit(16, block="bottleneck", strides=2)
    >>> tuple(unit(np.zeros((2, 32, 32, 16), "float32")).shape)
    (2, 16, 16, 64)
    >>> print(unit.describe())
    F: norm_0, relu, conv_1 1x1/2, norm_1, relu, conv_2 3x3, norm_2, relu, conv_3 1x1
    h: conv 1x1/2
    f: identity

    Source: Eq. 1 and 2, Fig. 4, Table 1 and the appendix of arXiv 1603.05027.
    """

    def __init__(
        self,
        filters: int,
        *,
        block: str | blocks.Block = "basic",
        strides: int = 1,
        arrangement: str | arrangements.Arrangement = "full_preactivation",
        shortcut: str | shortcuts.Shortcut = "identity",
        shape_shortcut: str = "auto",
        activate_shape_shortcut: bool = True,
        downsampling: str | downsamplings.Downsampling = "strided",
        normalization: str | keras.Layer = "batch",
        activation: Any = "relu",
        dropout: float = 0.0,
        dropout_at: str = "between_weights",
        dropout_varies: bool = False,
        stochastic_depth: float | None = None,
        use_bias: bool | str = False,
        bias_initializer: Any = "zeros",
        kernel_initializer: Any = None,
        kernel_regularizer: Any = None,
        zero_init_last: bool = False,
        data_format: str | None = None,
        seed: int | None = None,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool = True,
    ):
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        self.filters = _checks.plain(filters)
        self.block: Any = blocks.get(block)
        self.strides = _checks.plain(strides)
        self.arrangement = arrangements.get(arrangement)
        self.h = shortcuts.get(shortcut)
        self.shape_shortcut = shape_shortcut
        self.activate_shape_shortcut = _checks.plain(activate_shape_shortcut)
        self.downsampling = downsamplings.get(downsampling)
        self.normalization = chains.get_normalization(normalization)
        self.activation = chains.get_activation(activation)
        self.dropout = _checks.plain(dropout)
        self.dropout_at = dropout_at
        self.dropout_varies = _checks.plain(dropout_varies)
        self.stochastic_depth = _checks.plain(stochastic_depth)
        self.use_bias = use_bias
        self.seed = _checks.plain(seed)
        self.bias_initializer = initializers.seeded(keras.initializers.get(bias_initializer), seed)
        kernel = initializers.released_he() if kernel_initializer is None else kernel_initializer
        self.kernel_initializer = initializers.seeded(keras.initializers.get(kernel), seed)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.zero_init_last = _checks.plain(zero_init_last)
        self.data_format = spatial.data_format_of(data_format)
        options.check(self)
        if self.block.activation:
            self.activation = keras.activations.get(self.block.activation)
        if self.block.strided is None:
            self.data_format = "channels_last"  # features are the last axis
        self.components = Components(
            self.normalization, self.activation, use_bias, self.data_format, self.dtype_policy
        )
        self.weight_settings = Weights(
            self.kernel_initializer,
            self.kernel_regularizer,
            self.bias_initializer,
            self.data_format,
            self.dtype_policy,
        )

    def build(self, input_shape):
        axis, channels = self._check_input(input_shape)
        # dilation takes the place of strides: the unit has the weights of the unit with strides
        dilated = getattr(self.block, "dilated_strides", 1)
        changes_shape = self.strides * dilated > 1 or channels != self.channels_out
        several = self.h.streams > 1
        self._shortcut_is_activated = changes_shape and self.activate_shape_shortcut and not several
        stream_shape = spatial.strided_shape(input_shape, 1, self.data_format, channels)

        # F. Files of weights contain the names of these attributes.
        with keras.name_scope("branch"):
            self.first = self.components.make(self.arrangement.first, axis, channels, "{}_0")
            shape = chains.build_chain(self.first, stream_shape)
            self.rest = self.block.branch(self, axis)
            shape = chains.build_chain(self.rest, shape)
            self.drop = None
            if self.stochastic_depth is not None:
                self.drop = chains.StochasticDepth(
                    self.stochastic_depth,
                    seed=self.seed_at("stochastic_depth"),
                    dtype=self.dtype_policy,
                )

        # h, after the layers that give x the shape of F(x)
        with keras.name_scope("projection"):
            self.shape_change, strides = self._before_h(axis) if changes_shape else ([], 1)
            changed = chains.build_chain(self.shape_change, stream_shape)
        site = shortcuts.Site(
            rank=len(input_shape),
            channels=self.channels_out,
            strides=self.strides if several else strides,
            weights=self.weight_settings,
            seed=self.seed_at("shortcut"),
        )
        self.shortcut = shortcuts.ShortcutLayers(self.h, site)
        self.shortcut.build(input_shape if several else changed)

        # f
        with keras.name_scope("after_addition"):
            self.after_addition = self.components.make(
                self.arrangement.after_addition, axis, self.channels_out
            )
            chains.build_chain(self.after_addition, shape)
        if not self.trainable:
            # layers made after `__init__` are trainable, but a frozen norm must keep its statistics
            for layer in keras_private.sublayers(self):
                layer.trainable = False
        self.freeze_inside_again()

    @property
    def channels_out(self) -> int:
        """Number of channels of F(x), and of every stream of the output."""
        return self.filters * self.block.expansion

    def compute_output_shape(self, input_shape):
        self._check_input(input_shape)
        channels = self.channels_out * self.h.streams
        return spatial.strided_shape(input_shape, self.strides, self.data_format, channels)

    def call(self, x, drop_rate=None, shortcut_factor=None, training=None):
        numbers = {"drop_rate": drop_rate, "shortcut_factor": shortcut_factor}
        return self.trace(x, **numbers, training=training).output

    def trace(
        self,
        x,
        *,
        drop_rate=None,
        shortcut_factor=None,
        residual_scale=None,
        detach_residual=False,
        training=None,
    ) -> "Trace":
        """Apply the unit and return its parts.

        Args:
            x: x_l.
            drop_rate: A scalar that replaces `stochastic_depth`, if that is not None.
            shortcut_factor: A scalar that replaces the `factor` of a shortcut that
                `differs` between units.
            residual_scale: A scalar that multiplies F(x_l). With 0 only the shortcut is
                left.
            detach_residual: Whether gradients flow through the shortcut alone.
            training: Whether the unit is in training, as for every Keras layer.
        """
        x = chains.prepared(self, x)
        read, transformed = self.shortcut.read(x, training)  # x itself, unless it has streams
        activated = chains.run_chain(self.first, read, training)
        residual = chains.run_chain(self.rest, activated, training)
        if self.drop is not None:
            residual = self.drop(residual, drop_rate, training=training)
        if residual_scale is not None:
            residual = residual * ops.cast(residual_scale, residual.dtype)
        source = activated if self._shortcut_is_activated else x
        changed = self._on_streams(self.shape_change, source, training)
        # gates and constant scaling also change the residual
        shortcut, residual = self.shortcut.paths(
            changed, residual, transformed, training, shortcut_factor
        )
        if detach_residual:
            residual = ops.stop_gradient(residual)
        total = shortcuts.add(shortcut, residual)
        output = self._on_streams(self.after_addition, total, training)
        return Trace(activated, shortcut, residual, total, output)

    def _on_streams(self, chain: list[keras.Layer], x, training):
        """Apply layers to each stream of x by itself."""
        return streams.run_chain(chain, x, training, self.h.streams, self.shortcut.axis)

    def get_config(self):
        return super().get_config() | {
            "filters": self.filters,
            "block": blocks.serialize(self.block),
            "strides": self.strides,
            "arrangement": arrangements.serialize(self.arrangement),
            "shortcut": in_config(self.h),
            "shape_shortcut": self.shape_shortcut,
            "activate_shape_shortcut": self.activate_shape_shortcut,
            "downsampling": downsamplings.serialize(self.downsampling),
            "normalization": chains.normalization_config(self.normalization),
            "activation": chains.activation_config(self.activation),
            "dropout": self.dropout,
            "dropout_at": self.dropout_at,
            "dropout_varies": self.dropout_varies,
            "stochastic_depth": self.stochastic_depth,
            "use_bias": self.use_bias,
            "bias_initializer": in_config(self.bias_initializer),
            "kernel_initializer": in_config(self.kernel_initializer),
            "kernel_regularizer": in_config(self.kernel_regularizer),
            "zero_init_last": self.zero_init_last,
            "data_format": self.data_format,
            "seed": self.seed,
        }

    def at(self, name: str, **changes: Any) -> "ResidualUnit":
        """Return a new unit with the arguments of this one, for another place in a
        network.

        Args:
            name: Name of the new unit. If initialisers and the dropout of the shortcut
                have seeds, the seeds of the new unit are derived from these and its
                name.
            **changes: Arguments that differ, such as `strides=1`.

        Two units with the same seeded initialiser start with the same values, unless
        `at` made them.
        """
        own: dict[str, Any] = {
            "name": name,
            "kernel_initializer": initializers.spawn(self.kernel_initializer, name),
            "bias_initializer": initializers.spawn(self.bias_initializer, name),
            "shortcut": shortcuts.get(changes.pop("shortcut", self.h)).at(name),
            "seed": self.seed_at(name),
        }
        return self.changed(**own | changes)

    def changed(self, **changes: Any) -> "ResidualUnit":
        """Return a new unit with the arguments of this one, except `changes`."""
        unit = type(self)(**self.arguments() | changes)
        unit._frozen_layers = tuple(self.frozen_paths())
        return unit

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of this unit. An argument of a subclass must be an
        attribute with the same name.
        """
        others = {"shortcut": self.h, "dtype": self.dtype_policy}
        names = _arguments_of(type(self))
        return {name: others[name] if name in others else getattr(self, name) for name in names}

    def _check_input(self, shape) -> tuple[int, int]:
        """Return the channel axis, and the channel count of a stream, of an input of
        `shape`.
        """
        axis = spatial.channel_axis(self.data_format, len(shape))
        if len(shape) not in self.block.ranks or shape[axis] is None:
            raise ValueError(
                f"A unit with block={self.block.name!r} and data_format={self.data_format!r} "
                f"takes {self.block.inputs} with a known number of channels. Received: "
                f"shape={tuple(shape)}"
            )
        if shape[axis] % self.h.streams:
            raise ValueError(
                f"The input of a unit with {self.h.streams} streams holds all of them, so its "
                "number of channels must be a multiple of that. `CopyStreams` of "
                f"`keras_preact.layers.streams` makes it. Received: shape={tuple(shape)}"
            )
        return axis, shape[axis] // self.h.streams

    def _before_h(self, axis: int) -> tuple[list[keras.Layer], int]:
        """Return the layers between x and h in a unit that changes the shape, and the
        strides of h.

        | h | `shape_shortcut` | layers | strides of h |
        |---|---|---|---|
        | does not read x | any | none | 1 |
        | projects | not `"zero_pad"` | pooling | the unit's; 1 after a pooling |
        | other | `"zero_pad"` | pooling, zeros | 1 |
        | other | `"projection"`, `"auto"` | pooling, projection | 1 |
        """
        if not self.h.reads_input:
            return [], 1
        pooling = self.pooling("projection")
        strides = 1 if pooling else self.strides
        if self.shape_shortcut == "zero_pad":
            settings: dict = {"name": "zero_pad", "dtype": self.dtype_policy}
            zeros = shortcuts.ZeroPad(self.channels_out, strides, self.data_format, **settings)
            return [*pooling, zeros], 1
        if self.h.projects:
            return pooling, strides
        return [*pooling, *self._projection(axis, strides)], 1

    def _projection(self, axis: int, strides: int) -> list[keras.Layer]:
        """Make the 1x1 convolution of the shortcut, and the components after it."""
        after = self.components.make(self.arrangement.projection, axis, self.channels_out)
        name = "dense" if self.block.strided is None else "conv"
        projection = self.block.projection(
            self.channels_out,
            name=name,
            strides=strides,
            use_bias=self.components.has_bias(after),
            **self.weight_settings.at("projection", name),
        )
        return [projection, *after]

    def pooling(self, place: str) -> list[keras.Layer]:
        """Make the pooling at a place of its downsampling, if there is one."""
        dilates = getattr(self.block, "dilated_strides", 1) > 1
        return self.downsampling.pooling(
            place,
            self.strides,
            self.data_format,
            self.dtype_policy,
            dilation=self.block.dilation if dilates else None,
        )

    def seed_at(self, place: str) -> int | None:
        """Return the seed of the masks at a place of the unit; None for a random one."""
        return None if self.seed is None else initializers.derive_seed(self.seed, place)

    def describe(self) -> str:
        """Return the layers of the unit in order, a line for F, h and f each.

        A unit that is not built is described for as many input channels as it returns.

        Example:

        >>> import keras_preact as kp
        >>> print(kp.ResidualUnit(16, arrangement="original", shortcut="none").describe())
        F: conv_1 3x3, norm_1, relu, conv_2 3x3, norm_2
        h: NoShortcut
        f: relu
        """
        return descriptions.text(self.paths())

    def paths(self) -> descriptions.Paths:
        """Return the names of the layers of F, h and f, in order, as `describe` does."""
        unit = self if self.built else self._built_copy()
        is_identity = isinstance(unit.h, shortcuts.Identity)
        branch = [*unit.first, *unit.rest, *filter(None, [unit.drop])]
        shortcut = [*unit.shape_change]
        (shortcut if unit.h.transforms == "x" else branch).extend(unit.shortcut.transform)
        return {
            "F": chains.in_words(branch),
            "h": [*chains.in_words(shortcut), *([] if is_identity else [type(unit.h).__name__])],
            "f": chains.in_words(unit.after_addition),
        }

    def _repr_html_(self) -> str:
        return descriptions.diagram(f"{type(self).__name__} {self.name!r}", self.paths())

    def _built_copy(self) -> "ResidualUnit":
        """Return a built copy."""
        unit = self.changed()
        shape: list[int | None] = [None] * self.block.ranks.start
        axis = spatial.channel_axis(self.data_format, len(shape))
        shape[axis] = self.channels_out * self.h.streams
        unit.build(tuple(shape))
        return unit


def _arguments_of(unit_class: type) -> tuple[str, ...]:
    """Return the names of the arguments of a unit."""
    parameters = inspect.signature(unit_class).parameters
    names = {each.name: each for each in parameters.values() if each.kind is not each.VAR_KEYWORD}
    passes_on = len(names) < len(parameters)
    return tuple(names | inspect.signature(ResidualUnit).parameters if passes_on else names)


class Trace(NamedTuple):
    """The parts of a residual unit for one input, with the paper's names.

    Attributes:
        activated: Input of the first weight of F.
        shortcut: What the shortcut adds, h(x_l); None in a plain network.
        residual: What the branch adds: F(x_l) after stochastic depth, the residual
            scale, and the shortcut's factor or gate.
        sum: h(x_l) + F(x_l).
        output: f of the sum: x_{l+1}.
    """

    activated: Any
    shortcut: Any
    residual: Any
    sum: Any
    output: Any
