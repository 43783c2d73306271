"""Check Eq. 4 and 5 on a network, and measure what the shortcuts alone let through."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_preact import _checks, shortcuts
from keras_preact.analysis import _inputs
from keras_preact.analysis.additions import LayerUnit
from keras_preact.analysis.observed import Observed, output_of, pulled


@dataclasses.dataclass(frozen=True)
class IdentityCheck:
    """Errors of Eq. 4 and 5 for each unit l of L. x_E is the output of the last unit
    before the shape changes or the network ends.

    Attributes:
        units: Names of the units, in order.
        ends: Index of the unit that returns x_E, `(L,)`; -1 for a unit that changes the
            shape. For such a unit, all other entries are nan.
        forward_error: `||x_E - x_l - sum F(x_i)|| / ||x_E||`, `(L,)` (Eq. 4).
        direct_norm: `||dE/dx_E||`, the part of dE/dx_l that Eq. 5 predicts for the
            shortcuts, `(L,)`. It arrives only if h and f are identities. With the
            composite maps, it is what these make of dE/dx_E.
        residual_norm: `||dE/dx_E d/dx_l sum F(x_i)||`, the part that arrives through
            the branches, `(L,)`.
        gradient_error: Norm of dE/dx_l minus both parts, over `||dE/dx_l||`, `(L,)`
            (Eq. 5).

    If the shortcuts and the mappings after the additions are identities, or with the
    composite maps if the shortcuts are linear and the mappings identities, both errors
    are rounding errors of the dtype that the network computes in: about 1e-7 in
    float32, 1e-3 in float16 and 1e-2 in bfloat16. If not, they are of the order of 1.
    """

    units: tuple[str, ...]
    ends: np.ndarray
    forward_error: np.ndarray
    direct_norm: np.ndarray
    residual_norm: np.ndarray
    gradient_error: np.ndarray


def check_identities(
    model: keras.Model,
    x,
    labels=None,
    *,
    composite: bool = False,
    loss: Callable | None = None,
    training: bool = True,
) -> IdentityCheck:
    """Check on a batch whether signals add up as in Eq. 4, and gradients as in Eq. 5.

    The parts of the gradients are computed branch by branch, `J_F(x_i)^T dE/dx_{i+1}`,
    independently of the network's own backward pass.

    Args:
        model, x, labels, loss, training: See `propagation`.
        composite: Whether the products of the network's own shortcuts take the place of
            the identities, as in Eq. 7 and 8: `x_E = (h_{E-1} ... h_l) x_l +
            sum (h_{E-1} ... h_{i+1}) F(x_i)`. Gates, the coefficients of streams and
            dropout masks count as constants of a batch.

    Raises:
        ValueError: see `propagation`.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> x = np.random.default_rng(0).normal(size=(4, 8, 8, 1))
    >>> for name in ("full_preactivation", "original"):
    ...     model = kp.models.resnet_cifar(14, input_shape=(8, 8, 1), arrangement=name)
    ...     check = kp.analysis.check_identities(model, x)
    ...     forward, gradient = np.nanmax(check.forward_error), np.nanmax(check.gradient_error)
    ...     print(bool(forward < 1e-5), bool(gradient < 1e-4))
    True True
    False False

    Source: Eq. 4, 5, 7 and 8 of arXiv 1603.05027.
    """
    observed = Observed(model, x, labels, loss, training)
    _inputs.watch(model, x)
    with observed.same_random_numbers():
        return _checked(observed, composite)


def _checked(observed: Observed, composite: bool) -> IdentityCheck:
    _, signal, gradients, _ = observed.gradients(output_of)
    with keras.StatelessScope():  # batch statistics stay as they are
        values, residuals = observed.run(lambda trace, axis: ops.cast(trace.residual, "float32"))
    residual = [ops.convert_to_numpy(row) for rows in residuals for row in rows]
    gradient = [row.astype("float64") for row in gradients]
    branches = [
        branch
        for unit in observed.units
        for branch in observed.branches(unit, values, with_shortcut=composite)
    ]

    ends = _ends(signal)
    units = len(residual)
    maps = _maps(observed, values, signal, ends) if composite else [_IDENTITY] * units
    errors = np.full((4, units), np.nan)
    errors[0] = _forward_errors(signal, residual, maps, ends)
    direct = through = np.zeros(())
    for i in reversed(range(units)):
        if ends[i] < 0:
            continue
        end = ends[i] + 1
        if end == i + 1:
            direct, through = gradient[end], np.zeros(signal[i].shape)
        part = pulled(branches[i], signal[i], gradient[i + 1])
        if composite:  # of the sum of both paths
            part = part - maps[i].transposed(gradient[i + 1])
        direct, through = maps[i].transposed(direct), maps[i].transposed(through) + part
        errors[1:, i] = (
            np.linalg.norm(direct),
            np.linalg.norm(through),
            np.linalg.norm(gradient[i] - direct - through) / np.linalg.norm(gradient[i]),
        )
    return IdentityCheck(observed.names, ends, *errors)


class _Map(NamedTuple):
    """A linear map of arrays, and its transpose."""

    of: Callable
    transposed: Callable


_IDENTITY = _Map(lambda vector: vector, lambda vector: vector)


def _forward_errors(
    signal: Sequence, residual: Sequence, maps: Sequence[_Map], ends: np.ndarray
) -> np.ndarray:
    """Return `||x_E - h x_l - sum h F(x_i)|| / ||x_E||` for each unit l.

    The difference is a sum over the units i from l on: the rest of each one,
    `x_{i+1} - h x_i - F(x_i)`, times all later h. So each h is applied to one rest per
    earlier unit, or to nothing if it is the identity. For h x_i, F of the unit before
    is taken by itself, so that a shortcut that is not linear leaves a rest.
    """
    errors = np.full(len(ends), np.nan)
    rests: list[np.ndarray] = []
    for i, end in enumerate(ends):
        if end < 0:
            continue
        h = maps[i].of
        added = residual[i - 1] if rests else np.zeros_like(signal[i])
        rest = signal[i + 1] - h(signal[i] - added) - h(added) - residual[i]
        rests = [*map(h, rests), rest]
        if end == i:
            size = np.linalg.norm(signal[i + 1])
            for later, error in enumerate(itertools.accumulate(reversed(rests))):
                errors[i - later] = np.linalg.norm(error) / size
            rests = []
    return errors


def _maps(observed: Observed, values: dict, signal: Sequence, ends: np.ndarray) -> list[_Map]:
    """Return the map of each unit's shortcut at the unit's x_l. The entry of a unit that
    changes the shape must not be used.
    """
    at = [each for unit in observed.units for each in observed.shortcuts(unit, values)]
    return [
        _IDENTITY if end < 0 else _map(shortcut, x)
        for shortcut, x, end in zip(at, signal[:-1], ends, strict=True)
    ]


def _map(shortcut: Callable, x: np.ndarray) -> _Map:
    """Return the map of a shortcut at x. One that returns a vector without a structure is
    the identity. The vector's entries are exact in 16 bits.
    """
    with keras.StatelessScope():
        linear = shortcut(ops.convert_to_tensor(x))

    def of(vector):
        with keras.StatelessScope():
            return ops.convert_to_numpy(linear(ops.convert_to_tensor(vector, "float32")))

    vector = np.random.default_rng(0).integers(1, 100, x.shape).astype("float32")
    if np.array_equal(of(vector), vector):
        return _IDENTITY
    return _Map(of, functools.partial(pulled, linear, x))


@dataclasses.dataclass(frozen=True)
class CompositeGain:
    """Gain of the product of the shortcuts from x_l to x_E for each unit l of L. See
    `IdentityCheck` for x_E.

    Attributes:
        units: Names of the units, in order.
        ends: Index of the unit that returns x_E, `(L,)`; -1 for a unit that changes the
            shape. For such a unit, both gains are nan.
        forward: Largest sum of the absolute values in a row, the mean over the batch and
            all positions, `(L,)`: how much a signal can grow.
        backward: The same of the columns: how much a gradient can grow.
    """

    units: tuple[str, ...]
    ends: np.ndarray
    forward: np.ndarray
    backward: np.ndarray


def composite_gain(model: keras.Model, x, *, training: bool = False) -> CompositeGain:
    """Measure how much the product of all shortcuts can enlarge a signal and a gradient.

    For hyper-connections the product is that of the matrices H_res. A shortcut with one
    stream multiplies each entry by a number: identity 1, constant scaling `lambda^n`,
    and a gate its own at each position.

    Args:
        model, x, training: See `propagation`.

    Raises:
        ValueError: see `propagation`; and for a shortcut that mixes channels.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> halved = kp.models.resnet_cifar(20, input_shape=(8, 8, 1), shortcut="constant_scaling")
    >>> x = np.random.default_rng(0).normal(size=(2, 8, 8, 1))
    >>> gain = kp.analysis.composite_gain(halved, x)
    >>> gain.forward[:3].tolist()
    [0.125, 0.25, 0.5]

    Source: Sec. 3.1 of arXiv 2512.24880.
    """
    observed = Observed(model, x, training=training)
    _inputs.watch(model, x)
    with observed.same_random_numbers():
        return _gains(observed)


def _gains(observed: Observed) -> CompositeGain:
    with keras.StatelessScope():
        values, outputs = observed.run(lambda trace, axis: ops.cast(trace.output, "float32"))
    signal = [
        ops.convert_to_numpy(ops.cast(values[observed.units[0].start], "float32")),
        *(ops.convert_to_numpy(row) for rows in outputs for row in rows),
    ]
    ends = _ends(signal)
    maps = _maps(observed, values, signal, ends)
    places = [
        (unit.template.h.streams, 1 if unit.template.data_format == "channels_first" else -1)
        if isinstance(unit, LayerUnit)
        else (1, -1)
        for unit in observed.units
        for _ in unit.names
    ]
    gains = np.full((2, len(ends)), np.nan)
    product = np.zeros(())
    for i in reversed(range(len(ends))):
        if ends[i] < 0:
            continue
        matrix = _matrix(maps[i].of, signal[i], *places[i], observed.names[i])
        product = matrix if ends[i] == i else np.einsum("rs...,st...->rt...", product, matrix)
        gains[:, i] = [np.abs(product).sum(axis).max(0).mean() for axis in (1, 0)]
    return CompositeGain(observed.names, ends, *gains)


def _matrix(linear: Callable, x: np.ndarray, streams: int, axis: int, name: str) -> np.ndarray:
    """Return the entries of a map that mixes streams, `(streams, streams, *shape of one)`."""
    one = np.split(x, streams, axis)[0].shape

    def column(s: int) -> list[np.ndarray]:
        basis = np.concatenate([np.full(one, float(r == s)) for r in range(streams)], axis)
        return np.split(linear(basis), streams, axis)

    matrix = np.stack(list(map(column, range(streams))), 1).astype("float64")
    vector = np.random.default_rng(0).normal(size=x.shape).astype("float32")
    want = np.einsum("rs...,s...->r...", matrix, np.stack(np.split(vector, streams, axis)))
    found = np.stack(np.split(linear(vector), streams, axis))
    if np.linalg.norm(found - want) > 0.05 * np.linalg.norm(want):
        raise ValueError(
            "The gain is measured for shortcuts that mix streams, or multiply each entry: use "
            f"`direct_path` for this one. Received: the shortcut of {name}, which mixes channels"
        )
    return matrix


@dataclasses.dataclass(frozen=True)
class DirectPath:
    """The part of a gradient that goes back through the shortcuts alone, `(L+1,)` for
    x_0 ... x_L. See `IdentityCheck` for x_E.

    Attributes:
        units: Names of the units, in order.
        gain: Norm of the gradient at x_l over its norm at x_E: the product of the
            scalings between them, `lambda^(E-l)`.
        survival: Share of the nonzero entries at x_E that are also nonzero at x_l.

    Both are nan if the gradient at x_E is 0 everywhere, because the shortcuts after x_E
    let nothing through.
    """

    units: tuple[str, ...]
    gain: np.ndarray
    survival: np.ndarray


def direct_path(
    model: keras.Model, x, labels=None, *, loss: Callable | None = None, training: bool = True
) -> DirectPath:
    """Measure the gradient that reaches each x_l through the shortcuts and the mappings
    after the additions, without the branches.

    Identities let everything through. After n units, `h(x) = lambda x` leaves
    `lambda^n` of the norm. A dropout shortcut leaves `(1-p)^n` of the entries, see
    `expected_gain`. A ReLU after the addition leaves the entries that were positive in
    all n sums.

    Args:
        model, x, labels, loss, training: See `propagation`. In inference a dropout
            shortcut is an identity.

    Raises:
        ValueError: see `propagation`.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> halved = kp.models.resnet_cifar(20, input_shape=(8, 8, 1), shortcut="constant_scaling")
    >>> path = kp.analysis.direct_path(halved, np.random.default_rng(0).normal(size=(4, 8, 8, 1)))
    >>> path.gain[:4].round(3).tolist()
    [0.125, 0.25, 0.5, 1.0]

    Source: Sec. 3 of arXiv 1603.05027.
    """
    observed = Observed(model, x, labels, loss, training)
    _inputs.watch(model, x)
    _, signal, gradients, _ = observed.gradients(output_of, detach_residual=True)
    gradient = [row.astype("float64") for row in gradients]
    ends = [end if end >= 0 else i - 1 for i, end in enumerate([*_ends(signal), -1])]
    gain, survival = np.full((2, len(gradient)), np.nan)
    for i, end in enumerate(ends):
        here, there = gradient[i], gradient[end + 1]
        if arrived := np.count_nonzero(there):
            gain[i] = np.linalg.norm(here) / np.linalg.norm(there)
            survival[i] = np.count_nonzero((here != 0) & (there != 0)) / arrived
    return DirectPath(observed.names, gain, survival)


def expected_gain(shortcut: str | shortcuts.Shortcut, units: int) -> float:
    """Return how much of a gradient is left after the shortcuts of `units` units,
    according to the theory.

    Args:
        shortcut: A name from `kp.SHORTCUTS`, or a shortcut. Constant scaling has
            `lambda^n`. Dropout has `(1-p)^n`, the share of the entries that arrive;
            each unit scales them by `1/(1-p)`, so that the mean stays the same. Gating
            has `(1 - sigmoid(b))^n`, if the kernel of the gate is 0. A decayed identity
            without its own factor has the product of all alphas of a network of n units.
            Hyper-connections have 1: doubly stochastic matrices keep the sum of the
            streams' gradients. Without a constraint this holds at the start, where H_res
            is the identity.
        units: Number of units, n.

    Raises:
        ValueError: for a shortcut such as a convolution, because its gain depends on
            its weights.

    Example:

    >>> import keras_preact as kp
    >>> f"{kp.analysis.expected_gain(kp.shortcuts.ConstantScaling(0.9), 100):.1e}"
    '2.7e-05'

    Source: Sec. 3 and 3.1 of arXiv 1603.05027.
    """
    _checks.not_negative(units, "units")
    instance = shortcuts.get(shortcut)
    for shortcut_class, gain in _GAINS.items():
        if isinstance(instance, shortcut_class):
            return math.prod(gain(instance.of_unit(i, units)) for i in range(1, units + 1))
    known = ", ".join(shortcut_class.__name__ for shortcut_class in _GAINS)
    raise ValueError(
        f"The gain of {type(instance).__name__} depends on its weights. Known gains: {known}. "
        f"Received: {shortcut!r}"
    )


#: Class of a shortcut to its factor on a gradient in one unit.
_GAINS: dict[type, Callable] = {
    shortcuts.Identity: lambda shortcut: 1.0,
    shortcuts.ScaledResidual: lambda shortcut: 1.0,
    shortcuts.Orthogonal: lambda shortcut: 1.0,
    shortcuts.DepthScaling: lambda shortcut: 1.0,
    shortcuts.HyperConnections: lambda shortcut: 1.0,
    shortcuts.NoShortcut: lambda shortcut: 0.0,
    shortcuts.ConstantScaling: lambda shortcut: shortcut.shortcut,
    shortcuts.DecayedIdentity: lambda shortcut: shortcut.factor,
    shortcuts.Dropout: lambda shortcut: 1 - shortcut.rate,
    shortcuts.ExclusiveGating: lambda shortcut: 1 / (1 + math.exp(shortcut.bias)),
    shortcuts.ShortcutOnlyGating: lambda shortcut: 1 / (1 + math.exp(shortcut.bias)),
}


def _ends(signal: list[np.ndarray]) -> np.ndarray:
    """Return for each unit the index of the last unit before the shape changes or the
    network ends; -1 for a unit that changes the shape.
    """
    ends = np.full(len(signal), -1)
    for i in reversed(range(len(signal) - 1)):
        if signal[i].shape == signal[i + 1].shape:
            ends[i] = ends[i + 1] if ends[i + 1] >= 0 else i
    return ends[:-1]
