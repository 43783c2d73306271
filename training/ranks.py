"""Compare the errors of runs: medians, and the rank test of Mann and Whitney.

None is the error of a run that diverged, which is larger than every number.
"""

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np

#: Chance that two equal rows look different, of "higher" and "lower".
LEVEL = 0.05
#: Largest number of ways to divide the runs of two rows for which the p-value is exact.
EXACT = 200_000


def number(error: float | None) -> float:
    """Return the error of a run or of a published row; a fail has the largest."""
    return math.inf if error is None else error


def median(errors: Sequence[float | None]) -> float:
    """Return the median of errors."""
    return statistics.median(map(number, errors))


def spread(values: Sequence[float | None], digits: str) -> str:
    """Return the median of the runs, with the smallest and the largest number.

    Example:

    >>> spread([6.4, None, 6.2], ".1f"), spread([6.4, None], ".1f"), spread([6.4], ".1f")
    ('6.4 (6.2 to diverged)', 'diverged (6.4 to diverged)', '6.4')
    """
    numbers = list(map(number, values))
    middle, *ends = (
        format(each, digits) if math.isfinite(each) else "diverged"
        for each in (statistics.median(numbers), min(numbers), max(numbers))
    )
    return middle if ends[0] == ends[1] else f"{middle} ({' to '.join(ends)})"


def rank_test(errors: Sequence[float | None], others: Sequence[float | None]) -> tuple[int, float]:
    """Return -1 if `errors` are rather lower than `others`, 1 if they are rather higher,
    else 0, and the p-value: by the rank test of Mann and Whitney, two-sided.

    The p-value is exact, also for equal numbers, for up to 10 runs each.
    """
    from scipy import stats

    a, b = ([number(error) for error in each] for each in (errors, others))
    if not a or not b:
        return 0, 1.0
    ranks = stats.rankdata([*a, *b])
    expected = len(a) * (len(ranks) + 1) / 2
    shift = ranks[: len(a)].sum() - expected
    if math.comb(len(ranks), len(a)) <= EXACT:
        sums = np.array([sum(each) for each in itertools.combinations(ranks, len(a))])
        chance = float(np.mean(np.abs(sums - expected) >= abs(shift) - 1e-9))
    else:
        chance = float(stats.mannwhitneyu(a, b, method="asymptotic").pvalue)
    return int(np.sign(shift)), chance


def difference(errors: Sequence[float | None], others: Sequence[float | None]) -> int:
    """Return -1 if `errors` are significantly lower than `others`, 1 if they are
    significantly higher, else 0: by `rank_test`.
    """
    sign, chance = rank_test(errors, others)
    return sign if chance < LEVEL else 0


def least_chance(runs: int, others: int) -> float:
    """Return the smallest p-value that so many runs can reach: 0.1 for three each."""
    return 2 / math.comb(runs + others, runs)
