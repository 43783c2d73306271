"""A logit as a sum over the units of the last stage."""

import dataclasses
import re
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_preact.analysis import _inputs
from keras_preact.analysis.observed import Observed, pulled
from keras_preact.backend.arrays import as_numpy
from keras_preact.paths import Step
from keras_preact.units import Trace

#: Classes of layers that are linear, except for a shift, once signs and places of maxima are fixed.
_LINEAR = re.compile(
    r"(Global|Padded)?(Average|Max|Binomial)Pooling\dD|(Padded|Depthwise|Separable)?Conv\dD|Dense"
    r"|Activation(Layer)?|(Leaky|P)?ReLU|Relu|LeakyRelu|BatchNormalization|MeanOfStreams"
    r"|(Spatial|Gaussian|Alpha)?Dropout(\dD)?|GaussianNoise|(ZeroPadding|Cropping|UpSampling)\dD"
    r"|Identity|Cast|Flatten|Reshape|Permute|Transpose|Mean|Max"
)
_ACTIVATIONS = ("linear", "relu", "relu6", "leaky_relu")
#: Largest relative error of a unit's sum, and that in 16 bits.
_TOLERANCE, _TOLERANCES = 1e-4, {"float16": 1e-2, "bfloat16": 3e-2}


@dataclasses.dataclass(frozen=True, eq=False)
class Contributions:
    """A logit of each of n images as a sum over the L units of the last stage:
    `logits = start + residual.sum(axis=0) + bias`.

    Attributes:
        units: Names of these units, in order.
        classes: Class numbers, `(n,)`.
        start: What the shortcut of the first unit contributes, `(n,)`: all that is
            computed before the stage.
        residual: What the branch of each unit contributes, `(L, n)`.
        bias: What the shifts of the head contribute, `(n,)`.
        logits: The logits of the classes, `(n,)`; of class 0 of a binary classifier
            minus its output.
    """

    units: tuple[str, ...]
    classes: np.ndarray
    start: np.ndarray
    residual: np.ndarray
    bias: np.ndarray
    logits: np.ndarray


def contributions(model: keras.Model, images, classes=None) -> Contributions:
    """Measure at inference what each unit of the last stage adds to a logit.

    With identity shortcuts, the last map is the sum of the map before the last stage and
    of all F (Eq. 4). Normalisation at inference, pooling and classifier are linear, and
    so is a ReLU once its mask is known. Each F is multiplied by this linear map, which
    is the gradient of the logit. A shortcut that is linear, such as constant scaling, is
    part of the map; gates and the coefficients of several streams count as constants.

    Args:
        model: A pre-activation classifier with residual units, such as a network of this
            package, stacked or not: it adds h(x) and F without an f, and its head has
            no other nonlinear layers than ReLU and max pooling.
        images: A batch of inputs.
        classes: A class number per image; 0 or 1 for a binary classifier. None: the
            classes that the model predicts, the most probable ones if an image has
            several.

    Raises:
        ValueError: for another head; for units with an f, or a shortcut that is not
            linear; for outputs that are not finite; as `grad_cam` for classes, and as
            `propagation`.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(20, input_shape=(8, 8, 1))
    >>> images = np.random.default_rng(0).normal(size=(2, 8, 8, 1))
    >>> found = kp.analysis.contributions(model, images, [3, 5])
    >>> found.units
    ('stage3_unit1', 'stage3_unit2', 'stage3_unit3')
    >>> total = found.start + found.residual.sum(axis=0) + found.bias
    >>> bool(np.allclose(total, model.predict(images, verbose=0)[[0, 1], [3, 5]], atol=1e-5))
    True

    Source: Eq. 4 of arXiv 1603.05027.
    """
    observed = Observed(model, images, training=False, logits="A sum over units")
    _inputs.watch(model, images)
    graph, last = observed.graph, observed.units[-1]
    _check_head(observed, last.output)
    shape = graph.specs[last.output].shape

    def look(trace: Trace, axis: int):
        """Return the parts of a unit that may belong to the last stage."""
        own = trace.output.shape
        if len(own) != len(shape) or any(
            a not in (b, None) for a, b in zip(shape[1:], own[1:], strict=True)
        ):
            return ops.zeros(())
        shortcut = ops.zeros_like(trace.sum) if trace.shortcut is None else trace.shortcut
        parts = (shortcut, trace.residual, trace.output)
        return ops.stack([ops.cast(part, "float32") for part in parts])

    with keras.StatelessScope():
        values, seen = observed.run(look)
    output = values[graph.outputs[0]]
    if not np.isfinite(as_numpy(output)).all():
        raise ValueError(
            "The outputs of the model must be finite. Received: a model that returns infinite "
            "numbers or NaN"
        )
    chosen, weights = _inputs.class_weights(graph, as_numpy(output), classes)

    def weighted(outputs):
        return ops.sum(outputs[0] * ops.cast(weights, outputs[0].dtype))

    _, _, gradients, _ = observed.gradients(lambda trace, axis: ops.zeros(()), loss=weighted)
    rows = [row for rows in seen for row in ops.convert_to_numpy(rows)]
    first = len(rows)
    while first and rows[first - 1].shape == rows[-1].shape:
        first -= 1
    through = _carried_back(observed, values, [row[2] for row in rows[first:]], gradients[-1])
    pairs = list(zip(rows[first:], through, strict=True))
    # (L, 3, n): through h, F and the output of each unit
    parts = np.stack([_inner(row, gradient) for row, gradient in pairs])
    sizes = np.stack([_inner(abs(row), abs(gradient)).sum(axis=0) for row, gradient in pairs])
    start, residual, arrived = parts[0, 0], parts[:, 1], parts[:, 2]
    dtype = keras.backend.standardize_dtype(values[last.output].dtype)
    tolerance = _TOLERANCES.get(dtype, _TOLERANCE)
    for errors, cause in (
        (parts[:, 0] + residual - arrived, "an f after its addition"),
        (parts[1:, 0] - arrived[:-1], "a shortcut that is not linear"),
    ):
        wrong = (abs(errors) > tolerance * sizes[-len(errors) :]).any(axis=1)
        if wrong.any():
            unit = observed.names[len(rows) - len(errors) + int(wrong.argmax())]
            raise ValueError(
                "A logit is a sum over the units if these add F to a linear shortcut and nothing "
                f"follows the additions, as in full pre-activation. Received: {unit} with {cause}"
            )
    logits = (as_numpy(output) * weights).sum(axis=1, dtype="float64")
    return Contributions(
        observed.names[first:], chosen, start, residual, logits - arrived[-1], logits
    )


def _carried_back(
    observed: Observed, values: dict, outputs: list[np.ndarray], gradient: np.ndarray
) -> list[np.ndarray]:
    """Return what the gradient at the last of some outputs of units is at each, if it goes
    back through the shortcuts alone.
    """
    shortcuts: list[Callable] = []
    for unit in reversed(observed.units):
        if len(shortcuts) < len(outputs):  # copies of units take time
            shortcuts = [*observed.shortcuts(unit, values), *shortcuts]
    gradients = [gradient]
    for shortcut, x in zip(shortcuts[:0:-1], outputs[-2::-1], strict=True):
        with keras.StatelessScope():
            linear = shortcut(ops.convert_to_tensor(x))
        gradients.append(pulled(linear, x, gradients[-1]))
    return gradients[::-1]


def _inner(row: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Return the inner products of the parts of a unit, `(parts, n, ...)`, and a gradient,
    `(parts, n)`.
    """
    products = row.astype("float64") * gradient
    return products.reshape(*products.shape[:2], -1).sum(axis=-1)


def _check_head(observed: Observed, start: int) -> None:
    """Check that the logits are a function of the tensor `start`, linear but for signs and
    maxima.
    """
    graph = observed.graph
    [end] = graph.outputs
    reached: int | None = end
    while reached not in (start, None):
        reached = graph.dominators[reached]
    if reached is None:
        raise ValueError(
            "The logits must be a function of the last unit's output alone. Received: a model "
            "whose head also reads earlier tensors"
        )
    for i in graph.between(start, end):
        step = graph.steps[i]
        if i not in observed.calls and not _is_linear(step):
            raise ValueError(
                "Between the last unit and the logits only BatchNormalization, ReLU, pooling and "
                "linear layers have a fixed linear map at inference. Received: "
                f"{step.name} ({step.kind})"
            )


def _is_linear(step: Step) -> bool:
    function = getattr(step.operation, "activation", None)
    names = (getattr(keras.activations, name) for name in _ACTIVATIONS)
    return bool(_LINEAR.fullmatch(step.kind)) and (function is None or function in names)
