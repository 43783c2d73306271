"""Pipelines of tf.data with fixed parallelism and without autotuning.

An iterator of tf.data with autotuning waits in its destructor for a thread that may
sleep for up to a minute, and holds Python's lock meanwhile. The garbage collector can
call the destructor at any moment, and training would freeze.
"""

import os
from typing import Any

import numpy as np

#: Images that a pipeline decodes and augments at the same time.
CALLS = os.cpu_count() or 1
#: Number of batches to prepare in advance.
PREFETCHED = 2


def untuned(dataset):
    """Return a tf.data.Dataset without autotuning or sharding. It must have only the
    rows of this process already.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def of_array(x: np.ndarray, batch_size: int) -> dict[str, Any]:
    """Return the arguments of Keras' `predict` for an array. On TensorFlow, Keras would
    make an autotuned pipeline of it.
    """
    import keras  # not at the top: a server, which has no Keras, uses `untuned`

    if keras.backend.backend() != "tensorflow":
        return {"x": x, "batch_size": batch_size}
    import tensorflow as tf

    return {"x": untuned(tf.data.Dataset.from_tensor_slices(x).batch(batch_size))}
