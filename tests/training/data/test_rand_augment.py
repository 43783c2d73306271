"""RandAugment: every operation by hand, and which images get which operations."""

import collections

import numpy as np
import pytest

from tests.training import images as pictures
from training.data import training_stream
from training.data.rand_augment import NAMES, OPERATIONS, RandAugment

FILL = (120, 7, 200)


@pytest.fixture(scope="module")
def image():
    """Return waves and noise, with a different range in every channel."""
    rows, columns = np.mgrid[:24, :30] / 6
    waves = np.stack(
        [np.sin(rows + columns), np.cos(rows * columns / 4), np.sin(2 * columns)], axis=-1
    )
    noise = np.random.default_rng(0).uniform(-30, 30, waves.shape)
    return np.rint(waves * (60, 90, 20) + (90, 128, 180) + noise).astype("uint8")


def apply(name: str, image: np.ndarray, level: float, fill=FILL) -> np.ndarray:
    from PIL import Image

    return np.asarray(OPERATIONS[name](Image.fromarray(image), level, fill))


#: Name of an operation, its level, and the rows of a small image before and after it. Pillow
#: rounds down or to the nearest integer.
COLOURS = [
    ("identity", 1.0, [[7, 200]], [[7, 200]]),
    ("autocontrast", 1.0, [[50, 100, 150]], [[0, 127, 255]]),
    ("equalize", 1.0, [[10] * 255 + [11] * 255 + [90]], [[0] * 255 + [128] * 255 + [255]]),
    ("solarize", 0.5, [[0, 127, 128, 255]], [[0, 127, 127, 0]]),
    ("solarize", -1.0, [[0, 127, 128, 255]], [[255, 128, 127, 0]]),
    ("posterize", -1.0, [[15, 16, 31, 255]], [[0, 16, 16, 240]]),
    ("posterize", 0.5, [[63, 64, 255]], [[60, 64, 252]]),
    ("brightness", 0.5, [[100, 200]], [[145, 255]]),
    ("brightness", -1.0, [[100, 200]], [[10, 20]]),
    ("contrast", 1.0, [[50, 150]], [[5, 195]]),
    ("contrast", -1.0, [[50, 150]], [[95, 105]]),
    ("color", 1.0, [[(100, 50, 50)]], [[(131, 36, 36)]]),  # around a grey of 65
    ("color", -1.0, [[(100, 50, 50)]], [[(68, 63, 63)]]),
    ("sharpness", 1.0, [[50] * 3, [50, 100, 50], [50] * 3], [[50] * 3, [50, 127, 50], [50] * 3]),
    ("sharpness", -1.0, [[50] * 3, [50, 100, 50], [50] * 3], [[50] * 3, [50, 72, 50], [50] * 3]),
]


@pytest.mark.parametrize(("name", "level", "before", "after"), COLOURS)
def test_colours(name, level, before, after):
    before, after = (np.array(each, "uint8") for each in (before, after))
    if before.ndim == 2:
        before, after = (np.stack([each] * 3, axis=-1) for each in (before, after))
    found = apply(name, before, level).astype(int)
    np.testing.assert_allclose(found, after.astype(int), rtol=0, atol=1)


#: Name to a function that returns the source of a point of the result. It takes the level, x and y
#: from the left and top edge, width and height.
ORIGINS = {
    "rotate": lambda level, x, y, w, h: (
        w / 2 + np.cos(np.pi / 6 * level) * (x - w / 2) - np.sin(np.pi / 6 * level) * (y - h / 2),
        h / 2 + np.sin(np.pi / 6 * level) * (x - w / 2) + np.cos(np.pi / 6 * level) * (y - h / 2),
    ),
    "shear_x": lambda level, x, y, w, h: (x + 0.3 * level * y, y),
    "shear_y": lambda level, x, y, w, h: (x, y + 0.3 * level * x),
    "translate_x": lambda level, x, y, w, h: (x + np.rint(150 / 331 * level * w), y),
    "translate_y": lambda level, x, y, w, h: (x, y + np.rint(150 / 331 * level * h)),
}


@pytest.mark.parametrize("level", [-1.0, -0.3, 0.5, 1.0])
@pytest.mark.parametrize("name", ORIGINS)
def test_places(name, level, image):
    height, width, _ = image.shape
    y, x = np.mgrid[:height, :width] + 0.5
    x, y = ORIGINS[name](level, x, y, width, height)
    found = apply(name, image, level).astype(float)
    outside = (x < -0.01) | (x > width + 0.01) | (y < -0.01) | (y > height + 0.01)
    assert 0.01 < outside.mean() < 0.6
    np.testing.assert_array_equal(found[outside], np.broadcast_to(FILL, found[outside].shape))
    inside = (x > 0.5) & (x < width - 0.5) & (y > 0.5) & (y < height - 0.5)
    x, y = x[inside] - 0.5, y[inside] - 0.5  # in units of pixel centres
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    right, below = np.minimum(left + 1, width - 1), np.minimum(top + 1, height - 1)
    dx, dy = (x - left)[:, None], (y - top)[:, None]
    upper = (1 - dx) * image[top, left] + dx * image[top, right]
    lower = (1 - dx) * image[below, left] + dx * image[below, right]
    exact = name.startswith("translate")
    np.testing.assert_allclose(
        found[inside], (1 - dy) * upper + dy * lower, rtol=0, atol=0 if exact else 1.01
    )


def test_every_operation_is_checked_and_none_does_anything_at_magnitude_0(image):
    assert set(NAMES) == {*(name for name, *_ in COLOURS), *ORIGINS}
    assert len(NAMES) == 14
    for name in set(NAMES) - {"autocontrast", "equalize"}:  # these two have no magnitude
        np.testing.assert_array_equal(apply(name, image, 0.0), image, err_msg=name)


def test_all_operations_and_signs_are_equally_likely_and_independent():
    draws = [RandAugment(2, 15, 3, FILL).draw(place) for place in range(3000)]
    assert {abs(level) for drawn in draws for _, level in drawn} == {0.5}
    pairs = collections.Counter((first, second) for (first, _), (second, _) in draws)
    counts = np.array([pairs[first, second] for first in NAMES for second in NAMES])
    # chi-square with 195 degrees of freedom lies below 275 in 99.98 % of draws; the seed is fixed
    assert ((counts - 3000 / 196) ** 2 / (3000 / 196)).sum() < 275
    negative = [level < 0 for drawn in draws for _, level in drawn]
    assert 2850 < sum(negative) < 3150  # of 6000, within four deviations
    assert draws != [RandAugment(2, 15, 4, FILL).draw(place) for place in range(3000)]


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_gets_the_operations_of_its_place(channels):
    images = np.random.default_rng(0).integers(0, 256, (23, 8, 8, channels), "uint8")
    data = pictures.in_memory(images)
    mean = images.mean(axis=(0, 1, 2))
    plain = pictures.batches(training_stream(data, 6, "pad_crop_flip", None, 5), 4)
    drawn = pictures.batches(
        training_stream(data, 6, "pad_crop_flip", None, 5, rand_augment=(3, 20)), 4
    )
    augment = RandAugment(3, 20, 5, tuple(mean))
    for step, ((before, labels), (pixels, same)) in enumerate(zip(plain, drawn, strict=True)):
        assert pixels.dtype == np.uint8
        np.testing.assert_array_equal(labels, same)
        for i in range(6):
            pixel = before[i].squeeze(-1) if channels == 1 else before[i]
            for name, level in augment.draw(6 * step + i):
                assert abs(level) == pytest.approx(2 / 3)
                fill = tuple(np.rint(mean).astype(int).tolist())
                pixel = apply(name, pixel, level, fill if channels == 3 else fill[0])
            np.testing.assert_array_equal(pixels[i], pixel.reshape(before[i].shape))


def test_resized_images_are_rounded_and_stay_fractions_to_the_network():
    data = pictures.in_memory(np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), "uint8"))
    [(before, _)] = pictures.batches(training_stream(data, 12, "resized_crop_flip", 9, 0), 1)
    [(pixels, _)] = pictures.batches(
        training_stream(data, 12, "resized_crop_flip", 9, 0, rand_augment=(1, 0)), 1
    )
    assert pixels.dtype == np.float32
    rounded = np.rint(before)
    assert not np.array_equal(rounded, before)
    augment = RandAugment(1, 0, 0, FILL)
    kept = [i for i in range(12) if augment.draw(i)[0][0] not in ("autocontrast", "equalize")]
    assert kept
    np.testing.assert_array_equal(pixels[kept], rounded[kept])
