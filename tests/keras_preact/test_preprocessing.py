import json

import numpy as np
import pytest

from keras_preact.preprocessing import PREPROCESSING, Preprocessing


def test_statistics():
    assert {name: (row.mean, row.std) for name, row in PREPROCESSING.items() if name.startswith("cifar")} == {
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
        ({"std": (1,)}, ("one number a channel", "mean=(0.0, 0.0)", "std=(1.0,)")),
        ({"mean": (), "std": ()}, ("one number a channel",)),
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
