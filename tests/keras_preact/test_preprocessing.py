"""Statistics of the data sets, and images resized as Pillow does it."""

import json

import numpy as np
import pytest
from PIL import Image

from keras_preact.preprocessing import (
    PREPROCESSING,
    Preprocessing,
    resize_image,
    smoothly_resized,
)
from tests.keras_preact import harness


def test_statistics():
    imagenet = PREPROCESSING["imagenet"]
    np.testing.assert_allclose(np.divide(imagenet.mean, 255), (0.485, 0.456, 0.406), rtol=1e-12)
    np.testing.assert_allclose(np.divide(imagenet.std, 255), (0.229, 0.224, 0.225), rtol=1e-12)
    assert {name: (row.resize, row.crop, row.size) for name, row in PREPROCESSING.items()} == {
        "cifar10": (None, None, 32),
        "cifar100": (None, None, 32),
        "imagenet": (256, "center", 224),
        "digits": (None, None, 8),
    }
    for row in PREPROCESSING.values():
        assert Preprocessing(**json.loads(json.dumps(row.to_dict()))) == row


def test_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    images = np.round(datasets.load_digits().images[..., None] * 255 / 16).astype("uint8")
    normalized = PREPROCESSING["digits"].normalize(images)
    assert normalized.dtype == np.float32
    np.testing.assert_allclose((normalized.mean(), normalized.std()), (0, 1), atol=1e-4)


def test_normalize_works_on_the_last_axis():
    images = np.array([[[[10, 20], [30, 40]]]], "uint8")
    normalized = Preprocessing((10, 20), (5, 10), 2).normalize(images)
    np.testing.assert_array_equal(normalized, [[[[0, 0], [4, 2]]]])


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"std": (1, 0)}, "`std` must be a finite number above 0"),
        ({"std": (1,)}, "one number per channel"),
        ({"size": 0}, "`size`"),
        ({"crop": "top"}, "`crop` must be one of None, 'center'"),
        ({"resize": 40}, "crop=None"),
        ({"resize": 20, "crop": "center"}, "size=32"),
    ],
)
def test_errors(fields, word):
    fields = {"mean": (0, 0), "std": (1, 1), "size": 32} | fields
    assert word in harness.error_of(lambda: Preprocessing(**fields))


CENTER = Preprocessing((0,) * 3, (1,) * 3, 28, resize=32, crop="center")
CUT = Preprocessing((0,) * 3, (1,) * 3, 28, crop="center")
WHOLE = Preprocessing((0,) * 3, (1,) * 3, 28)


def noise(height, width):
    rng = np.random.default_rng(height + 1000 * width)
    return rng.integers(0, 256, (height, width, 3), "uint8")


def pillow(pixels, width, height):
    """Resize each channel as float32, which Pillow does not round."""
    channels = [Image.fromarray(pixels[..., c].astype("float32")) for c in range(pixels.shape[-1])]
    return np.stack(
        [np.asarray(c.resize((width, height), Image.Resampling.BILINEAR)) for c in channels],
        axis=-1,
    )


def reference(pixels, preprocessing, size):
    """Resize to the smallest image that covers the box of `resize`; return its middle."""
    height, width = size
    if preprocessing is None or preprocessing.crop is None:
        return pillow(pixels, width, height)
    ratio = (preprocessing.resize or preprocessing.size) / preprocessing.size
    scale = max(round(height * ratio) / pixels.shape[0], round(width * ratio) / pixels.shape[1])
    rows, columns = (round(side * scale) for side in pixels.shape[:2])
    top, left = (rows - height) // 2, (columns - width) // 2
    return pillow(pixels, columns, rows)[top : top + height, left : left + width]


@pytest.mark.parametrize("preprocessing", [CENTER, CUT, WHOLE, None])
@pytest.mark.parametrize("shape", [(60, 80), (81, 60), (8, 9), (28, 40), (32, 32), (3, 90)])
@pytest.mark.parametrize("size", [(28, 28), (56, 56), (21, 35), (40, 12)])
def test_as_pillow_does_it(preprocessing, shape, size):
    image = noise(*shape)
    found = resize_image(image, preprocessing, size).numpy()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference(image, preprocessing, size), atol=0.05)


def test_an_image_of_this_size_stays():
    image = noise(21, 35)
    for preprocessing in (CUT, WHOLE, None):
        np.testing.assert_array_equal(resize_image(image, preprocessing, (21, 35)), image)


@pytest.mark.parametrize("shape", [(60, 80), (81, 60), (8, 9), (480, 640), (225, 224), (300, 9000)])
@pytest.mark.parametrize("size", [224, 33])
def test_the_usual_preprocessing_for_imagenet_to_the_last_bit(shape, size):
    """Written out: the shorter side to 256 / 224 of the size, and the centre."""
    tf = pytest.importorskip("tensorflow")
    image = tf.cast(noise(*shape), tf.float32)
    shorter = np.float32(round(size * 256 / 224))
    scaled = np.round(np.float32(shape) * (shorter / np.float32(min(shape)))).astype("int32")
    whole = tf.image.resize(image, scaled, method="bilinear", antialias=True)
    want = tf.image.resize_with_crop_or_pad(whole, size, size)
    np.testing.assert_array_equal(resize_image(image, PREPROCESSING["imagenet"], size), want)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "method",
    ["bilinear", "bicubic", "lanczos3", "lanczos5", "gaussian", "mitchellcubic", "area", "nearest"],
)
def test_smooth_resizing_is_tensorflows_to_the_last_bit(method, dtype):
    """Smaller, larger, both, and the same size; from one and four channels; the size as
    numbers and as a tensor.
    """
    tf = pytest.importorskip("tensorflow")
    for shape, size in (
        ((61, 83, 3), (24, 24)),
        ((20, 30, 1), (51, 40)),
        ((90, 17, 4), (33, 34)),
        ((21, 35, 3), (21, 35)),
        ((1, 1, 3), (5, 7)),
    ):
        pixels = np.random.default_rng(0).integers(0, 256, shape)
        image = tf.cast(pixels, dtype)
        want = tf.cast(tf.image.resize(image, size, method, antialias=True), tf.float32)
        for given in (size, tf.constant(size)):
            found = smoothly_resized(image, given, method)
            assert found.dtype == tf.float32
            np.testing.assert_array_equal(found, want)
    with pytest.raises(ValueError, match="Resize method is not implemented"):
        smoothly_resized(image, (3, 3), "other")


@pytest.mark.parametrize("preprocessing", [CENTER, WHOLE])
@pytest.mark.parametrize("shape", [(1, 5000), (5000, 1), (4001, 2)])
def test_strips(preprocessing, shape):
    """Strips are not resized in one step. Shape and size are chosen so that the reference
    rounds alike.
    """
    image = noise(*shape)
    want = reference(image, preprocessing, (28, 28))
    np.testing.assert_allclose(resize_image(image, preprocessing, 28), want, atol=0.1)


def test_a_number_is_that_of_the_only_channel():
    assert Preprocessing(127.5, 64, 8) == Preprocessing((127.5,), (64.0,), 8)


def test_other_interpolations():
    nearest = Preprocessing((0,), (1,), 4, interpolation="nearest")
    image = np.arange(4, dtype="uint8").reshape(2, 2, 1)
    expected = image[..., 0].repeat(2, 0).repeat(2, 1)
    np.testing.assert_array_equal(resize_image(image, nearest, 4)[..., 0], expected)


@pytest.mark.parametrize("size", [8, 28, 64, 160, 224])
@pytest.mark.parametrize("preprocessing", [PREPROCESSING["imagenet"], PREPROCESSING["cifar10"]])
def test_for_another_size_it_does_what_resizing_to_this_size_does(preprocessing, size):
    size = np.int64(size)
    other = preprocessing.for_size(size)
    assert Preprocessing(**json.loads(json.dumps(other.to_dict()))) == other
    assert (other.size, other.mean, other.crop) == (size, preprocessing.mean, preprocessing.crop)
    image = np.random.default_rng(0).integers(0, 256, (90, 70, 3), "uint8")
    want = resize_image(image, preprocessing, size)
    np.testing.assert_array_equal(resize_image(image, other, size), want)
