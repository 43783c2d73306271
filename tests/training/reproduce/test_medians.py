"""Medians, intervals and orders against closed forms and numbers from text books."""

import math

import pytest

from training.reproduce import medians
from training.reproduce.medians import clear_order, interval, of_images


@pytest.mark.parametrize(
    ("values", "median", "mean", "std"),
    [
        ([6.0], 6.0, 6, None),
        ([7, 6], 6.5, 6.5, math.sqrt(0.5)),
        ([1, 2, 6], 2, 3, math.sqrt(7)),  # (4 + 1 + 9) / 2
        ([6, None, 5], 6, None, None),
        ([6, None], None, None, None),
    ],
)
def test_median_mean_and_std(values, median, mean, std):
    assert medians.median(values) == median
    assert medians.mean_and_std(values) == (mean, None if std is None else pytest.approx(std))


def test_interval():
    # std is sqrt 2, so std / sqrt n is 1
    assert interval([1, 3]) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)
    half = 2.776445 * math.sqrt(0.5) / math.sqrt(5)
    assert interval([4, 5, 6, 5, 5]) == pytest.approx((5 - half, 5 + half), abs=1e-5)
    assert interval([1]) is interval([1, 2, None]) is None


def test_interval_of_images():
    """Wilson's: its ends are the shares p that an error of 10 of 100 is 1.96 standard
    errors away from.
    """
    for end in of_images(10.0, 100):
        p = end / 100
        assert abs(0.1 - p) == pytest.approx(1.959964 * math.sqrt(p * (1 - p) / 100), rel=1e-6)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2, 3], [11, 12, 13], -1),
        ([1, 2, 3], [2, 3, 4], 0),
        # Student's for equal spreads: the means must be 2.776445 * sqrt(2 / 3) = 2.2670 apart
        ([1, 2, 3], [3.266, 4.266, 5.266], 0),
        ([1, 2, 3], [3.268, 4.268, 5.268], -1),
        ([1], [50], 0),
        ([1, 1], [50, 50], 0),  # equal numbers do not say how far the next one lies
        ([5, 6, 7, 8], [9, None, None, None], -1),  # chance orders four and four so once in 35
        ([5, 6, 7], [None, None, None], 0),  # and three and three once in 10
        ([5, 6, 7, 9], [9, None, None, None], 0),
        ([None] * 5, [None] * 5, 0),
    ],
)
def test_clear_order(one, other, expected):
    assert clear_order(one, other) == expected
    assert clear_order(other, one) == -expected
