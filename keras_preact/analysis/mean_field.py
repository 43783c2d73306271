"""Mean-field theory of wide networks at initialisation: how lengths, correlations and
gradients change with depth.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from keras_preact import _checks, _optional


def _sigmoid(x):
    return (1 + np.tanh(x / 2)) / 2


def _normal_density(x):
    return np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _normal_cdf(x):
    return (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))) / 2


#: Name, as in Keras, to an activation and its derivative.
ACTIVATIONS: Mapping[str, tuple[Callable, Callable]] = {
    "linear": (lambda x: x, np.ones_like),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "sigmoid": (_sigmoid, lambda x: _sigmoid(x) * _sigmoid(-x)),
    "gelu": (lambda x: x * _normal_cdf(x), lambda x: _normal_cdf(x) + x * _normal_density(x)),
    "silu": (lambda x: x * _sigmoid(x), lambda x: _sigmoid(x) * (1 + x * _sigmoid(-x))),
}

#: A fixed point below the first length counts as 0, one above the second as infinite.
SHORTEST, LONGEST = 1e-12, 1e8

#: A fixed point of the correlation below this one counts as 0.
ROUNDING = 1e-12

#: Replaces 0 in a denominator.
TINY = 1e-150

#: A network is critical if `chi` is this close to 1.
CRITICAL_WITHIN = 1e-6

# A Gaussian mean is a sum over panels, each with Gauss-Legendre nodes. Panels end at `_Z_BREAKS` of
# z, a standard normal variable, and at `_ARGUMENT_BREAKS` of the activation's argument, where the
# activations of the table bend or have kinks.
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
        activation: A name in `ACTIVATIONS`.
        weight_variance: sigma_w^2. A weight has the variance `weight_variance /
            fan_in`; He initialisation has 2.
        bias_variance: sigma_b^2.
        shortcut: h: `"none"` (a plain network) or `"identity"`.
        normalization: `"none"`, or `"batch"` before each activation (full
            pre-activation), with the statistics of a large batch of unrelated examples.
            Biases then have no effect.
        weights: Number of weight layers in the branch.
        branch_factor: Factor on the variance of F: `1 / units` for
            `kp.initializers.DepthScaledHe`.

    A length q is the mean square of the elements of x; with batch normalisation, it is
    their variance over the batch. The correlation c of two inputs of the same length
    is the mean of the products of their elements, over q.

    Raises:
        ValueError: for unknown names, negative variances, and results that only plain
            networks without normalisation have.

    Example:

    >>> he = MeanField("relu", weight_variance=2.0)
    >>> round(he.q_map(3.0), 9), round(he.chi(3.0), 9), he.phase, he.xi
    (3.0, 1.0, 'critical', inf)
    >>> chaotic = MeanField("tanh", weight_variance=2.5, bias_variance=0.1)
    >>> round(chaotic.c_star, 3), round(chaotic.chi_star, 3)  # how alike any two inputs become
    (0.664, 0.928)
    >>> he = MeanField("relu", 2.0, shortcut="identity", weights=2, normalization="batch")
    >>> he.gradients(1.0, 50)[[0, 25, 50]].round(1).tolist()  # squared norms, over the last one
    [1151.2, 4.1, 1.0]

    Source: Poole et al., arXiv 1606.05340; Schoenholz et al., arXiv 1611.01232 (plain
        networks); Xiao et al., arXiv 1806.05393 (convolutions); Yang and Schoenholz,
        arXiv 1712.08969 (shortcuts); for batch normalisation see `chi`.
    """

    activation: str = "tanh"
    weight_variance: float = 1.0
    bias_variance: float = 0.0
    shortcut: str = "none"
    normalization: str = "none"
    weights: int = 1
    branch_factor: float = 1.0

    def __post_init__(self):
        _checks.lookup(ACTIVATIONS, self.activation, "activation")
        _checks.one_of(self.shortcut, ("none", "identity"), "shortcut")
        _checks.one_of(self.normalization, ("none", "batch"), "normalization")
        _checks.positive_int(self.weights, "weights")
        for argument in ("weight_variance", "bias_variance", "branch_factor"):
            _checks.not_negative(getattr(self, argument), argument)

    def q_map(self, q: float) -> float:
        """Return the length of a unit's output if its input has the length q."""
        return self._through * q + self.branch_factor * self._branch_lengths(q)[-1]

    def chi(self, q: float) -> float:
        """Return the factor on a gradient's mean squared norm on its way back through a
        unit, if the unit's input has the length q.

        A weight and the activation before it contribute the factor `sigma_w^2 E
        phi'^2`; the identity adds 1. Batch normalisation divides by the length. Let `r
        = E phi'^2 / Var phi` for a standard normal argument, and let `V = sigma_w^2 Var
        phi` be what the branch adds to q. A branch of m weights then has the factor
        `r^m V / q`. After l units with shortcuts, it is about `r^m / l`: gradients grow
        towards the start as a power of the depth, `(L / l)^(r^m)`.

        Source: arXiv 1611.01232, Sec. 4; with shortcuts, arXiv 1712.08969. `r`, pi /
            (pi - 1) for ReLU, is the growth of a plain network in arXiv 1902.08129, q's
            linear growth is in arXiv 2002.10444; their product over units is derived
            here.
        """
        *lengths, after = self._branch_lengths(q)
        derivative = ACTIVATIONS[self.activation][1]
        # what each weight, with the activation before it, does to a squared norm
        factors = [self.weight_variance * _mean_square(derivative, length) for length in lengths]
        if self.normalization == "batch":
            # the first weight reads x / sqrt(q), the others what the weight before them returns
            factors[0] /= max(q, SHORTEST)
            factors[1:] = [factor / max(after, SHORTEST) for factor in factors[1:]]
        return self._through + self.branch_factor * math.prod(factors)

    def lengths(self, q: float, depth: int) -> np.ndarray:
        """Return q_0 ... q_L for the length q of x_0, `(depth + 1,)`."""
        _checks.positive_int(depth, "depth")
        lengths = [float(q)]
        for _ in range(depth):
            lengths.append(self.q_map(lengths[-1]))
        return np.array(lengths)

    def gradients(self, q: float, depth: int) -> np.ndarray:
        """Return the expected squared norms of the gradients at x_0 ... x_L over the
        one at x_L, `(depth + 1,)`.
        """
        factors = [self.chi(length) for length in self.lengths(q, depth)[:-1]]
        return np.cumprod([1.0, *factors[::-1]])[::-1]

    def correlation_map(self, c: float, q: float | None = None) -> float:
        """Return the correlation of the outputs of a unit for two inputs of the length q
        and the correlation c.

        With u and u' as normal variables of variance q and correlation c, a plain unit of
        one weight has `(sigma_w^2 E[phi(u) phi(u')] + sigma_b^2) / q_map(q)`. The identity
        adds `c q` to the numerator.

        Args:
            c: Correlation, -1 to 1.
            q: Length of both inputs. None: `q_star`.

        Raises:
            ValueError: for batch normalisation, whose statistics depend on all examples;
                for another c; if q or the length of the outputs is 0 or infinite.

        Source: arXiv 1606.05340; with shortcuts, arXiv 1712.08969.
        """
        q = self._length(q)
        covariance = self._branch_covariances(c, q)[-1]
        total = self._length(self.q_map(q))
        return _clipped((self._through * c * q + self.branch_factor * covariance) / total)

    def correlations(self, c: float, depth: int, q: float | None = None) -> np.ndarray:
        """Return the correlations c_0 ... c_L of two inputs, `(depth + 1,)`.

        Args:
            c: Correlation of the inputs, c_0.
            depth: Number of units, L.
            q: Length of the inputs, which then changes as in `lengths`. None: `q_star`.

        Raises:
            ValueError: as `correlation_map`.
        """
        found = [c]
        for length in self.lengths(self._length(q), depth)[:-1]:
            found.append(self.correlation_map(found[-1], float(length)))
        return np.array(found, float)

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
    def phase(self) -> str:
        """`"ordered"`, `"critical"` or `"chaotic"`: chi, at `q_star`, is below 1, 1, or
        above 1. Gradients vanish, keep their size, or explode.
        """
        if self.xi == math.inf:
            return "critical"
        return "ordered" if self._final_chi < 1 else "chaotic"

    @property
    def xi(self) -> float:
        """Depth scale: over this number of units a gradient's squared norm changes by a
        factor of e. Infinite in a critical network.

        In an ordered network with biases, differences between examples fade at the same
        rate.

        Source: Sec. 4 of arXiv 1611.01232.
        """
        chi = self._final_chi
        if abs(chi - 1) <= CRITICAL_WITHIN:
            return math.inf
        return 1 / abs(math.log(chi)) if chi > 0 else 0.0

    @property
    def c_star(self) -> float:
        """The correlation that two different inputs converge to: the stable fixed point
        of `correlation_map` at `q_star`.

        It is 1 in an ordered and in a critical network, which make all inputs alike, and
        below 1 in a chaotic one. In a critical linear network, every correlation stays.

        Raises:
            ValueError: for shortcuts and normalisation, and if `q_star` is 0 or infinite.

        Source: arXiv 1606.05340.
        """
        chi, q = self._final_chi, self._length()

        def rise(c):
            return self.correlation_map(c, q) - c

        if chi <= 1 + CRITICAL_WITHIN:
            return 1.0
        # The map is convex from 0 to 1, and steep at 1: it crosses the diagonal once.
        if rise(0.0) <= ROUNDING:
            return 0.0
        below = 0.5
        while rise(1 - below) >= 0:
            below /= 2
        return _root(rise, 0.0, 1 - below)

    @property
    def chi_star(self) -> float:
        """Slope of `correlation_map` at `c_star`; for one weight, `sigma_w^2 E[phi'(u)
        phi'(u')]`.

        After many units, each one multiplies the distance of a correlation from `c_star`
        by this factor. In an ordered network it is `chi`, at `q_star`.

        Raises:
            ValueError: as `c_star`.

        Source: arXiv 1611.01232.
        """
        c, q = self.c_star, self.q_star
        derivative = ACTIVATIONS[self.activation][1]
        before = zip(self._branch_lengths(q), self._branch_covariances(c, q), strict=True)
        slopes = [
            self.weight_variance * _mean_product(derivative, length, _clipped(covariance / length))
            for length, covariance in list(before)[:-1]
        ]
        return self.branch_factor * math.prod(slopes)

    @property
    def _through(self) -> float:
        return 1.0 if self.shortcut == "identity" else 0.0

    @property
    def _final_chi(self) -> float:
        if self.shortcut != "none" or self.normalization != "none":
            raise ValueError(
                "Phases, depth scales and fixed points are defined for plain networks without "
                f"normalisation. Received: shortcut={self.shortcut!r}, "
                f"normalization={self.normalization!r}"
            )
        # a ReLU has no slope at 0
        return self.chi(min(max(self.q_star, SHORTEST), LONGEST))

    def _branch_lengths(self, q: float) -> list[float]:
        """Return the lengths before each weight's activation and after the last one."""
        _checks.not_negative(q, "q")
        phi = ACTIVATIONS[self.activation][0]
        if self.normalization == "batch":
            variance = _mean_square(phi, 1.0) - _mean(phi, 1.0) ** 2
            return [1.0] * self.weights + [self.weight_variance * variance]
        lengths = [float(q)]
        for _ in range(self.weights):
            square = _mean_square(phi, lengths[-1])
            lengths.append(self.weight_variance * square + self.bias_variance)
        return lengths

    def _branch_covariances(self, c: float, q: float) -> list[float]:
        """Return the covariances of two inputs where `_branch_lengths` returns lengths."""
        if not _checks.is_number(c) or not -1 <= c <= 1:
            raise ValueError(f"`c` must be a number from -1 to 1. Received: c={c!r}")
        phi, covariances = ACTIVATIONS[self.activation][0], [float(c) * q]
        for length in self._branch_lengths(q)[:-1]:
            correlation = _clipped(covariances[-1] / length) if length else 1.0
            product = _mean_product(phi, length, correlation)
            covariances.append(self.weight_variance * product + self.bias_variance)
        return covariances

    def _length(self, q: float | None = None) -> float:
        """Return the length of two inputs or outputs that have a correlation."""
        if self.normalization != "none":
            raise ValueError(
                "Correlations are defined for networks without normalisation. Received: "
                f"normalization={self.normalization!r}"
            )
        q = self.q_star if q is None else q
        if not _checks.is_number(q) or not 0 < q < math.inf:
            raise ValueError(
                "Correlations need inputs and outputs of a finite length above 0. The lengths of "
                f"this network converge to {self.q_star:.3g}. Received: the length {q!r}"
            )
        return float(q)


def critical_weight_variance(activation: str, bias_variance: float = 0.0) -> float:
    """Return the sigma_w^2 at which a plain network is critical: gradients keep their
    size.

    Example:

    >>> round(critical_weight_variance("tanh"), 5), round(critical_weight_variance("relu"), 5)
    (1.0, 2.0)

    Source: Sec. 3 of arXiv 1606.05340.
    """

    def excess(weight_variance):
        return MeanField(activation, weight_variance, bias_variance)._final_chi - 1

    return _root(excess, 1e-3, 1e6)


def _nodes(breaks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes of a standard normal variable and their weights, both `(..., n)`.
    Panels also end at `breaks`, `(..., k)`.
    """
    always = np.broadcast_to(_Z_BREAKS, (*breaks.shape[:-1], len(_Z_BREAKS)))
    ends = np.concatenate([always, np.clip(breaks, _Z_BREAKS[0], _Z_BREAKS[-1])], axis=-1)
    ends.sort(axis=-1)
    half, middle = np.diff(ends)[..., None] / 2, (ends[..., 1:] + ends[..., :-1])[..., None] / 2
    z = middle + half * _NODES
    shape = (*breaks.shape[:-1], -1)
    return z.reshape(shape), (half * _NODE_WEIGHTS * _normal_density(z)).reshape(shape)


def _mean(function: Callable, q: float) -> float:
    """Return the mean of `function(u)` for a normal u with mean 0 and variance q."""
    scale = math.sqrt(q)
    z, weights = _nodes(_ARGUMENT_BREAKS / max(scale, TINY))
    return float(weights @ function(scale * z))


def _mean_product(function: Callable, q: float, c: float) -> float:
    """Return the mean of `function(u) function(v)` for normal u and v with mean 0,
    variance q and correlation c.
    """
    scale, rest = math.sqrt(q), math.sqrt((1 - c) * (1 + c))
    breaks = _ARGUMENT_BREAKS / max(scale, TINY)
    # u = scale z; v = scale (c z + rest w). The mean over w bends where c z is at a break, over a
    # width of `rest`.
    slope = math.copysign(max(abs(c), TINY), c)
    z, weights = _nodes(np.concatenate([breaks, breaks / slope, rest * _Z_BREAKS / slope]))
    through = c * z[:, None]
    w, inner_weights = _nodes((breaks - through) / max(rest, TINY))
    means = np.sum(inner_weights * function(scale * (through + rest * w)), axis=-1)
    return float(weights @ (function(scale * z) * means))


def _mean_square(function: Callable, q: float) -> float:
    return _mean(lambda u: function(u) ** 2, q)


def _clipped(c: float) -> float:
    """Return a correlation without its rounding beyond -1 and 1."""
    return min(max(c, -1.0), 1.0)


def _root(function: Callable, a: float, b: float) -> float:
    """Return a root of a function that has different signs at a and b."""
    return _optional.load("scipy.optimize").brentq(function, a, b, xtol=1e-300, rtol=1e-15)
