"""Singular values of the input-output Jacobian of a unit, a stage or a network, at one
point.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_preact import _checks, _optional
from keras_preact.backend import autodiff
from keras_preact.layers import chains
from keras_preact.models.segments import unit_names
from keras_preact.stacks import UnitStack

if TYPE_CHECKING:
    from keras_preact.models.network import ResidualNetwork

METHODS = ("auto", "exact", "lanczos")

#: `method="auto"` forms J if J has at most this many singular values.
EXACT_UP_TO = 1000

#: Relative change below which a singular value has converged: products are in float32.
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular values of a Jacobian J.

    Args:
        values: Singular values in descending order, float64: all `min(outputs, inputs)`
            of them, or the largest.
        shape: Shape of J, `(outputs, inputs)`.
        exact: Whether J itself was decomposed. Values of Lanczos' method are never
            above the true ones, except for rounding.

    Raises:
        ValueError: in a property that needs all singular values, if some are missing.

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
        """Largest over smallest singular value; infinite if the smallest is 0.

        Derivatives are in float32, with rounding errors of about 1e-7 of the largest
        value: take any condition number above 1e6 as "at least 1e6". If the function
        computes in 16 bits, the errors are about 1e-3 (float16) or 1e-2 (bfloat16).
        """
        values = self._all("condition_number")
        zero = max(self.shape) * np.finfo("float64").eps * values[0]  # as in np.linalg.matrix_rank
        return float("inf") if values[-1] <= zero else float(values[0] / values[-1])

    @property
    def mean_square(self) -> float:
        """Mean squared singular value, `tr(J J^T) / min(outputs, inputs)`: mean growth
        of a squared norm.
        """
        return float(np.mean(self._all("mean_square") ** 2))

    @property
    def isometry_distance(self) -> float:
        """Root mean square of `sigma - 1`: 0 for an isometry, 1 for J = 0.

        It is the distance of J from the nearest isometry Q (the orthogonal factor of
        the polar decomposition): the Frobenius norm of `J - Q` over `sqrt(min(outputs,
        inputs))`.

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
    """Return the map from x_first to x_last of a network: a function of one tensor that
    changes no variable.

    Args:
        network: A network of single units or stacks.
        first: Number of the first unit, from 0; the map reads that unit's input. None:
            the map reads the network's input.
        last: Number of the first unit after the map. None: the map ends after the last
            unit, before the head.
        training: Whether batch normalisation uses the statistics of the batch, and
            dropout and stochastic depth drop.

    Raises:
        ValueError: if the numbers are not numbers of units, in order.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, input_shape=(8, 8, 1))
    >>> x = between(model, None, 3)(np.zeros((1, 8, 8, 1), "float32"))  # x_3, before stage 2
    >>> tuple(x.shape), tuple(between(model, 3, 6)(x).shape)
    ((1, 8, 8, 16), (1, 4, 4, 32))
    """
    total = sum(len(unit_names(segment)) for segment in network.segments)
    start, end = first or 0, total if last is None else last
    are_numbers = _checks.is_int(start) and _checks.is_int(end)
    if not are_numbers or not 0 <= start <= end <= total or (first is not None and start == end):
        raise ValueError(
            f"`first` and `last` must be numbers of units in order, 0 to {total}. Received: "
            f"first={first!r}, last={last!r}"
        )
    chain = [keras.Model(network.input, network.first_input)] if first is None else []
    position = 0
    for segment in network.segments:
        depth = len(unit_names(segment))
        inside = range(max(start - position, 0), min(end - position, depth))
        if len(inside) == depth:
            chain.append(segment)
        elif inside:
            chain.append(UnitStack.from_units([segment.unit(i) for i in inside]))
        position += depth

    def run(x):
        with keras.StatelessScope():
            return chains.run_chain(chain, x, training)

    return run


def jacobian(function: Callable, x) -> np.ndarray:
    """Return the Jacobian of `function` at `x`.

    It is computed by rows or by columns, whichever are fewer.

    Args:
        function: A function of one tensor that returns one: a callable, a Keras layer
            or a model. It must not be random.
        x: A tensor or array of floats with a batch axis. The batch is part of the
            flattened input: the Jacobian of n examples has one block per example, and
            others if batch statistics couple them. One example is usual.

    Returns:
        `(outputs, inputs)`, float64, over the flattened output and input.

    Raises:
        ValueError: if x is empty, not finite or not of floats; if the function does not
            return one tensor of floats, or returns different values when called again.

    Example:

    >>> import numpy as np
    >>> jacobian(lambda x: x**2, np.array([[1.0, 3.0]], "float32")).tolist()
    [[2.0, 0.0], [0.0, 6.0]]
    """
    return _LinearMap(function, x).matrix()


def spectrum(
    function: Callable, x, *, k: int | None = None, method: str = "auto", seed: int = 0
) -> Spectrum:
    """Return all singular values of the Jacobian of `function` at `x`, or the `k`
    largest.

    Args:
        function, x: See `jacobian`.
        k: Number of the largest values to return; None for all.
        method: `"exact"` forms J and decomposes it, as every method does for all
            values. `"lanczos"` is ARPACK's method on J^T J: it only multiplies J with
            vectors, and needs SciPy. `"auto"` is exact if J has at most 1000 singular
            values, else Lanczos' method.
        seed: Seed of the random start of Lanczos' method.

    Raises:
        ValueError: as in `jacobian`; for an unknown method; for a k above `min(outputs,
            inputs)`.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> unit = kp.ResidualUnit(4, normalization="none", kernel_initializer="zeros")  # F = 0
    >>> result = spectrum(unit, np.ones((1, 5, 5, 4), "float32"))
    >>> result.shape, result.condition_number, result.isometry_distance
    ((100, 100), 1.0, 0.0)

    Source: Lehoucq, Sorensen and Yang, "ARPACK Users' Guide", 1998.
    """
    _checks.one_of(method, METHODS, "method")
    linear = _LinearMap(function, x)
    total = min(linear.shape)
    if k is not None:
        _checks.positive_int(k, "k")
        if k > total:
            raise ValueError(
                f"The Jacobian {linear.shape} has {total} singular values. Received: k={k}"
            )
    if method == "auto":
        method = "exact" if total <= EXACT_UP_TO else "lanczos"
    if method == "exact" or k is None or k == total:
        values = np.linalg.svd(linear.matrix(), compute_uv=False)
        return Spectrum(values[:k], linear.shape, exact=True)
    return Spectrum(_lanczos(linear, k, seed), linear.shape, exact=False)


class _LinearMap:
    """The Jacobian J as a function: `push(v)` is J v, `pull(u)` is J^T u."""

    def __init__(self, function: Callable, x):
        x = ops.convert_to_tensor(x)
        if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype)):
            raise ValueError(
                "`x` must hold floats, because other types have no derivative. Received: x of "
                f"{x.dtype}"
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
        self._push = autodiff.compiled(lambda v: autodiff.jvp(function, x, v))
        self._pull = autodiff.compiled(lambda u: autodiff.vjp(function, x)[1](u))

    def push(self, v: np.ndarray) -> np.ndarray:
        return _flat(self._push(ops.convert_to_tensor(v.reshape(self.inputs), self.dtypes[1])))

    def pull(self, u: np.ndarray) -> np.ndarray:
        return _flat(self._pull(ops.convert_to_tensor(u.reshape(self.outputs), self.dtypes[0])))

    def matrix(self) -> np.ndarray:
        outputs, inputs = self.shape
        if outputs <= inputs:
            return np.stack([self.pull(row) for row in np.eye(outputs)])
        return np.stack([self.push(column) for column in np.eye(inputs)], axis=1)


def _value(function: Callable, x) -> Any:
    """Return `function(x)`, one tensor of floats."""
    # JAX would compile a stack's scan again in each call.
    run = autodiff.compiled(function) if keras.backend.backend() == "jax" else function
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
            "`function` must return the same for the same x. Switch off what is random in it, "
            "such as dropout with training=False. Received: two values that differ"
        )
    return y


def _flat(tensor) -> np.ndarray:
    return ops.convert_to_numpy(tensor).astype("float64").reshape(-1)


def _lanczos(linear: _LinearMap, k: int, seed: int) -> np.ndarray:
    start = np.random.default_rng(seed).normal(size=linear.shape[1])
    if not linear.push(start).any():  # J = 0, for which ARPACK has no start
        return np.zeros(k)
    sparse = _optional.load("scipy.sparse.linalg")
    operator = sparse.LinearOperator(
        linear.shape, matvec=linear.push, rmatvec=linear.pull, dtype="float64"
    )
    values = sparse.svds(
        operator,
        k,
        tol=TOLERANCE / 10,
        v0=start[: min(linear.shape)],
        return_singular_vectors=False,
    )
    return np.sort(values)[::-1]
