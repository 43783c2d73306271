"""TensorFlow: replicas of `tf.distribute`."""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_preact import _batch_norm
from keras_preact.distribution import environment, mended_keras
from keras_preact.distribution.base import Distribution, flat, is_statistic
from keras_preact.stacks import UnitStack


class Mirrored(Distribution):
    """All weights on each device of this machine, a part of the batch on each."""

    _takes_devices = True

    def __init__(self, kind: str, devices, batch_norm: str):
        super().__init__(kind, devices, batch_norm)
        self._strategy = self._make(devices)
        self.replicas = self._strategy.num_replicas_in_sync

    def _make(self, devices) -> tf.distribute.Strategy:
        if devices is None:
            found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
            devices = [device.name for device in found]
        return _mirrored(tuple(devices))

    def _enter(self, stack: contextlib.ExitStack) -> None:
        self._scope = contextlib.ExitStack()
        self._scope.enter_context(self._strategy.scope())
        stack.callback(lambda: self._scope.close())

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """Leave the strategy's scope, in which variables are made, but the callbacks of
        `fit` cannot read all of them.
        """
        if self._strategy is not tf.distribute.get_strategy():
            yield
            return
        self._scope.close()
        try:
            yield
        finally:
            self._scope.enter_context(self._strategy.scope())

    def _statistics(self) -> _batch_norm.Statistics:
        if self.batch_norm == "per_replica":
            return _batch_norm.Statistics()
        return _batch_norm.Statistics(_batch_norm.synchronized_moments(_sum, self.replicas))

    def _prepare(self, model: keras.Model) -> None:
        for name in ("fit", "evaluate", "predict"):
            self._override(model, name, self._run_outside(model, name))
        optimizer = model.optimizer if model.compiled else None
        if self.replicas == 1 or optimizer is None or "apply" in vars(optimizer):
            return
        if _looks_at_gradients(optimizer):
            self._override(optimizer, "apply", _on_sums(optimizer))
        statistics = [variable for variable in model.variables if is_statistic(variable)]
        if self.batch_norm == "per_replica" and statistics:
            self._override(optimizer, "apply", _averaging(statistics, optimizer))

    def _run_outside(self, model: keras.Model, name: str) -> Callable:
        def run(*args, **options):
            with self._outside():
                return getattr(type(model), name)(model, *args, **options)

        return run

    def _check(self, model: keras.Model, options: dict) -> None:
        if model._distribute_strategy is not self._strategy:
            raise ValueError(
                "Make the model inside of `with distribution:`. Received: a model that was made "
                "elsewhere"
            )
        if options.get("jit_compile") is True and not tf.config.list_physical_devices("GPU"):
            raise ValueError(
                "XLA does not compile replicas on a CPU: use jit_compile='auto' or False."
            )
        stacks = [
            layer
            for layer in model._flatten_layers()
            if isinstance(layer, UnitStack) and layer._execution() == "scan"
        ]
        if stacks and self.batch_norm == "synchronized" and _has_batch_norm(stacks):
            raise ValueError(
                "TensorFlow's replicas cannot exchange statistics inside a loop: make the model "
                "with stacked=False (or its stacks with execution='loop'), or use "
                f"batch_norm='per_replica'. Received: the stack {stacks[0].name!r} and "
                "batch_norm='synchronized'"
            )


class MultiWorker(Mirrored):
    """All weights on each device of several processes."""

    _takes_devices = False

    def __init__(self, kind: str, devices, batch_norm: str):
        mended_keras.check_version()
        super().__init__(kind, devices, batch_norm)
        resolver = self._strategy.cluster_resolver
        workers = resolver.cluster_spec().as_dict().get("worker", [""])
        self.processes, self.process = len(workers), resolver.task_id or 0

    def _make(self, devices) -> tf.distribute.Strategy:
        return _multi_worker()

    def _enter(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(mended_keras.mended())
        super()._enter(stack)

    def _data(self, dataset) -> Any:
        """Batches of a replica each: TensorFlow's own sharding would be of what is a
        share already.
        """
        local = tf.nest.flatten(dataset.element_spec)[0].shape[0]
        if local is None:
            raise ValueError(
                "The batches must have a fixed size, such as from batch(..., drop_remainder=True)."
            )
        batches = dataset.rebatch(local * self.processes // self.replicas, drop_remainder=True)
        return self._strategy.distribute_datasets_from_function(
            lambda context: batches.prefetch(tf.data.AUTOTUNE)
        )

    def _predict(self, model: keras.Model, local: np.ndarray):
        def call(images):
            return model(images, training=False)

        @tf.function
        def step(images):
            return self._strategy.gather(self._strategy.run(call, args=(images,)), axis=0)

        batches = self._data(tf.data.Dataset.from_tensor_slices(local))
        return flat(np.stack([step(images).numpy() for images in batches]))


@functools.cache
def _mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """Return the one strategy of these devices: two would give what they exchange the
    same numbers.
    """
    on_cpu = all("CPU" in device.upper() for device in devices)
    return tf.distribute.MirroredStrategy(
        devices, tf.distribute.ReductionToOneDevice() if on_cpu else None
    )


@functools.cache
def _multi_worker() -> tf.distribute.Strategy:
    """Return the one strategy of this process."""
    job = environment.job()
    resolver = None
    if job is not None:
        cluster = tf.train.ClusterSpec({"worker": job.addresses})
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            cluster, task_type="worker", task_id=job.process, rpc_layer="grpc"
        )
    elif "TF_CONFIG" not in os.environ:
        raise ValueError(
            "The processes cannot find each other: set TF_CONFIG, or "
            "KERAS_DISTRIBUTION_JOB_ADDRESSES, KERAS_DISTRIBUTION_NUM_PROCESSES and "
            "KERAS_DISTRIBUTION_PROCESS_ID. Received: none of them"
        )
    return tf.distribute.MultiWorkerMirroredStrategy(resolver)


def _looks_at_gradients(optimizer) -> bool:
    """Whether an optimizer does more with gradients than to sum them over the replicas,
    which is the last that Keras does.

    It would clip each replica's part by itself, look for infinities in that of the
    first, and fail to accumulate, or to put averages in the place of weights.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    clips = (inner.clipnorm, inner.global_clipnorm, inner.clipvalue)
    counts = inner.gradient_accumulation_steps or (inner.use_ema and inner.ema_overwrite_frequency)
    return inner is not optimizer or bool(counts) or any(clip is not None for clip in clips)


def _on_sums(optimizer) -> Callable:
    """Return an `apply` that sums the gradients first, and does all the rest once for
    all replicas.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    plain = (
        optimizer._common_apply
        if inner is not optimizer
        else functools.partial(type(optimizer).apply, optimizer)
    )

    def once(strategy, gradients, variables):
        present = [gradient for gradient in gradients if gradient is not None]
        sums = strategy.extended.batch_reduce_to(
            tf.distribute.ReduceOp.SUM, [(each, each) for each in present]
        )
        whole = iter(strategy.experimental_local_results(each)[0] for each in sums)
        watcher = vars(inner).pop(
            "_all_reduce_sum_gradients", None
        )  # which asks for sums that are made here
        try:
            with mended_keras.merged():
                plain(
                    [None if gradient is None else next(whole) for gradient in gradients], variables
                )
        finally:
            if watcher is not None:
                vars(inner)["_all_reduce_sum_gradients"] = watcher

    def apply(gradients, variables=None):
        tf.distribute.get_replica_context().merge_call(
            once, args=(list(gradients), list(variables))
        )

    return apply


def _averaging(statistics: list[keras.Variable], optimizer) -> Callable:
    """Return an `apply` that averages moving statistics, of which each replica has its
    own, over all of them.
    """
    apply = optimizer.apply

    def average_and_apply(gradients, variables=None):
        values = tf.concat([tf.reshape(variable.value, [-1]) for variable in statistics], 0)
        mean = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, values)
        parts = tf.split(mean, [math.prod(variable.shape) for variable in statistics])
        for variable, part in zip(statistics, parts, strict=True):
            variable.assign(tf.reshape(part, variable.shape))
        return apply(gradients, variables)

    return average_and_apply


def _sum(tensor):
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tensor) if context else tensor


def _has_batch_norm(stacks: list[UnitStack]) -> bool:
    return any(is_statistic(variable) for stack in stacks for variable in stack.variables)
