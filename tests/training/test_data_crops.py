"""The paper's augmentation for CIFAR: pad, crop, flip, exactly and evenly."""

import numpy as np
import pytest

from tests.training import images as pictures
from training.data import training_stream

pytestmark = pytest.mark.once

#: The references of the three paddings: an image (height, width, channels) and the mean colour to
#: the padded image.
PADDED = {
    "mean": lambda image, mean: np.stack(
        [np.pad(image[..., c], 4, constant_values=round(mean[c])) for c in range(image.shape[-1])],
        axis=-1,
    ),
    "black": lambda image, mean: np.pad(image, ((4, 4), (4, 4), (0, 0))),
    "reflect": lambda image, mean: np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect"),
}


def results(padded: np.ndarray) -> dict[bytes, int]:
    """Return the 162 crops of a padded image, as bytes, and their numbers."""
    size = len(padded) - 8
    crops = [padded[i : i + size, j : j + size] for i in range(9) for j in range(9)]
    return {
        crop.tobytes(): number
        for number, crop in enumerate(crops + [crop[:, ::-1] for crop in crops])
    }


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("padding", PADDED)
def test_every_image_is_one_of_its_162_results(padding, channels):
    images = np.random.default_rng(0).integers(0, 256, (20, 6, 6, channels), "uint8")
    images[..., 0] //= 2  # another mean in every channel
    data = pictures.in_memory(images)
    mean = images.mean(axis=(0, 1, 2), dtype="float64")
    candidates = [results(PADDED[padding](image, mean)) for image in images]
    for pixels, labels in pictures.batches(
        training_stream(data, 8, "pad_crop_flip", None, 0, padding), 20
    ):
        assert (pixels.dtype, pixels.shape) == (np.uint8, (8, 6, 6, channels))
        for image, label in zip(pixels, labels, strict=True):
            assert image.tobytes() in candidates[label]


def test_all_results_are_equally_likely_and_independent():
    image = np.random.default_rng(0).integers(0, 256, (6, 6, 3), "uint8")
    data = pictures.in_memory(np.tile(image, (50, 1, 1, 1)))
    number = results(PADDED["mean"](image, image.mean(axis=(0, 1))))
    assert len(number) == 162
    stream = training_stream(data, 50, "pad_crop_flip", None, 0)
    drawn = np.array(
        [[number[crop.tobytes()] for crop in pixels] for pixels, _ in pictures.batches(stream, 120)]
    )
    counts = np.bincount(drawn.ravel(), minlength=162)
    # chi-square with 161 degrees of freedom lies below 235 in 99.99 % of draws; the seed is fixed
    assert ((counts - 6000 / 162) ** 2 / (6000 / 162)).sum() < 235
    # 37 pairs of neighbours are expected to be equal, within a batch and from one to the next; 62
    # are four deviations more
    assert (drawn[:, 1:] == drawn[:, :-1]).sum() < 62
    assert (drawn[1:] == drawn[:-1]).sum() < 62


def test_numbers_change_from_epoch_to_epoch_and_with_the_seed():
    data = pictures.in_memory(np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), "uint8"))

    def epochs(seed):
        rows = pictures.batches(training_stream(data, 4, "pad_crop_flip", None, seed), 2)
        return np.stack([pixels[np.argsort(labels)] for pixels, labels in rows])

    first, second = epochs(0)
    assert not np.array_equal(first, second)
    assert not np.array_equal(epochs(1)[0], first)


def test_the_images_themselves_stay_as_they_are():
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), "uint8")
    data = pictures.in_memory(images.copy())
    pictures.batches(training_stream(data, 6, "pad_crop_flip", None, 0), 3)
    np.testing.assert_array_equal(data.held.images, images)
