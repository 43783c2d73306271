"""kp.losses against NumPy in float64."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp
from tests.keras_preact import harness

RANDOM = np.random.default_rng(0)
LOGITS = 3 * RANDOM.standard_normal((6, 5))
LABELS = np.array([0, 4, 2, 2, 1, 3])
WEIGHTS = np.array([1.0, 0.0, 0.5, 2.0, 1.0, 0.25])


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def reference(labels, logits, smoothing):
    """The definition: cross-entropy with a one-hot target that is mixed with the
    uniform distribution.
    """
    classes = logits.shape[-1]
    target = (1 - smoothing) * np.eye(classes)[labels] + smoothing / classes
    return -(target * log_softmax(logits)).sum(-1)


def loss_of(labels, predictions, smoothing=0.1, weights=None, **options):
    options = {"reduction": "none"} | options
    loss = kp.losses.SparseCategoricalCrossentropy(smoothing, **options)
    return harness.numpy(loss(labels, predictions.astype("float32"), sample_weight=weights))


@pytest.mark.backend
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_every_example(smoothing):
    expected = reference(LABELS, LOGITS, smoothing)
    for labels in (LABELS, LABELS[:, None], LABELS.astype("uint8")):
        np.testing.assert_allclose(loss_of(labels, LOGITS, smoothing), expected, rtol=2e-6)
    shares = np.exp(log_softmax(LOGITS))
    got = loss_of(LABELS, shares, smoothing, from_logits=False)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum_over_batch_size", lambda losses: (losses * WEIGHTS).sum() / 6),
        ("sum", lambda losses: (losses * WEIGHTS).sum()),
        ("mean_with_sample_weight", lambda losses: (losses * WEIGHTS).sum() / WEIGHTS.sum()),
        (None, lambda losses: losses * WEIGHTS),
    ],
)
def test_reductions_and_sample_weights(reduction, expected):
    got = loss_of(LABELS, LOGITS, 0.2, WEIGHTS, reduction=reduction)
    np.testing.assert_allclose(got, expected(reference(LABELS, LOGITS, 0.2)), rtol=2e-6)


def test_a_label_at_each_place():
    """Dense prediction: images of labels, whose last axis of length 1 is no column of
    labels by chance.
    """
    logits, labels = RANDOM.standard_normal((2, 3, 1, 4)), RANDOM.integers(0, 4, (2, 3, 1))
    got = loss_of(labels, logits)
    np.testing.assert_allclose(got, reference(labels, logits, 0.1), rtol=2e-6)


@pytest.mark.backend
@pytest.mark.parametrize("size", [1e4, 1e30])
def test_extreme_logits_give_finite_losses(size):
    logits = np.array([[size, -size, 0.0], [size, -size, 0.0], [-size, -size, -size]])
    labels = np.array([0, 1, 2])
    losses = loss_of(labels, logits)
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(losses, reference(labels, logits, 0.1), rtol=1e-5)
    certain = np.array([[1.0, 0.0, 0.0]])
    assert np.isfinite(loss_of(np.array([1]), certain, from_logits=False)).all()


@pytest.mark.backend
def test_half_precision_logits_are_computed_in_float32():
    logits = ops.cast(LOGITS.astype("float32"), "bfloat16")
    loss = kp.losses.SparseCategoricalCrossentropy(0.1, reduction="none")(LABELS, logits)
    assert keras.backend.standardize_dtype(loss.dtype) == "float32"
    expected = reference(LABELS, harness.numpy(logits).astype("float64"), 0.1)
    np.testing.assert_allclose(harness.numpy(loss), expected, rtol=2e-6)


@pytest.mark.backend
def test_training_descends_its_gradient(tmp_path):
    """One step of a dense layer against the gradient in closed form: (p - target) x."""
    x = RANDOM.standard_normal((6, 3))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, use_bias=False)])
    before = model.get_weights()[0].astype("float64")
    loss = kp.losses.SparseCategoricalCrossentropy(0.1, name="mine")
    model.compile(keras.optimizers.SGD(0.5), loss)
    model.train_on_batch(x.astype("float32"), LABELS)
    target = 0.9 * np.eye(5)[LABELS] + 0.1 / 5
    gradient = x.T @ (np.exp(log_softmax(x @ before)) - target) / 6
    np.testing.assert_allclose(model.get_weights()[0], before - 0.5 * gradient, atol=1e-6)
    model.save(tmp_path / "model.keras")
    assert keras.saving.load_model(tmp_path / "model.keras").loss.get_config() == loss.get_config()


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 2])
def test_share_out_of_range(smoothing):
    message = harness.error_of(lambda: kp.losses.SparseCategoricalCrossentropy(smoothing))
    assert "label_smoothing" in message
