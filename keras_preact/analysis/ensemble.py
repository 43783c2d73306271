"""A residual network as an ensemble of paths: its errors without some of its units
(arXiv 1605.06431).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import keras
import numpy as np
from keras import ops

from keras_preact import _checks
from keras_preact.analysis import _inputs
from keras_preact.analysis.observed import Observed
from keras_preact.backend import autodiff
from keras_preact.backend.arrays import as_numpy


@dataclasses.dataclass(frozen=True)
class Lesions:
    """Errors of a network without some of its units.

    Attributes:
        units: Names of the units, in order.
        dropped: Indices of the removed units, one tuple per measurement.
        error: Share of wrongly classified examples, one per measurement.
        intact_error: The same share for the whole network.
    """

    units: tuple[str, ...]
    dropped: tuple[tuple[int, ...], ...]
    error: np.ndarray
    intact_error: float


def lesions(
    model: keras.Model,
    x,
    labels,
    dropped: Sequence[Sequence[int]] | None = None,
    *,
    batch_size: int = 256,
) -> Lesions:
    """Measure the error of a network without the branches of some units. Their
    shortcuts stay.

    Args:
        model: A trained classifier with residual units, stacked or not.
        x: Inputs, `(examples, ...)`; a list or a dictionary for several inputs.
        labels: Class numbers, `(examples,)`.
        dropped: Sets of units to remove, as indices from 0. None: each unit by itself.
        batch_size: Number of examples per batch.

    Raises:
        ValueError: for indices that do not exist, and as `propagation`.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1))
    >>> result = kp.analysis.lesions(
    ...     model, np.zeros((4, 8, 8, 1)), np.zeros(4, int), [(0,), (1, 2)]
    ... )
    >>> result.units, result.error.shape
    (('stage1_unit1', 'stage2_unit1', 'stage3_unit1'), (2,))

    Source: Sec. 4 of arXiv 1605.06431 (Veit et al.).
    """
    batch = _inputs.check_sample(model, x)
    _inputs.watch(model, x)
    examples = _inputs.size(batch)
    labels = _inputs.check_labels(labels, examples)
    if labels is None:
        raise ValueError("`labels` must hold a class for each example. Received: labels=None")
    _checks.positive_int(batch_size, "batch_size")
    size = min(batch_size, examples)
    observed = Observed(model, _inputs.examples(batch, slice(size)), training=False)
    outputs = _inputs.classifier(observed.graph)
    labels = _inputs.check_classes(labels, observed.graph, outputs)
    units = len(observed.names)
    dropped = [(i,) for i in range(units)] if dropped is None else dropped
    sets = [tuple(int(i) for i in indices) for indices in dropped]
    for indices in sets:
        if any(not 0 <= i < units for i in indices):
            raise ValueError(
                f"`dropped` must hold indices of the {units} units, from 0. Received: {indices}"
            )

    def predicted(factors, *inputs):
        values, _ = observed.run(
            lambda trace, axis: ops.zeros(()), inputs=inputs, residual_scale=factors
        )
        return values[observed.graph.outputs[0]]

    compiled = autodiff.compiled(predicted)

    def error(without: tuple[int, ...]) -> float:
        factors = np.ones(units, "float32")
        factors[list(without)] = 0
        wrong = np.empty(labels.shape, bool)
        for start in range(0, examples, size):
            chosen = np.arange(start, min(start + size, examples))
            # always the size that the network is compiled for
            arrays = keras.tree.flatten(_inputs.examples(batch, np.resize(chosen, size)))
            got = as_numpy(compiled(*map(ops.convert_to_tensor, [factors, *arrays])))
            answers = outputs.answers(got[: len(chosen)])
            wrong[chosen] = answers != labels[chosen]
        return float(wrong.mean())

    errors = np.array([error(indices) for indices in sets])
    return Lesions(observed.names, tuple(sets), errors, error(()))


def random_lesions(
    units: int, counts: Sequence[int], repeats: int, seed: int = 0
) -> Iterator[tuple[int, ...]]:
    """Yield random sets of units to remove: `repeats` sets of each size in `counts`.

    Example:

    >>> [len(dropped) for dropped in random_lesions(9, [1, 4], repeats=2)]
    [1, 1, 4, 4]
    """
    _checks.positive_int(units, "units")
    _checks.positive_int(repeats, "repeats")
    rng = np.random.default_rng(seed)
    for count in counts:
        if not 0 <= count <= units:
            raise ValueError(
                f"`counts` must be numbers of units, from 0 to {units}. Received: {count}"
            )
        for _ in range(repeats):
            yield tuple(sorted(rng.choice(units, count, replace=False).tolist()))


def path_lengths(units: int) -> np.ndarray:
    """Return the share of the `2^units` paths through a residual network that run
    through k branches, `(units + 1,)`.

    A path takes either the branch or the shortcut of each unit: the lengths are
    distributed binomially, around half the units.

    Example:

    >>> path_lengths(3).tolist()
    [0.125, 0.375, 0.375, 0.125]

    Source: Sec. 3 of arXiv 1605.06431.
    """
    _checks.positive_int(units, "units")
    return np.array([math.comb(units, k) / 2**units for k in range(units + 1)])
