"""Networks for sequences, compared with those for images: a picture whose columns are
all the sequence, and kernels of 3x3 that hold those of 3x1 in their middle column.
"""

import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

X = np.random.default_rng(0).normal(size=(3, 48, 5)).astype("float32")
OPTIONS = {"classes": 4, "width_factor": 0.5}


def as_image(model):
    """The network for images of 16 columns with the weights of a network for sequences: the
    middle columns of its kernels.
    """
    config = model.get_config() | {"input_shape": (48, 16, 5), "block": kp.blocks.Bottleneck()}
    config["stem"] = {"sequence": "3x3", "sequence_pooled": "7x7"}[config["stem"]]
    image = kp.models.ResidualNetwork.from_config(config)

    def widened(weight, wide):
        sizes = zip(weight.shape, wide.shape, strict=True)
        return np.pad(weight, [((new - size) // 2,) * 2 for size, new in sizes])

    image.set_weights([*map(widened, model.get_weights(), image.get_weights())])
    return image


@pytest.mark.parametrize("stem", ["sequence", "sequence_pooled"])
def test_equals_the_network_for_images(stem):
    model = kp.models.resnet_1d(11, input_shape=(48, 5), block="bottleneck", stem=stem, **OPTIONS)
    harness.randomize(model)
    image = as_image(model)
    pictures = np.repeat(X[:, :, None], 16, axis=2)
    want = harness.numpy(image(pictures, training=False))
    assert want.std() > 0.01
    close = {"rtol": 1e-4, "atol": 1e-4 * np.abs(want).max()}
    np.testing.assert_allclose(harness.numpy(model(X, training=False)), want, **close)


def test_stacks_lengths_and_gradients():
    model = kp.models.resnet_1d(20, input_shape=(None, 5), block="basic", **OPTIONS)
    harness.randomize(model)
    stacked = kp.models.stack(model)
    for length in (48, 33):
        want = harness.numpy(model(X[:, :length]))
        close = {"rtol": 1e-4, "atol": 1e-4 * np.abs(want).max()}
        np.testing.assert_allclose(harness.numpy(stacked(X[:, :length])), want, **close)
    found = [kp.analysis.propagation(each, X, [0, 1, 2]).gradient_norm for each in (model, stacked)]
    assert (found[0] > 0).all()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"input_shape": (48, 16, 5)}, "must be (length, channels)"),
        ({"input_shape": (48, None)}, "must be (length, channels)"),
        ({"input_shape": (3, 5)}, "divide the length by 4"),
        ({"downsampling": "blur"}, "needs a map of 2 pixels"),
        ({"dimensions": 3}, "`dimensions`"),
        ({"depth": 9}, "6n+2"),
    ],
)
def test_what_it_refuses(options, words):
    given = {"depth": 8, "input_shape": (48, 5), **OPTIONS} | options
    assert words in harness.error_of(lambda: kp.models.resnet_1d(**given))
