"""Bytes to the network: it computes from uint8 what it computes from float32, and the
bytes reach the step as they are.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.training import images as pictures
from training.data import evaluation_batches, training_stream

pytestmark = pytest.mark.backend


class Spying(keras.Model):
    """Keeps the type of the images that its training step gets."""

    def train_step(self, *arguments):
        batch = arguments[-1]  # JAX: behind the state
        self.seen = str(batch[0].dtype)
        return super().train_step(*arguments)


def fit(data, change):
    """Train the beginning of a network, which is all that meets pixels, with a head."""
    keras.utils.set_random_seed(0)
    preprocessing = {"mean": data.preprocessing.mean, "std": data.preprocessing.std}
    size = {"width_factor": 0.25, "input_shape": (8, 8, 3), "data_format": "channels_last"}
    core = kp.create_model("digits_resnet8_preact", **preprocessing, **size)
    flat = keras.layers.Flatten()(core.get_layer("stem_conv").output)
    model = Spying(core.input, keras.layers.Dense(10)(flat))
    model.compile(
        optimizer=kp.optimizers.CoupledSGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    batches = training_stream(data, 16, "pad_crop_flip", None, 0).dataset().map(change)
    test = evaluation_batches(data, data.test, 16, None).map(change)
    history = model.fit(batches, steps_per_epoch=4, epochs=2, shuffle=False, verbose=0).history
    return model.seen, history["loss"], model.predict(test, verbose=0)


def test_bytes_are_cast_in_the_step_and_give_what_floats_give():
    import tensorflow as tf

    random = np.random.default_rng(0)
    data = pictures.in_memory(random.integers(0, 256, (48, 8, 8, 3), "uint8"), np.arange(48) % 10)
    (seen, *ours), (floats, *theirs) = (
        fit(data, lambda pixels, labels, kind=kind: (tf.cast(pixels, kind), labels))
        for kind in ("uint8", "float32")
    )
    assert "uint8" in seen
    assert "float32" in floats
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
