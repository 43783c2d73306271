"""Singular values of input-output Jacobians: of a unit, of a stage, of a network, at
one point.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_preact import _autodiff, _checks, _layers
from keras_preact.stacks import UnitStack

if TYPE_CHECKING:
    from keras_preact.models.network import ResidualNetwork

METHODS = ("auto", "exact", "lanczos", "randomized")

#: The most values, those of J's smaller side, for which `method="auto"` forms J although fewer are
#: wanted.
EXACT_UP_TO = 1000

#: What counts as equal between two singular values, relative to the largest: products in float32
#: resolve little more.
TOLERANCE = 1e-5

#: Random directions beyond those that are wanted, and steps of Lanczos' method behind the last
#: change.
OVERSAMPLING = 10
#: The most power iterations of the randomised method.
POWER_ITERATIONS = 100


@dataclasses.dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular values of a Jacobian J.

    Args:
        values: In descending order, float64: all `min(outputs, inputs)` of them, or the
            largest.
        shape: Of J, `(outputs, inputs)`.
        exact: Whether they come from J itself; those of an iterative method are never
            above the true ones but for rounding.

    The properties need all singular values.

    Raises:
        ValueError: in a property, where only the largest values are there.

    Example:

    >>> import numpy as np
    >>> Spectrum(np.array([2.0, 1.0, 0.5]), (3, 3), exact=True).condition_number
    4.0
    """

    values: np.ndarray
    shape: tuple[int, int]
    exact: bool

    @property
    def is_complete(self) -> bool:
        return len(self.values) == min(self.shape)

    @property
    def condition_number(self) -> float:
        """Largest over smallest singular value; infinite where that is 0.

        Derivatives in float32 have rounding errors of about 1e-7 of the largest
        singular value: a condition number beyond 1e6 says no more than that.
        """
        values = self._all("condition_number")
        zero = max(self.shape) * np.finfo("float64").eps * values[0]  # as in np.linalg.matrix_rank
        return float("inf") if values[-1] <= zero else float(values[0] / values[-1])

    @property
    def mean_square(self) -> float:
        """Mean squared singular value, `tr(J J^T) / min(outputs, inputs)`: a squared
        norm's mean growth.
        """
        return float(np.mean(self._all("mean_square") ** 2))

    @property
    def isometry_distance(self) -> float:
        """Distance from dynamical isometry, where all singular values are 1: the root
        mean square of `sigma - 1`.

        It is the Frobenius norm of `J - Q` over `sqrt(min(outputs, inputs))`, with Q
        the isometry (orthonormal rows or columns) next to J: the orthogonal factor of
        J's polar decomposition. 0 for an isometry, 1 for J = 0.

        Source: arXiv 1711.04735 for dynamical isometry; the distance is Higham's,
            "Functions of Matrices", 2008, Ch. 8.
        """
        return float(np.sqrt(np.mean((self._all("isometry_distance") - 1) ** 2)))

    def _all(self, wanted: str) -> np.ndarray:
        if not self.is_complete:
            raise ValueError(
                f"`{wanted}` needs all singular values: leave out `k`. Received: the "
                f"{len(self.values)} largest of {min(self.shape)}"
            )
        return self.values


def between(
    network: "ResidualNetwork",
    first: int | None = None,
    last: int | None = None,
    *,
    training: bool = False,
) -> Callable:
    """Return the map from x_first to x_last of a network, a function of one tensor that
    changes no variable.

    Args:
        network: Of single units or of stacks.
        first: The map starts with unit `first`, counted from 0; its input is what that
            unit reads. None: the map starts with the network's own input.
        last: It ends in front of unit `last`. None: behind the last unit; the head is
            no part of it.
        training: Whether batch normalisation uses the statistics of the batch, and
            dropout and stochastic depth drop.

    Raises:
        ValueError: for numbers that are not those of units in order.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, input_shape=(8, 8, 1))
    >>> x = between(model, None, 3)(np.zeros((1, 8, 8, 1), "float32"))  # x_3, in front of stage 2
    >>> tuple(x.shape), tuple(between(model, 3, 6)(x).shape)
    ((1, 8, 8, 16), (1, 4, 4, 32))
    """
    total = sum(_depth(segment) for segment in network.segments)
    start, end = first or 0, total if last is None else last
    are_numbers = isinstance(start, int) and isinstance(end, int)
    if not are_numbers or not 0 <= start <= end <= total or (first is not None and start == end):
        raise ValueError(
            f"`first` and `last` must be numbers of units in order, 0 to {total}. Received: "
            f"first={first!r}, last={last!r}"
        )
    chain = [keras.Model(network.input, network._parts.first_input)] if first is None else []
    position = 0
    for segment in network.segments:
        depth = _depth(segment)
        inside = range(max(start - position, 0), min(end - position, depth))
        if len(inside) == depth:
            chain.append(segment)
        elif inside:
            chain.append(UnitStack.from_units([segment.unit(i) for i in inside]))
        position += depth

    def run(x):
        with keras.StatelessScope():
            return _layers.run_chain(chain, x, training)

    return run


def _depth(segment) -> int:
    return segment.depth if isinstance(segment, UnitStack) else 1


def jacobian(function: Callable, x) -> np.ndarray:
    """Return the Jacobian of `function` at `x`, by rows or by columns, whichever are
    fewer.

    Args:
        function: A callable of one tensor that returns one, a Keras layer or model.
            What is random in it must be switched off.
        x: A tensor or array of floats with a batch axis. The batch is part of the
            flattened input: the Jacobian of n examples holds a block for each, and what
            else batch statistics couple. One example is usual.

    Returns:
        `(outputs, inputs)`, float64, over the flattened output and input.

    Raises:
        ValueError: for an x that is empty, not finite or not of floats; for a function
            that returns anything else but one tensor of floats, or another one when
            called again.

    Example:

    >>> import numpy as np
    >>> jacobian(lambda x: x**2, np.array([[1.0, 3.0]], "float32")).tolist()
    [[2.0, 0.0], [0.0, 6.0]]
    """
    return _dense(_LinearMap(function, x))


def spectrum(
    function: Callable, x, *, k: int | None = None, method: str = "auto", seed: int = 0
) -> Spectrum:
    """Return the singular values of the Jacobian of `function` at `x`, all or the `k`
    largest.

    Args:
        function, x: As in `jacobian`.
        k: How many of the largest values; None for all.
        method: `"exact"` forms J and decomposes it. The others know J by products with
            vectors alone: `"lanczos"`, Golub-Kahan bidiagonalisation with full
            reorthogonalisation, stops when k values stand; values that are equal are
            found one after the other. `"randomized"`, subspace iteration on k + 10
            random directions, has them all at once, and is slower where the values
            behind the k-th are close to it. `"auto"` is exact where all values are
            wanted, or J has no more than 1000, and Lanczos' method else.
        seed: Of the random directions that the iterative methods start from.

    Small singular values converge last in all products with J: there are the largest
    alone, or all.

    Raises:
        ValueError: as in `jacobian`, for an unknown method, and for a k above
            `min(outputs, inputs)`.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> unit = kp.ResidualUnit(4, normalization="none", kernel_initializer="zeros")  # F = 0: the unit is the identity
    >>> found = spectrum(unit, np.ones((1, 5, 5, 4), "float32"))
    >>> found.shape, found.condition_number, found.isometry_distance
    ((100, 100), 1.0, 0.0)

    Source: Golub and Kahan, SIAM J. Numer. Anal. 2, 1965; Halko, Martinsson and Tropp,
        arXiv 0909.4061, Algorithm 4.4.
    """
    _checks.one_of(method, METHODS, "method")
    linear = _LinearMap(function, x)
    most = min(linear.shape)
    if k is not None:
        _checks.positive_int(k, "k")
        if k > most:
            raise ValueError(
                f"The Jacobian {linear.shape} has {most} singular values. Received: k={k}"
            )
    if method == "auto":
        method = "exact" if k is None or most <= EXACT_UP_TO else "lanczos"
    wanted = most if k is None else k
    values = _METHODS[method](linear, wanted, np.random.default_rng(seed))
    return Spectrum(values[:wanted], linear.shape, exact=method == "exact")


class _LinearMap:
    """J as products with vectors: `push(v)` is J v, `pull(u)` J^T u, in float64 outside
    of the derivatives.
    """

    def __init__(self, function: Callable, x):
        x = ops.convert_to_tensor(x)
        if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype)):
            raise ValueError(
                f"`x` must be of floats: there is no derivative on others. Received: x of {x.dtype}"
            )
        if 0 in x.shape:
            raise ValueError(
                f"`x` must hold at least one example. Received: x of shape {tuple(x.shape)}"
            )
        if not np.isfinite(_flat(x)).all():
            raise ValueError("`x` must be finite. Received: x with NaN or infinite values")
        y = _value(function, x)
        self.inputs, self.outputs = tuple(x.shape), tuple(y.shape)
        self.shape = (int(np.prod(self.outputs)), int(np.prod(self.inputs)))
        self.dtypes = (y.dtype, x.dtype)
        self._push = _autodiff.compiled(lambda v: _autodiff.jvp(function, x, v))
        self._pull = _autodiff.compiled(lambda u: _autodiff.vjp(function, x)[1](u))

    def push(self, v: np.ndarray) -> np.ndarray:
        return _flat(self._push(ops.convert_to_tensor(v.reshape(self.inputs), self.dtypes[1])))

    def pull(self, u: np.ndarray) -> np.ndarray:
        return _flat(self._pull(ops.convert_to_tensor(u.reshape(self.outputs), self.dtypes[0])))


def _value(function: Callable, x) -> Any:
    """Return `function(x)`, one tensor of floats."""
    # JAX would compile a stack's scan anew in each of the calls.
    run = _autodiff.compiled(function) if keras.backend.backend() == "jax" else function
    with keras.StatelessScope():
        y, again = run(x), run(x)
    if not ops.is_tensor(y) or not keras.backend.is_float_dtype(
        keras.backend.standardize_dtype(y.dtype)
    ):
        received = f"{tuple(y.shape)} of {y.dtype}" if ops.is_tensor(y) else type(y).__name__
        raise ValueError(f"`function` must return one tensor of floats. Received: {received}")
    first = _flat(y)
    if not np.allclose(
        first, _flat(again), rtol=1e-3, atol=1e-3 * np.abs(first).max(initial=0), equal_nan=True
    ):
        raise ValueError(
            "`function` must return the same for the same x: switch off what is random in it, "
            "such as dropout with training=False. Received: two values that differ"
        )
    return y


def _flat(tensor) -> np.ndarray:
    return ops.convert_to_numpy(tensor).astype("float64").reshape(-1)


def _dense(linear: _LinearMap) -> np.ndarray:
    outputs, inputs = linear.shape
    if outputs <= inputs:
        return np.stack([linear.pull(row) for row in np.eye(outputs)])
    return np.stack([linear.push(column) for column in np.eye(inputs)], axis=1)


def _exact(linear: _LinearMap, k: int, rng: np.random.Generator) -> np.ndarray:
    return np.linalg.svd(_dense(linear), compute_uv=False)


def _lanczos(linear: _LinearMap, k: int, rng: np.random.Generator) -> np.ndarray:
    """Find bases with `J V = U B` and an upper bidiagonal B, whose largest singular
    values converge to those of J first.
    """
    push: Callable = linear.push
    pull: Callable = linear.pull
    outputs, inputs = linear.shape
    if outputs < inputs:  # start on the smaller side, which the basis spans in the end
        push, pull, outputs, inputs = pull, push, inputs, outputs
    left, right = np.zeros((0, outputs)), np.zeros((0, inputs))
    diagonal: list[float] = []
    above: list[float] = []  # above[j] couples u_j to v_{j+1}
    values, unchanged = np.zeros(k), 0
    v = _new_direction(right, rng)
    while True:
        right = np.vstack([right, v])
        u, norm = _orthogonal(push(v), left)
        alone = norm <= TOLERANCE * max([*diagonal, *above, norm])  # J v lies in what is there
        diagonal.append(0.0 if alone else norm)
        left = np.vstack([left, _new_direction(left, rng) if alone else u / norm])
        v, coupling = _orthogonal(pull(left[-1]), right)
        closed = coupling <= TOLERANCE * max([*diagonal, *above])
        if len(diagonal) >= k:
            before = values
            vectors, values, _ = np.linalg.svd(np.diag(diagonal) + np.diag(above, 1))
            tolerance = TOLERANCE * values[0]
            # A value that has converged need not be among the k largest: others, or equal ones, may
            # still come up.
            unchanged = (
                unchanged + 1 if np.allclose(before[:k], values[:k], rtol=0, atol=tolerance) else 0
            )
            residuals = 0.0 if closed else coupling * np.abs(vectors[-1, :k]).max()
            if len(diagonal) == inputs or (residuals <= tolerance and unchanged >= OVERSAMPLING):
                return values
        if closed:  # nothing more comes from here
            coupling, v = 1.0, _new_direction(right, rng)
        v = v / coupling
        above.append(0.0 if closed else coupling)


def _orthogonal(vector: np.ndarray, basis: np.ndarray) -> tuple[np.ndarray, float]:
    """Return what of `vector` is orthogonal to the rows of `basis`, and its norm."""
    for _ in range(2):  # once leaves rounding errors of the size of what it took away
        vector = vector - (basis @ vector) @ basis
    return vector, float(np.linalg.norm(vector))


def _new_direction(basis: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a random unit vector orthogonal to the rows of `basis`, 0 where they span
    everything.
    """
    if len(basis) == basis.shape[1]:
        return np.zeros(basis.shape[1])
    vector, norm = _orthogonal(rng.normal(size=(basis.shape[1],)), basis)
    return vector / norm


def _randomized(linear: _LinearMap, k: int, rng: np.random.Generator) -> np.ndarray:
    """Iterate `J^T J` on a random subspace until its k largest values stand."""
    size = min(k + OVERSAMPLING, *linear.shape)
    basis = np.linalg.qr(rng.normal(size=(linear.shape[1], size)))[0]
    values = np.zeros(size)
    for _ in range(POWER_ITERATIONS):
        before = values
        images = np.stack([linear.push(column) for column in basis.T], axis=1)
        left, values, _ = np.linalg.svd(images, full_matrices=False)
        if np.allclose(values[:k], before[:k], rtol=0, atol=TOLERANCE * values[0]):
            break
        basis = np.linalg.qr(np.stack([linear.pull(column) for column in left.T], axis=1))[0]
    return values


_METHODS: dict[str, Callable] = {"exact": _exact, "lanczos": _lanczos, "randomized": _randomized}
