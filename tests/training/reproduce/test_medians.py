"""Medians, intervals and orders against closed forms and numbers from text books."""

import doctest
import math

import numpy as np
import pytest

from training.reproduce import medians
from training.reproduce.medians import (
    Item,
    clear_order,
    interval,
    kendall,
    mean,
    median,
    pairs,
    std,
    welch,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([6.0], 6.0),
        ([7, 6], 6.5),
        ([9, 5, 6], 6),
        ([6, None, 5], 6),
        ([6, None], None),
        ([None], None),
        ([], None),
    ],
)
def test_median(values, expected):
    assert median(values) == expected


def test_mean_and_std():
    assert (mean([1, 2, 6]), std([1, 2, 6])) == (3, pytest.approx(math.sqrt(7)))  # (4 + 1 + 9) / 2
    assert (mean([2]), std([2])) == (2, None)
    assert (mean([2, 3, None]), std([2, 3, None])) == (None, None)
    assert (mean([]), std([])) == (None, None)


def test_interval():
    # std is sqrt 2, so std / sqrt n is 1
    assert interval([1, 3]) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)
    low, high = interval([4, 5, 6, 5, 5])
    assert (low + high) / 2 == pytest.approx(5)
    assert high - 5 == pytest.approx(2.776445 * math.sqrt(0.5) / math.sqrt(5), abs=1e-5)
    assert interval([1]) is interval([]) is interval([1, 2, None]) is None


def test_intervals_hold_the_mean_as_often_as_they_say():
    rng = np.random.default_rng(0)
    one, other = rng.normal(3, 1, (1000, 5)), rng.normal(2, 3, (1000, 4))
    held = [low <= 3 <= high for low, high in map(interval, one.tolist())]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)
    held = [ends[0] <= 1 <= ends[1] for ends in map(welch, one.tolist(), other.tolist())]
    assert np.mean(held) == pytest.approx(0.95, abs=0.02)


def test_welch_is_students_interval_for_equal_spreads():
    a, b = [1.0, 2.0, 3.0], [11.0, 12.0, 13.0]
    half = 2.776445 * math.sqrt(2 / 3)  # 4 degrees of freedom, standard deviations of 1
    assert welch(b, a) == pytest.approx((10 - half, 10 + half), abs=1e-5)
    assert welch(a, b) == pytest.approx((-10 - half, -10 + half), abs=1e-5)


def test_welchs_degrees_of_freedom_are_those_of_the_wider_sample_where_the_other_has_no_spread():
    half = 12.7062  # 1 degree of freedom, std / sqrt n of 1
    assert welch([1, 3], [0, 0, 0]) == pytest.approx((2 - half, 2 + half), abs=1e-4)
    assert welch([1, 1], [0, 0]) is welch([1], [0, 1]) is welch([1, None], [0, 1]) is None


def test_clear_order():
    assert clear_order([1, 2, 3], [11, 12, 13]) == -1
    assert clear_order([11, 12, 13], [1, 2, 3]) == 1
    assert clear_order([1, 2, 3], [2, 3, 4]) == 0
    assert clear_order([1], [50]) == clear_order([], [50]) == 0


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([5, 6, 7, 8], [9, None, None, None], -1),  # chance orders four and four so once in 35
        ([9, None, None, None], [5, 6, 7, 8], 1),
        ([5, 6, 7], [None, None, None], 0),  # and three and three once in 10
        ([5, 6, 7, 9], [9, None, None, None], 0),
        ([None] * 5, [None] * 5, 0),
    ],
)
def test_clear_order_of_runs_that_diverged(one, other, expected):
    assert clear_order(one, other) == expected


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


def test_pairs_are_clear_beyond_the_interval_alone():
    [pair] = pairs([Item("second", 2.0, [11, 12, 13]), Item("first", 1.0, [1, 2, 3])])
    assert (pair.first, pair.medians, pair.clearly) == ("first", 1, 1)
    [pair] = pairs([Item("second", 2.0, [1, 2, 3]), Item("first", 1.0, [11, 12, 13])])
    assert (pair.first, pair.medians, pair.clearly) == ("first", -1, -1)
    [pair] = pairs([Item("second", 2.0, [2, 3, 4]), Item("first", 1.0, [1, 2, 3])])
    assert (pair.medians, pair.clearly) == (1, 0)


def test_examples():
    assert doctest.testmod(medians).failed == 0
