"""How input pipelines run in parallel: by fixed numbers, without autotuning.

An iterator of tf.data with autotuning waits in its destructor for a thread that may
sleep for up to a minute, and holds Python's lock meanwhile. The garbage collector can
start that at any moment: a training would freeze.
"""

import os

#: Images that a pipeline decodes and augments at the same time.
CALLS = os.cpu_count() or 1
#: Batches that are ready before they are asked for.
PREFETCHED = 2


def untuned(dataset):
    """Return a tf.data.Dataset without autotuning. Each process reads all of it: its rows
    are the process's already.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
