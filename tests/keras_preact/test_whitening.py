"""The whitening stem: its kernel against NumPy's singular value decomposition,
and its behaviour in training.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.layers.whitening import Whitening2D
from tests.keras_preact import harness


def smooth_images(count=40, size=9, channels=3):
    """Images with similar neighbouring pixels and different channels."""
    random = np.random.default_rng(0)
    steps = random.normal(size=(count, size, size, channels))
    images = steps.cumsum(1).cumsum(2) @ random.normal(size=(channels, channels)) + 3
    return images.astype("float32")


def patches(images, size):
    """Patches (n, size * size * channels), cut out one by one."""
    height, width = images.shape[1:3]
    return np.array(
        [
            image[i : i + size, j : j + size].ravel()
            for image in images.astype("float64")
            for i in range(height - size + 1)
            for j in range(width - size + 1)
        ]
    )


@pytest.mark.backend
@pytest.mark.parametrize(
    ("size", "data_format"), [(1, "channels_last"), (2, "channels_last"), (3, "channels_first")]
)
def test_components_are_those_of_the_patches(size, data_format):
    images = smooth_images(count=300)  # more than `adapt` has in memory at a time
    layer = Whitening2D(size, data_format=data_format)
    given = np.moveaxis(images, -1, 1) if data_format == "channels_first" else images
    layer.adapt(given)
    y = harness.numpy(layer(given[:50]))
    assert layer.compute_output_shape(given.shape)[1:] == y.shape[1:]
    y = np.moveaxis(y, 1, -1) if data_format == "channels_first" else y
    all_patches = patches(images, size)
    count = all_patches.shape[1]
    assert y.shape == (50, 10 - size, 10 - size, 2 * count)
    np.testing.assert_allclose(y[..., count:], -y[..., :count], atol=1e-5)
    centred = all_patches - all_patches.mean(0)
    _, singular, components = np.linalg.svd(centred, full_matrices=False)
    variances = singular**2 / len(centred)
    got = y[..., :count].reshape(-1, count)
    want = patches(images[:50], size) @ components.T / np.sqrt(variances + 5e-4)
    signs = np.sign((got * want).sum(0))  # a component has no sign
    np.testing.assert_allclose(got, want * signs, atol=2e-3 * np.abs(want).max())
    kernel = harness.numpy(layer.kernel).reshape(count, 2 * count)[:, :count]
    assert (kernel[np.abs(kernel).argmax(0), np.arange(count)] > 0).all()  # the largest entry


def test_wrong_and_constant_images():
    layer = Whitening2D(2)
    layer.build((None, 5, 5, 3))
    for images, word in (
        (np.zeros((4, 5, 3)), "4 dimensions"),
        (np.full((1, 5, 5, 3), np.nan), "finite"),
        (np.zeros((4, 5, 5, 2)), "3 channels"),
        (np.zeros((0, 5, 5, 3)), "at least one image"),
    ):
        assert word in harness.error_of(lambda images=images: layer.adapt(images))
    layer.adapt(np.full((4, 5, 5, 3), 7.0))
    assert np.isfinite(harness.numpy(layer.kernel)).all()


def test_network_adapts_to_raw_images(tmp_path):
    """`adapt` goes through the preprocessing; training and files keep its kernel."""
    images = 20 * smooth_images(size=16)
    mean, std = images.mean((0, 1, 2)), images.std((0, 1, 2))
    model = kp.models.fast_resnet(width_factor=0.1, input_shape=(16, 16, 3), mean=mean, std=std)
    layer = Whitening2D(2)
    layer.adapt((images - mean) / std)
    model.adapt(images)
    kernel = harness.numpy(layer.kernel)
    np.testing.assert_allclose(harness.numpy(model.get_layer("stem_conv").kernel), kernel, 1e-3)
    harness.compiled(model, kp.optimizers.CoupledSGD(0.1), jit_compile=False)
    before = harness.weights(model)
    model.fit(images, np.arange(40) % 10, verbose=0)
    assert before.keys() - harness.changed(model, before) == {"stem_conv/kernel"}
    assert not any(
        "stem_norm" in path for path in before
    )  # the stem's output is normalised already
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert not loaded.get_layer("stem_conv").trainable
    other = kp.models.resnet_cifar(8)
    message = harness.error_of(lambda: other.adapt(images))
    assert "stem='whitening'" in message
