"""A distribution: what the devices that share a batch have in common, on any backend."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_preact import _batch_norm, _checks

BATCH_NORMS = ("synchronized", "per_replica")


class Distribution:
    """One device, and what the kinds for several override.

    A model is made, compiled and fitted inside of `with distribution:`; behind it, all
    settings are what they were.

    Uneven batches have one rule for all kinds. A batch of training is always whole:
    data sets drop what is left over. `evaluation_data` fills the last batches up with
    rows of weight 0, and `predict` with rows that it cuts off again.

    Attributes:
        kind: The key in `KINDS`.
        replicas: Devices that share a batch, over all processes.
        processes: How many processes train together.
        process: Which of them this is, from 0.
        batch_norm: `"synchronized"` or `"per_replica"`.
    """

    replicas = 1
    processes = 1
    process = 0

    def __init__(self, kind: str = "none", devices=None, batch_norm: str = "synchronized"):
        _checks.one_of(batch_norm, BATCH_NORMS, "batch_norm")
        if devices is not None and not self._takes_devices:
            raise ValueError(
                f"kind={kind!r} takes no `devices`: it has those of each process. Received: "
                f"devices={devices}"
            )
        self.kind = kind
        self.batch_norm = batch_norm
        self._entered: contextlib.ExitStack | None = None

    #: Whether it is made for a choice of devices.
    _takes_devices = False

    def __repr__(self) -> str:
        return f"<Distribution {self.kind}: {self.replicas} devices, process {self.process} of {self.processes}>"

    def __enter__(self) -> "Distribution":
        if self._entered is not None:
            raise ValueError(f"{self!r} is active already: enter it once.")
        with contextlib.ExitStack() as stack:
            if self.replicas > 1:
                stack.enter_context(_batch_norm.statistics(self._statistics()))
            self._enter(stack)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        entered, self._entered = self._entered, None
        assert entered is not None
        entered.close()

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes what there is once."""
        return self.process == 0

    def rows(self, batch_size: int) -> slice:
        """Return which rows of a batch of `batch_size` this process feeds.

        Raises:
            ValueError: unless all devices get equally many.
        """
        _checks.positive_int(batch_size, "batch_size")
        if batch_size % self.replicas:
            below = batch_size - batch_size % self.replicas
            near = " or ".join(str(size) for size in (below, below + self.replicas) if size)
            raise ValueError(
                f"`batch_size` must divide by the {self.replicas} devices of kind={self.kind!r}: "
                f"use {near}. Received: batch_size={batch_size}"
            )
        local = batch_size // self.processes
        return slice(self.process * local, (self.process + 1) * local)

    def compile(self, model: keras.Model, **options) -> None:
        """Compile a model that was made inside of this distribution, as
        `model.compile(**options)`.

        Raises:
            ValueError: for a model from outside, and for what cannot run on several
                devices.
        """
        self._check_entered()
        if self.replicas > 1:
            self._check(model, options)
        model.compile(**options)
        self._prepare(model)

    def training_data(self, dataset) -> Any:
        """Return what `fit` takes for a tf.data.Dataset of this process's rows of every
        batch, `(x, y)` of fixed shapes.
        """
        self._check_entered()
        return self._data(dataset)

    def evaluation_data(self, dataset, batch_size: int, count: int) -> Any:
        """Return what `evaluate` and `validation_data` take for `count` images in
        batches.

        The weights make a loss that Keras averages over all rows, and the
        `weighted_metrics`, means over the images. (Keras leaves the weights out of
        `metrics`, which would count the rows that fill up.)

        Args:
            dataset: A tf.data.Dataset of `(x, y)`, this process's rows of every batch
                in order; the last one may be smaller or missing.
            batch_size: Of all processes together.
            count: Of all processes' images together.

        Returns:
            ceil(count / batch_size) batches of `(x, y, weights)` of one shape.
        """
        self._check_entered()
        return self._data(padded(dataset, self.rows(batch_size), batch_size, count))

    def predict(self, model: keras.Model, images: np.ndarray, batch_size: int):
        """Return the model's outputs for `images`, which every process has, as arrays
        on every process.
        """
        self._check_entered()
        rows = self.rows(batch_size)
        count = len(images)
        if not count:
            raise ValueError("There is nothing to predict. Received: no images")
        images = np.asarray(images)
        whole = np.concatenate(
            [images, np.zeros((-count % batch_size, *images.shape[1:]), images.dtype)]
        )
        local = whole.reshape(-1, batch_size, *images.shape[1:])[:, rows]
        self._prepare(model)
        return keras.tree.map_structure(lambda output: output[:count], self._predict(model, local))

    def _check_entered(self) -> None:
        if self._entered is None:
            raise ValueError(
                "Everything of a model is made inside of `with distribution:`. Received: "
                f"{self!r}, not entered"
            )

    def _enter(self, stack: contextlib.ExitStack) -> None:
        """Activate what the backend needs, and leave in `stack` how to undo it."""

    def _statistics(self) -> _batch_norm.Statistics:
        return _batch_norm.Statistics()

    def _check(self, model: keras.Model, options: dict) -> None:
        """Raise a ValueError for a model or options that cannot run on several devices."""

    def _prepare(self, model: keras.Model) -> None:
        """Put into a model what it needs on several devices, if it is not there."""

    def _data(self, dataset) -> Any:
        """Return what `fit` takes for a data set of this process's rows."""
        return dataset

    def _predict(self, model: keras.Model, local: np.ndarray):
        """Return all outputs for `(batches, rows of this process, ...)`, in order."""
        return model.predict(flat(local), batch_size=local.shape[1], verbose=0)

    def _override(self, owner, name: str, function: Callable) -> None:
        """Put `function` in the place of a method of one object, until the distribution
        is left.
        """
        assert self._entered is not None
        attributes = vars(owner)
        attributes[name] = function  # past Keras' tracking of attributes
        self._entered.callback(attributes.pop, name, None)


def padded(dataset, rows: slice, batch_size: int, count: int):
    """Return `dataset` with weights, its batches all of `rows`; see
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
    return filled.apply(tf.data.experimental.assert_cardinality(batches)).prefetch(tf.data.AUTOTUNE)


def flat(batches: np.ndarray) -> np.ndarray:
    """Return the rows of `(batches, rows, ...)`."""
    return batches.reshape(-1, *batches.shape[2:])


def is_statistic(variable: keras.Variable) -> bool:
    """Whether batch normalisation moves a variable, without a gradient."""
    return variable.path.rsplit("/", 1)[-1] in ("moving_mean", "moving_variance")
