"""What is done with the batches of any stream before they leave: RandAugment, mixup and
CutMix.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_preact.backend import tf_data

from .mixing import Mixing
from .rand_augment import RandAugment
from .readers import LAST


def finished(
    open: Callable[[int, np.ndarray], Any],
    batch_size: int,
    augment: RandAugment | None,
    mixing: Mixing | None,
) -> Callable[[int, np.ndarray], Any]:
    """Return a function that opens the streams of another one and finishes their
    batches, in NumPy.

    An image is mixed with the one before it in the whole batch, the first with the
    last: the order is random already, and a process has to prepare one image more for
    it, or none.

    Args:
        open: Returns the data set of batches (images, labels) from a step on, of these
            rows.
        batch_size: Images per batch, over all processes.
        augment: Alters the images, if anything.
        mixing: Mixes them afterwards, if anything. Labels leave as shares of the
            classes then.
    """

    def open_finished(start: int, rows: np.ndarray):
        before = (rows - 1) % batch_size
        numbers = rows if mixing is None else np.union1d(rows, before)
        partners = np.searchsorted(numbers, [rows, before])

        def finish(step, images, labels):
            if augment is not None:
                images = augment(images, step * batch_size + numbers)
            if mixing is None:
                return images, labels
            return mixing(int(step), images, labels, partners)

        def with_shapes(step, batch):
            images, labels = batch
            kinds = (images.dtype, labels.dtype if mixing is None else tf.float32)
            shape = (len(rows),) if mixing is None else (len(rows), mixing.classes)
            finals = tf.numpy_function(finish, [step, images, labels], kinds, stateful=False)
            return tuple(map(tf.ensure_shape, finals, ((len(rows), *images.shape[1:]), shape)))

        batches = tf.data.Dataset.zip(tf.data.Dataset.range(start, LAST), open(start, numbers))
        return batches.map(
            with_shapes, num_parallel_calls=tf_data.CALLS, deterministic=True
        ).prefetch(tf_data.PREFETCHED)

    return open_finished
