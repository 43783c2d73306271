"""The loss around the weights: its curvature, and the noise of its gradient."""

import dataclasses
import math
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_preact import _checks, _optional
from keras_preact.analysis import _inputs
from keras_preact.backend import autodiff
from keras_preact.graph import Graph


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
        training: Whether normalisations use the statistics of the batch. Then nothing
            in the model may be random, such as dropout.
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
    arrays = _inputs.check_sample(model, x)
    _inputs.watch(model, x)
    labels = _inputs.check_labels(labels, len(arrays[0]))
    value, scale = _loss(model, Graph(model, _one(arrays)), arrays, labels, loss, training)
    multiply = autodiff.compiled(lambda *vectors: autodiff.hvp(value, variables, vectors))
    sizes = [int(np.prod(variable.shape)) for variable in variables]
    ends = np.cumsum(sizes)[:-1]

    def product(vector: np.ndarray) -> np.ndarray:
        parts = [
            ops.convert_to_tensor(part.reshape(variable.shape), variable.dtype)
            for part, variable in zip(np.split(vector.reshape(-1), ends), variables, strict=True)
        ]
        products = map(ops.convert_to_numpy, multiply(*parts))
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
    arrays = _inputs.check_sample(model, x)
    _inputs.watch(model, x)
    examples = len(arrays[0])
    if not _checks.is_int(parts) or parts < 2 or examples % parts:
        raise ValueError(
            f"`parts` must be at least 2 and divide the {examples} examples. Received: "
            f"parts={parts}"
        )
    labels = _inputs.check_labels(labels, examples)
    variables, size = model.trainable_variables, examples // parts
    graph = Graph(model, _one([array[:size] for array in arrays]))
    mean: list = [0.0] * len(variables)
    squares = []
    for start in range(0, examples, size):
        part = [array[start : start + size] for array in arrays]
        part_labels = None if labels is None else labels[start : start + size]
        value, scale = _loss(model, graph, part, part_labels, loss, training)
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


def _one(arrays: list[np.ndarray]):
    """Return a batch as a model takes it: an array, or a list for several inputs."""
    return arrays if len(arrays) > 1 else arrays[0]


def _loss(model, graph: Graph, arrays, labels, loss, training: bool) -> tuple[Callable, float]:
    """Return the function without arguments that computes the loss of a batch times a
    scale, and the scale.
    """
    total, batch = _inputs.loss_of(graph, labels, loss), _one(arrays)
    scale = _inputs.loss_scale(model, batch, total, training)
    return lambda: scale * total(keras.tree.flatten(model(batch, training=training))), scale
