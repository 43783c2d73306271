"""What Keras does not do right under `tf.distribute`, replaced while it is needed.

Two functions fail under `MultiWorkerMirroredStrategy`: `reduce_per_replica` averages
what a step returns over an axis that numbers do not have, and `_maybe_symbolic_build`
takes the values of several replicas for tensors. Both are Keras' own affair, so that
the versions they were seen in are listed.
"""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer

VERSIONS = ("3.15.1",)


def check_version() -> None:
    """Raise a ValueError for a version of Keras of which it is not known what to mend."""
    if keras.__version__ not in VERSIONS:
        raise ValueError(
            "kind='multi_worker' on TensorFlow is known to work with Keras "
            f"{' and '.join(VERSIONS)}; on JAX and torch, with all. Received: Keras "
            f"{keras.__version__}"
        )


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """While active, `fit` and `evaluate` work under `MultiWorkerMirroredStrategy`."""
    reduce, build = trainer.reduce_per_replica, trainer.TensorFlowTrainer._maybe_symbolic_build

    def reduce_per_replica(values, strategy, reduction):
        if reduction == "auto" and trainer._collective_all_reduce_multi_worker(strategy):
            return keras.tree.map_structure(
                lambda value: strategy.reduce("MEAN", value, axis=None), values
            )
        return reduce(values, strategy, reduction)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        strategy = self._distribute_strategy
        if iterator is None or not trainer._collective_all_reduce_multi_worker(strategy):
            return build(self, iterator, data_batch)
        for _, _, batches in iterator:
            batch = keras.tree.map_structure(
                lambda value: strategy.experimental_local_results(value)[0], next(batches)
            )
            with strategy.scope():
                return self._symbolic_build(data_batch=batch)

    trainer.reduce_per_replica = reduce_per_replica
    trainer.TensorFlowTrainer._maybe_symbolic_build = _maybe_symbolic_build
    try:
        yield
    finally:
        trainer.reduce_per_replica, trainer.TensorFlowTrainer._maybe_symbolic_build = reduce, build


@contextlib.contextmanager
def merged() -> Iterator[None]:
    """While active, an optimizer's steps can be traced for all replicas at once, where
    there is nothing left to merge.
    """
    interim = tf.__internal__.distribute.interim
    before = interim.maybe_merge_call
    interim.maybe_merge_call = lambda function, strategy, *args, **options: function(
        strategy, *args, **options
    )
    try:
        yield
    finally:
        interim.maybe_merge_call = before
