"""kp.losses against NumPy in float64."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_preact as kp

pytestmark = pytest.mark.backend

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


def value(loss, labels, predictions, **kwargs):
    return ops.convert_to_numpy(loss(labels, predictions.astype("float32"), **kwargs))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_every_example(smoothing):
    loss = kp.losses.SparseCategoricalCrossentropy(smoothing, reduction="none")
    expected = reference(LABELS, LOGITS, smoothing)
    for labels in (LABELS, LABELS[:, None], LABELS.astype("uint8")):
        np.testing.assert_allclose(value(loss, labels, LOGITS), expected, rtol=2e-6)
    probabilities = np.exp(log_softmax(LOGITS))
    loss = kp.losses.SparseCategoricalCrossentropy(smoothing, from_logits=False, reduction="none")
    np.testing.assert_allclose(value(loss, LABELS, probabilities), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("reduction", "weights", "expected"),
    [
        ("sum_over_batch_size", None, lambda losses: losses.mean()),
        ("sum_over_batch_size", WEIGHTS, lambda losses: (losses * WEIGHTS).sum() / 6),
        ("sum", WEIGHTS, lambda losses: (losses * WEIGHTS).sum()),
        (
            "mean_with_sample_weight",
            WEIGHTS,
            lambda losses: (losses * WEIGHTS).sum() / WEIGHTS.sum(),
        ),
        (None, WEIGHTS, lambda losses: losses * WEIGHTS),
    ],
)
def test_reductions_and_sample_weights(reduction, weights, expected):
    loss = kp.losses.SparseCategoricalCrossentropy(0.2, reduction=reduction)
    losses = reference(LABELS, LOGITS, 0.2)
    np.testing.assert_allclose(
        value(loss, LABELS, LOGITS, sample_weight=weights), expected(losses), rtol=2e-6
    )


def test_a_label_at_each_place():
    """Dense prediction: images of labels, whose last axis of length 1 is no column of
    labels by chance.
    """
    logits = RANDOM.standard_normal((2, 3, 1, 4))
    labels = RANDOM.integers(0, 4, (2, 3, 1))
    loss = kp.losses.SparseCategoricalCrossentropy(0.1, reduction="none")
    np.testing.assert_allclose(
        value(loss, labels, logits), reference(labels, logits, 0.1), rtol=2e-6
    )


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_extreme_logits_give_finite_losses(size):
    logits = np.array([[size, -size, 0.0], [size, -size, 0.0], [-size, -size, -size]])
    labels = np.array([0, 1, 2])
    loss = kp.losses.SparseCategoricalCrossentropy(0.1, reduction="none")
    losses = value(loss, labels, logits)
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(losses, reference(labels, logits, 0.1), rtol=1e-5)
    certain = np.array([[1.0, 0.0, 0.0]])
    loss = kp.losses.SparseCategoricalCrossentropy(0.1, from_logits=False)
    assert np.isfinite(value(loss, np.array([1]), certain))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_logits_are_computed_in_float32(dtype):
    logits = ops.cast(LOGITS.astype("float32"), dtype)
    exact = np.asarray(ops.convert_to_numpy(ops.cast(logits, "float32")), "float64")
    loss = kp.losses.SparseCategoricalCrossentropy(0.1, reduction="none")(LABELS, logits)
    assert keras.backend.standardize_dtype(loss.dtype) == "float32"
    np.testing.assert_allclose(ops.convert_to_numpy(loss), reference(LABELS, exact, 0.1), rtol=2e-6)


def test_training_descends_its_gradient():
    """One step of a dense layer against the gradient in closed form: (p - target) x."""
    x = RANDOM.standard_normal((6, 3))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, use_bias=False)])
    before = model.get_weights()[0].astype("float64")
    model.compile(keras.optimizers.SGD(0.5), kp.losses.SparseCategoricalCrossentropy(0.1))
    model.train_on_batch(x.astype("float32"), LABELS)
    target = 0.9 * np.eye(5)[LABELS] + 0.1 / 5
    gradient = x.T @ (np.exp(log_softmax(x @ before)) - target) / 6
    np.testing.assert_allclose(model.get_weights()[0], before - 0.5 * gradient, atol=1e-6)


def test_configuration_survives(tmp_path):
    loss = kp.losses.SparseCategoricalCrossentropy(
        0.1, from_logits=False, reduction="sum", name="mine"
    )
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
    assert type(again) is kp.losses.SparseCategoricalCrossentropy
    assert again.get_config() == loss.get_config()
    assert (again.label_smoothing, again.from_logits, again.reduction, again.name) == (
        0.1,
        False,
        "sum",
        "mine",
    )
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
    model.compile("sgd", kp.losses.SparseCategoricalCrossentropy(0.3))
    model.save(tmp_path / "model.keras")
    assert keras.saving.load_model(tmp_path / "model.keras").loss.label_smoothing == 0.3


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 2])
def test_share_out_of_range(smoothing):
    with pytest.raises(ValueError, match=r"label_smoothing.*Received"):
        kp.losses.SparseCategoricalCrossentropy(smoothing)
