"""What is done with the batches of any stream before they leave: RandAugment, mixup and
CutMix.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_preact.backend import tf_data

from .mixing import Mixing
from .rand_augment import RandAugment
from .readers import LAST


class Finished:
    """Opens the streams of another opener and finishes their batches, in NumPy.

    An image is mixed with the one in front of it in the whole batch, the first with the
    last: the order is random already, and a process has to prepare one image more for
    it, or none.

    Args:
        open: Returns the data set of batches (images, labels) from a step on, of these
            rows.
        batch_size: Images a batch, over all processes.
        augment: Alters the images, if anything.
        mixing: Mixes them afterwards, if anything. Labels leave as shares of the
            classes then.
    """

    def __init__(
        self,
        open: Callable[[int, np.ndarray], Any],
        batch_size: int,
        augment: RandAugment | None,
        mixing: Mixing | None,
    ):
        self._open, self._batch_size = open, batch_size
        self._augment, self._mixing = augment, mixing

    def __call__(self, start: int, rows: np.ndarray):
        """Return the tf.data.Dataset of the batches from `start` on."""
        import tensorflow as tf

        numbers = rows if self._mixing is None else np.union1d(rows, (rows - 1) % self._batch_size)
        partners = np.searchsorted(numbers, [rows, (rows - 1) % self._batch_size])

        def finish(step, images, labels):
            if self._augment is not None:
                images = self._augment(images, step * self._batch_size + numbers)
            return (
                (images, labels)
                if self._mixing is None
                else self._mixing(int(step), images, labels, partners)
            )

        def finished(step, batch):
            images, labels = batch
            kinds = (images.dtype, labels.dtype if self._mixing is None else tf.float32)
            shape = (len(rows),) if self._mixing is None else (len(rows), self._mixing.classes)
            finals = tf.numpy_function(finish, [step, images, labels], kinds, stateful=False)
            return tuple(map(tf.ensure_shape, finals, ((len(rows), *images.shape[1:]), shape)))

        batches = tf.data.Dataset.zip(
            tf.data.Dataset.range(start, LAST), self._open(start, numbers)
        )
        return batches.map(finished, num_parallel_calls=tf_data.CALLS, deterministic=True).prefetch(
            tf_data.PREFETCHED
        )
