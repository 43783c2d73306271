import json

import numpy as np
import pytest
from PIL import Image

from keras_preact.preprocessing import PREPROCESSING, Preprocessing, resize_image


def test_statistics():
    assert {
        name: (row.mean, row.std) for name, row in PREPROCESSING.items() if name.startswith("cifar")
    } == {
        "cifar10": ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
        "cifar100": ((129.3, 124.1, 112.4), (68.2, 65.4, 70.4)),
    }
    imagenet = PREPROCESSING["imagenet"]
    np.testing.assert_allclose(np.divide(imagenet.mean, 255), (0.485, 0.456, 0.406), rtol=1e-12)
    np.testing.assert_allclose(np.divide(imagenet.std, 255), (0.229, 0.224, 0.225), rtol=1e-12)


def test_sizes():
    assert {name: (row.resize, row.crop, row.size) for name, row in PREPROCESSING.items()} == {
        "cifar10": (None, None, 32),
        "cifar100": (None, None, 32),
        "imagenet": (256, "center", 224),
        "digits": (None, None, 8),
    }


def test_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    images = np.round(datasets.load_digits().images[..., None] * 255 / 16).astype("uint8")
    assert images.shape == (1797, 8, 8, 1)
    digits = PREPROCESSING["digits"]
    np.testing.assert_allclose(digits.mean, images.mean((0, 1, 2)), rtol=1e-7)
    np.testing.assert_allclose(digits.std, images.std((0, 1, 2)), rtol=1e-7)
    normalized = digits.normalize(images)
    assert normalized.dtype == np.float32
    np.testing.assert_allclose((normalized.mean(), normalized.std()), (0, 1), atol=1e-4)


@pytest.mark.parametrize("name", PREPROCESSING)
def test_round_trip_through_json(name):
    fields = PREPROCESSING[name].to_dict()
    assert Preprocessing(**json.loads(json.dumps(fields))) == PREPROCESSING[name]
    assert json.loads(json.dumps(fields)) == fields


def test_normalize_works_on_the_last_axis():
    images = np.array([[[[10, 20], [30, 40]]]], "uint8")
    normalized = Preprocessing((10, 20), (5, 10), 2).normalize(images)
    assert normalized.dtype == np.float32
    np.testing.assert_array_equal(normalized, [[[[0, 0], [4, 2]]]])


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"std": (1, 0)}, ("`std` must be positive", "std=(1.0, 0.0)")),
        ({"std": (1,)}, ("one number per channel", "mean=(0.0, 0.0)", "std=(1.0,)")),
        ({"mean": (), "std": ()}, ("one number per channel",)),
        ({"size": 0}, ("`size`", "positive integer", "size=0")),
        ({"crop": "top"}, ("`crop` must be one of None, 'center'", "crop='top'")),
        ({"resize": 40}, ("crop='center'", "resize=40", "crop=None")),
        ({"resize": 20, "crop": "center"}, ("crop='center'", "resize=20", "size=32")),
        ({"resize": 40.0, "crop": "center"}, ("`resize`", "positive integer")),
    ],
)
def test_errors(fields, parts):
    with pytest.raises(ValueError, match="Received") as error:
        Preprocessing(**{"mean": (0, 0), "std": (1, 1), "size": 32} | fields)
    assert all(part in str(error.value) for part in parts)


CENTER = Preprocessing((0,) * 3, (1,) * 3, 28, resize=32, crop="center")
CUT = Preprocessing((0,) * 3, (1,) * 3, 28, crop="center")
WHOLE = Preprocessing((0,) * 3, (1,) * 3, 28)


def noise(height, width):
    return np.random.default_rng(height + 1000 * width).integers(
        0, 256, (height, width, 3), "uint8"
    )


def pillow(pixels, width, height):
    """Each channel scaled as float32, which Pillow does not round."""
    channels = [Image.fromarray(pixels[..., c].astype("float32")) for c in range(pixels.shape[-1])]
    return np.stack(
        [np.asarray(c.resize((width, height), Image.Resampling.BILINEAR)) for c in channels],
        axis=-1,
    )


def reference(pixels, preprocessing, size):
    """Scaled so that the box that `resize` speaks of is just covered, and its middle."""
    height, width = size
    if preprocessing is None or preprocessing.crop is None:
        return pillow(pixels, width, height)
    ratio = (preprocessing.resize or preprocessing.size) / preprocessing.size
    scale = max(round(height * ratio) / pixels.shape[0], round(width * ratio) / pixels.shape[1])
    rows, columns = (round(side * scale) for side in pixels.shape[:2])
    top, left = (rows - height) // 2, (columns - width) // 2
    return pillow(pixels, columns, rows)[top : top + height, left : left + width]


class TestResizeImage:
    @pytest.mark.parametrize("preprocessing", [CENTER, CUT, WHOLE, None])
    @pytest.mark.parametrize(
        "shape",
        [(60, 80), (81, 60), (37, 90), (8, 9), (400, 300), (28, 40), (32, 32), (3, 90), (1, 31)],
    )
    @pytest.mark.parametrize("size", [28, 56, (28, 28), (21, 35), (40, 12)])
    def test_as_pillow_does_it(self, preprocessing, shape, size):
        image = noise(*shape)
        found = resize_image(image, preprocessing, size).numpy()
        assert found.dtype == np.float32
        want = reference(image, preprocessing, size if isinstance(size, tuple) else (size, size))
        np.testing.assert_allclose(found, want, atol=0.05)

    @pytest.mark.parametrize("preprocessing", [CUT, WHOLE, None])
    @pytest.mark.parametrize("dtype", ["uint8", "float32", "int32"])
    def test_an_image_of_this_size_stays(self, preprocessing, dtype):
        image = noise(21, 35).astype(dtype)
        found = resize_image(image, preprocessing, (21, 35)).numpy()
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, image)

    @pytest.mark.parametrize(
        "shape",
        [(60, 80), (81, 60), (37, 90), (8, 9), (480, 640), (224, 224), (225, 224), (300, 9000)],
    )
    @pytest.mark.parametrize("size", [224, 28, 33])
    def test_the_usual_test_of_imagenet_to_the_last_bit(self, shape, size):
        """Written out: the shorter side to 256 / 224 of the size, and the centre."""
        import tensorflow as tf

        image = noise(*shape)
        shorter = round(size * 256 / 224)
        scaled = np.round(
            np.float32(shape) * (np.float32(shorter) / np.float32(min(shape)))
        ).astype("int32")
        whole = tf.image.resize(
            tf.cast(image, tf.float32), scaled, method="bilinear", antialias=True
        )
        want = tf.image.resize_with_crop_or_pad(whole, size, size)
        np.testing.assert_array_equal(resize_image(image, PREPROCESSING["imagenet"], size), want)

    @pytest.mark.parametrize("preprocessing", [CENTER, WHOLE])
    @pytest.mark.parametrize("shape", [(1, 5000), (5000, 1), (2, 4001), (4001, 2), (1, 50_000)])
    def test_strips(self, preprocessing, shape):
        """They are not resized in one step; `shape` and size are such that both ways
        round alike.
        """
        image = noise(*shape)
        if max(shape) < 50_000 or preprocessing is WHOLE:
            want = reference(image, preprocessing, (28, 28))
            np.testing.assert_allclose(resize_image(image, preprocessing, 28), want, atol=0.1)
        else:  # 28 of 32 pixels that are all between the two in the middle
            middle = image[:, 24_999:25_001].astype("float32")
            found = resize_image(image, preprocessing, 28).numpy()
            np.testing.assert_allclose(found.min((0, 1)), middle.min((0, 1)), atol=13)
            assert (found >= middle.min((0, 1)) - 0.1).all()
            assert (found <= middle.max((0, 1)) + 0.1).all()

    def test_other_interpolations(self):
        nearest = Preprocessing((0,), (1,), 4, interpolation="nearest")
        image = np.arange(4, dtype="uint8").reshape(2, 2, 1)
        np.testing.assert_array_equal(
            resize_image(image, nearest, 4)[..., 0], image[..., 0].repeat(2, 0).repeat(2, 1)
        )

    def test_in_a_graph_with_free_sizes(self):
        import tensorflow as tf

        spec = tf.TensorSpec((None, None, 3), tf.uint8)
        function = tf.function(
            lambda image: resize_image(image, CENTER, (21, 35)),
            input_signature=[spec],
            autograph=False,
        )
        assert function.get_concrete_function().output_shapes == (21, 35, 3)
        for shape in ((21, 35), (60, 80), (1, 5000)):
            np.testing.assert_array_equal(
                function(noise(*shape)), resize_image(noise(*shape), CENTER, (21, 35))
            )
