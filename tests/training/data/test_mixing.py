"""Mixup and CutMix: pixels and labels against NumPy, and their distributions."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from tests.training import images as pictures
from training.data import training_stream
from training.data.mixing import Mixing

CLASSES = 23


@pytest.fixture(scope="module")
def data():
    """Return 23 random images; the label is the image's number."""
    images = np.random.default_rng(1).integers(0, 256, (CLASSES, 8, 10, 3), "uint8")[:, :, :8]
    return dataclasses.replace(
        pictures.in_memory(np.ascontiguousarray(images)), classes=tuple(map(str, range(CLASSES)))
    )


def shares(targets: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of the images' own labels in the targets of a batch. It must be the
    same for all images, and the rest must be the partners' labels.
    """
    one_hot = np.eye(targets.shape[1])[labels]
    others = labels != np.roll(labels, 1)  # a batch of two epochs may hold an image twice
    [own] = {float(row[label]) for row, label in zip(targets[others], labels[others], strict=True)}
    np.testing.assert_allclose(
        targets, own * one_hot + (1 - own) * np.roll(one_hot, 1, axis=0), rtol=0, atol=1e-7
    )
    return own


def of(data, steps=40, augmentation="pad_crop_flip", size=None, **options):
    """Return pairs of a plain batch and the same batch with the options."""
    plain, mixed = (
        training_stream(data, 6, augmentation, size, 3, **chosen) for chosen in ({}, options)
    )
    return zip(pictures.batches(plain, steps), pictures.batches(mixed, steps), strict=True)


def distance(own: np.ndarray, alpha: float) -> float:
    """Return the largest difference from the cumulative Beta distribution, at points where
    the rounding of the shares does not matter.
    """
    points = np.linspace(0.001, 0.999, 999)
    below = np.searchsorted(np.sort(own), points) / len(own)
    return np.abs(below - stats.beta(alpha, alpha).cdf(points)).max()


class TestMixup:
    def test_bytes_to_the_last_bit(self, data):
        """Shares are whole multiples of 2 ** -16, so that integers give the exact value before
        rounding.
        """
        seen = set()
        for (before, labels), (pixels, targets) in of(data, mixup=0.4):
            assert (pixels.dtype, targets.dtype) == (np.uint8, np.float32)
            own = shares(targets, labels)
            seen.add(own)
            share = int(own * 2**16)
            assert share == own * 2**16
            numerators = share * before.astype("int64") + (2**16 - share) * np.roll(
                before, 1, axis=0
            ).astype("int64")
            down, rest = np.divmod(numerators, 2**16)
            up = (rest > 2**15) | ((rest == 2**15) & (down % 2 == 1))
            np.testing.assert_array_equal(pixels, down + up)
            np.testing.assert_array_equal(targets.sum(axis=1), 1)
        assert len(seen) == 40

    def test_resized_images(self, data):
        for (before, labels), (pixels, targets) in of(data, 5, "resized_crop_flip", 7, mixup=0.4):
            assert (pixels.dtype, targets.dtype) == (np.float32, np.float32)
            own = shares(targets, labels)
            expected = own * before.astype("float64") + (1 - own) * np.roll(before, 1, axis=0)
            np.testing.assert_allclose(pixels, expected, rtol=1e-6, atol=1e-4)


class TestCutMix:
    def test_a_box_is_the_partners_and_its_area_is_the_partners_share_of_the_label(self, data):
        boxes = set()
        for (before, labels), (pixels, targets) in of(data, augmentation="none", cutmix=1.0):
            assert (pixels.dtype, targets.dtype) == (np.uint8, np.float32)
            own = shares(targets, labels)
            partner = np.roll(before, 1, axis=0)
            pasted = (pixels != before).any(axis=(0, 3))  # no pixel is equal in all six pairs
            rows, columns = pasted.any(axis=1), pasted.any(axis=0)
            np.testing.assert_array_equal(pasted, rows[:, None] & columns)
            np.testing.assert_array_equal(pixels, np.where(pasted[:, :, None], partner, before))
            for side in (rows, columns):  # the box is in one piece
                assert np.count_nonzero(np.diff(side.astype(int), prepend=0, append=0)) in (0, 2)
            assert own == np.float32(1 - pasted.sum() / 64)
            boxes.add(pasted.tobytes())
        assert len(boxes) > 25

    def test_boxes_are_those_of_the_papers_code(self):
        """Compare areas and places with an independent sample: shares have a Beta
        distribution, centres are uniform, boxes are clipped.
        """
        height, width, count = 12, 20, 4000
        mixing = Mixing(0.0, 0.7, 0, 10)
        drawn = [mixing.draw(step, height, width) for step in range(count)]
        random = np.random.default_rng(11)
        ratio = np.sqrt(1 - random.beta(0.7, 0.7, count))

        def inside(length):
            centre, half = random.integers(0, length, count), (length * ratio).astype(int) // 2
            at = np.arange(length)
            return (at >= (centre - half)[:, None]) & (at < (centre + half)[:, None])

        expected = inside(height)[:, :, None] & inside(width)[:, None]
        found = np.zeros((count, height, width), bool)
        for mask, mixture in zip(found, drawn, strict=True):
            mask[mixture.box] = True
            assert mixture.own == pytest.approx(1 - mask.mean(), abs=1e-12)
        areas = [masks.sum(axis=(1, 2)) for masks in (found, expected)]
        assert stats.ks_2samp(*areas).statistic < 1.95 * np.sqrt(2 / count)
        # two shares of 4000 draws each differ by less than 4.5 deviations in every pixel
        assert np.abs(found.mean(axis=0) - expected.mean(axis=0)).max() < 4.5 * np.sqrt(0.5 / count)


def test_mixup_and_cutmix_are_equally_frequent():
    mixing = Mixing(0.2, 1.0, 0, 10)
    pasted = np.array([mixing.draw(step, 8, 8).box is not None for step in range(2000)])
    assert 910 < pasted.sum() < 1090  # within four deviations
    assert 400 < (pasted[1:] & pasted[:-1]).sum() < 600
    own = np.array([mixing.draw(step, 8, 8).own for step in np.flatnonzero(~pasted)])
    assert distance(own, 0.2) < 1.95 / np.sqrt(len(own))
