"""Distributions for TensorFlow: replicas of `tf.distribute`."""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_preact.backend import devices, keras_private, tf_data
from keras_preact.distribution import environment
from keras_preact.distribution.base import Distribution, Step, flat, is_statistic
from keras_preact.layers.batch_norm import Statistics, synchronized_moments, tensorflow_kernel
from keras_preact.stacks import LayerStack
from keras_preact.wrapped_optimizer import unwrapped

#: Versions of Keras in which `_Workers` is known to work.
VERSIONS = ("3.15.1",)


class Mirrored(Distribution):
    """Each device of this machine has all weights and a part of the batch."""

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
        self._scope = stack.enter_context(contextlib.ExitStack())
        self._scope.enter_context(self._strategy.scope())

    def compile(self, model: keras.Model, **options) -> None:
        self._check_entered()
        with self._strategy.scope():
            super().compile(model, **options)
        # Variables are made inside the scope, but the callbacks of `fit` cannot read all of
        # them there.
        self._scope.close()

    def _statistics(self) -> Statistics:
        if self.batch_norm == "per_replica":
            return Statistics()
        moments = synchronized_moments(_sum, self.replicas)
        return Statistics(moments, kernel=functools.partial(_normalize, self.replicas))

    def _step(self, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Step | None:
        statistics = self._own_statistics(model)
        sums_first = _looks_at_gradients(optimizer)
        if not statistics and not sums_first:
            return None

        def step(gradients: list, variables: list) -> None:
            if statistics:
                _average(statistics)
            if sums_first:
                _apply_to_sums(optimizer, gradients, variables)
            else:
                optimizer.apply(gradients, variables)

        return step

    def _check(self, model: keras.Model, options: dict) -> None:
        if keras_private.strategy_of(model) is not self._strategy:
            raise ValueError(
                "Make the model inside `with distribution:`, before another one is compiled. "
                "Received: a model that was made elsewhere"
            )
        if options.get("jit_compile") is True and devices.xla_is_slower():
            raise ValueError(
                "XLA does not compile replicas on a CPU: use jit_compile='auto' or False. "
                "Received: jit_compile=True"
            )
        stacks = [
            layer
            for layer in keras_private.layers(model)
            if isinstance(layer, LayerStack) and layer._execution() == "scan"
        ]
        statistics = [each for stack in stacks for each in stack.variables if is_statistic(each)]
        if statistics and self.batch_norm == "synchronized":
            raise ValueError(
                "TensorFlow's replicas cannot exchange statistics inside a loop: make the model "
                "with stacked=False (or its stacks with execution='loop'), or use "
                f"batch_norm='per_replica'. Received: the stack {stacks[0].name!r} and "
                "batch_norm='synchronized'"
            )


class MultiWorker(Mirrored):
    """Each device of all processes has all weights and a part of the batch."""

    _takes_devices = False

    def __init__(self, kind: str, devices, batch_norm: str):
        if keras.__version__ not in VERSIONS:
            raise ValueError(
                f"kind='multi_worker' on TensorFlow needs Keras {' or '.join(VERSIONS)}: install "
                "that version, or use JAX or torch. Received: Keras "
                f"{keras.__version__}"
            )
        super().__init__(kind, devices, batch_norm)
        resolver = self._strategy.cluster_resolver
        workers = resolver.cluster_spec().as_dict().get("worker", [""])
        self.processes, self.process = len(workers), resolver.task_id or 0

    def _make(self, devices) -> tf.distribute.Strategy:
        return _multi_worker()

    def _data(self, dataset) -> Any:
        """Return batches for one replica each. TensorFlow's own sharding would split this
        process's share again.
        """
        local = tf.nest.flatten(dataset.element_spec)[0].shape[0]
        if local is None:
            raise ValueError(
                "The batches must have a fixed size, such as from batch(..., drop_remainder=True)."
            )
        batches = dataset.rebatch(local * self.processes // self.replicas, drop_remainder=True)
        return self._strategy.distribute_datasets_from_function(
            lambda context: tf_data.untuned(batches.prefetch(tf_data.PREFETCHED))
        )

    def highest(self, value: int) -> int:
        return int(tf.reduce_max(self._values(tf.constant([value]))))

    @functools.cached_property
    def _values(self) -> Callable:
        return self._gathering(tf.identity)

    def _gathering(self, function: Callable) -> Callable:
        """Return a function that joins what `function` returns in the replicas."""

        @tf.function
        def gather(value):
            return self._strategy.gather(self._strategy.run(function, args=(value,)), axis=0)

        return gather

    def _predict(self, model: keras.Model, local: np.ndarray):
        step = self._gathering(lambda images: model(images, training=False))
        batches = self._data(tf_data.untuned(tf.data.Dataset.from_tensor_slices(local)))
        return flat(np.stack([step(images).numpy() for images in batches]))


class _Workers(tf.distribute.MultiWorkerMirroredStrategy):
    """A strategy with a `reduce` that works in Keras' `fit` and `evaluate`.

    Keras averages the numbers that a step returns over an axis that they do not have.
    It also treats a batch of several replicas as one tensor, although it needs only the
    shapes.
    """

    def reduce(self, reduce_op, value, axis):
        if isinstance(value, tuple | list | dict):
            return keras.tree.map_structure(
                lambda each: self.experimental_local_results(each)[0], value
            )
        are_numbers = all(not each.shape.rank for each in self.experimental_local_results(value))
        return super().reduce(reduce_op, value, None if are_numbers else axis)


@functools.cache
def _mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """Return the only strategy of these devices. Two strategies would use the same numbers
    for their messages.
    """
    on_cpu = all("CPU" in device.upper() for device in devices)
    return tf.distribute.MirroredStrategy(
        devices, tf.distribute.ReductionToOneDevice() if on_cpu else None
    )


@functools.cache
def _multi_worker() -> tf.distribute.Strategy:
    """Return the only strategy of this process."""
    job = environment.job()
    resolver = None
    if job is not None:
        cluster = tf.train.ClusterSpec({"worker": job.addresses})
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            cluster, task_type="worker", task_id=job.process, rpc_layer="grpc"
        )
    elif "TF_CONFIG" not in os.environ:
        raise ValueError(
            f"The processes cannot find each other: set TF_CONFIG, or {environment.VARIABLES}. "
            "Received: none of them"
        )
    return _Workers(resolver)


def _looks_at_gradients(optimizer) -> bool:
    """Whether an optimizer uses gradients before Keras sums them over the replicas.

    Such an optimizer would clip the gradients of each replica separately, look for
    infinities only in the first replica's, and fail to accumulate gradients or to
    replace weights by their averages.
    """
    inner = unwrapped(optimizer)
    clips = (inner.clipnorm, inner.global_clipnorm, inner.clipvalue)
    counts = inner.gradient_accumulation_steps or (inner.use_ema and inner.ema_overwrite_frequency)
    return inner is not optimizer or bool(counts) or any(clip is not None for clip in clips)


def _apply_to_sums(optimizer, gradients: list, variables: list) -> None:
    """Sum the gradients over the replicas, then apply the optimizer once for all."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    apply = keras_private.apply_unscaled(optimizer) if scaled else optimizer.apply

    def once(strategy, gradients, variables):
        present = [gradient for gradient in gradients if gradient is not None]
        sums = strategy.extended.batch_reduce_to(
            tf.distribute.ReduceOp.SUM, [(each, each) for each in present]
        )
        whole = iter(strategy.experimental_local_results(each)[0] for each in sums)
        with _nothing_to_merge():
            apply([None if gradient is None else next(whole) for gradient in gradients], variables)

    tf.distribute.get_replica_context().merge_call(once, args=(gradients, variables))


@contextlib.contextmanager
def _nothing_to_merge() -> Iterator[None]:
    """Let TensorFlow trace an optimizer's steps after the replicas are merged, although
    these steps merge the replicas themselves.

    TensorFlow has no option for it, and no subclass or wrapper can do it:
    `_use_merge_call` of `strategy.extended` decides. That object has a private class,
    the strategy's constructor makes it, and variables use it too. So this context
    replaces `maybe_merge_call`, which Keras' optimizers look up for every call.
    """
    interim = tf.__internal__.distribute.interim
    merge = interim.maybe_merge_call
    interim.maybe_merge_call = lambda function, strategy, *args, **options: function(
        strategy, *args, **options
    )
    try:
        yield
    finally:
        interim.maybe_merge_call = merge


def _average(statistics: list[keras.Variable]) -> None:
    """Average the moving statistics of the replicas."""
    values = tf.concat([tf.reshape(variable.value, [-1]) for variable in statistics], 0)
    mean = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, values)
    parts = tf.split(mean, [math.prod(variable.shape) for variable in statistics])
    for variable, part in zip(statistics, parts, strict=True):
        variable.assign(tf.reshape(part, variable.shape))


def _sum(tensor):
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tensor) if context else tensor


def _normalize(replicas: int, x, gamma, beta, epsilon: float):
    """Normalise images, channels last, by the statistics of all replicas' batches: one
    exchange forward and one backward.
    """
    n = tf.cast(tf.size(x) // tf.shape(x)[-1], tf.float32)

    @tf.custom_gradient
    def normalize(x, gamma, beta):
        _, mean, variance = tensorflow_kernel(x, gamma, beta, None, None, epsilon, training=True)
        # the kernel divides by n - 1 for the variance
        square = variance * ((n - 1) / n) + tf.square(mean)
        mean, square = tf.unstack(_sum(tf.stack([mean, square])) / replicas)
        variance = tf.maximum(square - tf.square(mean), 0.0)
        deviation = tf.sqrt(variance + epsilon)
        scale = gamma / deviation
        y = x * tf.cast(scale, x.dtype) + tf.cast(beta - mean * scale, x.dtype)

        def gradient(grad_y, *_):
            # for constant statistics: dy * gamma / deviation, sum of dy * x_hat, sum of dy
            direct, grad_gamma, grad_beta, *_ = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=grad_y,
                x=x,
                scale=gamma,
                reserve_space_1=mean,
                reserve_space_2=variance,
                reserve_space_3=tf.zeros((0,)),
                epsilon=epsilon,
                is_training=False,
            )
            sums = _sum(tf.stack([grad_beta, grad_gamma])) / (n * replicas)
            mean_grad, mean_product = tf.unstack(sums)
            slope = -scale * mean_product / deviation
            offset = -scale * mean_grad - slope * mean
            grad_x = direct + (x * tf.cast(slope, x.dtype) + tf.cast(offset, x.dtype))
            return grad_x, grad_gamma, grad_beta

        return (y, mean, variance), gradient

    return normalize(x, gamma, beta)
