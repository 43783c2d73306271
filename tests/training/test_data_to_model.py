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
        self.seen = str(batch[0].dtype).removeprefix("torch.").replace("<dtype: 'uint8'>", "uint8")
        return super().train_step(*arguments)


def build(data, dtype):
    """Return the beginning of a network, which is all that meets pixels, with a head."""
    keras.utils.set_random_seed(0)
    core = kp.create_model(
        "digits_resnet8_preact",
        width_factor=0.25,
        input_shape=(8, 8, data.channels),
        mean=data.preprocessing.mean,
        std=data.preprocessing.std,
        dtype=dtype,
        data_format="channels_last",
    )
    scores = keras.layers.Dense(10, dtype="float32")(
        keras.layers.Flatten()(core.get_layer("stem_conv").output)
    )
    model = Spying(core.input, scores)
    model.compile(
        optimizer=kp.optimizers.CoupledSGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_bytes_are_cast_in_the_step_and_give_what_floats_give(dtype):
    import tensorflow as tf

    random = np.random.default_rng(0)
    data = pictures.in_memory(random.integers(0, 256, (48, 8, 8, 3), "uint8"), np.arange(48) % 10)
    stream = training_stream(data, 16, "pad_crop_flip", None, 0)

    def run(cast):
        model = build(data, dtype)
        floats = lambda pixels, labels: (tf.cast(pixels, tf.float32), labels)  # noqa: E731
        batches, test = stream.dataset(), evaluation_batches(data, data.test, 16, None)
        if cast:
            batches, test = batches.map(floats), test.map(floats)
        history = model.fit(batches, steps_per_epoch=4, epochs=2, shuffle=False, verbose=0).history
        return (
            model.seen,
            history,
            model.evaluate(test, verbose=0),
            model.predict(test, verbose=0),
            model.get_weights(),
        )

    ours, theirs = run(cast=False), run(cast=True)
    assert ours[0] == "uint8"
    assert "float32" in theirs[0]
    assert ours[1:3] == theirs[1:3]
    np.testing.assert_array_equal(ours[3], theirs[3])
    assert all(map(np.array_equal, ours[4], theirs[4]))
    assert np.isfinite(ours[3]).all()
