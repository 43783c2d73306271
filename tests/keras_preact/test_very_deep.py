"""Networks of ten thousand layers: one step back and forth, gradients of one size at
both ends, a loss that falls.
"""

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import keras_preact as kp

pytestmark = pytest.mark.backend


def digits(batch):
    images, labels = load_digits(return_X_y=True)
    images = (images - images.mean()) / images.std()
    return images[:batch].reshape(-1, 8, 8, 1).astype("float32"), labels[:batch]


def first_gradients_and_losses(model, batch, steps, learning_rate):
    """Return the norm of the gradient of every kernel of every unit at the start, and
    the losses of `steps` steps on a batch.

    The first step of SGD without decay moves each weight by its gradient times the
    learning rate.
    """
    x, y = digits(batch)
    optimizer = kp.optimizers.CoupledSGD(learning_rate, coupled_weight_decay=0)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    kernels = {
        weight.path: weight for weight in model.trainable_weights if weight.path.endswith("kernel")
    }
    before = {
        path: np.array(keras.ops.convert_to_numpy(weight.value)) for path, weight in kernels.items()
    }
    losses = [float(model.train_on_batch(x, y))]
    norms = {}
    for path, weight in kernels.items():
        moved = (before[path] - keras.ops.convert_to_numpy(weight.value)) / learning_rate
        norms[path] = (
            np.sqrt((moved**2).reshape(len(moved), -1).sum(1))
            if "_units/" in path
            else np.sqrt((moved**2).sum())
        )
    losses += [float(model.train_on_batch(x, y)) for _ in range(steps - 1)]
    return norms, losses


@pytest.mark.soak
def test_preactivation_network_of_10001_layers():
    keras.utils.set_random_seed(0)
    model = kp.create_model("digits_resnet10001_preact", width_factor=0.25)
    assert sum(getattr(segment, "depth", 1) for segment in model.segments) == 3333
    norms, losses = first_gradients_and_losses(model, batch=16, steps=3, learning_rate=0.01)
    assert all(np.isfinite(norm).all() for norm in norms.values())
    for i in (1, 2, 3):  # the same weight of the first unit and of the last
        first, last = (
            norms[f"stage1_units/branch/conv_{i}/kernel"][0],
            norms[f"stage3_units/branch/conv_{i}/kernel"][-1],
        )
        assert 1 / 20 < first / last < 20, i
    assert 1 / 20 < norms["stem_conv/kernel"] / norms["head_classifier/kernel"] < 20
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.soak
def test_vanilla_network_of_10000_layers():
    keras.utils.set_random_seed(0)
    model = kp.create_model("digits_vanilla10000", strides=2)
    assert model.segments[1].depth == 9997
    norms, losses = first_gradients_and_losses(model, batch=16, steps=2, learning_rate=1e-3)
    depth_profile = norms["stage1_units/branch/conv_1/kernel"]
    assert np.isfinite(depth_profile).all()
    assert 1 / 20 < depth_profile[:100].mean() / depth_profile[-100:].mean() < 20
    assert 1 / 20 < norms["stem_conv/kernel"] / norms["head_classifier/kernel"] < 20
    assert losses[-1] < losses[0]


def test_vanilla_network_is_a_chain_of_convolutions():
    """Against `tanh(conv(x) + b)` written out, and its error for too few layers."""
    model = kp.models.vanilla_cnn(6, filters=4, input_shape=(5, 6, 2), classes=3, stacked=True)
    x = np.random.default_rng(0).normal(size=(2, 5, 6, 2)).astype("float32")
    y = x
    singles = kp.models.unstack(model)
    for kernel, bias in zip(singles.weights[:-2:2], singles.weights[1:-2:2], strict=True):
        y = keras.ops.tanh(keras.ops.conv(y, kernel.value, padding="same") + bias.value)
        assert np.any(keras.ops.convert_to_numpy(bias.value))
    y = keras.ops.mean(y, (1, 2)) @ singles.weights[-2].value + singles.weights[-1].value
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(model(x)), keras.ops.convert_to_numpy(y), atol=1e-5
    )
    with pytest.raises(ValueError, match=r"3 is the least. Received: depth=2"):
        kp.models.vanilla_cnn(2)
