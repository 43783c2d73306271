"""h, the shortcut of `x_{l+1} = f(h(x_l) + F(x_l))`: the seven of Table 1, and what a
change of shape needs.
"""

from collections.abc import Mapping
from types import MappingProxyType

import keras
from keras import ops

from keras_preact import _checks, initializers
from keras_preact.layers import chains, spatial


class Shortcut(keras.Layer):
    """A shortcut: takes `x` and `F(x)`, tensors of one shape, and returns `h(x) +
    F(x)`.

    An instance given to a `ResidualUnit` is a pattern; every unit makes its own copy,
    with its own weights.

    A shortcut of your own is a subclass with its own `paths`, registered with
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
        """Return a new shortcut like this one, with the seeds of a place."""
        config = self.get_config()
        if self.kernel_initializer is not None:
            config["kernel_initializer"] = initializers.spawn(self.kernel_initializer, place)
        if config.get("seed") is not None:
            config["seed"] = initializers.derive_seed(config["seed"], place)
        return type(self).from_config(config)

    def paths(self, x, residual, training=None) -> tuple:
        """Return the two tensors that are added: through the shortcut, None where there
        is none, and through the branch.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no `paths(x, residual, training=None)`."
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
    """A shortcut with a 1x1 convolution (on vectors, a dense layer) in it."""

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
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
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

    def gate(self, x):
        """`g(x) = sigmoid(W_g x + b_g)`, of the shape of x, each value in (0, 1)."""
        return ops.sigmoid(chains.run_chain(self.transform, x))

    def get_config(self):
        return super().get_config() | {"bias": self.bias}


@keras.saving.register_keras_serializable("keras_preact")
class ExclusiveGating(_Gating):
    """`(1 - g(x)) * x + g(x) * F(x)`, as in highway networks.

    Args:
        bias: b_g at the start. The more negative, the more open the shortcut; 0 to -5
            failed, -6 gave 8.70 %.
        normalization: Between the gate's convolution and its sigmoid; the paper does
            not speak of one.

    Source: Sec. 3.1, Fig. 2 (c) and Table 1.
    """

    def paths(self, x, residual, training=None):
        gate = self.gate(x)
        return (1 - gate) * x, gate * residual


@keras.saving.register_keras_serializable("keras_preact")
class ShortcutOnlyGating(_Gating):
    """`(1 - g(x)) * x + F(x)`.

    Args:
        bias: b_g at the start: 0 gave 12.86 %, -6 gave 6.91 %.
        normalization: Between the gate's convolution and its sigmoid; the paper does
            not speak of one.

    Source: Sec. 3.1, Fig. 2 (d) and Table 1.
    """

    def paths(self, x, residual, training=None):
        return (1 - self.gate(x)) * x, residual


@keras.saving.register_keras_serializable("keras_preact")
class Conv1x1(_WeightedShortcut):
    """`W x + F(x)` with a 1x1 convolution in every unit (option C of arXiv 1512.03385;
    Table 1: 12.22 %).

    Args:
        filters: Channels out; None for as many as come in.
        strides: Step of the convolution. A unit that changes the shape sets both.
        normalization: Normalisation after the convolution; the paper mentions none.

    Source: Sec. 3.1, Fig. 2 (e) and Table 1.
    """

    projects = True

    def __init__(self, filters: int | None = None, strides: int = 1, **kwargs):
        super().__init__(**kwargs)
        self.filters = filters
        self.strides = strides

    def build(self, input_shape, residual_shape=None):
        self._build_weight(input_shape, self.filters, self.strides, use_bias=False)

    def paths(self, x, residual, training=None):
        return chains.run_chain(self.transform, x), residual

    def get_config(self):
        return super().get_config() | {"filters": self.filters, "strides": self.strides}


@keras.saving.register_keras_serializable("keras_preact")
class Dropout(Shortcut):
    """`dropout(x) + F(x)`: x in training with a share of `rate` set to 0 and the rest
    scaled by `1 / (1 - rate)`.

    At inference it is the identity. The paper's net failed with a rate of 0.5.

    Source: Sec. 3.1, Fig. 2 (f) and Table 1.
    """

    def __init__(self, rate: float = 0.5, seed: int | None = None, **kwargs):
        super().__init__(**kwargs)
        _checks.fraction(rate, "rate")
        self.rate = rate
        self.seed = seed
        self.dropout = keras.layers.Dropout(rate, seed=seed, dtype=self.dtype_policy)

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
        ValueError: for an unknown name (the message holds the nearest ones), or a gate
            bias where there is no gate.
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
            f"`gate_bias` is for a shortcut with a gate: {gated}. Received: "
            f"gate_bias={gate_bias!r}, shortcut={shortcut!r}"
        )
    return type(made).from_config(made.get_config() | {"bias": gate_bias})


@keras.saving.register_keras_serializable("keras_preact")
class ZeroPad(keras.Layer):
    """Every `strides`-th pixel of x, with zero channels after its own: option A of
    arXiv 1512.03385, without weights.

    Args:
        filters: Channels out, at least as many as come in.
        strides: Step in both directions of an image; vectors have none.
        data_format: `"channels_last"` or `"channels_first"`.
    """

    def __init__(self, filters: int, strides: int = 1, data_format: str | None = None, **kwargs):
        super().__init__(**kwargs)
        self.filters = filters
        self.strides = strides
        self.data_format = spatial.data_format_of(data_format)

    def build(self, input_shape):
        channels = input_shape[spatial.channel_axis(self.data_format, len(input_shape))]
        if channels > self.filters:
            raise ValueError(
                "Zero padding cannot take channels away: use shape_shortcut='projection' for a "
                f"unit that narrows. Received: {channels} channels in, {self.filters} out"
            )
        self.missing = self.filters - channels

    def call(self, x):
        first = spatial.channel_axis(self.data_format, x.ndim) == 1
        if x.ndim == 4:
            x = spatial.sampled(x, self.strides, self.data_format)
        sides = [(0, 0)] * x.ndim
        sides[1 if first else -1] = (0, self.missing)
        return ops.pad(x, sides)

    def compute_output_shape(self, input_shape):
        return spatial.strided_shape(input_shape, self.strides, self.data_format, self.filters)

    def get_config(self):
        return super().get_config() | {
            "filters": self.filters,
            "strides": self.strides,
            "data_format": self.data_format,
        }
