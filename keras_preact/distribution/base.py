"""The base class of distributions, for all backends."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_preact import _checks
from keras_preact.backend import keras_private, tf_data
from keras_preact.layers.batch_norm import BatchNormalization, Statistics
from keras_preact.wrapped_optimizer import WrappedOptimizer

BATCH_NORMS = ("synchronized", "per_replica")


class Distribution:
    """Training on one device, and the base class of distributions for several devices.

    Make, compile and fit a model inside `with distribution:`. Make every model and
    optimizer of the block before the first `compile`, since on TensorFlow later
    variables belong to one device. When the block ends, all settings are restored.

    All distributions treat incomplete batches alike. Training batches are always
    complete: data sets drop the remainder. `evaluation_data` pads the last batch with
    rows of weight 0, and `predict` with rows that it removes from the result.

    Attributes:
        kind: The key in `KINDS`.
        replicas: Number of devices that share a batch, over all processes.
        processes: Number of processes that train together.
        process: Number of this process, from 0.
        batch_norm: `"synchronized"` or `"per_replica"`.
    """

    replicas = 1
    processes = 1
    process = 0

    def __init__(self, kind: str = "none", devices=None, batch_norm: str = "synchronized"):
        _checks.one_of(batch_norm, BATCH_NORMS, "batch_norm")
        if devices is not None and not self._takes_devices:
            raise ValueError(
                f"kind={kind!r} takes no `devices`: it uses the devices of each process. Received: "
                f"devices={devices}"
            )
        self.kind = kind
        self.batch_norm = batch_norm
        self._entered: contextlib.ExitStack | None = None

    #: Whether a caller chooses the devices.
    _takes_devices = False

    def __repr__(self) -> str:
        return (
            f"<Distribution {self.kind}: {self.replicas} devices, process {self.process} of "
            f"{self.processes}>"
        )

    def __enter__(self) -> "Distribution":
        if self._entered is not None:
            raise ValueError(f"{self!r} is active already: enter it once.")
        with contextlib.ExitStack() as stack:
            self._enter(stack)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        entered, self._entered = self._entered, None
        assert entered is not None
        entered.close()

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files that only one process writes."""
        return self.process == 0

    def rows(self, batch_size: int) -> slice:
        """Return the rows of a batch of `batch_size` that this process provides.

        Raises:
            ValueError: unless every device gets the same number of rows.
        """
        _checks.positive_int(batch_size, "batch_size")
        if batch_size % self.replicas:
            below = batch_size - batch_size % self.replicas
            near = " or ".join(str(size) for size in (below, below + self.replicas) if size)
            raise ValueError(
                f"`batch_size` must be a multiple of {self.replicas}, the number of devices of "
                f"kind={self.kind!r}: use {near}. Received: batch_size={batch_size}"
            )
        local = batch_size // self.processes
        return slice(self.process * local, (self.process + 1) * local)

    def compile(self, model: keras.Model, **options) -> None:
        """Compile a model that was made inside this distribution: `model.compile(**options)`.

        Raises:
            ValueError: for a model made elsewhere, and for a model or options that
                cannot run on several devices.
        """
        self._check_entered()
        if self.replicas == 1:
            model.compile(**options)
            return
        self._check(model, options)
        assert self._entered is not None
        model.compile(**options)
        if step := self._step(model, model.optimizer):
            model.optimizer = shared = SharedOptimizer(model.optimizer, step, self._whole_gradients)
            self._entered.callback(shared.release)
        self._entered.enter_context(with_statistics(model, self._statistics()))

    def training_data(self, dataset) -> Any:
        """Return data for `fit` from a tf.data.Dataset of this process's rows of every
        batch, `(x, y)` of fixed shapes.
        """
        self._check_entered()
        return self._data(dataset)

    def evaluation_data(self, dataset, batch_size: int, count: int) -> Any:
        """Return data for `evaluate` and `validation_data`: `count` images in batches, with
        weights.

        The weights make a loss that Keras averages over all rows, and each of the
        `weighted_metrics`, a mean over the images. (Keras ignores the weights in
        `metrics`, which would count the padding.)

        Args:
            dataset: A tf.data.Dataset of `(x, y)`, this process's rows of every batch
                in order; the last batch may be smaller or missing.
            batch_size: Images per batch, over all processes.
            count: Number of images, over all processes.

        Returns:
            ceil(count / batch_size) batches of `(x, y, weights)` of one shape.
        """
        self._check_entered()
        return self._data(padded(dataset, self.rows(batch_size), batch_size, count))

    def predict(self, model: keras.Model, images: np.ndarray, batch_size: int):
        """Return the model's outputs for `images` as arrays, on every process. Every
        process passes all images.
        """
        self._check_entered()
        rows = self.rows(batch_size)
        count = len(images)
        if not count:
            raise ValueError("`images` must contain at least one image. Received: no images")
        images = np.asarray(images)
        whole = np.concatenate(
            [images, np.zeros((-count % batch_size, *images.shape[1:]), images.dtype)]
        )
        local = whole.reshape(-1, batch_size, *images.shape[1:])[:, rows]
        return keras.tree.map_structure(lambda output: output[:count], self._predict(model, local))

    def highest(self, value: int) -> int:
        """Return the highest value of all processes, on every process. All processes must
        call it at the same point, such as between two steps.
        """
        return value

    def _check_entered(self) -> None:
        if self._entered is None:
            raise ValueError(
                f"Use a distribution inside `with distribution:`. Received: {self!r}, not entered"
            )

    def _enter(self, stack: contextlib.ExitStack) -> None:
        """Activate the settings of the backend, and register in `stack` how to undo them."""

    def _statistics(self) -> Statistics:
        """Return how batch normalisation computes the statistics of a shared batch."""
        return Statistics()

    def _own_statistics(self, model: keras.Model) -> list[keras.Variable]:
        """Return the moving statistics that differ between replicas."""
        per_replica = self.batch_norm == "per_replica"
        return [variable for variable in model.variables if per_replica and is_statistic(variable)]

    def _check(self, model: keras.Model, options: dict) -> None:
        """Raise a ValueError for a model or options that cannot run on several devices."""

    def _step(self, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> "Step | None":
        """Return a function that replaces `optimizer.apply`, or None to keep it."""
        return None

    def _whole_gradients(self, gradients: Sequence) -> Sequence:
        """Return the gradients of the whole batch, for callbacks, from the gradients that
        `apply` gets. On TensorFlow, callbacks sum them over the replicas themselves.
        """
        return gradients

    def _data(self, dataset) -> Any:
        """Return data for `fit` from a data set of this process's rows."""
        return dataset

    def _predict(self, model: keras.Model, local: np.ndarray):
        """Return all outputs for `(batches, rows of this process, ...)`, in order."""
        return model.predict(**tf_data.of_array(flat(local), local.shape[1]), verbose=0)


#: Function that applies gradients to their variables, for all devices.
Step = Callable[[list, list], None]


class SharedOptimizer(WrappedOptimizer):
    """An optimizer that applies gradients with `step`, and after `release` as the wrapped
    optimizer does.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, step: Step, whole_gradients):
        super().__init__(optimizer)
        object.__setattr__(self, "_step", step)
        object.__setattr__(self, "whole_gradients", whole_gradients)

    def apply(self, grads: Sequence, trainable_variables: Sequence | None = None) -> None:
        self._step(list(grads), list(trainable_variables or keras_private.built_for(self)))

    def release(self) -> None:
        object.__setattr__(self, "_step", self.__wrapped__.apply)


@contextlib.contextmanager
def with_statistics(model: keras.Model, statistics: Statistics) -> Iterator[None]:
    """Return a context in which every `kp` batch normalisation of a model, also inside
    stacks of units, computes its statistics as `statistics` says.
    """
    layers = [
        layer for layer in keras_private.layers(model) if isinstance(layer, BatchNormalization)
    ]
    before = [layer.statistics for layer in layers]
    for layer in layers:
        layer.statistics = statistics
    try:
        yield
    finally:
        for layer, previous in zip(layers, before, strict=True):
            layer.statistics = previous


def padded(dataset, rows: slice, batch_size: int, count: int):
    """Return `dataset` with weights, each batch as large as `rows`; see
    `Distribution.evaluation_data`.
    """
    import tensorflow as tf

    _checks.positive_int(count, "count")
    local = rows.stop - rows.start
    batches = -(-count // batch_size)
    weight = batches * batch_size / count

    def fill(x, y):
        present = tf.shape(tf.nest.flatten(x)[0])[0]

        def to_size(tensor):
            filled = tf.pad(tensor, [[0, local - present], *[[0, 0]] * (tensor.shape.rank - 1)])
            return tf.ensure_shape(filled, (local, *tensor.shape[1:]))

        weights = tf.cast(tf.range(local) < present, tf.float32) * weight
        return *tf.nest.map_structure(to_size, (x, y)), weights

    nothing = tf.nest.map_structure(
        lambda spec: tf.zeros((0, *spec.shape[1:]), spec.dtype), dataset.element_spec
    )
    missing = tf.data.Dataset.from_tensors(nothing).repeat()
    filled = dataset.map(fill).concatenate(missing.map(fill)).take(batches)
    filled = filled.apply(tf.data.experimental.assert_cardinality(batches))
    return tf_data.untuned(filled.prefetch(tf_data.PREFETCHED))


def flat(batches: np.ndarray) -> np.ndarray:
    """Join the batches of `(batches, rows, ...)`: return `(all rows, ...)`."""
    return batches.reshape(-1, *batches.shape[2:])


def is_statistic(variable: keras.Variable) -> bool:
    """Whether a variable is a moving statistic of batch normalisation."""
    return variable.path.rsplit("/", 1)[-1] in ("moving_mean", "moving_variance")
