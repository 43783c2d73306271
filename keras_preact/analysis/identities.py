"""Check Eq. 4 and 5 on a network, and measure what the shortcuts alone let through."""

import dataclasses
import math
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_preact import shortcuts
from keras_preact.analysis import _inputs
from keras_preact.analysis.observed import Observed
from keras_preact.backend import autodiff
from keras_preact.units import Trace


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
            shortcuts, `(L,)`. It arrives only if h and f are identities.
        residual_norm: `||dE/dx_E d/dx_l sum F(x_i)||`, the part that arrives through
            the branches, `(L,)`.
        gradient_error: Norm of dE/dx_l minus both parts, over `||dE/dx_l||`, `(L,)`
            (Eq. 5).

    If the shortcuts and the mappings after the additions are identities, both errors
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
    model: keras.Model, x, labels=None, *, loss: Callable | None = None, training: bool = True
) -> IdentityCheck:
    """Check on a batch whether signals add up as in Eq. 4, and gradients as in Eq. 5.

    The parts of the gradients are computed branch by branch, `J_F(x_i)^T dE/dx_{i+1}`,
    independently of the network's own backward pass.

    Args:
        model, x, labels, loss, training: See `propagation`.

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

    Source: Eq. 4 and 5 of arXiv 1603.05027.
    """
    observed = Observed(model, x, labels, loss, training)
    _inputs.watch(model, x)
    _, signal, gradients, _ = observed.gradients(_output)
    with keras.StatelessScope():  # batch statistics stay as they are
        values, residuals = observed.run(lambda trace, axis: ops.cast(trace.residual, "float32"))
    residual = [ops.convert_to_numpy(row) for rows in residuals for row in rows]
    gradient = [row.astype("float64") for row in gradients]
    branches = [branch for unit in observed.units for branch in observed.branches(unit, values)]

    ends = _ends(signal)
    units = len(residual)
    errors = np.full((4, units), np.nan)
    added = through = np.zeros(())
    for i in reversed(range(units)):
        if ends[i] < 0:
            continue
        if ends[i] == i:
            added, through = np.zeros(signal[i].shape), np.zeros(signal[i].shape)
        end = ends[i] + 1
        through = through + _pulled(branches[i], signal[i], gradient[i + 1])
        added = added + residual[i]
        errors[:, i] = (
            np.linalg.norm(signal[end] - signal[i] - added) / np.linalg.norm(signal[end]),
            np.linalg.norm(gradient[end]),
            np.linalg.norm(through),
            np.linalg.norm(gradient[i] - gradient[end] - through) / np.linalg.norm(gradient[i]),
        )
    return IdentityCheck(observed.names, ends, *errors)


def _pulled(branch: Callable, x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Return `J_F(x)^T gradient`."""
    _, pull = autodiff.vjp(branch, x)
    # Small gradients would be 0 in float16. A power of 2 adds no rounding.
    size = np.exp2(np.frexp(np.abs(gradient).max())[1])
    return ops.convert_to_numpy(pull((gradient / size).astype("float32"))) * size


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
    _, signal, gradients, _ = observed.gradients(_output, detach_residual=True)
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
    shortcuts.NoShortcut: lambda shortcut: 0.0,
    shortcuts.ConstantScaling: lambda shortcut: shortcut.shortcut,
    shortcuts.DecayedIdentity: lambda shortcut: shortcut.factor,
    shortcuts.Dropout: lambda shortcut: 1 - shortcut.rate,
    shortcuts.ExclusiveGating: lambda shortcut: 1 / (1 + math.exp(shortcut.bias)),
    shortcuts.ShortcutOnlyGating: lambda shortcut: 1 / (1 + math.exp(shortcut.bias)),
}


def _output(trace: Trace, axis: int):
    return ops.cast(trace.output, "float32")


def _ends(signal: list[np.ndarray]) -> np.ndarray:
    """Return for each unit the index of the last unit before the shape changes or the
    network ends; -1 for a unit that changes the shape.
    """
    ends = np.full(len(signal), -1)
    for i in reversed(range(len(signal) - 1)):
        if signal[i].shape == signal[i + 1].shape:
            ends[i] = ends[i + 1] if ends[i + 1] >= 0 else i
    return ends[:-1]
