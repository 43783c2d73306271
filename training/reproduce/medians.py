"""Medians, intervals and orders of a few runs. A run that diverged has None for a
number, larger than every other.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

#: Of the intervals.
LEVEL = 0.95

Values = Sequence[float | None]


def _numbers(values: Values) -> np.ndarray:
    return np.array([math.inf if value is None else value for value in values], "float64")


def median(values: Values) -> float | None:
    """Return the median; None where it is that of diverged runs, or of none.

    Example:

    >>> median([6.4, None, 6.2]), median([6.4, None])
    (6.4, None)
    """
    middle = float(np.median(_numbers(values))) if values else math.inf
    return middle if math.isfinite(middle) else None


def mean(values: Values) -> float | None:
    """Return the mean; None of no runs, and where one of them has diverged."""
    numbers = _numbers(values)
    return float(numbers.mean()) if values and np.isfinite(numbers).all() else None


def std(values: Values) -> float | None:
    """Return the standard deviation, over `n - 1`; None below two runs, and where one
    of them has diverged.
    """
    return None if len(values) < 2 or mean(values) is None else float(_numbers(values).std(ddof=1))


def interval(values: Values) -> tuple[float, float] | None:
    """Return Student's interval for the mean; None without a standard deviation."""
    from scipy import stats

    middle, spread = mean(values), std(values)
    if middle is None or spread is None:
        return None
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * spread / math.sqrt(len(values))
    return float(middle - half), float(middle + half)


def welch(values: Values, others: Values) -> tuple[float, float] | None:
    """Return Welch's interval for the mean of `values` minus that of `others`.

    Returns:
        Its ends; None if one of the two has no standard deviation, or both are 0: equal
        numbers do not say how far the next one lies.
    """
    from scipy import stats

    if not (std(values) or std(others)) or std(values) is None or std(others) is None:
        return None
    result = stats.ttest_ind(_numbers(values), _numbers(others), equal_var=False)
    low, high = result.confidence_interval(LEVEL)
    return float(low), float(high)


def clear_order(values: Values, others: Values) -> int:
    """Return -1 where `values` are clearly lower than `others`, 1 where they are
    clearly higher, 0 where that is open.

    Clearly: Welch's interval excludes 0. Where runs have diverged, which leaves no
    mean: all of one are below all of the other, and are so many that chance would order
    them so with a probability of at most 1 - `LEVEL`.
    """
    if None in (*values, *others):
        a, b = _numbers(values), _numbers(others)
        if not values or not others or 2 / math.comb(len(a) + len(b), len(a)) > 1 - LEVEL:
            return 0
        return int(a.min() > b.max()) - int(a.max() < b.min())
    ends = welch(values, others)
    return 0 if ends is None else int(ends[0] > 0) - int(ends[1] < 0)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two rows of which the paper has a lower number for the first.

    Args:
        first, second: Their labels.
        medians: 1 where ours are in the paper's order, -1 the other way round, 0 where
            they are equal.
        clearly: The same of the order beyond chance (`clear_order`); 0 where that is
            open.
    """

    first: str
    second: str
    medians: int
    clearly: int


@dataclasses.dataclass(frozen=True)
class Item:
    """A row to be ordered.

    Args:
        label: Unlike those of the others.
        published: The paper's number; None for a fail, which is larger than every
            number.
        values: Ours, one a run, at least one.
    """

    label: str
    published: float | None
    values: Values


def _sign(one: float | None, other: float | None) -> int:
    """Return -1 where `one` is lower than `other`, 1 where it is higher, 0 where they
    are equal; None is the highest.
    """
    a, b = _numbers([one, other])
    return int(a > b) - int(a < b)


def pairs(items: Sequence[Item]) -> list[Pair]:
    """Return all pairs that the paper orders: two fails are not ordered, nor are two
    equal numbers.

    Example:

    >>> pairs([Item("original", 7.61, [7.7]), Item("full", 4.92, [5.0])])[0]
    Pair(first='full', second='original', medians=1, clearly=0)
    """
    found = []
    for one, other in itertools.combinations(items, 2):
        paper = _sign(one.published, other.published)
        if paper:
            first, second = (one, other) if paper < 0 else (other, one)
            ours = -_sign(median(first.values), median(second.values))
            found.append(
                Pair(first.label, second.label, ours, -clear_order(first.values, second.values))
            )
    return found


def kendall(found: Sequence[Pair]) -> float | None:
    """Return Kendall's tau over the pairs: those in the paper's order minus those the
    other way round, by their number.
    """
    return sum(pair.medians for pair in found) / len(found) if found else None
