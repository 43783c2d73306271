"""Claims about deep linear networks, y = W_L ... W_1 x, trained by gradient descent."""

import functools
import itertools
from collections.abc import Iterable

import numpy as np

from .finding import Finding, conditional, decided

#: Numbers of layers and widths of the networks. Inputs and outputs have `FEATURES` numbers.
DEPTHS, WIDTHS, FEATURES = (4, 16, 64), (8, 32, 64, 128), 8
#: Learning rates times layers. The best one counts.
RATES = tuple(2.0**-i for i in range(6))
#: A network has learned if its loss falls below this share of the first target's in `LIMIT` steps.
SHARE, LIMIT = 0.01, 100


@np.errstate(over="ignore")  # a rate that is too high
def _losses(depth: int, width: int, rate: float, orthogonal: bool) -> list[float]:
    """Return the losses of gradient descent as shares of the targets' squared norm, up to
    the one that is small enough or `LIMIT` steps. Inputs and targets are orthogonal
    matrices.
    """
    random = np.random.default_rng(0)

    def weights(rows: int, columns: int) -> np.ndarray:
        matrix = random.normal(size=(rows, columns))
        if not orthogonal:
            return matrix / np.sqrt(columns)
        left, _, right = np.linalg.svd(matrix, full_matrices=False)
        return np.asarray(left @ right)

    x, y = (np.linalg.qr(random.normal(size=(FEATURES, FEATURES)))[0] for _ in range(2))
    sizes = [FEATURES, *[width] * (depth - 1), FEATURES]
    layers = [weights(after, before) for before, after in itertools.pairwise(sizes)]
    losses: list[float] = []
    for _ in range(LIMIT):
        signals = [x]
        for w in layers:
            signals.append(w @ signals[-1])
        error = signals[-1] - y
        losses.append(float(np.sum(error**2) / np.sum(y**2)))
        if not SHARE <= losses[-1] < 1e6:
            break
        for i in reversed(range(depth)):
            change = error @ signals[i].T
            error = layers[i].T @ error
            layers[i] -= rate / depth * change
    return losses


@functools.cache
def _steps(depth: int, width: int, orthogonal: bool) -> int:
    """Return the number of steps at the best rate; `LIMIT` if the network does not learn."""
    found = [_losses(depth, width, rate, orthogonal) for rate in RATES]
    return min(len(losses) - 1 if losses[-1] < SHARE else LIMIT for losses in found)


def gaussian_needs_width() -> Finding:
    """With Gaussian weights, the width that a network needs grows with the depth. It holds
    if the smallest width that learns in 100 steps grows from 4 to 64 layers.
    """
    needed = []
    for depth in DEPTHS:
        enough = [width for width in WIDTHS if _steps(depth, width, False) < LIMIT]
        needed.append(enough[0] if enough else 2 * WIDTHS[-1])
    steps = [_steps(depth, WIDTHS[-1], False) for depth in DEPTHS]
    return decided(
        needed == sorted(needed) and needed[-1] > needed[0],
        f"{_listed(DEPTHS)} layers need a width of {_listed(needed)} (of {_listed(WIDTHS)}); with "
        f"{WIDTHS[-1]} channels they take {_listed(steps)} steps.",
        widths=needed,
        steps=steps,
    )


def orthogonal_ignores_depth() -> Finding:
    """With orthogonal weights, the number of steps does not depend on the depth. It holds
    if 64 layers take at most twice as many steps as 4.
    """
    wide, narrow = ([_steps(depth, width, True) for depth in DEPTHS] for width in (32, FEATURES))
    shown = [f"over {LIMIT}" if steps == LIMIT else str(steps) for steps in narrow]
    return conditional(
        "the layers are wider than the data",
        wide[-1] <= 2 * wide[0],
        narrow[-1] < LIMIT and narrow[-1] <= 2 * narrow[0],
        f"{_listed(DEPTHS)} layers of width 32 take {_listed(wide)} steps; of width {FEATURES}, as "
        f"the data, {_listed(shown)}.",
        wide=wide,
        narrow=narrow,
    )


def loss_falls_as_bounded(depth: int = 16, width: int = 128, rate: float = 0.1) -> Finding:
    """A step with the rate eta multiplies the loss by at most 1 - eta L sigma_min(X)^2 / 2,
    with the rate divided by the number of outputs. It holds if it is so in each step, with
    orthogonal weights and inputs.
    """
    losses = np.array(_losses(depth, width, rate, orthogonal=True))
    factors = losses[1:] / losses[:-1]
    bound = 1 - rate / 2  # eta is rate / L, and orthogonal inputs have sigma_min(X) = 1
    return decided(
        bool(factors.max() <= bound),
        f"{depth} layers of width {width}, eta L = {rate:g}: {len(factors)} steps multiply the "
        f"loss by {factors.min():.2f} to {factors.max():.2f}; the bound is {bound:.2f}.",
        largest=float(factors.max()),
    )


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
