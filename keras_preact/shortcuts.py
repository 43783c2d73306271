"""h, the shortcut of `x_{l+1} = f(h(x_l) + F(x_l))`: the seven shortcuts of Table 1,
and zero padding for units that change the shape.
"""

from collections.abc import Mapping
from types import MappingProxyType

import keras
from keras import ops

from keras_preact import _checks, initializers
from keras_preact._objects import in_config
from keras_preact.layers import chains, spatial


class Shortcut(keras.Layer):
    """The base class of shortcuts: takes `x` and `F(x)` and returns `h(x) + F(x)`.

    `x` and `F(x)` have the same shape, unless the shortcut `projects`.

    A `ResidualUnit` uses the instance that it gets as a template: every unit makes its
    own copy, with its own weights.

    To add a shortcut, write a subclass with its own `paths` and register it with
    `keras.saving.register_keras_serializable`.
    """

    #: Part of its weights' paths.
    place = "shortcut"
    #: Whether it has a gate, and so a gate bias.
    gated = False
    #: Whether it reads x at all.
    reads_input = True
    #: Whether its own convolution can change the shape, so that no projection is needed before it.
    projects = False
    #: Initialiser of its weight; None for the unit's.
    kernel_initializer: keras.initializers.Initializer | None = None

    def at(self, place: str) -> "Shortcut":
        """Return a new shortcut like this one. Its seeds are derived from the seeds of
        this one and `place`, such as the name of a unit.
        """
        config = self.get_config()
        if self.kernel_initializer is not None:
            config["kernel_initializer"] = initializers.spawn(self.kernel_initializer, place)
        if config.get("seed") is not None:
            config["seed"] = initializers.derive_seed(config["seed"], place)
        return type(self).from_config(config)

    def paths(self, x, residual, training=None) -> tuple:
        """Return the two tensors that are added: one from the shortcut, or None if
        there is no shortcut, and one from the branch.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `paths(x, residual, training=None)`."
        )

    def call(self, x, residual, training=None):
        return add(*self.paths(x, residual, training))

    def compute_output_shape(self, x_shape, residual_shape=None):
        return x_shape if residual_shape is None else residual_shape


def add(shortcut, residual):
    """Add what `Shortcut.paths` returned."""
    return residual if shortcut is None else shortcut + residual


@keras.saving.register_keras_serializable("keras_preact")
class Identity(Shortcut):
    """`x + F(x)`: the clean shortcut (Table 1, first row: 6.61 %)."""

    def paths(self, x, residual, training=None):
        return x, residual


@keras.saving.register_keras_serializable("keras_preact")
class NoShortcut(Shortcut):
    """`F(x)`: the plain network, which the paper counts as constant scaling with a
    shortcut factor of 0.
    """

    reads_input = False

    def paths(self, x, residual, training=None):
        return None, residual


@keras.saving.register_keras_serializable("keras_preact")
class ConstantScaling(Shortcut):
    """`shortcut * x + residual * F(x)` with two constant factors.

    Args:
        shortcut: The factor on x, lambda in Sec. 3.
        residual: The factor on F(x). The paper's net failed with (0.5, 1) and reached
            12.35 % with (0.5, 0.5).

    Source: Sec. 3.1, Fig. 2 (b) and Table 1.
    """

    def __init__(self, shortcut: float = 0.5, residual: float = 0.5, **kwargs):
        super().__init__(**kwargs)
        self.shortcut = float(shortcut)
        self.residual = float(residual)

    def paths(self, x, residual, training=None):
        return self.shortcut * x, self.residual * residual

    def get_config(self):
        return super().get_config() | {"shortcut": self.shortcut, "residual": self.residual}


class _WeightedShortcut(Shortcut):
    """A shortcut with a 1x1 convolution, or for vectors with a dense layer."""

    def __init__(
        self, *, normalization="none", kernel_initializer=None, data_format=None, **kwargs
    ):
        super().__init__(**kwargs)
        self.normalization = chains.get_normalization(normalization)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.data_format = spatial.data_format_of(data_format)

    def _build_weight(self, input_shape, filters=None, strides=1, **kwargs):
        """Make and build the convolution, and the normalisation after it if there is
        one.
        """
        rank = len(input_shape)
        axis = spatial.channel_axis(self.data_format, rank)
        filters = filters or input_shape[axis]
        weight = chains.weight(
            filters,
            1 if rank == 4 else None,
            strides=strides,
            data_format=self.data_format,
            kernel_initializer=self.kernel_initializer or "glorot_uniform",
            name="conv" if rank == 4 else "dense",
            dtype=self.dtype_policy,
            **kwargs,
        )
        self.transform = [
            weight,
            *chains.normalization(
                self.normalization, axis, filters, name="norm", dtype=self.dtype_policy
            ),
        ]
        chains.build_chain(self.transform, input_shape)

    def get_config(self):
        return super().get_config() | {
            "normalization": chains.normalization_config(self.normalization),
            "kernel_initializer": in_config(self.kernel_initializer),
            "data_format": self.data_format,
        }


class _Gating(_WeightedShortcut):
    place = "gate"
    gated = True

    def __init__(self, bias: float = -6.0, **kwargs):
        super().__init__(**kwargs)
        self.bias = float(bias)

    def build(self, input_shape, residual_shape=None):
        self._build_weight(
            input_shape, bias_initializer=keras.initializers.Constant(self.bias), use_bias=True
        )

    def gate(self, x, training=None):
        """`g(x) = sigmoid(W_g x + b_g)`, with the shape of x and values in (0, 1)."""
        return ops.sigmoid(chains.run_chain(self.transform, x, training))

    def get_config(self):
        return super().get_config() | {"bias": self.bias}


@keras.saving.register_keras_serializable("keras_preact")
class ExclusiveGating(_Gating):
    """`(1 - g(x)) * x + g(x) * F(x)`, as in highway networks.

    Args:
        bias: Initial value of b_g. A more negative value opens the shortcut further.
            0 to -5 failed, -6 gave 8.70 %.
        normalization: Normalisation between the gate's convolution and its sigmoid; the
            paper mentions none.

    Source: Sec. 3.1, Fig. 2 (c) and Table 1.
    """

    def paths(self, x, residual, training=None):
        gate = self.gate(x, training)
        return (1 - gate) * x, gate * residual


@keras.saving.register_keras_serializable("keras_preact")
class ShortcutOnlyGating(_Gating):
    """`(1 - g(x)) * x + F(x)`.

    Args:
        bias: Initial value of b_g: 0 gave 12.86 %, -6 gave 6.91 %.
        normalization: Normalisation between the gate's convolution and its sigmoid; the
            paper mentions none.

    Source: Sec. 3.1, Fig. 2 (d) and Table 1.
    """

    def paths(self, x, residual, training=None):
        return (1 - self.gate(x, training)) * x, residual


@keras.saving.register_keras_serializable("keras_preact")
class Conv1x1(_WeightedShortcut):
    """`W x + F(x)` with a 1x1 convolution in every unit (option C of arXiv 1512.03385;
    Table 1: 12.22 %).

    Args:
        filters: Number of output channels. None: the number of input channels.
        strides: Stride of the convolution. A unit that changes the shape sets both.
        normalization: Normalisation after the convolution; the paper mentions none.

    Source: Sec. 3.1, Fig. 2 (e) and Table 1.
    """

    projects = True

    def __init__(self, filters: int | None = None, strides: int = 1, **kwargs):
        super().__init__(**kwargs)
        if filters is not None:
            _checks.positive_int(filters, "filters")
        _checks.positive_int(strides, "strides")
        self.filters, self.strides = _checks.plain((filters, strides))

    def build(self, input_shape, residual_shape=None):
        self._build_weight(input_shape, self.filters, self.strides, use_bias=False)

    def paths(self, x, residual, training=None):
        return chains.run_chain(self.transform, x, training), residual

    def get_config(self):
        return super().get_config() | {"filters": self.filters, "strides": self.strides}


@keras.saving.register_keras_serializable("keras_preact")
class Dropout(Shortcut):
    """`dropout(x) + F(x)`: in training a share of `rate` of x is set to 0 and the rest
    is multiplied by `1 / (1 - rate)`.

    At inference it is the identity. The paper's net failed with a rate of 0.5.

    Source: Sec. 3.1, Fig. 2 (f) and Table 1.
    """

    def __init__(self, rate: float = 0.5, seed: int | None = None, **kwargs):
        super().__init__(**kwargs)
        _checks.fraction(rate, "rate")
        self.rate = _checks.plain(rate)
        self.seed = seed = _checks.plain(seed)
        self.dropout = keras.layers.Dropout(self.rate, seed=seed, dtype=self.dtype_policy)

    def paths(self, x, residual, training=None):
        return self.dropout(x, training=training), residual

    def get_config(self):
        return super().get_config() | {"rate": self.rate, "seed": self.seed}


#: Name to class; every class can be made without arguments.
SHORTCUTS: Mapping[str, type[Shortcut]] = MappingProxyType(
    {
        "identity": Identity,
        "constant_scaling": ConstantScaling,
        "exclusive_gating": ExclusiveGating,
        "shortcut_only_gating": ShortcutOnlyGating,
        "conv1x1": Conv1x1,
        "dropout": Dropout,
        "none": NoShortcut,
    }
)


def get(shortcut: str | dict | Shortcut, gate_bias: float | None = None) -> Shortcut:
    """Return the shortcut of that name, or `shortcut` itself if it is one already.

    Args:
        shortcut: A name from `SHORTCUTS`, a `Shortcut`, or the config of one.
        gate_bias: The bias b_g that the gate starts with, for the two shortcuts that
            have a gate.

    Raises:
        ValueError: for an unknown name (the message holds the nearest ones), or for a
            gate bias if the shortcut has no gate.
    """
    if isinstance(shortcut, dict):  # from a serialised config
        shortcut = keras.saving.deserialize_keras_object(shortcut)
    made = (
        shortcut
        if isinstance(shortcut, Shortcut)
        else _checks.lookup(SHORTCUTS, shortcut, "shortcut")()
    )
    if gate_bias is None:
        return made
    if not made.gated:
        gated = ", ".join(name for name, row in SHORTCUTS.items() if row.gated)
        raise ValueError(
            f"`gate_bias` needs a shortcut with a gate: {gated}. Received: "
            f"gate_bias={gate_bias!r}, shortcut={shortcut!r}"
        )
    return type(made).from_config(made.get_config() | {"bias": gate_bias})


@keras.saving.register_keras_serializable("keras_preact")
class ZeroPad(keras.Layer):
    """Takes every `strides`-th pixel of x and appends channels of zeros: option A of
    arXiv 1512.03385. It has no weights.

    Args:
        filters: Number of output channels, at least the number of input channels.
        strides: Stride in both directions of an image; vectors have none.
        data_format: `"channels_last"` or `"channels_first"`.
    """

    def __init__(self, filters: int, strides: int = 1, data_format: str | None = None, **kwargs):
        super().__init__(**kwargs)
        _checks.positive_int(filters, "filters")
        _checks.positive_int(strides, "strides")
        self.filters, self.strides = _checks.plain((filters, strides))
        self.data_format = spatial.data_format_of(data_format)

    def build(self, input_shape):
        channels = input_shape[spatial.channel_axis(self.data_format, len(input_shape))]
        if channels > self.filters:
            raise ValueError(
                "Zero padding cannot remove channels: use shape_shortcut='projection' for a unit "
                f"with fewer channels out. Received: {channels} channels in, {self.filters} out"
            )
        self.missing = self.filters - channels

    def call(self, x):
        first = spatial.channel_axis(self.data_format, x.ndim) == 1
        if x.ndim == 4:
            x = spatial.sampled(x, self.strides, self.data_format)
        pad_width = [(0, 0)] * x.ndim
        pad_width[1 if first else -1] = (0, self.missing)
        return ops.pad(x, pad_width)

    def compute_output_shape(self, input_shape):
        return spatial.strided_shape(input_shape, self.strides, self.data_format, self.filters)

    def get_config(self):
        return super().get_config() | {
            "filters": self.filters,
            "strides": self.strides,
            "data_format": self.data_format,
        }
