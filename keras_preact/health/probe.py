"""Norms of gradients, weights and updates, which an optimizer with a probe computes in
the train step.
"""

import contextlib
from collections.abc import Iterator, Sequence

import keras
from keras import ops

from keras_preact.health.weights import Watched

#: Rows of the figures.
GRADIENT, WEIGHT, UPDATE = range(3)


class Probe:
    """Measures the steps of an optimizer until it is removed.

    The optimizer gets two variables that do not train: the figures, `(3, n)` for n
    weights, and the number of their update. In this instance alone, its method that
    applies gradients is replaced by one that writes them, and those that save and load
    it ignore the two variables. Its class and its own variables stay.

    Args:
        model: Compiled and built.
        interval: Updates whose number is a multiple of this one are measured.
        limit: A gradient norm. Every update is measured, and after one whose gradient
            is above or not finite the figures stay as they are. None: no limit.

    Figures are norms, in float32: of the gradient before it is clipped, of the weight
    before the update, and of its change, decay included. Accumulated gradients count as
    their mean. With several replicas of `tf.distribute` it is the sum over them, of
    gradients that Keras has clipped before.
    """

    def __init__(self, model: keras.Model, watched: Watched, interval: int, limit: float | None):
        self.watched = watched
        self.limit = limit
        self.outer = model.optimizer
        self.optimizer = getattr(
            self.outer, "inner_optimizer", self.outer
        )  # of a LossScaleOptimizer: unscaled gradients
        self.accumulated = self.optimizer.gradient_accumulation_steps or 1
        self.period = interval * self.accumulated
        #: The history of its fit; every fit has another one.
        self.fit = model.history
        #: Whether the next step is measured. PyTorch needs to know before the step, others look at
        #: its number in it.
        self.due = False
        with _scope(model):
            if not self.outer.built:
                self.outer.build(watched.variables)
            self.figures, self.step = (
                self.optimizer.add_variable(
                    shape, dtype=dtype, aggregation="only_first_replica", name=name
                )
                for shape, dtype, name in (
                    ((3, len(watched.places)), "float32", "figures"),
                    ((), "int32", "measured_update"),
                )
            )
        self.variables = (self.figures, self.step)
        self._replicas = _replicas(model)
        self._summed: list = []
        self._overridden: list[tuple] = []
        self._index = {
            self.optimizer._var_key(variable): i for i, variable in enumerate(watched.variables)
        }
        self._override(self.optimizer, "_backend_apply_gradients", self._apply)
        if self._replicas > 1:
            self._override(self.optimizer, "_all_reduce_sum_gradients", self._sum)
        for optimizer in {id(each): each for each in (self.outer, self.optimizer)}.values():
            self._override(
                optimizer, "save_own_variables", self._without_probe(optimizer.save_own_variables)
            )
            self._override(
                optimizer, "load_own_variables", self._without_probe(optimizer.load_own_variables)
            )
        vars(self.outer)["_health_probe"] = self

    def remove(self) -> None:
        """Remove the probe from the optimizer."""
        for optimizer, name in self._overridden:
            del vars(optimizer)[name]
        del vars(self.outer)["_health_probe"]
        for variable in self.variables:
            self.optimizer._untrack_variable(variable)

    @staticmethod
    def of(optimizer) -> "Probe | None":
        """Return the probe in `optimizer`, or None."""
        return vars(optimizer).get("_health_probe")

    @property
    def steps(self) -> int:
        """Train steps of the optimizer so far; with accumulated gradients, batches."""
        return int(ops.convert_to_numpy(self.optimizer._iterations.value))

    def _override(self, optimizer, name: str, function) -> None:
        vars(optimizer)[name] = function  # past the optimizer's own tracking of attributes
        self._overridden.append((optimizer, name))

    def _without_probe(self, method):
        def call(store):
            with self._hidden():
                return method(store)

        return call

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[None]:
        for variable in self.variables:
            self.optimizer._untrack_variable(variable)
        try:
            yield
        finally:
            for variable in self.variables:
                self.optimizer._track_variable(variable)

    def _apply(self, gradients, variables) -> None:
        """Apply the gradients as the optimizer does, and write the figures."""
        plain = self.optimizer.__class__._backend_apply_gradients
        on_torch = keras.backend.backend() == "torch"
        if on_torch and not self.due:
            plain(self.optimizer, gradients, variables)
            return
        complete = self._with_accumulated(gradients, variables)
        before = [
            ops.add(variable, 0) for variable in variables
        ]  # a copy: on TensorFlow a conversion is none
        self._summed = []
        plain(self.optimizer, gradients, variables)
        complete = self._summed or complete

        def measure():
            updates = [
                ops.subtract(variable, old) for variable, old in zip(variables, before, strict=True)
            ]
            return ops.stack(
                [self._norms(tensors, variables) for tensors in (complete, before, updates)]
            )

        number = ops.cast(
            ops.floor_divide(ops.add(self.optimizer._iterations, 1), self.accumulated), "int32"
        )
        figures, step = ops.convert_to_tensor(self.figures), ops.convert_to_tensor(self.step)
        due = ops.equal(ops.mod(ops.add(self.optimizer._iterations, 1), self.period), 0)
        if self.limit is not None:
            due = (
                ops.logical_and(self._is_bad(self._norms(complete, variables)), self._is_update())
                | due
            )
            due = ops.logical_and(due, ops.logical_not(self._is_bad(figures[GRADIENT])))
        # what is assigned in a branch does not reach all replicas
        figures, step = ops.cond(due, lambda: (measure(), number), lambda: (figures, step))
        self.figures.assign(figures)
        self.step.assign(step)

    def _is_update(self):
        return ops.equal(ops.mod(ops.add(self.optimizer._iterations, 1), self.accumulated), 0)

    def _is_bad(self, norms):
        norm = ops.sqrt(ops.sum(ops.square(norms)))
        # TensorFlow turns `not (norm <= limit)`, which would say both, into `norm > limit`, which
        # NaN is not
        return ops.logical_or(ops.logical_not(ops.isfinite(norm)), ops.greater(norm, self.limit))

    def _sum(self, gradients_and_variables):
        summed = self.optimizer.__class__._all_reduce_sum_gradients(
            self.optimizer, gradients_and_variables
        )
        import tensorflow as tf

        if not tf.distribute.in_cross_replica_context():  # else summed before they were clipped
            self._summed = [gradient for gradient, _ in summed]
        return summed

    def _with_accumulated(self, gradients, variables) -> list:
        """Return the gradients of an update, with those accumulated in the steps
        before.
        """
        if self.accumulated == 1:
            return list(gradients)
        left = (
            self.optimizer._accumulated_gradients[self.optimizer._get_variable_index(variable)]
            for variable in variables
        )
        return [
            (gradient + before) / self.accumulated
            for gradient, before in zip(gradients, left, strict=True)
        ]

    def _norms(self, tensors: Sequence, variables: Sequence):
        """Return the norm of each watched weight's tensor, `(n,)`, 0 without one."""
        given = {
            self._index[self.optimizer._var_key(v)]: t
            for v, t in zip(variables, tensors, strict=True)
        }
        parts = []
        for i, (variable, stacked) in enumerate(
            zip(self.watched.variables, self.watched.stacked, strict=True)
        ):
            if i in given:
                squares = ops.square(ops.cast(_all_rows(given[i]), "float32"))
                axes = tuple(range(int(stacked), len(variable.shape)))
                parts.append(ops.reshape(ops.sqrt(ops.sum(squares, axis=axes)), (-1,)))
            else:
                parts.append(ops.zeros(variable.shape[0] if stacked else 1))
        return ops.concatenate(parts)


def own_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of the model's optimizer, which is built if needed, without
    those of a probe.
    """
    optimizer = model.optimizer
    if not optimizer.built:
        with _scope(model):
            optimizer.build(model.trainable_variables)
    probe = Probe.of(optimizer)
    hidden = set() if probe is None else {id(variable) for variable in probe.variables}
    return [variable for variable in optimizer.variables if id(variable) not in hidden]


def _all_rows(gradient):
    """Return a tensor for an embedding's gradient, which TensorFlow holds as a list of
    rows, perhaps with repetitions.
    """
    if keras.backend.backend() != "tensorflow":
        return gradient
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def _scope(model: keras.Model) -> contextlib.AbstractContextManager:
    """Return the scope for new variables of the model's optimizer."""
    if keras.backend.backend() == "tensorflow":
        return model.distribute_strategy.scope()
    return contextlib.nullcontext()


def _replicas(model: keras.Model) -> int:
    return (
        model.distribute_strategy.num_replicas_in_sync
        if keras.backend.backend() == "tensorflow"
        else 1
    )
