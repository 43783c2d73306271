"""The paper's augmentation for CIFAR: pad, crop, flip, exactly and evenly."""

import dataclasses

import numpy as np
import pytest

from tests.training import images as pictures
from training.data import training_stream

#: Reference of each padding: a function that takes an image (height, width, channels), the mean
#: colour and the border, and returns the padded image.
PADDED = {
    "mean": lambda image, mean, n: np.stack(
        [np.pad(image[..., c], n, constant_values=round(mean[c])) for c in range(image.shape[-1])],
        axis=-1,
    ),
    "black": lambda image, mean, n: np.pad(image, ((n, n), (n, n), (0, 0))),
    "reflect": lambda image, mean, n: np.pad(image, ((n, n), (n, n), (0, 0)), mode="reflect"),
}


def results(padded: np.ndarray, border: int = 4) -> dict[bytes, int]:
    """Number the crops of a padded image: bytes of a crop to its number. With a border of
    4 there are 162.
    """
    size, places = len(padded) - 2 * border, range(2 * border + 1)
    crops = [padded[i : i + size, j : j + size] for i in places for j in places]
    return {
        crop.tobytes(): number
        for number, crop in enumerate(crops + [crop[:, ::-1] for crop in crops])
    }


@pytest.fixture(params=["whole batches", "image by image"])
def crops_of(request):
    """Return a function from images to batches of their crops, in the two ways in which
    they are made: in memory, and for images that are read from files or resized. The pixels
    stay whole numbers in both.
    """

    def crops(data, batch_size, count, padding="mean", **options):
        size, dtype = None, np.uint8
        if request.param == "image by image":
            data, size, dtype = dataclasses.replace(data, size=None), data.size, np.float32
        drawn = training_stream(data, batch_size, "pad_crop_flip", size, 0, padding, **options)
        for pixels, labels in pictures.batches(drawn, count):
            assert pixels.dtype == dtype
            np.testing.assert_array_equal(pixels.astype("uint8"), pixels)
            yield pixels.astype("uint8"), labels

    return crops


@pytest.mark.parametrize("border", [1, 4])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("padding", PADDED)
def test_every_image_is_one_of_its_results(crops_of, padding, channels, border):
    images = np.random.default_rng(0).integers(0, 256, (20, 6, 6, channels), "uint8")
    images[..., 0] //= 2  # the channels have different means
    data = pictures.in_memory(images.copy())
    mean = images.mean(axis=(0, 1, 2), dtype="float64")
    candidates = [results(PADDED[padding](image, mean, border), border) for image in images]
    drawn = set()
    for pixels, labels in crops_of(data, 8, 20, padding, border=border):
        assert pixels.shape == (8, 6, 6, channels)
        for image, label in zip(pixels, labels, strict=True):
            assert image.tobytes() in candidates[label]
            drawn.add(candidates[label][image.tobytes()])
    assert len(drawn) == 18 if border == 1 else len(drawn) > 2 * (2 * border - 1) ** 2 / 2
    np.testing.assert_array_equal(data.in_memory.images, images)  # they are not changed


def test_all_results_are_equally_likely_and_independent(crops_of):
    image = np.random.default_rng(0).integers(0, 256, (6, 6, 3), "uint8")
    data = pictures.in_memory(np.tile(image, (50, 1, 1, 1)))
    number = results(PADDED["mean"](image, image.mean(axis=(0, 1)), 4))
    assert len(number) == 162
    drawn = np.array(
        [[number[crop.tobytes()] for crop in pixels] for pixels, _ in crops_of(data, 50, 120)]
    )
    counts = np.bincount(drawn.ravel(), minlength=162)
    # chi-square with 161 degrees of freedom lies below 235 in 99.99 % of draws; the seed is fixed
    assert ((counts - 6000 / 162) ** 2 / (6000 / 162)).sum() < 235
    # 37 pairs of neighbours are expected to be equal, within a batch and from one to the next; 62
    # are four deviations more
    assert (drawn[:, 1:] == drawn[:, :-1]).sum() < 62
    assert (drawn[1:] == drawn[:-1]).sum() < 62


def _rises(columns: np.ndarray) -> bool:
    seen = columns[columns > 0].astype(int)
    assert len(set(np.diff(seen))) == 1
    return seen[1] > seen[0]


def test_resized_images_are_padded_after_resizing():
    data = pictures.numbered(10, size=4)
    stream = training_stream(data, 5, "pad_crop_flip", 8, 0, "black", border=2)
    for pixels, labels in pictures.batches(stream, 6):
        assert pixels.shape == (5, 8, 8, 3)
        for image, label in zip(pixels, labels, strict=True):
            inside = image[2:-2, 2:-2]
            np.testing.assert_array_equal(inside, np.full(inside.shape, label))
            black = (image == 0).all(axis=-1)
            assert label == 0 or {*np.unique(image)} <= {0, label}
            rows, columns = black.all(axis=1).sum(), black.all(axis=0).sum()
            assert label == 0 or (rows <= 2 and columns <= 2)
            assert label == 0 or black.sum() == 8 * (rows + columns) - rows * columns


@pytest.mark.parametrize("augmentation", ["pad_crop_flip", "resized_crop_flip"])
def test_half_of_the_images_are_flipped_or_none(augmentation):
    image = np.broadcast_to(5 * np.arange(1, 41, dtype="uint8")[:, None], (40, 40, 1))
    data = pictures.in_memory(np.tile(image, (50, 1, 1, 1)))
    for flip, least, most in (("random", 70, 130), ("none", 0, 0)):  # of 200 images
        stream = training_stream(data, 50, augmentation, None, 1, "reflect", flip=flip)
        crops = np.concatenate([pixels for pixels, _ in pictures.batches(stream, 4)])
        # only columns outside of the padding: the reflection reverses the order of the others
        falls = crops[:, 20, 10, 0] > crops[:, 20, 30, 0]
        assert least <= falls.sum() <= most


@pytest.mark.parametrize("size", [24, 23])
def test_alternating_flips(size):
    """An epoch flips half of the images, the next epoch the other half. Batches may contain
    the end of one epoch and the start of the next.
    """
    image = np.empty((1, 9, 9, 1), "uint8")
    image[..., 0] = 1 + np.arange(9)  # every crop has at least five of these rising columns
    data = pictures.in_memory(np.tile(image, (size, 1, 1, 1)))
    stream = training_stream(data, 8, "pad_crop_flip", None, 1, "black", flip="alternating")
    drawn = [
        (label, not _rises(crop.max(axis=(0, 2))))
        for pixels, labels in pictures.batches(stream, size)
        for crop, label in zip(pixels, labels, strict=True)
    ]
    epochs = [dict(drawn[start : start + size]) for start in range(0, 8 * size, size)]
    assert 6 < sum(epochs[0].values()) < size - 6
    for number, epoch in enumerate(epochs):
        assert len(epoch) == size
        assert all(epoch[label] == first ^ (number % 2) for label, first in epochs[0].items())
