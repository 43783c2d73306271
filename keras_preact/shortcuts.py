"""h, the shortcut of `x_{l+1} = f(h(x_l) + F(x_l))`: the seven shortcuts of Table 1,
later ones, and zero padding for units that change the shape.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import keras
from keras import ops

from keras_preact import _checks, initializers
from keras_preact._objects import Specification, from_table, in_config
from keras_preact.layers import chains, spatial, streams
from keras_preact.layers.components import Weights

#: Settings in older configurations of shortcuts, which were layers: those of every layer, and those
#: that a unit decides.
_OF_LAYERS = ("name", "trainable", "dtype", "activity_regularizer", "autocast")
_OF_UNITS = ("data_format", "filters", "strides")


@dataclasses.dataclass(frozen=True)
class Site:
    """The place of a shortcut: what its unit decides about its layers.

    Args:
        rank: Number of dimensions of x, with the batch.
        channels: Number of channels of F(x).
        strides: Strides of a shortcut that `projects` or has several streams; 1 for the
            others.
        weights: The settings of the unit's weights.
        seed: Seed of masks; None for a random one.
    """

    rank: int
    channels: int
    strides: int
    weights: Weights
    seed: int | None

    @property
    def dtype(self) -> Any:
        """The unit's dtype policy."""
        return self.weights.dtype

    def weight(self, **settings: Any) -> keras.Layer:
        """Make a 1x1 convolution, or for vectors a dense layer, that returns as many
        channels as F(x).
        """
        is_map = self.rank == 4
        defaults = {
            **self.weights.kernel_at("shortcut"),
            "strides": self.strides,
            "name": "conv" if is_map else "dense",
        }
        return chains.weight(self.channels, 1 if is_map else None, **defaults | settings)

    @property
    def axis(self) -> int:
        """Axis of the channels."""
        return spatial.channel_axis(self.weights.data_format, self.rank)

    def normalization(self, kind: chains.Normalization) -> list[keras.Layer]:
        """Make a normalisation: a list with one layer, or an empty list for `"none"`."""
        return chains.normalization(kind, self.axis, self.channels, name="norm", dtype=self.dtype)


@dataclasses.dataclass(frozen=True)
class Shortcut(Specification):
    """The base class of shortcuts: what `x` and `F(x)` contribute to `h(x) + F(x)`.

    A shortcut has options and no weights. Each unit calls `layers` to make the layers
    of its own shortcut, and `paths` to combine their output with `F(x)`.

    To add a shortcut, write a frozen dataclass with its options as fields and register it
    with `keras.saving.register_keras_serializable`. An option `kernel_initializer` or
    `seed` gets other values in each unit.

    Attributes:
        streams: Number of residual streams, n. If there are several, x has n times the
            channels, one stream after the other.
        place: Part of the paths of its weights.
        gated: Whether it has a gate with an initial bias, its option `bias`.
        reads_input: Whether it reads x at all.
        projects: Whether its own layers can change the shape of x, so that no projection
            is needed before them.
        transforms: What its layers transform: `"x"`, `"residual"`, which is F(x), or
            `"both"`: the first layer gets the tuple `(x, F(x))`.
        computes_coefficients: Whether its layers compute from x the coefficients of the
            paths, as a gate does. Analyses that take the shortcut as a linear map of x
            keep them as they are.
        differs: Whether its option `factor` is a number that differs between the units of
            a network, see `of_unit`. In a stack of units, it is a tensor.

    Example:

    >>> import dataclasses
    >>> import keras
    >>> import numpy as np
    >>> import keras_preact as kp
    >>> @keras.saving.register_keras_serializable("mine")
    ... @dataclasses.dataclass(frozen=True)
    ... class Mixed(kp.shortcuts.Shortcut):
    ...     share: float = 0.5
    ...
    ...     def layers(self, site):
    ...         return [site.weight(use_bias=False)]
    ...
    ...     def paths(self, x, residual, transformed):
    ...         return (1 - self.share) * x + self.share * transformed, residual
    >>> unit = kp.ResidualUnit(16, shortcut=Mixed(share=0.1))
    >>> tuple(unit(np.zeros((2, 8, 8, 16), "float32")).shape)
    (2, 8, 8, 16)
    """

    streams: ClassVar[int] = 1
    place: ClassVar[str] = "shortcut"
    gated: ClassVar[bool] = False
    reads_input: ClassVar[bool] = True
    projects: ClassVar[bool] = False
    transforms: ClassVar[str] = "x"
    computes_coefficients: ClassVar[bool] = False
    differs: ClassVar[bool] = False

    def layers(self, site: Site) -> list[keras.Layer]:
        """Make the layers that transform x, or what `transforms` says, in order; none
        by default.
        """
        return []

    def reads(self, x, transformed):
        """Return what the branch reads, for a shortcut with several streams.

        Args:
            x: The streams of the unit's input, a list.
            transformed: Output of `layers` for the unit's input, in any form.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `reads(x, transformed)`.")

    def paths(self, x, residual, transformed) -> tuple:
        """Return the two tensors that are added: one from the shortcut, or None if
        there is no shortcut, and one from the branch. With several streams, x and both
        results are lists of streams.

        Args:
            x: The input of the shortcut. It has the shape of F(x), unless the shortcut
                `projects`.
            residual: F(x).
            transformed: Output of `layers`, in any form; x itself without layers. With
                several streams, what `reads` received.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `paths(x, residual, transformed)`."
        )

    def at(self, place: str) -> "Shortcut":
        """Return this shortcut with seeds that are derived from its seeds and `place`,
        such as the name of a unit.
        """
        changes: dict[str, Any] = {}
        if (kernel := getattr(self, "kernel_initializer", None)) is not None:
            changes["kernel_initializer"] = initializers.spawn(kernel, place)
        if (seed := getattr(self, "seed", None)) is not None:
            changes["seed"] = initializers.derive_seed(seed, place)
        return dataclasses.replace(self, **changes)

    def of_unit(self, index: int, units: int) -> "Shortcut":
        """Return this shortcut for unit `index` (1, 2, ...) of a network of `units`."""
        return self

    def with_factor(self, factor) -> "Shortcut":
        """Return this shortcut with another `factor`.

        Raises:
            ValueError: unless its factor `differs` between units.
        """
        if not self.differs:
            raise ValueError(
                "`shortcut_factors` needs a shortcut whose factor differs between units, such as "
                f"kp.shortcuts.DecayedIdentity. Received: {self!r}"
            )
        changes: dict[str, Any] = {"factor": factor}
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Shortcut":
        old = {*_OF_LAYERS, *_OF_UNITS} - {field.name for field in dataclasses.fields(cls)}
        return super().from_config({key: config[key] for key in config.keys() - old})


class ShortcutLayers(keras.Layer):
    """The layers of a shortcut in one unit.

    Args:
        shortcut: The shortcut.
        site: Its place.
    """

    def __init__(self, shortcut: Shortcut, site: Site):
        super().__init__(name=shortcut.place, dtype=site.dtype)
        self.of = shortcut
        self.axis = site.axis
        self.transform = shortcut.layers(site)  # files of weights contain this name

    def build(self, input_shape):
        if self.transform:
            shape = chains.build_chain(self.transform[:-1], input_shape)
            self.transform[-1].build(shape)  # its output may be several tensors

    def read(self, x, training=None) -> tuple:
        """Return what the branch reads, and with several streams the output of the layers,
        which `paths` takes.
        """
        if self.of.streams == 1:
            return x, None
        transformed = chains.run_chain(self.transform, x, training)
        return self.of.reads(self._split(x), transformed), transformed

    def paths(self, x, residual, transformed=None, training=None, factor=None) -> tuple:
        """Return what `Shortcut.paths` returns, with the streams in one tensor. A `factor`
        replaces the shortcut's own.
        """
        of = self.of if factor is None else self.of.with_factor(factor)
        if of.streams == 1:
            given = {"x": x, "residual": residual, "both": (x, residual)}[of.transforms]
            return of.paths(x, residual, chains.run_chain(self.transform, given, training))
        paths = of.paths(self._split(x), residual, transformed)
        return tuple(ops.concatenate(path, self.axis) for path in paths)

    def linear(self, x, training=None) -> Callable:
        """Return the linear map that the shortcut is if its coefficients, such as gates and
        those of streams, stay as they are at x.
        """
        fixed = self.of.computes_coefficients
        coefficients = chains.run_chain(self.transform, x, training) if fixed else None

        def apply(vector):
            transformed = coefficients
            if not fixed and self.of.transforms == "x":
                transformed = chains.run_chain(self.transform, vector, training)
            if self.of.streams == 1:
                path, _ = self.of.paths(vector, ops.zeros_like(vector), transformed)
                return ops.zeros_like(vector) if path is None else path
            parts = self._split(vector)
            path, _ = self.of.paths(parts, ops.zeros_like(parts[0]), transformed)
            return ops.concatenate(path, self.axis)

        return apply

    def _split(self, x) -> list:
        return ops.split(x, self.of.streams, self.axis)


def add(shortcut, residual):
    """Add what `Shortcut.paths` returned."""
    return residual if shortcut is None else shortcut + residual


@keras.saving.register_keras_serializable("keras_preact")
class Identity(Shortcut):
    """`x + F(x)`: the clean shortcut (Table 1, first row: 6.61 %)."""

    def paths(self, x, residual, transformed):
        return x, residual


@keras.saving.register_keras_serializable("keras_preact")
class NoShortcut(Shortcut):
    """`F(x)`: the plain network, which the paper counts as constant scaling with a
    shortcut factor of 0.
    """

    reads_input = False

    def paths(self, x, residual, transformed):
        return None, residual


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True)
class ConstantScaling(Shortcut):
    """`shortcut * x + residual * F(x)` with two constant factors.

    Args:
        shortcut: The factor on x, lambda in Sec. 3.
        residual: The factor on F(x). The paper's net failed with (0.5, 1) and reached
            12.35 % with (0.5, 0.5).

    Source: Sec. 3.1, Fig. 2 (b) and Table 1.
    """

    shortcut: float = 0.5
    residual: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.finite(self.shortcut, "shortcut")
        _checks.finite(self.residual, "residual")

    def paths(self, x, residual, transformed):
        return self.shortcut * x, self.residual * residual


@dataclasses.dataclass(frozen=True)
class _Weighted(Shortcut):
    """A shortcut with a 1x1 convolution, or for vectors with a dense layer."""

    normalization: Any = dataclasses.field(default="none", kw_only=True)
    kernel_initializer: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        kernel = keras.initializers.get(self.kernel_initializer)
        object.__setattr__(self, "normalization", chains.get_normalization(self.normalization))
        object.__setattr__(self, "kernel_initializer", kernel)

    def weight(self, site: Site, **settings: Any) -> list[keras.Layer]:
        """Make the weight, and the normalisation after it if there is one."""
        if self.kernel_initializer is not None:
            settings["kernel_initializer"] = self.kernel_initializer
        return [site.weight(**settings), *site.normalization(self.normalization)]

    def get_config(self):
        return super().get_config() | {
            "normalization": chains.normalization_config(self.normalization),
            "kernel_initializer": in_config(self.kernel_initializer),
        }


@dataclasses.dataclass(frozen=True)
class _Gating(_Weighted):
    bias: float = -6.0

    place = "gate"
    gated = True
    computes_coefficients = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.finite(self.bias, "bias")

    def layers(self, site):
        start = keras.initializers.Constant(self.bias)
        return self.weight(site, use_bias=True, bias_initializer=start)


@keras.saving.register_keras_serializable("keras_preact")
class ExclusiveGating(_Gating):
    """`(1 - g(x)) * x + g(x) * F(x)` with `g(x) = sigmoid(W_g x + b_g)`, as in highway
    networks.

    Args:
        bias: Initial value of b_g. A more negative value opens the shortcut further.
            0 to -5 failed, -6 gave 8.70 %.
        normalization: Normalisation between the gate's convolution and its sigmoid; the
            paper mentions none.
        kernel_initializer: Initialiser of W_g; None for the unit's.

    Source: Sec. 3.1, Fig. 2 (c) and Table 1.
    """

    def paths(self, x, residual, transformed):
        gate = ops.sigmoid(transformed)
        return (1 - gate) * x, gate * residual


@keras.saving.register_keras_serializable("keras_preact")
class ShortcutOnlyGating(_Gating):
    """`(1 - g(x)) * x + F(x)` with `g(x) = sigmoid(W_g x + b_g)`.

    Args:
        bias: Initial value of b_g: 0 gave 12.86 %, -6 gave 6.91 %.
        normalization, kernel_initializer: See `ExclusiveGating`.

    Source: Sec. 3.1, Fig. 2 (d) and Table 1.
    """

    def paths(self, x, residual, transformed):
        return (1 - ops.sigmoid(transformed)) * x, residual


@keras.saving.register_keras_serializable("keras_preact")
class Conv1x1(_Weighted):
    """`W x + F(x)` with a 1x1 convolution in every unit (option C of arXiv 1512.03385;
    Table 1: 12.22 %).

    Args:
        normalization: Normalisation after the convolution; the paper mentions none.
        kernel_initializer: Initialiser of W; None for the unit's.

    Source: Sec. 3.1, Fig. 2 (e) and Table 1.
    """

    projects = True

    def layers(self, site):
        return self.weight(site, use_bias=False)

    def paths(self, x, residual, transformed):
        return transformed, residual


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True)
class Dropout(Shortcut):
    """`dropout(x) + F(x)`: in training a share of `rate` of x is set to 0 and the rest
    is multiplied by `1 / (1 - rate)`.

    At inference it is the identity. The paper's net failed with a rate of 0.5.

    Args:
        rate: Share of the entries that are dropped.
        seed: Seed of the masks; None for the unit's, or a random one.

    Source: Sec. 3.1, Fig. 2 (f) and Table 1.
    """

    rate: float = 0.5
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.fraction(self.rate, "rate")

    def layers(self, site):
        seed = site.seed if self.seed is None else self.seed
        return [keras.layers.Dropout(self.rate, seed=seed, name="dropout", dtype=site.dtype)]

    def paths(self, x, residual, transformed):
        return transformed, residual


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True)
class ScaledResidual(Shortcut):
    """`x + alpha * F(x)` with a trained alpha, so that a new unit is nearly, or exactly,
    its input.

    Optimisers decay alpha as any weight; `exclude_from_decay=("scale",)` excludes it.

    Args:
        initial: Value of alpha at the start: 0 for SkipInit and ReZero. For LayerScale 0.1
            up to 18 transformer layers, 1e-5 for 24, and 1e-6 for more.
        per_channel: Whether each channel has an alpha (LayerScale), or the unit has one.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> x = np.random.default_rng(0).normal(size=(2, 8, 8, 16)).astype("float32")
    >>> unit = kp.ResidualUnit(16, shortcut="scaled_residual")
    >>> bool((keras.ops.convert_to_numpy(unit(x)) == x).all())
    True

    Source: SkipInit, arXiv 2002.10444; ReZero, Eq. 1 of arXiv 2003.04887; LayerScale,
        Sec. 2 of arXiv 2103.17239.
    """

    initial: float = 0.0
    per_channel: bool = False

    transforms = "residual"

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.finite(self.initial, "initial")

    def layers(self, site):
        axis = site.axis if self.per_channel else None
        return [chains.Scale(self.initial, axis, name="scale", dtype=site.dtype)]

    def paths(self, x, residual, transformed):
        return x, transformed


class _Rejection(keras.layers.Layer):
    """Returns the part of F(x) that is orthogonal to x, for the tuple `(x, F(x))`.

    Args:
        axes: Axes of the vectors.
        epsilon: Added to the squared norm of x.
    """

    def __init__(self, axes: tuple[int, ...], epsilon: float, **kwargs):
        super().__init__(**kwargs)
        self.axes, self.epsilon = axes, epsilon

    def call(self, tensors):
        kept = tensors[1].dtype
        # a sum of 16-bit products over a map has few correct digits, and can overflow
        dtype = keras.backend.result_type(kept, "float32")
        x, residual = (ops.cast(tensor, dtype) for tensor in tensors)
        product = ops.sum(x * residual, self.axes, keepdims=True)
        squares = ops.sum(x * x, self.axes, keepdims=True)
        return ops.cast(residual - product / (squares + self.epsilon) * x, kept)

    def compute_output_shape(self, input_shape):
        return input_shape[1]


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True)
class Orthogonal(Shortcut):
    """`x + F(x) - (<x, F(x)> / (<x, x> + epsilon)) x`: the branch adds only what is
    orthogonal to x, so no unit changes the length of the x that it gets, to first order.

    Inner products are computed in float32, whatever the unit computes in; the paper's
    code multiplies in the unit's precision.

    Args:
        over: `"channels"`: a pixel or a token is a vector. `"map"`: a whole map is one;
            tokens have none, because they would see later tokens.
        epsilon: Keeps the quotient finite where x is 0.

    Source: arXiv 2505.11881, feature-wise and global.
    """

    over: str = "channels"
    epsilon: float = 1e-6

    transforms = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.one_of(self.over, ("channels", "map"), "over")
        _checks.positive(self.epsilon, "epsilon")

    def layers(self, site):
        if self.over == "map" and site.rank not in (2, 4):
            raise ValueError(
                "Only images have a map; tokens would see later ones. Use "
                "Orthogonal(over='channels'). Received: over='map' for an input of "
                f"{site.rank} dimensions"
            )
        axes = (site.axis,) if self.over == "channels" else tuple(range(1, site.rank))
        return [_Rejection(axes, self.epsilon, name="rejection", dtype=site.dtype)]

    def paths(self, x, residual, transformed):
        return x, transformed


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True)
class DecayedIdentity(Shortcut):
    """`alpha_l * x + F(x)` with a constant that falls with the unit: in unit l of L
    `alpha_l = 1 - (1 - last) * l / L`. In a transformer, attention and MLP are two units.

    Args:
        last: alpha_L, between 0 and 1.
        factor: alpha_l of this unit. None: the network sets it.

    Example:

    >>> import keras_preact as kp
    >>> h = kp.shortcuts.DecayedIdentity(last=0.5)
    >>> model = kp.models.resnet_cifar(26, input_shape=(8, 8, 1), shortcut=h, stacked=False)
    >>> [round(unit.h.factor, 3) for unit in model.units][:4]
    [0.958, 0.917, 0.875, 0.833]

    Source: arXiv 2404.10947, where it helps generative pre-training.
    """

    last: float = 0.6
    factor: float | None = None

    differs = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _checks.is_number(self.last) or not 0 <= self.last <= 1:
            raise ValueError(f"`last` must be a number in [0, 1]. Received: last={self.last!r}")

    def of_unit(self, index, units):
        if self.factor is not None:
            return self
        return dataclasses.replace(self, factor=1 - (1 - self.last) * index / units)

    def layers(self, site):
        if self.factor is None:
            raise ValueError(
                "A unit by itself needs DecayedIdentity(factor=...), and a UnitStack "
                "`shortcut_factors`: their place in a network is not known. Received: factor=None"
            )
        return []

    def paths(self, x, residual, transformed):
        return ops.cast(self.factor, x.dtype) * x, residual


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True)
class DepthScaling(Shortcut):
    """`x + (base / L) ** power * F(x)` in a network of L units, so that one learning rate
    serves networks of all depths.

    The rate is searched with `base` units, where the network is the ordinary one. All L
    branches together then move x as much as `base` branches do, if the optimiser's rate of
    the branches follows: see `kp.optimizers.depth_rates`.

    Args:
        power: 0.5 (depth-muP): the sum of independent branches keeps its size. 1
            (CompleteP): the sum of equal branches does, and weights inside a branch learn
            features at every depth.
        base: Number of units of the network in which the rate was searched; in a
            transformer, attention and MLP are two units.
        units: L. None: the network sets it.

    Example:

    >>> import keras_preact as kp
    >>> h = kp.shortcuts.DepthScaling(power=0.5, base=9)
    >>> model = kp.models.resnet_cifar(74, input_shape=(8, 8, 1), shortcut=h, stacked=False)
    >>> len(model.units), model.units[0].h.multiplier
    (36, 0.5)

    Source: depth-muP, arXiv 2310.02244 and 2309.16620; CompleteP, arXiv 2505.01618.
    """

    power: float = 1.0
    base: int = 9
    units: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _checks.is_number(self.power) or not 0 <= self.power <= 1:
            raise ValueError(f"`power` must be a number in [0, 1]. Received: power={self.power!r}")
        _checks.positive_int(self.base, "base")
        if self.units is not None:
            _checks.positive_int(self.units, "units")

    @property
    def multiplier(self) -> float:
        """The factor on F(x).

        Raises:
            ValueError: if the number of units is not known.
        """
        if self.units is None:
            raise ValueError(
                "A unit by itself needs DepthScaling(units=...), the number of units in its "
                "network. Received: units=None"
            )
        return (self.base / self.units) ** self.power

    def of_unit(self, index, units):
        return self if self.units is not None else dataclasses.replace(self, units=units)

    def layers(self, site):
        _ = self.multiplier  # a unit without the number of units fails here, not in its call
        return []

    def paths(self, x, residual, transformed):
        return x, self.multiplier * residual


@keras.saving.register_keras_serializable("keras_preact")
class DeepNormScaling(Shortcut):
    """`L^(1/4) x + F(x)` in a network of L units, each of which gets it as a
    `ConstantScaling`.

    A layer of a transformer is two units. So this is the `(2 N)^(1/4)` of an encoder or a
    decoder with N layers. `kp.models.DEEP_NORM` has the arrangement and the initialiser
    that belong to it.

    Source: Fig. 2 of arXiv 2203.00555.
    """

    def of_unit(self, index, units):
        return ConstantScaling(units**0.25, 1.0)

    def layers(self, site):
        raise ValueError(
            "A unit by itself needs ConstantScaling(L ** 0.25, 1.0), with L, the number of units "
            f"in its network. Received: {self!r}"
        )


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True)
class HyperConnections(Shortcut):
    """`H_res X + h_post F(h_pre X)`: X is a state of several residual streams that the
    unit mixes, instead of one x.

    The branch reads one mix of the streams (h_pre), its output is added to all of them
    (h_post), and the shortcut mixes them among themselves (H_res). The coefficients are
    computed for each pixel or token, in float32: X divided by its root mean square over
    all channels of all streams, a linear map, three trained scalars that start at 0.01,
    for h_pre, h_post and H_res, and a trained bias. Then h_pre = sigmoid(...) and
    h_post = 2 sigmoid(...).

    A network copies the output of its stem into the streams, and takes their mean before
    its head. At the start it computes what the network with one stream computes: the
    linear map is 0, h_pre sums to 1, and the other coefficients are about those of an
    identity shortcut. In training the streams become different, because no two have the
    same share in h_pre; a seed of the unit's kernels picks the largest.

    x and the output of a unit have `streams` times the channels, stream after stream. A
    unit that changes the shape does so with each stream by itself, and starts from the
    raw X, whatever `activate_shape_shortcut` is. f also acts on each stream by itself. So
    all other weights have the shapes of a network with one stream.

    Args:
        streams: Number of streams, n: 2 or more.
        constraint: What H_res can be. `"none"`: any matrix (hyper-connections).
            `"sinkhorn"`: doubly stochastic up to the error of 20 rounds of Sinkhorn and
            Knopp (mHC). `"permutations"`: exactly doubly stochastic, a mean of the n!
            permutation matrices, for 4 streams or fewer (mHC-lite).
        coefficients: `"pixel"`, or `"map"` for the same coefficients at all pixels of a
            map, computed from its mean; not for vectors and tokens.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> unit = kp.ResidualUnit(16, shortcut=kp.shortcuts.HyperConnections(constraint="none"))
    >>> tuple(unit(np.zeros((2, 8, 8, 4 * 16), "float32")).shape)
    (2, 8, 8, 64)
    >>> model = kp.models.resnet_cifar(8, shortcut="hyper_connections", input_shape=(8, 8, 1))
    >>> tuple(model.unit_outputs[0].shape), model.output_shape
    ((None, 8, 8, 64), (None, 10))

    Source: Eq. 7 to 9 of arXiv 2512.24880 (mHC), for every constraint. arXiv 2601.05732
        (mHC-lite) for `"permutations"`. The first paper, arXiv 2409.19606 (Eq. 1 to 14),
        normalises each stream by itself, bounds the linear maps by tanh and does not bound
        h_pre and h_post. Here only H_res differs between the constraints, and there is no
        tanh: networks with and without it are equally good there (Table 1).
    """

    streams: int = 4  # type: ignore[misc]
    constraint: str = "sinkhorn"
    coefficients: str = "pixel"

    computes_coefficients = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive_int(self.streams, "streams")
        _checks.one_of(self.constraint, streams.CONSTRAINTS, "constraint")
        _checks.one_of(self.coefficients, ("pixel", "map"), "coefficients")
        if self.streams == 1:
            raise ValueError(
                "Hyper-connections need 2 streams or more; a unit with one has "
                "shortcut='identity'. Received: streams=1"
            )
        if self.constraint == "permutations" and self.streams > 4:
            raise ValueError(
                f"constraint='permutations' has a weight for each of the {self.streams}! "
                "permutations: use 4 streams or fewer, or 'sinkhorn'. Received: "
                f"streams={self.streams}"
            )

    def layers(self, site):
        if self.coefficients == "map" and site.rank != 4:
            raise ValueError(
                "coefficients='map' needs maps, and would let a token see later ones: use "
                f"'pixel'. Received: an input of {site.rank} dimensions"
            )
        seed = initializers.seed_of(site.weights.kernel_initializer)
        return [
            streams.Coefficients(
                self.streams,
                self.constraint,
                self.coefficients,
                site.strides,
                site.weights.data_format,
                site.weights.kernel_regularizer,
                None if seed is None else initializers.derive_seed(seed, "shortcut"),
                name="coefficients",
                dtype=site.dtype,
            )
        ]

    def reads(self, x, transformed):
        return streams.mixed(transformed[0], x)

    def paths(self, x, residual, transformed):
        _, post, rows = transformed
        placed = [streams.mixed([coefficient], [residual]) for coefficient in post]
        return [streams.mixed(row, x) for row in rows], placed


#: Name to class; every class can be made without arguments. The first seven are Table 1's.
SHORTCUTS: Mapping[str, type[Shortcut]] = MappingProxyType(
    {
        "identity": Identity,
        "constant_scaling": ConstantScaling,
        "exclusive_gating": ExclusiveGating,
        "shortcut_only_gating": ShortcutOnlyGating,
        "conv1x1": Conv1x1,
        "dropout": Dropout,
        "none": NoShortcut,
        "scaled_residual": ScaledResidual,
        "orthogonal": Orthogonal,
        "decayed_identity": DecayedIdentity,
        "depth_scaling": DepthScaling,
        "hyper_connections": HyperConnections,
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
    made: Shortcut = from_table(shortcut, Shortcut, SHORTCUTS, "shortcut")
    if gate_bias is None:
        return made
    if not made.gated:
        gated = ", ".join(name for name, row in SHORTCUTS.items() if row.gated)
        raise ValueError(
            f"`gate_bias` needs a shortcut with a gate: {gated}. Received: "
            f"gate_bias={gate_bias!r}, shortcut={shortcut!r}"
        )
    changes: dict[str, Any] = {"bias": gate_bias}
    return dataclasses.replace(made, **changes)


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
