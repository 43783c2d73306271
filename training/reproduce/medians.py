"""Medians and intervals of a few runs. A run that diverged has None for a number, larger
than every other.
"""

import math
from collections.abc import Sequence

import numpy as np

#: Confidence level of the intervals.
LEVEL = 0.95

Values = Sequence[float | None]


def _numbers(values: Values) -> np.ndarray:
    return np.array([math.inf if value is None else value for value in values], "float64")


def median(values: Values) -> float | None:
    """Return the median; None if it is that of diverged runs.

    Example:

    >>> median([6.4, None, 6.2]), median([6.4, None])
    (6.4, None)
    """
    middle = float(np.median(_numbers(values)))
    return middle if math.isfinite(middle) else None


def mean_and_std(values: Values) -> tuple[float | None, float | None]:
    """Return the mean and the standard deviation, over `n - 1`; None for both if a run
    diverged, None for the latter if there is only one run.
    """
    numbers = _numbers(values)
    if not np.isfinite(numbers).all():
        return None, None
    return float(numbers.mean()), float(numbers.std(ddof=1)) if len(numbers) > 1 else None


def interval(values: Values) -> tuple[float, float] | None:
    """Return Student's interval for the mean; None without a standard deviation."""
    from scipy import stats

    mean, std = mean_and_std(values)
    if mean is None or std is None:
        return None
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * std / math.sqrt(len(values))
    return float(mean - half), float(mean + half)


def of_images(error: float, images: int) -> tuple[float, float]:
    """Return Wilson's interval for an error in percent that was measured on `images`
    images: where it may lie on other images.
    """
    from scipy import stats

    ends = stats.binomtest(round(error / 100 * images), images).proportion_ci(LEVEL, "wilson")
    return 100 * float(ends.low), 100 * float(ends.high)


def clear_order(values: Values, others: Values) -> int:
    """Return -1 if `values` are clearly lower than `others`, 1 if they are clearly
    higher, 0 if that is open.

    Clearly: Welch's interval for the difference of the means excludes 0. If runs
    diverged, which leaves no mean: all of one are below all of the other, and are so
    many that chance would order them so with a probability of at most 1 - `LEVEL`.
    """
    from scipy import stats

    a, b = _numbers(values), _numbers(others)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        if 2 / math.comb(len(a) + len(b), len(a)) > 1 - LEVEL:
            return 0
        return int(a.min() > b.max()) - int(a.max() < b.min())
    if min(len(a), len(b)) < 2 or not (a.std() or b.std()):
        return 0
    ends = stats.ttest_ind(a, b, equal_var=False).confidence_interval(LEVEL)
    return int(ends.low > 0) - int(ends.high < 0)
