"""Muon against its equations in NumPy, in float64, and against Torch's."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp

pytestmark = pytest.mark.backend

RATE, DECAY, MOMENTUM, STEPS = 0.03, 0.1, 0.6, 3
#: Of the Newton-Schulz iteration: x a + x^3 b + x^5 c on singular values.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def of_singular_values(matrix: np.ndarray) -> np.ndarray:
    """Five iterations, done on the singular values instead of the matrix."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / np.linalg.norm(s)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


def reference(start: np.ndarray, gradients: np.ndarray, nesterov: bool) -> np.ndarray:
    """The path of a matrix `(rows, columns)`."""
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


def variable(values, path="conv/kernel", stacked=False):
    layer, name = path.split("/")
    with keras.name_scope(layer):
        made = keras.Variable(values, name=name)
    if stacked:
        made.stacked_axes = 1
    return made


def value(made: keras.Variable) -> np.ndarray:
    return ops.convert_to_numpy(made.value)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 3, 2, 8), (1, 1, 8, 2), (3, 2, 4)])
def test_a_kernel_is_a_matrix(shape, nesterov):
    draw = np.random.default_rng(0)
    start = draw.normal(size=shape).astype("float32")
    gradients = draw.normal(size=(STEPS, *shape)).astype("float32")
    kernel, optimizer = variable(start), muon(nesterov)
    for gradient in gradients:
        optimizer.apply([ops.convert_to_tensor(gradient)], [kernel])
    matrices = gradients.reshape(STEPS, -1, shape[-1])
    expected = reference(start.reshape(-1, shape[-1]), matrices, nesterov)
    np.testing.assert_allclose(value(kernel).reshape(expected.shape), expected, atol=2e-5)


def test_equals_torch():
    """Torch's iteration computes in bfloat16."""
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(0)
    start, gradients = draw.normal(size=(6, 4)), draw.normal(size=(STEPS, 6, 4))
    weight = torch.nn.Parameter(torch.tensor(start.astype("float32")))
    peer = torch.optim.Muon(
        [weight], RATE, DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    kernel, optimizer = variable(start.astype("float32")), muon()
    for gradient in gradients.astype("float32"):
        weight.grad = torch.tensor(gradient)
        peer.step()
        optimizer.apply([ops.convert_to_tensor(gradient)], [kernel])
    moved = np.abs(value(kernel) - start).max()
    np.testing.assert_allclose(value(kernel), weight.detach().numpy(), atol=0.03 * moved)


def test_units_of_a_stack_are_apart():
    draw = np.random.default_rng(0)
    start, gradient = (draw.normal(size=(3, 3, 3, 2, 4)).astype("float32") for _ in range(2))
    stack, gammas = variable(start, stacked=True), variable(start[:, 0, 0, 0], stacked=True)
    optimizer = muon()
    given = [ops.convert_to_tensor(each) for each in (gradient, gradient[:, 0, 0, 0])]
    optimizer.apply(given, [stack, gammas])
    for unit in range(3):
        [own, gradients] = start[unit].reshape(-1, 4), gradient[unit].reshape(1, -1, 4)
        expected = reference(own, gradients, nesterov=True)
        np.testing.assert_allclose(value(stack)[unit].reshape(-1, 4), expected, atol=2e-5)
    one = variable(start[0, 0, 0, 0])
    muon().apply([ops.convert_to_tensor(gradient[0, 0, 0, 0])], [one])
    np.testing.assert_allclose(value(gammas)[0], value(one), rtol=1e-6)


def test_a_stack_marks_its_weights():
    model = kp.models.resnet_cifar(20, input_shape=(8, 8, 1), width_factor=0.25, stacked=True)
    marked = {weight.path for weight in model.weights if getattr(weight, "stacked_axes", 0)}
    assert marked == {weight.path for weight in model.weights if "_units/" in weight.path}
    assert marked


@pytest.mark.parametrize(
    ("shape", "path"),
    [
        ((4,), "norm/gamma"),
        ((3, 3, 4, 1), "depthwise/kernel"),
        ((4, 3), "head_classifier/kernel"),
        ((3, 3, 1, 4), "stem_conv/kernel"),
        ((4, 3), "embedding/embeddings"),
    ],
)
def test_other_weights_are_trained_by_adamw(shape, path):
    draw = np.random.default_rng(0)
    start, *gradients = (draw.normal(size=shape).astype("float32") for _ in range(4))
    options = {"adam_weight_decay": 0.02, "adam_lr_ratio": 0.5}
    ours, peer = (variable(start, path) for _ in range(2))
    optimizer = muon(**options)
    adamw = keras.optimizers.AdamW(0.5 * RATE, weight_decay=0.02 / 0.5)
    for gradient in gradients:
        optimizer.apply([ops.convert_to_tensor(gradient)], [ours])
        adamw.apply([ops.convert_to_tensor(gradient)], [peer])
    np.testing.assert_allclose(value(ours), value(peer), rtol=1e-5, atol=1e-6)


def test_decay_can_leave_weights_out():
    kernel, gamma = variable(np.ones((2, 2))), variable(np.ones(2), "norm/gamma")
    optimizer = muon(adam_weight_decay=DECAY, exclude_from_decay=("norm",))
    optimizer.apply([ops.zeros((2, 2)), ops.zeros(2)], [kernel, gamma])
    np.testing.assert_allclose(value(kernel), 1 - RATE * DECAY, rtol=1e-6)
    np.testing.assert_allclose(value(gamma), 1)


def test_fits_and_survives_saving(tmp_path):
    model = kp.models.resnet_cifar(8, input_shape=(8, 8, 1), width_factor=0.25)
    model.compile(muon(), kp.losses.SparseCategoricalCrossentropy())
    draw = np.random.default_rng(0)
    images, labels = draw.normal(size=(32, 8, 8, 1)), draw.integers(10, size=32)
    losses = model.fit(images, labels, epochs=8, batch_size=16, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, kp.optimizers.Muon)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
