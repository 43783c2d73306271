"""Pipelines of TensorFlow's tf.data."""

from typing import Any

import keras
import numpy as np

#: Batches that are ready before they are asked for.
PREFETCHED = 2


def untuned(dataset):
    """Return a tf.data.Dataset without autotuning, with which the destructor of an
    iterator can wait for a minute and hold Python's lock meanwhile.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def of_array(x: np.ndarray, batch_size: int) -> dict[str, Any]:
    """Return the arguments of Keras' `predict` for an array. On TensorFlow, Keras would
    make an autotuned pipeline of it.
    """
    if keras.backend.backend() != "tensorflow":
        return {"x": x, "batch_size": batch_size}
    import tensorflow as tf

    return {"x": untuned(tf.data.Dataset.from_tensor_slices(x).batch(batch_size))}
