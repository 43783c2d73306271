"""Networks of ten thousand layers: a forward and a backward pass, gradients of similar
size at both ends, and a falling loss.
"""

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import keras_preact as kp
from tests.keras_preact import harness


def digits(batch):
    images, labels = load_digits(return_X_y=True)
    images = (images - images.mean()) / images.std()
    return images[:batch].reshape(-1, 8, 8, 1).astype("float32"), labels[:batch]


def first_gradients_and_losses(model, steps, learning_rate):
    """Return the norm of the first gradient of every kernel, one norm per unit of a stack,
    and the losses of `steps` steps on a batch.

    The first step of SGD without decay moves each weight by its gradient times the
    learning rate.
    """
    x, y = digits(16)
    harness.compiled(model, kp.optimizers.CoupledSGD(learning_rate, coupled_weight_decay=0))
    before = harness.weights(model)
    losses = [float(model.train_on_batch(x, y))]
    norms = {}
    for path, value in harness.kernels(model).items():
        moved = (before[path] - value) / learning_rate
        axes = tuple(range(1 if "_units/" in path else 0, moved.ndim))
        norms[path] = np.sqrt((moved**2).sum(axes))
        assert np.isfinite(norms[path]).all()
    losses += [float(model.train_on_batch(x, y)) for _ in range(steps - 1)]
    assert 1 / 20 < norms["stem_conv/kernel"] / norms["head_classifier/kernel"] < 20
    return norms, losses


@pytest.mark.parametrize("depth", [1001, pytest.param(10001, marks=pytest.mark.soak)])
def test_preactivation_network(depth):
    model = kp.create_model(
        "digits_resnet10001_preact", depth=depth - (depth - 2) % 9, width_factor=0.25
    )
    norms, losses = first_gradients_and_losses(model, steps=3, learning_rate=0.01)
    for i in (1, 2, 3):  # the same weight of the first unit and of the last
        first = norms[f"stage1_units/branch/conv_{i}/kernel"][0]
        last = norms[f"stage3_units/branch/conv_{i}/kernel"][-1]
        assert 1 / 20 < first / last < 20, i
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "depth", [200, *(pytest.param(depth, marks=pytest.mark.soak) for depth in (1000, 10000))]
)
def test_vanilla_network(depth):
    model = kp.create_model("digits_vanilla10000", depth=depth, strides=2)
    assert model.segments[1].depth == depth - 3
    norms, losses = first_gradients_and_losses(model, steps=2, learning_rate=1e-3)
    profile = norms["stage1_units/branch/conv_1/kernel"]
    tenth = depth // 100
    assert 1 / 20 < profile[:tenth].mean() / profile[-tenth:].mean() < 20
    assert losses[-1] < losses[0]


def test_vanilla_network_is_a_chain_of_convolutions():
    """Compare with `tanh(conv(x) + b)` written out; check the error for too few layers."""
    model = kp.models.vanilla_cnn(6, filters=4, input_shape=(5, 6, 2), classes=3, stacked=True)
    x = y = harness.images(2, 5, 6, 2)
    singles = kp.models.unstack(model)
    for kernel, bias in zip(singles.weights[:-2:2], singles.weights[1:-2:2], strict=True):
        y = keras.ops.tanh(keras.ops.conv(y, kernel.value, padding="same") + bias.value)
        assert harness.numpy(bias.value).any()
    y = keras.ops.mean(y, (1, 2)) @ singles.weights[-2].value + singles.weights[-1].value
    harness.close(harness.numpy(model(x)), harness.numpy(y))
    assert "depth=2" in harness.error_of(lambda: kp.models.vanilla_cnn(2))


def test_networks_are_stacked_where_they_are_deep():
    deep, shallow = (kp.models.resnet_cifar(depth, width_factor=0.0625) for depth in (110, 14))
    assert [type(each) for each in deep.segments] == [kp.ResidualUnit, kp.UnitStack] * 3
    assert {type(each) for each in shallow.segments} == {kp.ResidualUnit}
