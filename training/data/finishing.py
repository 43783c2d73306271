"""The last augmentations of a batch, for every kind of stream: RandAugment, mixup and
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
    """Return a function that opens the same data set as `open`, and then augments and
    mixes its batches in NumPy.

    Each image is mixed with the image before it in the whole batch, and the first with
    the last. The order is random already, and a process prepares at most one image more
    for this.

    Args:
        open: Function of a step and rows. It returns the data set of batches (images,
            labels) from this step on, with these rows of each batch.
        batch_size: Images per batch, over all processes.
        augment: Alters the images. None: they are not altered.
        mixing: Mixes them afterwards; labels are then shares of the classes. None: they
            are not mixed.
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
            dtypes = (images.dtype, labels.dtype if mixing is None else tf.float32)
            shape = (len(rows),) if mixing is None else (len(rows), mixing.classes)
            outputs = tf.numpy_function(finish, [step, images, labels], dtypes, stateful=False)
            return tuple(map(tf.ensure_shape, outputs, ((len(rows), *images.shape[1:]), shape)))

        batches = tf.data.Dataset.zip(tf.data.Dataset.range(start, LAST), open(start, numbers))
        return batches.map(
            with_shapes, num_parallel_calls=tf_data.CALLS, deterministic=True
        ).prefetch(tf_data.PREFETCHED)

    return open_finished
