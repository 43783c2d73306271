"""Pixels in the wrong range, labels that no class has, and losses that do not fit the
output are reported.
"""

import functools
import warnings

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

N = 32
PIXELS = np.random.default_rng(0).integers(0, 256, (N, 8, 8, 3)).astype("uint8")
LABELS = np.arange(N) % 10
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
CIFAR = kp.preprocessing.PREPROCESSING["cifar10"]
OF_PIXELS = {"mean": CIFAR.mean, "std": CIFAR.std}
SOURCES = ["arrays", "dataset"]


def network(**options):
    return kp.models.resnet_cifar(8, width_factor=0.25, input_shape=(8, 8, 3), **options)


@functools.cache
def compiled(**options):
    model = network(**options)
    model.compile("sgd", LOGITS)
    return model


def data_of(source, images):
    """Return the arguments of `fit`."""
    if source == "arrays":
        return images, LABELS
    tf = pytest.importorskip("tensorflow")
    return (tf.data.Dataset.from_tensor_slices((images, LABELS)).batch(16),)


def messages(function, *args, **kwargs):
    """Return the warnings about the input of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, verbose=0, **kwargs)
    return [str(each.message) for each in caught if str(each.message).startswith("The input")]


def fit(model, source, images, **options):
    return messages(model.fit, *data_of(source, images), **options)


@pytest.mark.backend
@pytest.mark.parametrize("source", SOURCES)
def test_a_wrong_range_warns_once_and_a_right_one_never(source):
    model = compiled(**OF_PIXELS)
    assert fit(model, source, PIXELS) == []
    [message] = fit(model, source, PIXELS / 255)
    assert "from 0 to 1. This network expects values from 0 to 255" in message
    assert "Multiply it by 255" in message


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({"mean": 0.47, "std": 0.25}, "Divide it by 255"), ({}, "Build it with the `mean`")],
)
def test_pixels_that_are_too_large(options, remedy):
    assert fit(compiled(**options), "arrays", PIXELS / 255) == []
    [message] = fit(compiled(**options), "arrays", PIXELS)
    assert remedy in message


@pytest.mark.parametrize("source", SOURCES)
def test_evaluate_predict_and_validation_data_are_looked_at(source):
    model = compiled(**OF_PIXELS)
    for images, expected in ((PIXELS, 0), (PIXELS / 255, 1)):
        data = data_of(source, images)
        assert len(messages(model.evaluate, *data)) == expected
        assert len(messages(model.predict, *data[:1])) == expected
        held_out = data if len(data) > 1 else data[0]
        assert len(fit(model, "arrays", PIXELS, validation_data=held_out)) == expected


def test_a_data_set_gives_keras_the_same_elements():
    expected = kp.preprocessing.InputRange(CIFAR.mean, CIFAR.std)
    seen = kp.models.first_batch.watched(*data_of("dataset", PIXELS), expected)
    images, labels = zip(*seen, strict=True)
    np.testing.assert_array_equal(np.concatenate(images), PIXELS)
    np.testing.assert_array_equal(np.concatenate(labels), LABELS)


def test_only_the_first_batch_is_judged():
    scaled = PIXELS / 255
    for first, second, expected in ((scaled, PIXELS, 1), (PIXELS, scaled, 0)):
        images = np.concatenate([first[:16], second[16:]])
        assert len(fit(compiled(**OF_PIXELS), "dataset", images)) == expected


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((N, 8, 8, 3)),
        np.full((1, 8, 8, 3), 255.0),
        (PIXELS[:2] < 4).astype("float32"),  # two nearly black images
        PIXELS[:1].astype("float32"),
        np.full((1, 8, 8, 3), 0.5),
        np.full((N, 8, 8, 3), np.nan),
    ],
    ids=["black", "white", "dark", "one", "constant", "nan"],
)
def test_no_false_alarm(images):
    assert messages(compiled(**OF_PIXELS).predict, images) == []


def test_bounds():
    for mean, std, bounds in (
        (0, 1, (-2, 2)),
        (CIFAR.mean, CIFAR.std, (0, 255)),
        (0.5, 0.5, (0, 1)),
        (5.0, 6.0, (-7, 17)),
    ):
        assert kp.preprocessing.InputRange(mean, std).bounds == bounds


def test_expected_input_of_any_model():
    """Rescaling and Normalization are composed, with the channels in any place."""
    layers, mean, std = keras.layers, np.array([1.0, 2.0, 3.0]), np.array([0.5, 1.0, 2.0])
    normalization = layers.Normalization(axis=1, mean=mean, variance=std**2)
    first = layers.Rescaling(1 / 10, offset=-1.0)
    found = kp.models.expected_input(
        keras.Sequential([keras.Input((3, 8, 8)), first, normalization])
    )
    np.testing.assert_allclose(found.mean, 10 * (1 + mean), rtol=1e-6)
    np.testing.assert_allclose(found.std, 10 * std, rtol=1e-6)
    assert found.axis == 1


@pytest.mark.parametrize(
    "loss",
    [
        "categorical_crossentropy",
        keras.losses.sparse_categorical_crossentropy,
        [keras.losses.CategoricalCrossentropy()],
    ],
    ids=harness.label,
)
def test_a_loss_on_probabilities_warns_on_logits(loss):
    with pytest.warns(UserWarning, match=r"returns logits.*\(from_logits=True\)"):
        network().compile("sgd", loss)
    network(classifier_activation="softmax").compile("sgd", loss)


def test_a_loss_on_logits_warns_on_probabilities():
    with pytest.warns(UserWarning, match="returns probabilities"):
        network(classifier_activation="softmax").compile("sgd", LOGITS)
    for loss in (
        "mse",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda y, p: p,
    ):
        network().compile("sgd", loss)


@pytest.mark.parametrize("deed", ["fit", "evaluate"])
def test_labels_that_no_class_has(deed):
    function = getattr(compiled(), deed)
    for labels, words in (
        (LABELS + 1, "labels from 1 to 10"),
        (LABELS - 1, "labels from -1 to 8"),
        (np.eye(10)[LABELS], "one-hot"),
    ):
        message = harness.error_of(lambda labels=labels: function(PIXELS / 255, labels, verbose=0))
        assert words in message
