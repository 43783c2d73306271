"""Norms of gradients, weights and updates, computed in the train step by a wrapper of
the optimizer.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_preact.backend import keras_private
from keras_preact.health.weights import Watched
from keras_preact.wrapped_optimizer import WrappedOptimizer, unwrapped


class Probe:
    """Measures the updates of a model's optimizer until it is removed.

    It replaces `model.optimizer` by a `ProbedOptimizer` around it. The figures, `(3, n)`
    for n weights with a row each for gradients, weights and updates, and the number of
    their update are variables of that wrapper. The optimizer itself does not change.

    Args:
        model: A compiled and built model.
        watched: The weights of the model.
        interval: Measure every update with a number that is a multiple of this one.
        limit: Limit of the gradient norm. Every update is checked. After an update with a
            gradient norm above the limit or not finite, the figures stay as they are.
            None: no limit.

    Figures are norms, in float32: of the gradient before it is clipped, of the weight
    before the update, and of its change, including decay. Accumulated gradients count as
    their mean. With several replicas, the gradient is over the whole batch.

    Attributes:
        optimizer: The user's optimizer.
        fit: The history of the present fit; every fit has another one.
        due: Whether the next step is measured. Only PyTorch needs to know it before the
            step; the other backends look at the step's number.
    """

    def __init__(self, model: keras.Model, watched: Watched, interval: int, limit: float | None):
        self.model = model
        self.watched = watched
        self.interval = interval
        self.limit = limit
        self.optimizer = model.optimizer
        self.inner = unwrapped(self.optimizer)
        self.accumulated = self.inner.gradient_accumulation_steps or 1
        self.fit = model.history
        self.due = False
        with _scope(model):
            if not self.optimizer.built:
                self.optimizer.build(watched.variables)
            zeros = functools.partial(
                keras.Variable, "zeros", trainable=False, aggregation="only_first_replica"
            )
            self.figures = zeros((3, len(watched.places)), dtype="float32", name="figures")
            self.step = zeros((), dtype="int32", name="measured_update")
        model.optimizer = ProbedOptimizer(self)

    def remove(self) -> None:
        """Put the user's optimizer back."""
        self.model.optimizer = self.optimizer

    @staticmethod
    def of(optimizer) -> "Probe | None":
        """Return the probe of `model.optimizer`, or None."""
        return optimizer.probe if isinstance(optimizer, ProbedOptimizer) else None

    @property
    def steps(self) -> int:
        """Train steps of the optimizer so far; with accumulated gradients, batches."""
        return int(ops.convert_to_numpy(keras_private.steps(self.inner).value))

    def before(self, gradients: Sequence, variables: Sequence) -> "_Before":
        """Return the values before the update that the figures need."""
        if keras.backend.backend() == "tensorflow":
            gradients = _summed_over_replicas(gradients)
        # an optimizer that exchanges gradients itself has this function
        if exchange := getattr(self.optimizer, "whole_gradients", None):
            gradients = exchange(gradients)
        by_id = {id(variable): each for variable, each in zip(variables, gradients, strict=True)}
        measured = [by_id.get(id(variable)) for variable in self.watched.variables]
        # the scale of a LossScaleOptimizer, or of another optimizer
        scale = getattr(self.optimizer, "dynamic_scale", self.inner.loss_scale_factor)
        scale = None if scale is None else ops.convert_to_tensor(scale)
        if self.accumulated > 1:
            measured = [
                each if each is None else self._with_accumulated(each, variable, scale)
                for each, variable in zip(measured, self.watched.variables, strict=True)
            ]
            scale = None
        # a copy: on TensorFlow a conversion does not copy
        number = ops.add(self.inner.iterations, 0)
        return _Before(measured, scale, self._weights(number), number)

    def _weights(self, number):
        """Return the values of the weights before update `number + 1`, as one vector. In a
        step that is not measured, the values are arbitrary.
        """
        variables = self.watched.variables
        dtype = "float64" if any(each.dtype == "float64" for each in variables) else "float32"

        def copy():
            return ops.concatenate([ops.reshape(ops.cast(each, dtype), -1) for each in variables])

        if keras.backend.backend() != "tensorflow" or self.limit is not None:
            return copy()
        # TensorFlow really copies them, and would do so in every step
        size = sum(math.prod(each.shape) for each in variables)
        due = ops.equal(ops.mod(number + 1, self.interval), 0)
        return ops.cond(due, copy, lambda: ops.zeros(size, dtype))

    def _with_accumulated(self, gradient, variable: keras.Variable, scale):
        """Return the mean of a gradient and the gradients of the batches before it."""
        collected = keras_private.accumulated_gradient(self.inner, variable)
        gradient = _dense(gradient) if scale is None else _dense(gradient) / scale
        return (gradient + collected) / self.accumulated

    def after(self, before: "_Before") -> tuple:
        """Return the values of `figures` and `step` after an update."""
        number = ops.convert_to_tensor(self.inner.iterations)
        # a LossScaleOptimizer skips steps; with accumulated gradients most steps update nothing
        updated = ops.greater(number, before.number)
        due = ops.logical_and(updated, ops.equal(ops.mod(number, self.interval), 0))
        figures, step = ops.convert_to_tensor(self.figures), ops.convert_to_tensor(self.step)
        if self.limit is not None:
            bad = self._is_bad(self._norms(before.gradients, before.scale))
            due = ops.logical_or(ops.logical_and(bad, updated), due)
            due = ops.logical_and(due, ops.logical_not(self._is_bad(figures[0])))

        def measure():
            weights, first = [], 0
            for variable in self.watched.variables:
                last = first + math.prod(variable.shape)
                weights.append(ops.reshape(before.weights[first:last], variable.shape))
                first = last
            updates = [
                ops.subtract(ops.cast(variable, old.dtype), old)
                for variable, old in zip(self.watched.variables, weights, strict=True)
            ]
            norms = [
                self._norms(before.gradients, before.scale),
                self._norms(weights),
                self._norms(updates),
            ]
            return ops.stack(norms), ops.cast(number, "int32")

        # values that a branch assigns do not reach all replicas
        return ops.cond(due, measure, lambda: (figures, step))

    def _is_bad(self, norms):
        norm = ops.sqrt(ops.sum(ops.square(norms)))
        # TensorFlow turns `not (norm <= limit)`, which is true for NaN, into `norm > limit`, which
        # is false for NaN
        return ops.logical_or(ops.logical_not(ops.isfinite(norm)), ops.greater(norm, self.limit))

    def _norms(self, tensors: Sequence, scale=None):
        """Return the norm of each watched weight's tensor, divided by `scale`, `(n,)`; 0
        without a tensor.
        """
        all_norms = []
        watched = self.watched
        for variable, stacked, tensor in zip(
            watched.variables, watched.stacked, tensors, strict=True
        ):
            if tensor is None:
                all_norms.append(ops.zeros(variable.shape[0] if stacked else 1))
                continue
            tensor = ops.cast(_dense(tensor), "float32")
            tensor = tensor if scale is None else tensor / scale
            axes = tuple(range(int(stacked), len(variable.shape)))
            norms = ops.sqrt(ops.sum(ops.square(tensor), axis=axes))
            all_norms.append(ops.reshape(norms, (-1,)))
        return ops.concatenate(all_norms)


class _Before(NamedTuple):
    """The values before an update that `Probe` needs: the gradient of each watched weight,
    multiplied by `scale`; the values of all weights, as one vector; the number of updates.
    """

    gradients: list
    scale: Any
    weights: Any
    number: Any


class ProbedOptimizer(WrappedOptimizer):
    """A wrapper of an optimizer that lets a `Probe` measure its updates.

    The probe's variables are in `variables`, since they are part of the train step's
    state. Only the wrapped optimizer is saved.
    """

    probe: Probe

    def __init__(self, probe: Probe):
        super().__init__(probe.optimizer)
        object.__setattr__(self, "probe", probe)

    @property
    def variables(self) -> list[keras.Variable]:
        return [*super().variables, self.probe.figures, self.probe.step]

    def apply(self, grads: Sequence, trainable_variables: Sequence | None = None) -> None:
        probe = self.probe
        variables = trainable_variables or probe.watched.variables
        if keras.backend.backend() == "torch" and not probe.due:
            super().apply(grads, variables)
            return
        before = probe.before(grads, variables)
        super().apply(grads, variables)
        figures, step = probe.after(before)
        probe.figures.assign(figures)
        probe.step.assign(step)

    def stateless_apply(
        self, optimizer_variables: Sequence, grads: Sequence, trainable_variables: Sequence
    ) -> tuple[list, list]:
        probe = self.probe
        *inner, figures, step = optimizer_variables
        state = [*probe.watched.variables, *self.variables]

        def values(*tensors):
            return keras.StatelessScope(list(zip(state, tensors, strict=True)))

        with values(*trainable_variables, *inner, figures, step):
            before = probe.before(grads, probe.watched.variables)
        weights, inner = super().stateless_apply(inner, grads, trainable_variables)
        with values(*weights, *inner, figures, step):
            measured = probe.after(before)
        return weights, [*inner, *measured]


def own_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of the model's optimizer without the variables of a probe.
    The optimizer is built if needed.
    """
    probe = Probe.of(model.optimizer)
    optimizer = model.optimizer if probe is None else probe.optimizer
    if not optimizer.built:
        with _scope(model):
            optimizer.build(model.trainable_variables)
    return optimizer.variables


def _dense(gradient):
    """Return a gradient as a tensor. TensorFlow holds an embedding's gradient as a list
    of rows, perhaps with repetitions.
    """
    if keras.backend.backend() != "tensorflow":
        return gradient
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def _summed_over_replicas(gradients: Sequence) -> Sequence:
    """Return the gradients of the whole batch from the gradients of a replica of
    `tf.distribute`.
    """
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return gradients
    present = [_dense(gradient) for gradient in gradients if gradient is not None]
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, present))
    return [gradient if gradient is None else next(sums) for gradient in gradients]


def _scope(model: keras.Model) -> contextlib.AbstractContextManager:
    """Return the scope for new variables of the model's optimizer."""
    if keras.backend.backend() == "tensorflow":
        return model.distribute_strategy.scope()
    return contextlib.nullcontext()
