"""The loss around the weights: its curvature, the noise of its gradient, and the rate at
which an update would raise it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import keras
import numpy as np
from keras import ops

from keras_preact import _checks, _optional
from keras_preact.analysis import _inputs
from keras_preact.backend import autodiff
from keras_preact.backend.arrays import as_numpy
from keras_preact.graph import Graph
from keras_preact.wrapped_optimizer import unwrapped

#: The critical rate is between two rates with at most this ratio. Before, rates are multiplied or
#: divided by this step, at most so many times.
_RATIO, _STEP, _STEPS = 1.2, 4.0, 10


#: Notes of a `CriticalRate`.
_UPHILL = (
    "The update does not go downhill on this batch, which momentum from other batches can cause. "
    "Measure another batch, or plain SGD."
)
_ENDLESS = "No rate up to a million times the present one raises the loss."
_ROUNDING = "No rate lowers the loss by more than its rounding error."


@dataclasses.dataclass(frozen=True, eq=False)
class Curvature:
    """The Hessian of the loss with respect to all trained weights.

    Attributes:
        eigenvalues: The largest ones, `(k,)`, in descending order.
        trace: Estimate of the sum of all eigenvalues.
        trace_error: Standard error of that estimate.
    """

    eigenvalues: np.ndarray
    trace: float
    trace_error: float


def curvature(
    model: keras.Model,
    x,
    labels=None,
    *,
    loss: Callable | None = None,
    training: bool = False,
    k: int = 1,
    probes: int = 10,
    seed: int = 0,
) -> Curvature:
    """Measure the Hessian of the loss on a batch; the network stays as it is.

    Lanczos' method finds the eigenvalues, and Hutchinson's the trace. Both need only
    products of the Hessian with vectors. Gradient descent does not stay in a minimum if
    its learning rate is above 2 divided by the largest eigenvalue.

    Args:
        model: Any Keras model that the backend can differentiate twice. TensorFlow
            cannot do this for stacks with `remat`.
        x, labels, loss: Arguments of `propagation`.
        training: Whether normalisations use the statistics of the batch. Dropout has
            the same masks in every pass.
        k: Number of eigenvalues.
        probes: Number of random vectors for the trace. Its error falls as 1 /
            sqrt(probes).
        seed: Seed of these vectors and of the start of Lanczos' method.

    Raises:
        ValueError: as `propagation`; for `k` or `probes` below 1; for a Hessian that is
            not finite.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1))
    >>> x = np.random.default_rng(0).normal(size=(8, 8, 8, 1))
    >>> kp.analysis.curvature(model, x, np.arange(8), k=2).eigenvalues.shape
    (2,)

    Source: arXiv 1611.01838 (largest eigenvalues), arXiv 1912.07145 (trace).
    """
    _checks.positive_int(k, "k")
    _checks.positive_int(probes, "probes")
    variables = model.trainable_variables
    value, scale = _inputs.checked_loss(model, x, labels, loss, training)
    _inputs.watch(model, x)
    multiply = autodiff.compiled(lambda *vectors: autodiff.hvp(value, variables, vectors))
    sizes = [int(np.prod(variable.shape)) for variable in variables]
    ends = np.cumsum(sizes)[:-1]

    def product(vector: np.ndarray) -> np.ndarray:
        parts = [
            ops.convert_to_tensor(part.reshape(variable.shape), variable.dtype)
            for part, variable in zip(np.split(vector.reshape(-1), ends), variables, strict=True)
        ]
        with autodiff.same_random_numbers(model):
            products = list(map(ops.convert_to_numpy, multiply(*parts)))
        whole = np.concatenate([part.astype("float64").ravel() for part in products])
        if not np.isfinite(whole).all():
            raise ValueError(
                "The Hessian must be finite. Received: a product with infinite or NaN values. If "
                "the model computes in float16, measure a copy: "
                "kp.models.changed_copy(model, dtype='float32')"
            )
        return whole / scale

    random, total = np.random.default_rng(seed), sum(sizes)
    signs = random.choice([-1.0, 1.0], (probes, total))
    estimates = np.array([vector @ product(vector) for vector in signs])
    sparse = _optional.load("scipy.sparse.linalg")
    operator = sparse.LinearOperator((total, total), matvec=product, dtype="float64")
    start = random.normal(size=total)
    eigenvalues = sparse.eigsh(operator, k, which="LA", v0=start, return_eigenvectors=False)
    error = float(estimates.std(ddof=1) / np.sqrt(probes)) if probes > 1 else math.nan
    return Curvature(np.sort(eigenvalues)[::-1], float(estimates.mean()), error)


@dataclasses.dataclass(frozen=True)
class GradientNoise:
    """How far the gradient of a batch is from the gradient of all images.

    Attributes:
        scale: `variance / square`: the batch size at which the noise of the gradient is
            as large as the gradient. Far larger batches save few steps, and far smaller
            ones cost no more images. Infinite if no gradient is seen in the noise.
        square: Estimate of the squared norm of the gradient without noise.
        variance: Estimate of the variance of the gradient of one example, summed over
            the weights.
    """

    scale: float
    square: float
    variance: float

    @property
    def batch_size(self) -> int | None:
        """The power of 2 closest to the scale, as a first batch size; None if the scale
        is infinite.
        """
        return 2 ** max(0, round(math.log2(self.scale))) if math.isfinite(self.scale) else None


def gradient_noise(
    model: keras.Model,
    x,
    labels=None,
    *,
    loss: Callable | None = None,
    training: bool = True,
    parts: int = 8,
) -> GradientNoise:
    """Measure the noise scale of the gradient on a batch; the network stays as it is.

    It compares the gradients of equal parts of the batch with their mean.

    Args:
        model: Any Keras model.
        x, labels, loss: Arguments of `propagation`; the more examples, the better.
        training: Whether normalisations use the statistics of each part, as in
            training.
        parts: Number of parts, which divides the number of examples.

    Raises:
        ValueError: as `propagation`, and for another number of parts.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1))
    >>> x = np.random.default_rng(0).normal(size=(64, 8, 8, 1))
    >>> noise = kp.analysis.gradient_noise(model, x, np.arange(64) % 10)
    >>> noise.variance > 0
    True
    >>> size = noise.batch_size or 64
    >>> optimizer = kp.optimizers.CoupledSGD(kp.recommend(depth=8, batch_size=size).learning_rate)

    Source: Appendix A.1 of arXiv 1812.06162.
    """
    batch = _inputs.check_sample(model, x)
    _inputs.watch(model, x)
    examples = _inputs.size(batch)
    if not _checks.is_int(parts) or parts < 2 or examples % parts:
        raise ValueError(
            f"`parts` must be at least 2 and divide the {examples} examples. Received: "
            f"parts={parts}"
        )
    labels = _inputs.check_labels(labels, examples)
    variables, size = model.trainable_variables, examples // parts
    graph = Graph(model, _inputs.examples(batch, slice(size)))
    mean: list = [0.0] * len(variables)
    squares = []
    for start in range(0, examples, size):
        part = _inputs.examples(batch, slice(start, start + size))
        part_labels = None if labels is None else labels[start : start + size]
        total = _inputs.loss_of(graph, part_labels, loss)
        value, scale = _inputs.scaled_loss(model, part, total, training)
        *_, gradients = autodiff.value_and_gradients(
            lambda value=value: (value(), []), [], variables
        )
        exact = [ops.convert_to_numpy(each).astype("float64") / scale for each in gradients]
        squares.append(sum(float((array**2).sum()) for array in exact))
        mean = [total + array / parts for total, array in zip(mean, exact, strict=True)]
    small, large = float(np.mean(squares)), sum(float((array**2).sum()) for array in mean)
    square = (examples * large - size * small) / (examples - size)
    variance = (small - large) / (1 / size - 1 / examples)
    return GradientNoise(variance / square if square > 0 else math.inf, square, variance)


@dataclasses.dataclass(frozen=True)
class CriticalRate:
    """The learning rate from which on the next update raises the loss of its batch.

    Attributes:
        rate: This rate. 0 if the update goes uphill, as momentum may; infinite if no
            rate up to a million times the present one raises the loss.
        learning_rate: The present rate of the optimizer.
        passes: How often the loss was computed.
        note: Why the rate is 0 or infinite, or not exact because no pass had a lower loss
            than now; else empty.
    """

    rate: float
    learning_rate: float
    passes: int
    note: str = ""

    @property
    def share(self) -> float:
        """The present rate as a share of the critical one; infinite if that is 0."""
        return self.learning_rate / self.rate if self.rate else math.inf

    @property
    def sharpness(self) -> float:
        """Critical sharpness, 2 / `rate`. For the gradient itself and a quadratic loss it is
        the curvature along the gradient.
        """
        return 2 / self.rate if self.rate else math.inf


def critical_rate(
    model: keras.Model,
    x,
    labels=None,
    optimizer: keras.optimizers.Optimizer | None = None,
    *,
    loss: Callable | None = None,
    training: bool = True,
) -> CriticalRate:
    """Find the smallest learning rate at which the next update on a batch raises the loss
    of this batch. Network and optimizer stay as they are.

    The whole update of the optimizer, with its momentum and decay, is made longer or
    shorter: its rate is multiplied or divided by 4 until the loss rises or no longer
    rises, then bisected. The result is within 10 % of the critical rate, after 6 to 9
    forward passes if the present rate is within a factor of 256.

    Args:
        model: Any Keras model.
        x, labels, loss: Arguments of `propagation`. The loss has no regularisers.
        optimizer: The optimizer; None for the one of `compile`.
        training: Whether normalisations use the statistics of the batch, as in
            training. Dropout has the same masks in every pass.

    Raises:
        ValueError: as `propagation`; without an optimizer, for an update that is 0, as
            with a rate of 0 or in the midst of accumulated gradients, and for a loss
            or a gradient that is not finite.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1))
    >>> x = np.random.default_rng(0).normal(size=(32, 8, 8, 1))
    >>> optimizer = kp.optimizers.CoupledSGD(0.1)
    >>> found = kp.analysis.critical_rate(model, x, np.arange(32) % 10, optimizer)
    >>> found.share < 1  # an update at 0.1 lowers the loss
    True

    Source: arXiv 2601.16979, abstract: critical sharpness, from forward passes along the
        update.
    """
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "The direction is the next update of an optimizer: compile the model, or pass an "
            f"`optimizer` of Keras. Received: optimizer={optimizer!r}"
        )
    variables = model.trainable_variables
    value, scale = _inputs.checked_loss(model, x, labels, loss, training)
    _inputs.watch(model, x)
    with autodiff.same_random_numbers(model):
        *_, gradients = autodiff.value_and_gradients(lambda: (value(), []), [], variables)
    exact = [ops.cast(gradient, "float32") / scale for gradient in gradients]
    start = [ops.copy(variable.value) for variable in variables]
    update = _next_update(optimizer, variables, exact)
    rate = float(ops.copy(optimizer.learning_rate))
    if not any(change.any() for change in update):
        raise ValueError(
            "The next update must change the weights. Received: an update of 0, at a learning "
            f"rate of {rate:g}"
        )
    slope = sum(  # along the update
        float((as_numpy(gradient).astype("float64") * change).sum())
        for gradient, change in zip(exact, update, strict=True)
    )
    if not math.isfinite(slope):
        raise ValueError(
            "The gradient and the update must be finite. Received: a derivative along the update "
            f"of {slope}"
        )
    tensors = [*start, *(ops.convert_to_tensor(change) for change in update)]

    @autodiff.compiled
    def moved(factor, *tensors):
        first, changes = tensors[: len(variables)], tensors[len(variables) :]
        weights = [a + ops.cast(factor * b, a.dtype) for a, b in zip(first, changes, strict=True)]
        with keras.StatelessScope(list(zip(variables, weights, strict=True))):
            return value()

    def loss_at(factor: float) -> float:
        with autodiff.without_gradients(), autodiff.same_random_numbers(model):
            losses.append(float(moved(ops.convert_to_tensor(factor, "float32"), *tensors)))
        return losses[-1]

    losses: list[float] = []
    present = loss_at(0.0)
    if not math.isfinite(present):
        raise ValueError(f"The loss must be finite. Received: {present / scale}")
    if slope >= 0:
        return CriticalRate(0.0, rate, len(losses), _UPHILL)
    factor = _smallest(lambda factor: not loss_at(factor) <= present)
    note = "" if any(loss < present for loss in losses) else _ROUNDING
    return CriticalRate(factor * rate, rate, len(losses), _ENDLESS if factor == math.inf else note)


def _smallest(rises: Callable[[float], bool]) -> float:
    """Return a factor from which on `rises` is true, searched from 1: 0 or infinity if
    there is none within `_STEPS`.
    """
    is_high, low, high = rises(1.0), 1.0, 1.0
    for _ in range(_STEPS):
        low, high = (low / _STEP, low) if is_high else (high, _STEP * high)
        if rises(low if is_high else high) != is_high:
            break
    else:
        return 0.0 if is_high else math.inf
    while high / low > _RATIO:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if rises(middle) else (middle, high)
    return math.sqrt(low * high)


def _next_update(optimizer, variables: Sequence[keras.Variable], gradients) -> list[np.ndarray]:
    """Return the changes of the variables by the next update of an optimizer. Both stay as
    they are.
    """
    if not optimizer.built:
        optimizer.build(variables)
    inner = unwrapped(optimizer)
    unscaled = inner.loss_scale_factor or 1
    state = [*variables, *inner.variables]
    before = [as_numpy(ops.copy(variable.value)) for variable in state]
    try:
        with autodiff.without_gradients():
            inner.apply([gradient * unscaled for gradient in gradients], variables)
        after = [as_numpy(ops.copy(variable.value)) for variable in variables]
    finally:
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)
    return [
        new.astype("float32") - old.astype("float32")
        for new, old in zip(after, before, strict=False)
    ]
