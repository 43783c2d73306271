"""A network whose training images are on the device."""

import itertools
from typing import Any

import keras

from keras_preact.backend import state

from ..data.resident import Cut


class OnDevice(keras.Model):
    """A network preceded by a lookup of its training images.

    It takes codes of training images, or images. On JAX, `steps_per_execution` steps
    are one compiled loop: Keras itself starts each step from the host there, and uses
    such a loop on TensorFlow alone.

    Args:
        network: Network from pixels to logits.
        cut: The images.
    """

    train_function: Any

    def __init__(self, network: keras.Model, cut: Cut):
        super().__init__(name=network.name)
        self.network = network
        self.cut = cut
        self.built = True  # network and lookup are built

    def call(self, inputs, training=None):
        images = self.cut(inputs) if len(inputs.shape) == 1 else inputs
        return self.network(images, training=training)

    def make_train_function(self, force=False):
        state.build_optimizer(self)
        looped = (
            keras.backend.backend() == "jax"
            and self.steps_per_execution > 1
            and self.jit_compile
            and not self.run_eagerly
        )
        if not looped or (self.train_function is not None and not force):
            return super().make_train_function(force)
        import jax

        compiled = jax.jit(self.loop, donate_argnums=0)

        def from_iterator(state, iterator):
            return compiled(state, list(itertools.islice(iterator, self.steps_per_execution)))

        self.train_function = from_iterator
        return None

    def loop(self, state, batches):
        """Train on several batches, on JAX: `train_step` for each, in one loop."""
        import jax

        def step(state, batch):
            logs, state = self.train_step(state, batch)
            return state, logs

        stacked = jax.tree.map(lambda *arrays: jax.numpy.stack(arrays), *batches)
        state, logs = jax.lax.scan(step, state, stacked)
        return {name: values[-1] for name, values in logs.items()}, state
