"""Signal propagation: statistics of the signals and gradients of every unit."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import keras
import numpy as np
from keras import ops

from keras_preact.analysis import _inputs
from keras_preact.analysis.observed import Observed, norms, other_axes
from keras_preact.units import Trace

#: Statistics of every unit, in the order of `_look`.
_STATISTICS = (
    *("x_norm", "x_mean", "x_std"),
    *("residual_norm", "residual_mean", "residual_std"),
    *("shortcut_norm", "cut", "dead"),
    *("residual_cosine", "residual_parallel", "output_cosine"),
)


@dataclasses.dataclass(frozen=True)
class Propagation:
    """The signals of a network of L units on a batch. A norm of x or F is the root mean
    square of the norms of all examples.

    Attributes:
        units: Names of the units, in order.
        x_norm, x_mean, x_std: Norm, mean and standard deviation of x_0 ... x_L,
            `(L+1,)`. The first unit reads x_0, and the last one returns x_L.
        residual_norm, residual_mean, residual_std: The same statistics of what the
            branch adds, `(L,)`.
        shortcut_norm: Norm of what the shortcut adds, `(L,)`; 0 in a plain network.
        cut: Share of the sums that the mapping after the addition sets to zero, `(L,)`:
            the truncation of Sec. 4.1. 0 if it is the identity.
        dead: Share of the channels read by the branch's first weight that are 0 for all
            examples and at all positions, `(L,)`.
        residual_cosine: Cosine of the angle between what the shortcut and what the branch
            add, cos(h(x_l), F(x_l)), `(L,)`. Below 0, the branch takes away from what the
            shortcut carries.
        residual_parallel: Share of the squared norm of F(x_l) that is parallel to
            h(x_l), `(L,)`.
        output_cosine: cos(h(x_l), x_{l+1}), `(L,)`: 1 if the unit does not turn the
            signal.
        gradient_norm: `||dE/dx_l||` of x_0 ... x_L for the whole batch, `(L+1,)`.
        weight_gradients: Name of a weight below its unit to the norms of its gradients,
            `(L,)`; nan for a unit without this weight.
        loss: The loss E.

    With an identity shortcut, h(x_l) is x_l. The cosines and the parallel share are
    means over the examples for which neither vector is 0; nan if there are none, as in
    a plain network.
    """

    units: tuple[str, ...]
    x_norm: np.ndarray
    x_mean: np.ndarray
    x_std: np.ndarray
    residual_norm: np.ndarray
    residual_mean: np.ndarray
    residual_std: np.ndarray
    shortcut_norm: np.ndarray
    cut: np.ndarray
    dead: np.ndarray
    residual_cosine: np.ndarray
    residual_parallel: np.ndarray
    output_cosine: np.ndarray
    gradient_norm: np.ndarray
    weight_gradients: Mapping[str, np.ndarray]
    loss: float

    @property
    def ratio(self) -> np.ndarray:
        """Norm of what the branch adds over the norm of what the shortcut adds, `(L,)`;
        infinite in a plain network.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.residual_norm / self.shortcut_norm

    @property
    def gradient_ratio(self) -> float:
        """`||dE/dx_0|| / ||dE/dx_L||`; nan if both are 0 or infinite. If the shape changes
        in between, these are norms of maps of different sizes.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(self.gradient_norm[0] / self.gradient_norm[-1])


def propagation(
    model: keras.Model, x, labels=None, *, loss: Callable | None = None, training: bool = True
) -> Propagation:
    """Measure the signals of a network on a batch; the network stays as it is.

    Args:
        model: Any Keras model with residual units: one of this package, stacked or not,
            or any other in which two paths that start at one tensor are added.
        x: A batch of inputs. For a model with several inputs a list, or a dictionary by
            their names. For a network of this package, values outside the range that it
            expects cause a warning, as in its `fit`.
        labels: Class numbers, one per example, or what `loss` takes.
        loss: A function `(labels, output)`. None: with labels, the cross-entropy from
            the logits or probabilities that the model returns; without labels, half the
            squared norm of the output, averaged over the batch.
        training: Whether normalisations use the statistics of the batch, and dropout
            drops. Before training, moving statistics say nothing about the network.

    Raises:
        ValueError: for an empty or non-finite batch, a model without residual units, or
            one that cannot be traced.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, input_shape=(8, 8, 1))
    >>> x = np.random.default_rng(0).normal(size=(8, 8, 8, 1))
    >>> signals = kp.analysis.propagation(model, x, np.arange(8))
    >>> signals.x_norm.shape, signals.gradient_norm.shape, signals.units[-1]
    ((10,), (10,), 'stage3_unit3')

    Source: Eq. 3 to 5, Sec. 3 and 4.1 of arXiv 1603.05027; for the part of F that is
        parallel to x, arXiv 2505.11881.
    """
    observed = Observed(model, x, labels, loss, training)
    _inputs.watch(model, x)
    value, statistics, gradients, on_weights = observed.gradients(
        _look, variables=observed.trainable_weights
    )
    fields = dict(zip(_STATISTICS, np.stack(statistics).T, strict=True))
    for name in _STATISTICS[3:]:
        fields[name] = fields[name][1:]  # x_0 belongs to no unit
    return Propagation(
        units=observed.names,
        gradient_norm=np.concatenate([norms(gradient, 1) for gradient in gradients]),
        weight_gradients=_by_weight(observed, on_weights),
        loss=value,
        **fields,
    )


def _moments(tensor) -> list:
    """Return norm, mean and standard deviation, scalars."""
    tensor = ops.cast(tensor, "float32")
    return [
        ops.sqrt(ops.sum(ops.square(tensor)) / tensor.shape[0]),
        ops.mean(tensor),
        ops.std(tensor),
    ]


def _cosines(a, b) -> list:
    """Return the means over the examples of the cosine between two tensors, and of its
    square, scalars.
    """
    a, b = (ops.reshape(ops.cast(x, "float32"), (x.shape[0], -1)) for x in (a, b))
    sizes = ops.norm(a, axis=1) * ops.norm(b, axis=1)
    defined = sizes > 0
    cosine = ops.sum(a * b, axis=1) / ops.where(defined, sizes, 1.0)  # 0 if it is undefined
    count = ops.sum(ops.cast(defined, "float32"))
    return [ops.sum(cosine) / count, ops.sum(ops.square(cosine)) / count]


def _look(trace: Trace, axis: int):
    """Return `_STATISTICS` of one unit. For x_0, only the statistics of x are not 0."""
    if trace.residual is None:
        return ops.stack([*_moments(trace.output), *[ops.zeros(())] * (len(_STATISTICS) - 3)])
    dead = ops.all(ops.equal(trace.activated, 0), axis=other_axes(trace.activated, axis))
    cut = ops.logical_and(ops.equal(trace.output, 0), ops.not_equal(trace.sum, 0))
    through, cosines = ops.zeros(()), [ops.full((), math.nan)] * 3
    if trace.shortcut is not None:
        through = _moments(trace.shortcut)[0]
        turned, _ = _cosines(trace.shortcut, trace.output)
        cosines = [*_cosines(trace.shortcut, trace.residual), turned]
    shares = [ops.mean(ops.cast(share, "float32")) for share in (cut, dead)]
    moments = [*_moments(trace.output), *_moments(trace.residual)]
    return ops.stack([*moments, through, *shares, *cosines])


def _by_weight(observed: Observed, gradients: Mapping[int, np.ndarray]) -> dict[str, np.ndarray]:
    table: dict[str, np.ndarray] = {}
    before = 0
    for unit in observed.units:
        for name, weight in observed.weights(unit):
            if id(weight) in gradients:
                row = table.setdefault(name, np.full(len(observed.names), np.nan))
                row[before : before + unit.depth] = norms(gradients[id(weight)], unit.depth)
        before += unit.depth
    return table
