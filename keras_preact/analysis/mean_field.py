"""Mean-field theory of wide networks at initialisation: how lengths, correlations and
gradients change with depth.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from keras_preact import _checks
from keras_preact.analysis import _optional

SHORTCUTS = ("none", "identity")
NORMALIZATIONS = ("none", "batch")


@dataclasses.dataclass(frozen=True)
class Activation:
    """A function of an array and its derivative."""

    function: Callable
    derivative: Callable


def _special(name: str) -> Callable:
    """Return a function of `scipy.special`, which is imported at the first call."""
    return lambda x: getattr(_optional.load("scipy.special"), name)(x)


_erf, _sigmoid, _normal_cdf = map(_special, ("erf", "expit", "ndtr"))


def _normal_density(x):
    return np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


#: Name to `Activation`. The names are those of Keras, which has no erf.
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

#: A fixed point below the first length counts as 0, one above the second as infinite.
SHORTEST, LONGEST = 1e-12, 1e8

#: A network is critical if `chi` is this close to 1.
CRITICAL_WITHIN = 1e-6

# Gaussian means are sums over panels, each with Gauss-Legendre nodes. Panels end at these values of
# z, a standard normal variable, and where the activation's argument has one of the others: there
# the activations of the table bend or have kinks.
_Z_BREAKS = np.array([-9.0, -6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0, 9.0])
_ARGUMENT_BREAKS = np.array([-10.0, -3.0, -1.0, 0.0, 1.0, 3.0, 10.0])
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(14)


@dataclasses.dataclass(frozen=True)
class MeanField:
    """A wide network of equal units with Gaussian weights, at initialisation.

    A unit is `x_{l+1} = h(x_l) + F(x_l)`. F applies activation and weights one or more
    times: `F(x) = W phi(x) + b` for one. The width goes to infinity; for images, that
    is the number of channels.

    Args:
        activation: A name in `ACTIVATIONS`, or a function of a NumPy array, which is
            then differentiated numerically.
        weight_variance: sigma_w^2. A weight has the variance `weight_variance /
            fan_in`; He initialisation has 2.
        bias_variance: sigma_b^2.
        shortcut: h: `"none"` (a plain network) or `"identity"`.
        normalization: `"none"`, or `"batch"` before each activation (full
            pre-activation), with the statistics of a large batch of unrelated examples.
            Biases then have no effect.
        weights: Number of weights in the branch.
        branch_factor: Factor on the variance of F: `1 / units` for
            `kp.initializers.DepthScaledHe`.

    A length q is the mean square of the elements of x; with batch normalisation, it is
    their variance over the batch. The analysis needs SciPy.

    Raises:
        ValueError: for unknown names, negative variances, and results that only plain
            networks or networks without normalisation have.

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
        """Return the length after a unit whose input has the length q."""
        _not_negative(q, "q")
        return self._through * q + self.branch_factor * self._branch_lengths(q)[-1]

    def c_map(self, c: float, q: float) -> float:
        """Return the correlation (cosine) of two examples after a unit.

        Args:
            c: Correlation before the unit.
            q: Length of both examples before the unit.
        """
        self._without("c_map", "normalization")
        return self._correlate(c, q)[0]

    def slope(self, c: float, q: float) -> float:
        """Return the derivative of `c_map` with respect to c.

        Price's theorem: the derivative of `E phi(u) phi(v)` with respect to the
        covariance of u and v is `E phi'(u) phi'(v)`.
        """
        self._without("slope", "normalization")
        return self._correlate(c, q)[1]

    def chi(self, q: float) -> float:
        """Return the factor on a gradient's mean squared norm on its way back through a
        unit whose input has the length q.

        A weight and the activation before it contribute the factor `sigma_w^2 E
        phi'^2`; the identity adds 1. Batch normalisation divides by the length. Let `r
        = E phi'^2 / Var phi` for a standard normal argument, and let `V = sigma_w^2 Var
        phi` be what the branch adds to q. A branch of m weights then has the factor
        `r^m V / q`. After l units with shortcuts that is about `r^m / l`: gradients
        grow towards the start as a power of the depth, `(L / l)^(r^m)`.

        Source: arXiv 1611.01232, Sec. 4; with shortcuts, arXiv 1712.08969. `r`, pi /
            (pi - 1) for ReLU, is the growth of a
        plain network in arXiv 1902.08129, q's linear growth is in arXiv 2002.10444;
        their product over units is derived here.
        """
        _not_negative(q, "q")
        *lengths, after = self._branch_lengths(q)
        if self.normalization == "batch":
            # The first weight reads x / sqrt(q), the others what the weight before them returns.
            divisors = [max(length, SHORTEST) for length in (q, *[after] * (self.weights - 1))]
        else:
            divisors = [1.0] * self.weights
        factor = self.branch_factor
        for length, divisor in zip(lengths, divisors, strict=True):
            slope = self._mean_square(self._phi.derivative, length)
            factor *= self.weight_variance * slope / divisor
        return self._through + factor

    def lengths(self, q: float, depth: int) -> np.ndarray:
        """Return q_0 ... q_L for the length q of x_0, `(depth + 1,)`."""
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
        """The length that a network converges to from 1: a fixed point of `q_map`, 0 or
        infinity.
        """

        def growth(q):
            change = self.q_map(q) / q - 1
            return 0.0 if abs(change) < 1e-14 else change

        q, first = 1.0, growth(1.0)
        if not first:
            return q
        step = 2.0 if first > 0 else 0.5
        while growth(q) * first > 0:
            q *= step
            if not SHORTEST < q < LONGEST:
                return math.inf if first > 0 else 0.0
        return _root(growth, q / step, q)

    @property
    def c_star(self) -> float:
        """The correlation that two examples converge to, at the length `q_star`: 1 in
        an ordered or critical network, NaN if `q_star` is infinite.
        """
        self._without("c_star", "shortcut", "normalization")
        if self.q_star == math.inf:
            return math.nan
        q = self._final_length
        if self.chi(q) <= 1 + CRITICAL_WITHIN:
            return 1.0

        def distance(c):
            after, slope = self._correlate(min(c, 1.0), q)
            return after - c, slope - 1

        # `c_map` is convex: from 0, Newton's method reaches the first of its two fixed points and
        # does not pass it.
        find = _optional.load("scipy.optimize").root_scalar
        return find(distance, x0=0.0, fprime=True, method="newton", xtol=1e-12).root

    @property
    def phase(self) -> str:
        """`"ordered"`, `"critical"` or `"chaotic"`: chi, at `q_star`, is below 1, 1, or
        above 1. Gradients vanish, keep their size, or explode.
        """
        self._without("phase", "shortcut", "normalization")
        return _phase(self._final_chi)

    @property
    def xi_q(self) -> float:
        """Depth scale of lengths: `|q_l - q_star|` falls as `exp(-l / xi_q)`. Infinite
        at criticality without biases.

        Source: Eq. 8 of arXiv 1611.01232.
        """
        self._without("xi_q", "shortcut", "normalization")
        q, slope = max(self.q_star, SHORTEST), self.branch_factor
        if q == math.inf:
            return math.inf
        for length in self._branch_lengths(q)[:-1]:
            # Derivative of a Gaussian mean by the variance; needs no derivative of the activation.
            mean = self._mean(
                lambda z, s=length**0.5: self._phi.function(s * z) ** 2 * (z**2 - 1), length
            )
            slope *= self.weight_variance * mean / (2 * length)
        return _depth_scale(slope)

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
        """The length `q_star`, or a small one if that is 0: a ReLU has no slope at 0."""
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

    def _without(self, what: str, *options: str) -> None:
        """Check that these options of the network are `"none"`."""
        if any(getattr(self, option) != "none" for option in options):
            raise ValueError(
                f"`{what}` is defined for networks without {' and '.join(options)}. Received: "
                f"shortcut={self.shortcut!r}, normalization={self.normalization!r}"
            )

    def _branch_lengths(self, q: float) -> list[float]:
        """Return the lengths before each weight's activation, and after the last weight."""
        if self.normalization == "batch":
            mean = self._mean(self._phi.function, 1.0)
            variance = self._mean_square(self._phi.function, 1.0) - mean**2
            return [1.0] * self.weights + [self.weight_variance * variance]
        lengths = [float(q)]
        for _ in range(self.weights):
            square = self._mean_square(self._phi.function, lengths[-1])
            lengths.append(self.weight_variance * square + self.bias_variance)
        return lengths

    def _correlate(self, c: float, q: float) -> tuple[float, float]:
        """Return the correlation after a unit, and its derivative by c."""
        if not -1 <= c <= 1:
            raise ValueError(f"`c` must be a correlation, from -1 to 1. Received: c={c!r}")
        _not_negative(q, "q")
        covariance, factor = c * q, 1.0
        for length in self._branch_lengths(q)[:-1]:
            before = _ratio(covariance, length)
            factor *= self.weight_variance * self._pair_mean(self._phi.derivative, length, before)
            product = self._pair_mean(self._phi.function, length, before)
            covariance = self.weight_variance * product + self.bias_variance
        after = self.q_map(q)
        slope = self._through + self.branch_factor * factor
        return (
            _ratio(self._through * c * q + self.branch_factor * covariance, after),
            slope * q / after if q else slope,
        )

    def _mean_square(self, function: Callable, q: float) -> float:
        return self._mean(lambda z: function(math.sqrt(q) * z) ** 2, q)

    @staticmethod
    def _mean(function: Callable, q: float) -> float:
        """Return the mean of `function(z)`, z standard normal, for a function that bends
        where `sqrt(q) z` is at a break.
        """
        z, weights = _gauss_rule(_ARGUMENT_BREAKS / max(math.sqrt(q), 1e-150))
        return float(weights @ function(z))

    @staticmethod
    def _pair_mean(function: Callable, q: float, c: float) -> float:
        """Return `E function(u) function(v)` for Gaussian u and v of variance q and
        correlation c.
        """
        scale, rest = math.sqrt(q), math.sqrt(max(1 - c**2, 0.0))
        breaks = _ARGUMENT_BREAKS / max(scale, 1e-150)
        if rest == 0:
            z, weights = _gauss_rule(breaks)
            return float(weights @ (function(scale * z) * function(math.copysign(scale, c) * z)))
        # The mean over v, given u, bends within a few `rest` of where the function does.
        z, weights = _gauss_rule(np.concatenate([breaks, breaks - 5 * rest, breaks + 5 * rest]))
        # v given u: its breaks differ for each u.
        inner, inner_weights = _gauss_rule((breaks - c * z[:, None]) / rest)
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
        """Names of the phases, an array of the same shape."""
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
    axes = [np.asarray(values, "float64") for values in (weight_variances, bias_variances)]
    cells = []
    for weight in axes[0]:
        row = [MeanField(activation, float(weight), float(bias)) for bias in axes[1]]
        cells.append([(each.q_star, each._final_chi, each.c_star, each.xi_c) for each in row])
    return PhaseDiagram(*axes, *np.moveaxis(np.array(cells), -1, 0))


def critical_weight_variance(activation: str | Callable, bias_variance: float = 0.0) -> float:
    """Return the sigma_w^2 at which a plain network is critical: gradients keep their
    size.

    Raises:
        ValueError: if there is none up to 1e6.

    Example:

    >>> round(critical_weight_variance("tanh"), 5), round(critical_weight_variance("relu"), 5)
    (1.0, 2.0)

    Source: Sec. 3 of arXiv 1606.05340.
    """

    def excess(weight_variance):
        return MeanField(activation, weight_variance, bias_variance)._final_chi - 1

    high = 1e-3
    while excess(high) <= 0:
        high *= 2
        if high > 1e6:
            raise ValueError(
                "No weight variance up to 1e6 is critical. Received: "
                f"bias_variance={bias_variance!r}"
            )
    return _root(excess, high / 2, high)


def _gauss_rule(breaks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights for Gaussian means of functions that bend at `breaks`,
    `(..., n)`; panels may be empty.
    """
    ends = np.broadcast_to(_Z_BREAKS, (*breaks.shape[:-1], len(_Z_BREAKS)))
    clipped = np.clip(breaks, _Z_BREAKS[0], _Z_BREAKS[-1])
    ends = np.sort(np.concatenate([ends, clipped], axis=-1), axis=-1)
    half, middle = np.diff(ends)[..., None] / 2, (ends[..., 1:, None] + ends[..., :-1, None]) / 2
    z = middle + half * _NODES
    weights = half * _NODE_WEIGHTS * _normal_density(z)
    return z.reshape(*breaks.shape[:-1], -1), weights.reshape(*breaks.shape[:-1], -1)


def _root(function: Callable, a: float, b: float) -> float:
    """Return a root of a function that has different signs at a and b."""
    return _optional.load("scipy.optimize").brentq(function, a, b, xtol=1e-300, rtol=1e-15)


def _depth_scale(slope: float) -> float:
    if slope >= 1 - CRITICAL_WITHIN:
        return math.inf
    return -1 / math.log(slope) if slope > 0 else 0.0


def _phase(chi: float) -> str:
    if abs(chi - 1) <= CRITICAL_WITHIN:
        return "critical"
    return "ordered" if chi < 1 else "chaotic"


def _ratio(a: float, b: float) -> float:
    """Return the correlation a / b; it is 1 if both lengths are 0."""
    return min(a / b, 1.0) if b > 0 else 1.0


def _not_negative(value: float, argument: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(
            f"`{argument}` must be a finite number that is not negative. Received: "
            f"{argument}={value!r}"
        )
