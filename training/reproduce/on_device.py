"""A network in training whose images are on the device: `fit` gets codes, and computes
many steps without the host.
"""

from collections.abc import Iterator

import keras
import numpy as np

from ..data.resident import Cut, Stream


class OnDevice(keras.Model):
    """A network behind the images that it is trained on.

    On JAX, `together` steps are one compiled loop, and a batch of `fit` holds the codes
    of all of them. Keras' own `steps_per_execution`, which on JAX starts each step from
    the host, is what TensorFlow does it by. Torch goes step by step.

    Args:
        network: From pixels to logits.
        cut: The images.
        together: Steps to be computed at a time.
    """

    def __init__(self, network: keras.Model, cut: Cut, together: int = 1):
        super().__init__(name=network.name)
        self.network = network
        self.cut = cut
        backend = keras.backend.backend()
        #: Steps in a batch of `fit`.
        self.steps_per_batch = together if backend == "jax" else 1
        #: The argument of `compile`.
        self.together = together if backend == "tensorflow" else 1

    def call(self, codes, training=None):
        return self.network(self.cut(codes), training=training)

    def train_step(self, *arguments):
        if self.steps_per_batch == 1:
            return super().train_step(*arguments)
        import jax

        one = super().train_step

        def step(state, data):
            logs, state = one(state, data)
            return state, logs

        state, logs = jax.lax.scan(step, *arguments)
        return {name: values[-1] for name, values in logs.items()}, state

    def batches(
        self, stream: Stream, first: int, last: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Return batches of `fit` from step `first` to `last`, whose distance
        `steps_per_batch` divides.
        """
        if self.steps_per_batch == 1:
            yield from map(stream.batch, range(first, last))
            return
        for start in range(first, last, self.steps_per_batch):
            codes, labels = zip(
                *map(stream.batch, range(start, start + self.steps_per_batch)), strict=True
            )
            yield np.stack(codes), np.stack(labels)
