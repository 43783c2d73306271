"""Muon against its equations in NumPy, in float64, and against Torch's."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from tests.keras_preact import harness
from tests.keras_preact.harness import variable

RATE, DECAY, MOMENTUM, STEPS = 0.03, 0.1, 0.6, 3
#: The Newton-Schulz iteration computes x a + x^3 b + x^5 c on singular values.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def of_singular_values(matrix: np.ndarray) -> np.ndarray:
    """Apply five iterations to the singular values instead of the matrix."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / np.linalg.norm(s)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


def reference(start: np.ndarray, gradients: np.ndarray, nesterov: bool) -> np.ndarray:
    """A matrix `(rows, columns)` after the updates."""
    w, v = start.astype("float64"), np.zeros(start.shape)
    for gradient in gradients.astype("float64"):
        v = MOMENTUM * v + gradient
        total = gradient + MOMENTUM * v if nesterov else v
        w = w * (1 - RATE * DECAY)
        w = w - RATE * 0.2 * max(w.shape) ** 0.5 * of_singular_values(total)
    return w


def muon(nesterov=True, **options):
    return kp.optimizers.Muon(
        RATE, weight_decay=DECAY, momentum=MOMENTUM, nesterov=nesterov, **options
    )


@pytest.mark.backend
@pytest.mark.parametrize(
    ("shape", "nesterov"),
    [((6, 4), False), ((4, 6), True), ((3, 3, 2, 8), True), ((3, 2, 4), False)],
)
def test_a_kernel_is_a_matrix(shape, nesterov):
    draw = np.random.default_rng(0)
    start = draw.normal(size=shape).astype("float32")
    gradients = draw.normal(size=(STEPS, *shape)).astype("float32")
    kernel, optimizer = variable(start), muon(nesterov)
    for gradient in gradients:
        optimizer.apply([ops.convert_to_tensor(gradient)], [kernel])
    matrices = gradients.reshape(STEPS, -1, shape[-1])
    expected = reference(start.reshape(-1, shape[-1]), matrices, nesterov)
    np.testing.assert_allclose(harness.numpy(kernel).reshape(expected.shape), expected, atol=2e-5)


@pytest.mark.backend
def test_units_of_a_stack_are_apart():
    draw = np.random.default_rng(0)
    start, gradient = (draw.normal(size=(3, 3, 3, 2, 4)).astype("float32") for _ in range(2))
    stack, gammas = variable(start), variable(start[:, 0, 0, 0])
    stack.stacked_axes = gammas.stacked_axes = 1
    optimizer = muon()
    given = [ops.convert_to_tensor(each) for each in (gradient, gradient[:, 0, 0, 0])]
    optimizer.apply(given, [stack, gammas])
    for unit in range(3):
        [own, gradients] = start[unit].reshape(-1, 4), gradient[unit].reshape(1, -1, 4)
        expected = reference(own, gradients, nesterov=True)
        np.testing.assert_allclose(harness.numpy(stack)[unit].reshape(-1, 4), expected, atol=2e-5)
    one = variable(start[0, 0, 0, 0])
    muon().apply([ops.convert_to_tensor(gradient[0, 0, 0, 0])], [one])
    np.testing.assert_allclose(harness.numpy(gammas)[0], harness.numpy(one), rtol=1e-6)


@pytest.mark.parametrize(
    "path", ["norm/gamma", "depthwise/kernel", "head_classifier/kernel", "stem_conv/kernel"]
)
def test_other_weights_are_trained_by_adamw(path):
    shape = (4,) if "norm" in path else (3, 3, 4, 1)
    draw = np.random.default_rng(0)
    start, *gradients = (draw.normal(size=shape).astype("float32") for _ in range(4))
    ours, peer = (variable(start, path) for _ in range(2))
    words = ["norm"] if "norm" in path else []
    optimizer = muon(adam_weight_decay=0.02, adam_lr_ratio=0.5, exclude_from_decay=words)
    adamw = keras.optimizers.AdamW(0.5 * RATE, weight_decay=0 if "norm" in path else 0.02 / 0.5)
    for gradient in gradients:
        optimizer.apply([ops.convert_to_tensor(gradient)], [ours])
        adamw.apply([ops.convert_to_tensor(gradient)], [peer])
    np.testing.assert_allclose(harness.numpy(ours), harness.numpy(peer), rtol=1e-5, atol=1e-6)


def test_a_stack_marks_its_weights():
    model = kp.models.resnet_cifar(20, input_shape=(8, 8, 1), width_factor=0.25, stacked=True)
    marked = {weight.path for weight in model.weights if getattr(weight, "stacked_axes", 0)}
    assert marked == {weight.path for weight in model.weights if "_units/" in weight.path}
    assert marked


@pytest.mark.backend
def test_fits_and_survives_saving(tmp_path):
    model = kp.models.dense_resnet(4, width=4, input_shape=(5,), classes=3)
    harness.compiled(model, muon(), jit_compile=False)
    model.fit(np.ones((4, 5)), np.arange(4) % 3, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert isinstance(loaded, kp.optimizers.Muon)
    assert loaded.get_config() == model.optimizer.get_config()
