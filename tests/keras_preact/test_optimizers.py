"""CoupledSGD against its equations in NumPy, and against Torch's SGD, which the released code used."""

import keras
import numpy as np
import pytest

import keras_preact as kp

RATE, DECAY, STEPS = 0.1, 0.05, 4


def gradients():
    return np.random.default_rng(1).normal(size=(STEPS, 3, 2)).astype("float32")


def keras_path(optimizer, start, name="kernel"):
    variable = keras.Variable(start, name=name)
    for gradient in gradients():
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    return np.array(variable)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_update_is_the_papers(momentum, nesterov):
    start = np.ones((3, 2), "float32")
    w, v = start.astype("float64"), np.zeros((3, 2))
    for gradient in gradients().astype("float64"):
        g = gradient + DECAY * w
        v = momentum * v - RATE * g
        w = w + (momentum * v - RATE * g if nesterov else v)
    optimizer = kp.optimizers.CoupledSGD(RATE, momentum=momentum, nesterov=nesterov, coupled_weight_decay=DECAY)
    np.testing.assert_allclose(keras_path(optimizer, start), w, rtol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_equals_torch(nesterov):
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(3, 2))
    peer = torch.optim.SGD([weight], RATE, momentum=0.9, weight_decay=DECAY, nesterov=nesterov)
    for gradient in gradients():
        weight.grad = torch.tensor(gradient)
        peer.step()
    ours = kp.optimizers.CoupledSGD(RATE, nesterov=nesterov, coupled_weight_decay=DECAY)
    np.testing.assert_allclose(keras_path(ours, np.ones((3, 2), "float32")), weight.detach().numpy(), rtol=1e-5)


def test_is_not_keras_weight_decay():
    start = np.ones((3, 2), "float32")
    theirs = keras_path(keras.optimizers.SGD(RATE, momentum=0.9, weight_decay=DECAY), start)
    ours = keras_path(kp.optimizers.CoupledSGD(RATE, coupled_weight_decay=DECAY), start)
    assert np.abs(ours - theirs).max() > 1e-3


def test_excluded_weights_are_not_decayed():
    optimizer = kp.optimizers.CoupledSGD(RATE, momentum=0, coupled_weight_decay=DECAY, exclude_from_decay=("norm",))
    kernel, gamma = keras.Variable([1.0], name="kernel"), keras.Variable([1.0], name="norm_gamma")
    optimizer.apply([keras.ops.zeros(1)] * 2, [kernel, gamma])
    np.testing.assert_allclose(np.array(kernel), [1 - RATE * DECAY], rtol=1e-6)
    np.testing.assert_array_equal(np.array(gamma), [1.0])


def test_decays_inside_fit_and_survives_saving(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = kp.optimizers.CoupledSGD(RATE, momentum=0, coupled_weight_decay=DECAY, exclude_from_decay=("norm",))
    model.compile(optimizer, "mse")
    before = np.array(model.weights[0])
    # zero inputs: the gradient of the loss is 0, and decay alone moves the weights
    model.fit(np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32"), batch_size=2, epochs=3, verbose=0)
    np.testing.assert_allclose(np.array(model.weights[0]), before * (1 - RATE * DECAY) ** 6, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, kp.optimizers.CoupledSGD)
    assert loaded.optimizer.get_config() == optimizer.get_config()


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"takes `coupled_weight_decay`"):
        kp.optimizers.CoupledSGD(weight_decay=1e-4)
    with pytest.raises(ValueError, match=r"must not be negative. Received: -1"):
        kp.optimizers.CoupledSGD(coupled_weight_decay=-1)
