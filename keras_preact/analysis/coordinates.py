"""Coordinate check: whether networks of all sizes learn alike at one learning rate."""

import dataclasses
from collections.abc import Callable, Sequence

import keras
import numpy as np
from keras import ops

from keras_preact import _checks
from keras_preact.analysis import _inputs
from keras_preact.analysis.observed import Observed, output_of
from keras_preact.backend import autodiff


@dataclasses.dataclass(frozen=True)
class CoordinateCheck:
    """How far the first updates move the output of the last unit, x_L, in networks of n
    sizes.

    Attributes:
        sizes: The sizes, `(n,)`.
        steps: Numbers of updates, `(t,)`.
        start: Root mean square of x_L before the first update, `(n,)`.
        change: Root mean square of the difference between x_L after these updates and
            before them, `(n, t)`.
    """

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    start: np.ndarray
    change: np.ndarray

    @property
    def exponents(self) -> np.ndarray:
        """The powers of the size that fit the changes best, `(t,)`: about 0 if one
        learning rate serves all sizes. Positive: larger networks move further, and need a
        lower rate.
        """
        with np.errstate(divide="ignore"):
            return np.polyfit(np.log(self.sizes), np.log(self.change), 1)[0]


def coordinate_check(
    builder: Callable[[int], keras.Model],
    sizes: Sequence[int],
    x,
    labels=None,
    *,
    optimizer: Callable[[keras.Model], keras.optimizers.Optimizer],
    steps: Sequence[int] = (1, 2, 4, 8),
    loss: Callable | None = None,
    training: bool = True,
) -> CoordinateCheck:
    """Train networks of several sizes on one batch for a few updates, and measure how far
    the output of their last unit moves.

    The sizes can be depths or widths. If the networks and their rates are parametrised
    right, the change does not depend on the size, and the rate that is best for a small
    network is good for a large one.

    Args:
        builder: Returns a network of a size. Give it seeds if the result must be the same
            each time.
        sizes: At least two sizes.
        x, labels, loss, training: See `propagation`. Dropout has the same masks in every
            pass.
        optimizer: Returns the optimizer of a network, such as
            `lambda model: kp.optimizers.CoupledSGD(0.1)`.
        steps: Numbers of updates after which x_L is measured, in increasing order.

    Raises:
        ValueError: as `propagation`, and for sizes or steps that do not fit.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    >>> check = kp.analysis.coordinate_check(
    ...     lambda depth: kp.models.dense_resnet(depth, width=16, input_shape=(16,)),
    ...     (10, 18),
    ...     x,
    ...     np.arange(8),
    ...     optimizer=lambda model: kp.optimizers.CoupledSGD(0.01),
    ...     steps=(1, 2),
    ... )
    >>> check.change.shape
    (2, 2)

    Source: Appendix D.1 of arXiv 2203.03466; by depth, arXiv 2505.01618.
    """
    sizes, steps = tuple(sizes), tuple(steps)
    if len(set(sizes)) < 2:
        raise ValueError(f"There must be two sizes or more. Received: sizes={sizes}")
    for step in steps:
        _checks.positive_int(step, "steps")
    if not steps or list(steps) != sorted(set(steps)):
        raise ValueError(
            f"`steps` must be numbers of updates in increasing order. Received: steps={steps}"
        )
    if not callable(optimizer):
        raise ValueError(
            "`optimizer` must be a function that returns the optimizer of a model, because each "
            f"size needs its own. Received: {optimizer!r}"
        )
    start, change = np.full(len(sizes), np.nan), np.full((len(sizes), len(steps)), np.nan)
    for i, size in enumerate(sizes):
        model = builder(size)
        observed = Observed(model, x, labels, loss, training)
        if not i:
            _inputs.watch(model, x)
        with autodiff.same_random_numbers(model):
            before = _last(observed)
            start[i] = _rms(before)
            update = _update(observed, optimizer(model))
            for done in range(1, steps[-1] + 1):
                update()
                if done in steps:
                    change[i, steps.index(done)] = _rms(_last(observed) - before)
    return CoordinateCheck(sizes, steps, start, change)


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.square(array.astype("float64")).mean()))


def _last(observed: Observed) -> np.ndarray:
    """Return x_L."""
    with keras.StatelessScope():  # batch statistics stay as they are
        _, outputs = observed.run(output_of)
    return ops.convert_to_numpy(outputs[-1][-1])


def _update(observed: Observed, optimizer: keras.optimizers.Optimizer) -> Callable:
    """Return a function that makes one update on the batch."""
    value, scale = _inputs.scaled_loss(
        observed.model, observed.batch, observed.loss, observed.graph.training
    )
    variables = observed.model.trainable_variables
    optimizer.build(variables)

    def update() -> None:
        *_, gradients = autodiff.value_and_gradients(lambda: (value(), []), [], variables)
        with autodiff.without_gradients():
            optimizer.apply([gradient / scale for gradient in gradients], variables)

    return update
