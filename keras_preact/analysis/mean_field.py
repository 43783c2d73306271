"""Mean-field theory of wide networks at initialisation: how lengths, correlations and
gradients go through depth.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from keras_preact import _checks

SHORTCUTS = ("none", "identity")
NORMALIZATIONS = ("none", "batch")


@dataclasses.dataclass(frozen=True)
class Activation:
    """A function of an array and its derivative."""

    function: Callable
    derivative: Callable


def _sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))


def _erf(x):
    return _ERF(x).astype("float64")


_ERF = np.frompyfunc(math.erf, 1, 1)


def _normal_density(x):
    return np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _normal_cdf(x):
    return 0.5 * (1 + _erf(x / math.sqrt(2)))


#: Name to `Activation`; the names are Keras' (which has no erf).
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "linear": Activation(lambda x: x, np.ones_like),
        "relu": Activation(lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
        "leaky_relu": Activation(
            lambda x: np.where(x > 0, x, 0.2 * x), lambda x: np.where(x > 0, 1.0, 0.2)
        ),
        "elu": Activation(
            lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
            lambda x: np.exp(np.minimum(x, 0)),
        ),
        "tanh": Activation(np.tanh, lambda x: 1 - np.tanh(x) ** 2),
        "sigmoid": Activation(_sigmoid, lambda x: _sigmoid(x) * _sigmoid(-x)),
        "erf": Activation(_erf, lambda x: 2 / math.sqrt(math.pi) * np.exp(-(x**2))),
        "gelu": Activation(
            lambda x: x * _normal_cdf(x), lambda x: _normal_cdf(x) + x * _normal_density(x)
        ),
        "silu": Activation(
            lambda x: x * _sigmoid(x), lambda x: _sigmoid(x) * (1 + x * _sigmoid(-x))
        ),
        "hard_silu": Activation(
            lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
            lambda x: np.where(np.abs(x) < 3, x / 3 + 0.5, (x > 0) * 1.0),
        ),
    }
)

#: Lengths below and above which a fixed point is 0 or infinite.
SHORTEST, LONGEST = 1e-12, 1e8

#: How far from 1 `chi` may be at criticality.
CRITICAL_WITHIN = 1e-6

# Gaussian integrals are sums over panels between these points: of z, a standard normal variable,
# and of the activation's argument, where the activations of the table have their kinks or bend. In
# each panel, Gauss and Legendre's nodes.
_Z_BREAKS = np.array([-9.0, -6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0, 9.0])
_ARGUMENT_BREAKS = np.array([-10.0, -3.0, -1.0, 0.0, 1.0, 3.0, 10.0])
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(14)


@dataclasses.dataclass(frozen=True)
class MeanField:
    """A wide network of equal units with Gaussian weights, at initialisation.

    A unit is `x_{l+1} = h(x_l) + F(x_l)`, with F so many times activation and weights:
    `F(x) = W phi(x) + b` for one. Weights have the variance `weight_variance / fan_in`,
    and the width goes to infinity; for images, the number of channels.

    Args:
        activation: A name from `ACTIVATIONS`, or a function of a NumPy array; its
            derivative is then taken by differences.
        weight_variance: sigma_w^2; He initialisation has 2.
        bias_variance: sigma_b^2.
        shortcut: h: `"none"` (a plain network) or `"identity"`.
        normalization: `"none"`, or `"batch"` in front of every activation (full
            pre-activation), with the statistics of a large batch of examples that have
            nothing in common. Biases then do not matter.
        weights: Of the branch.
        branch_factor: What F's variance is multiplied by: `1 / units` for
            `kp.initializers.DepthScaledHe`.

    A length q is the mean square of the elements of x; with batch normalisation, their
    variance over the batch.

    Raises:
        ValueError: for unknown names and variances that are none; in what only plain
            networks without normalisation have.

    Example:

    >>> he = MeanField("relu", weight_variance=2.0)
    >>> round(he.q_map(3.0), 9), round(he.chi(3.0), 9), he.phase
    (3.0, 1.0, 'critical')
    >>> he = MeanField("relu", 2.0, shortcut="identity", weights=2, normalization="batch")
    >>> he.gradients(1.0, 50)[[0, 25, 50]].round(1).tolist()  # squared norms, over the last one
    [1151.2, 4.1, 1.0]

    Source: Poole et al., arXiv 1606.05340; Schoenholz et al., arXiv 1611.01232 (plain
        networks); Xiao et al., arXiv 1806.05393
    (convolutions); Yang and Schoenholz, arXiv 1712.08969 (shortcuts); for batch
    normalisation see `chi`.
    """

    activation: str | Callable = "tanh"
    weight_variance: float = 1.0
    bias_variance: float = 0.0
    shortcut: str = "none"
    normalization: str = "none"
    weights: int = 1
    branch_factor: float = 1.0

    def __post_init__(self):
        if not callable(self.activation):
            _checks.lookup(ACTIVATIONS, self.activation, "activation")
        _checks.one_of(self.shortcut, SHORTCUTS, "shortcut")
        _checks.one_of(self.normalization, NORMALIZATIONS, "normalization")
        _checks.positive_int(self.weights, "weights")
        for argument in ("weight_variance", "bias_variance", "branch_factor"):
            _not_negative(getattr(self, argument), argument)

    def q_map(self, q: float) -> float:
        """Return the length behind a unit whose input has the length q."""
        _not_negative(q, "q")
        return self._through * q + self.branch_factor * self._branch_lengths(q)[-1]

    def c_map(self, c: float, q: float) -> float:
        """Return the correlation (cosine) of two examples behind a unit, from that of
        its inputs, c, and their length q.
        """
        _correlation(c)
        _not_negative(q, "q")
        self._only("c_map", normalization=True)
        covariance, lengths = c * q, self._branch_lengths(q)
        for length in lengths[:-1]:
            moment = self._pair_mean(self._phi.function, length, _ratio(covariance, length))
            covariance = self.weight_variance * moment + self.bias_variance
        return _ratio(self._through * c * q + self.branch_factor * covariance, self.q_map(q))

    def slope(self, c: float, q: float) -> float:
        """Return the derivative of `c_map` by c.

        By Price's theorem, that of `E phi(u) phi(v)` by the covariance of u and v is `E
        phi'(u) phi'(v)`.
        """
        _correlation(c)
        _not_negative(q, "q")
        self._only("slope", normalization=True)
        covariance, factor = c * q, 1.0
        for length in self._branch_lengths(q)[:-1]:
            correlation = _ratio(covariance, length)
            factor *= self.weight_variance * self._pair_mean(
                self._phi.derivative, length, correlation
            )
            covariance = (
                self.weight_variance * self._pair_mean(self._phi.function, length, correlation)
                + self.bias_variance
            )
        total = self._through + self.branch_factor * factor
        return total if q == 0 else total * q / self.q_map(q)

    def chi(self, q: float) -> float:
        """Return what a gradient's mean squared norm is multiplied by on its way back
        through a unit, whose input has q.

        A weight with the activation in front of it multiplies it by `sigma_w^2 E
        phi'^2`, the identity adds 1. Batch normalisation divides by the length: with `r
        = E phi'^2 / Var phi`, of a standard normal argument, the factor of a branch of
        m weights is `r^m V / q`, where `V = sigma_w^2 Var phi` is what the branch adds
        to q. Behind l units with shortcuts that is about `r^m / l`, and gradients grow
        towards the start as a power of the depth, `(L / l)^(r^m)`.

        Source: arXiv 1611.01232, Sec. 4; with shortcuts, arXiv 1712.08969. `r`, pi /
            (pi - 1) for ReLU, is the growth of a
        plain network in arXiv 1902.08129, q's linear growth is in arXiv 2002.10444;
        their product over units is derived here.
        """
        _not_negative(q, "q")
        lengths = self._branch_lengths(q)[:-1]
        factor = 1.0
        for i, length in enumerate(lengths):
            if self.normalization == "batch":
                normalized_from = q if i == 0 else self._branch_lengths(q)[-1]
                factor *= (
                    self.weight_variance
                    * self._mean_square(self._phi.derivative, 1.0)
                    / max(normalized_from, SHORTEST)
                )
            else:
                factor *= self.weight_variance * self._mean_square(self._phi.derivative, length)
        return self._through + self.branch_factor * factor

    def lengths(self, q: float, depth: int) -> np.ndarray:
        """Return q_0 ... q_L, from the length of x_0 on; `(depth + 1,)`."""
        _checks.positive_int(depth, "depth")
        lengths = [float(q)]
        for _ in range(depth):
            lengths.append(self.q_map(lengths[-1]))
        return np.array(lengths)

    def correlations(self, c: float, q: float, depth: int) -> np.ndarray:
        """Return c_0 ... c_L of two examples of the length q, `(depth + 1,)`."""
        correlations = [float(c)]
        for length in self.lengths(q, depth)[:-1]:
            correlations.append(self.c_map(correlations[-1], length))
        return np.array(correlations)

    def gradients(self, q: float, depth: int) -> np.ndarray:
        """Return the expected squared norms of the gradients at x_0 ... x_L over that
        at x_L, `(depth + 1,)`.
        """
        factors = [self.chi(length) for length in self.lengths(q, depth)[:-1]]
        return np.cumprod([1.0, *factors[::-1]])[::-1]

    @property
    def q_star(self) -> float:
        """The length that a network comes to from 1, `q_map(q_star) = q_star`: 0 and
        infinity as well.
        """

        def grows(q):
            change = self.q_map(q) / q - 1
            return 0 if abs(change) < 1e-14 else math.copysign(1, change)

        q, direction = 1.0, grows(1.0)
        while direction and grows(q) == direction:
            q *= 2.0**direction
            if not SHORTEST < q < LONGEST:
                return math.inf if direction > 0 else 0.0
        return (
            _bisect(lambda other: grows(other) != -direction, q * 2.0**-direction, q)
            if direction
            else q
        )

    @property
    def c_star(self) -> float:
        """The correlation that two examples come to, at the length `q_star`: 1 where
        the network is ordered or critical.

        Not a number where `q_star` is infinite.
        """
        self._only("c_star", shortcut=True, normalization=True)
        if self.q_star == math.inf:
            return math.nan
        q = self._final_length
        if self.chi(q) <= 1 + CRITICAL_WITHIN:
            return 1.0
        # c_map is convex: Newton's method comes from 0 to the first of its two fixed points, and
        # not beyond
        c = 0.0
        for _ in range(50):
            step = (self.c_map(c, q) - c) / (1 - self.slope(c, q))
            c += step
            if abs(step) < 1e-12:
                break
        return c

    @property
    def phase(self) -> str:
        """`"ordered"`, `"critical"` or `"chaotic"`: chi, at `q_star`, below 1, 1, above
        1. Gradients vanish, stay, explode.
        """
        self._only("phase", shortcut=True, normalization=True)
        return _phase(self._final_chi)

    @property
    def xi_q(self) -> float:
        """Depth scale of lengths: `|q_l - q_star|` falls as `exp(-l / xi_q)`.

        Source: Eq. 8 of arXiv 1611.01232.
        """
        self._only("xi_q", shortcut=True, normalization=True)
        q, slope = max(self.q_star, 1e-6), 1.0
        if q == math.inf:
            return math.inf
        for length in self._branch_lengths(q)[:-1]:
            # the derivative of a Gaussian mean by the variance, with no derivative of the
            # activation
            mean = self._mean(
                lambda z, s=length**0.5: self._phi.function(s * z) ** 2 * (z**2 - 1), length
            )
            slope *= self.weight_variance * mean / (2 * length)
        return _depth_scale(self.branch_factor * slope)

    @property
    def xi_c(self) -> float:
        """Depth scale of correlations: `|c_l - c_star|` falls as `exp(-l / xi_c)`.
        Infinite at criticality.

        Source: Eq. 9 of arXiv 1611.01232.
        """
        c = self.c_star
        return math.nan if math.isnan(c) else _depth_scale(self.slope(c, self._final_length))

    @property
    def _through(self) -> float:
        return 1.0 if self.shortcut == "identity" else 0.0

    @property
    def _final_length(self) -> float:
        """The length `q_star`, where it is 0 the limit of small ones: of a ReLU, the
        slope at 0 itself says nothing.
        """
        return min(max(self.q_star, SHORTEST), LONGEST)

    @property
    def _final_chi(self) -> float:
        return self.chi(self._final_length)

    @property
    def _phi(self) -> Activation:
        if not callable(self.activation):
            return ACTIVATIONS[self.activation]
        function, h = self.activation, 1e-5
        return Activation(function, lambda x: (function(x + h) - function(x - h)) / (2 * h))

    def _only(self, what: str, shortcut: bool = False, normalization: bool = False) -> None:
        if (shortcut and self.shortcut != "none") or (
            normalization and self.normalization != "none"
        ):
            of = (
                "networks without shortcut and normalization"
                if shortcut
                else "networks without normalization"
            )
            raise ValueError(
                f"`{what}` is of {of}. Received: shortcut={self.shortcut!r}, "
                f"normalization={self.normalization!r}"
            )

    def _branch_lengths(self, q: float) -> list[float]:
        """Return the lengths in front of each weight's activation, and behind the last
        weight.
        """
        if self.normalization == "batch":
            mean = self._mean(lambda z: self._phi.function(z), 1.0)
            return [1.0] * self.weights + [
                self.weight_variance * (self._mean_square(self._phi.function, 1.0) - mean**2)
            ]
        lengths = [float(q)]
        for _ in range(self.weights):
            square = self._mean_square(self._phi.function, lengths[-1])
            lengths.append(self.weight_variance * square + self.bias_variance)
        return lengths

    def _mean_square(self, function: Callable, q: float) -> float:
        return self._mean(lambda z: function(math.sqrt(q) * z) ** 2, q)

    @staticmethod
    def _mean(function: Callable, q: float) -> float:
        """Return the mean of `function(z)`, z standard normal, that bends where
        `sqrt(q) z` is at a break.
        """
        z, weights = _rule(_ARGUMENT_BREAKS / max(math.sqrt(q), 1e-150))
        return float(weights @ function(z))

    @staticmethod
    def _pair_mean(function: Callable, q: float, c: float) -> float:
        """Return `E function(u) function(v)` for Gaussian u and v of the variance q and
        the correlation c.
        """
        scale, rest = math.sqrt(q), math.sqrt(max(1 - c**2, 0.0))
        breaks = _ARGUMENT_BREAKS / max(scale, 1e-150)
        if rest == 0:
            z, weights = _rule(breaks)
            return float(weights @ (function(scale * z) * function(math.copysign(scale, c) * z)))
        # the mean over v, given u, bends within a few `rest` of where the function does
        z, weights = _rule(np.concatenate([breaks, breaks - 5 * rest, breaks + 5 * rest]))
        # v given u: its breaks stand elsewhere for every u
        inner, inner_weights = _rule((breaks - c * z[:, None]) / rest)
        given = (inner_weights * function(scale * (c * z[:, None] + rest * inner))).sum(1)
        return float(weights @ (function(scale * z) * given))


@dataclasses.dataclass(frozen=True, eq=False)
class PhaseDiagram:
    """Where a plain network is ordered, critical and chaotic.

    Args:
        weight_variances, bias_variances: The axes.
        q_star, chi, c_star, xi_c: As in `MeanField`, chi at `q_star`; arrays `(weight
            variances, bias variances)`.
    """

    weight_variances: np.ndarray
    bias_variances: np.ndarray
    q_star: np.ndarray
    chi: np.ndarray
    c_star: np.ndarray
    xi_c: np.ndarray

    @property
    def phase(self) -> np.ndarray:
        """Names of the phases, an array as the others."""
        return np.vectorize(_phase)(self.chi)


def phase_diagram(
    activation: str | Callable,
    weight_variances: Sequence[float] | np.ndarray,
    bias_variances: Sequence[float] | np.ndarray,
) -> PhaseDiagram:
    """Return the phases of a plain network for all pairs of variances.

    Raises:
        ValueError: as `MeanField`.

    Example:

    >>> phase_diagram("tanh", [0.5, 2.0], [0.01]).phase.tolist()
    [['ordered'], ['chaotic']]

    Source: Fig. 1 of arXiv 1611.01232.
    """
    axes = np.asarray(weight_variances, "float64"), np.asarray(bias_variances, "float64")
    fields = [
        [MeanField(activation, float(weight), float(bias)) for bias in axes[1]]
        for weight in axes[0]
    ]

    def table(value):
        return np.array([[value(field) for field in row] for row in fields])

    return PhaseDiagram(
        *axes,
        q_star=table(lambda field: field.q_star),
        chi=table(lambda field: field._final_chi),
        c_star=table(lambda field: field.c_star),
        xi_c=table(lambda field: field.xi_c),
    )


def critical_weight_variance(activation: str | Callable, bias_variance: float = 0.0) -> float:
    """Return the sigma_w^2 at which a plain network is critical: gradients keep their
    size.

    Raises:
        ValueError: where there is none up to 1e6.

    Example:

    >>> round(critical_weight_variance("tanh"), 5), round(critical_weight_variance("relu"), 5)
    (1.0, 2.0)

    Source: Sec. 3 of arXiv 1606.05340.
    """

    def chaotic(weight_variance):
        return MeanField(activation, weight_variance, bias_variance)._final_chi > 1

    high = 1e-3
    while not chaotic(high):
        high *= 2
        if high > 1e6:
            raise ValueError(
                "No weight variance up to 1e6 is critical. Received: "
                f"bias_variance={bias_variance!r}"
            )
    return _bisect(lambda value: not chaotic(value), high / 2, high)


def _rule(breaks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights of Gaussian means, of functions that bend at `breaks`,
    `(..., n)`; panels may be empty.
    """
    ends = np.broadcast_to(_Z_BREAKS, (*breaks.shape[:-1], len(_Z_BREAKS)))
    ends = np.sort(
        np.concatenate([ends, np.clip(breaks, _Z_BREAKS[0], _Z_BREAKS[-1])], axis=-1), axis=-1
    )
    half, middle = np.diff(ends)[..., None] / 2, (ends[..., 1:, None] + ends[..., :-1, None]) / 2
    z = middle + half * _NODES
    weights = half * _NODE_WEIGHTS * _normal_density(z)
    return z.reshape(*breaks.shape[:-1], -1), weights.reshape(*breaks.shape[:-1], -1)


def _bisect(below: Callable, low: float, high: float) -> float:
    """Return where `below`, true at `low` and false at `high`, changes."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


def _depth_scale(slope: float) -> float:
    if slope >= 1 - CRITICAL_WITHIN:
        return math.inf
    return -1 / math.log(slope) if slope > 0 else 0.0


def _phase(chi: float) -> str:
    if abs(chi - 1) <= CRITICAL_WITHIN:
        return "critical"
    return "ordered" if chi < 1 else "chaotic"


def _ratio(a: float, b: float) -> float:
    """Return a / b, a correlation; that of nothing is 1."""
    return min(a / b, 1.0) if b > 0 else 1.0


def _correlation(c: float) -> None:
    if not -1 <= c <= 1:
        raise ValueError(f"`c` must be a correlation, from -1 to 1. Received: c={c!r}")


def _not_negative(value: float, argument: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(
            f"`{argument}` must be a finite number that is not negative. Received: "
            f"{argument}={value!r}"
        )
