"""The range of inputs that a model expects, read from the layers that it starts with."""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.export import _scores
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

L = keras.layers
SHAPE = (8, 8, 3)
MEAN, STD = np.array([100.0, 120.0, 140.0]), np.array([50.0, 60.0, 70.0])
AUGMENTATION = [L.RandomFlip(), L.RandomRotation(0.1)]


def before_a_classifier(*layers):
    """A sequential model that begins with these layers."""
    return keras.Sequential([keras.Input(SHAPE), *layers, L.Conv2D(2, 3), L.Flatten(), L.Dense(4)])


def functional(scaled):
    """A functional model in which a function scales the input."""
    inputs = keras.Input(SHAPE)
    return keras.Model(inputs, L.Dense(4)(L.Flatten()(L.Conv2D(2, 3)(scaled(inputs)))))


def normalization(**options):
    return L.Normalization(mean=MEAN, variance=STD**2, **options)


def of_each_pixel():
    """Of 3 x 3 pixels: with the same mean and standard deviation, and one without any."""
    images = np.random.default_rng(0).uniform(0, 255, (500, *SHAPE)).astype("float32")
    images[:, 0, 0] = 0
    layer = L.Normalization(axis=(1, 2, 3))
    layer.adapt(images)
    return layer


def with_a_branch(inputs):
    """The scaling is in a branch, so it is none of the input."""
    return L.Add()([inputs, L.Rescaling(0.1)(L.Conv2D(3, 3, padding="same")(inputs))])


PREPROCESSED = keras.applications.mobilenet_v2.preprocess_input
INSIDE = L.Rescaling(1 / 127.5, -1)
PIXELS, NO_SCALING = (127.5, 127.5), (0, 1)

#: Name to a model, and the mean and standard deviation that it expects.
MODELS = {
    "nothing": (before_a_classifier(), NO_SCALING),
    "a normalisation": (before_a_classifier(normalization()), (MEAN, STD)),
    "two layers": (
        before_a_classifier(L.Rescaling(0.1, -1), normalization()),
        (10 * (1 + MEAN), 10 * STD),
    ),
    "its inverse": (
        before_a_classifier(normalization(invert=True)),
        (-MEAN / STD, 1 / STD),
    ),
    "augmentation": (before_a_classifier(*AUGMENTATION, INSIDE), PIXELS),
    "augmentation in a model": (
        before_a_classifier(keras.Sequential(AUGMENTATION), INSIDE),
        PIXELS,
    ),
    "in a model": (before_a_classifier(keras.Sequential([INSIDE])), PIXELS),
    "in a functional model": (
        before_a_classifier(keras.Model(x := keras.Input(SHAPE), INSIDE(x)), L.Rescaling(2)),
        (127.5, 63.75),
    ),
    "with all that follows in a model": (
        keras.Sequential([keras.Input(SHAPE), functional(INSIDE), L.Dense(2)]),
        PIXELS,
    ),
    "a cast and a crop": (
        functional(lambda x: INSIDE(L.CenterCrop(6, 6)(keras.ops.cast(x, "float32")))),
        PIXELS,
    ),
    "operations": (functional(PREPROCESSED), PIXELS),
    "operations with a constant first": (functional(lambda x: (1 / 127.5) * x - 1), PIXELS),
    "a quotient by the input": (functional(lambda x: 255 / (x + 1)), (-1, 1)),
    "a channel that is not used": (
        before_a_classifier(L.Rescaling([0.02, 0.0, 0.04])),
        (0, [50, 1, 25]),
    ),
    "after a convolution": (before_a_classifier(L.Conv2D(3, 1), INSIDE), NO_SCALING),
    "in a branch": (functional(with_a_branch), NO_SCALING),
    "in a subclass": (kp.create_model("digits_resnet8_preact"), NO_SCALING),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_expected_input(name):
    model, expected = MODELS[name]
    mean, std = expected
    found = kp.models.expected_input(model)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.std, std, rtol=1e-6)
    assert found.axis == -1
    assert _scores.take_apart(model).takes_pixels == (expected is not NO_SCALING)


def test_the_channels_of_the_expected_input():
    """Also the first ones."""
    model = keras.Sequential([keras.Input((3, 8, 8)), normalization(axis=1)])
    found = kp.models.expected_input(model)
    harness.close(found.mean, MEAN)
    harness.close(found.std, STD)
    assert found.axis == 1


def test_each_pixel_with_its_own_normalisation():
    """One range describes them all, and a pixel that is always 0 does not spoil it."""
    found = kp.models.expected_input(before_a_classifier(of_each_pixel()))
    assert found.bounds == (0, 255)
    assert 120 < found.mean < 130


def test_pixels_that_are_divided_by_255():
    """Their classifier takes no image files: these have pixels from 0 to 255."""
    scores = _scores.take_apart(before_a_classifier(L.Normalization(mean=0.5, variance=0.06)))
    assert scores.expected.bounds == (0, 1)
    assert not scores.takes_pixels
