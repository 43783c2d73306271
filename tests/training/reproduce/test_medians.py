"""Medians, intervals and orders against closed forms and numbers from text books."""

import math

import pytest

from training.reproduce import medians
from training.reproduce.medians import Item, clear_order, interval, kendall, pairs, welch


@pytest.mark.parametrize(
    ("values", "median", "mean", "std"),
    [
        ([6.0], 6.0, 6, None),
        ([7, 6], 6.5, 6.5, math.sqrt(0.5)),
        ([1, 2, 6], 2, 3, math.sqrt(7)),  # (4 + 1 + 9) / 2
        ([6, None, 5], 6, None, None),
        ([6, None], None, None, None),
        ([], None, None, None),
    ],
)
def test_median_mean_and_std(values, median, mean, std):
    assert medians.median(values) == median
    assert medians.mean(values) == mean
    assert medians.std(values) == (None if std is None else pytest.approx(std))


def test_interval():
    # std is sqrt 2, so std / sqrt n is 1
    assert interval([1, 3]) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)
    half = 2.776445 * math.sqrt(0.5) / math.sqrt(5)
    assert interval([4, 5, 6, 5, 5]) == pytest.approx((5 - half, 5 + half), abs=1e-5)
    assert interval([1]) is interval([]) is interval([1, 2, None]) is None


def test_welch():
    # Student's for equal spreads: 4 degrees of freedom, standard deviations of 1
    half = 2.776445 * math.sqrt(2 / 3)
    assert welch([11, 12, 13], [1, 2, 3]) == pytest.approx((10 - half, 10 + half), abs=1e-5)
    # that of the wider sample where the other has no spread: 1 degree, std / sqrt n of 1
    assert welch([1, 3], [0, 0, 0]) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)
    assert welch([1, 1], [0, 0]) is welch([1], [0, 1]) is welch([1, None], [0, 1]) is None


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2, 3], [11, 12, 13], -1),
        ([1, 2, 3], [2, 3, 4], 0),
        ([1], [50], 0),
        ([], [50], 0),
        ([5, 6, 7, 8], [9, None, None, None], -1),  # chance orders four and four so once in 35
        ([5, 6, 7], [None, None, None], 0),  # and three and three once in 10
        ([5, 6, 7, 9], [9, None, None, None], 0),
        ([None] * 5, [None] * 5, 0),
    ],
)
def test_clear_order(one, other, expected):
    assert clear_order(one, other) == expected
    assert clear_order(other, one) == -expected


def test_pairs():
    items = [
        Item("b", 6.6, [6.5, 6.7]),  # 6.6
        Item("a", 5.0, [7.0]),
        Item("fail", None, [30.0]),
        Item("fails too", None, [None]),
        Item("as b", 6.6, [1.0]),
    ]
    found = {(pair.first, pair.second): pair.medians for pair in pairs(items)}
    assert found == {
        **{("a", "b"): -1, ("a", "as b"): -1},
        **{(number, fail): 1 for number in ("a", "b", "as b") for fail in ("fail", "fails too")},
    }
    assert kendall(pairs(items)) == pytest.approx((6 - 2) / 8)
    assert kendall([]) is None
    [pair] = pairs([Item("second", 2.0, [1, 2, 3]), Item("first", 1.0, [11, 12, 13])])
    assert (pair.first, pair.medians, pair.clearly) == ("first", -1, -1)
