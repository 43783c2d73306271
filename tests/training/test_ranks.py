"""The rank test of rows of results and of groups of runs, by hand and against SciPy."""

import numpy as np
import pytest

from training.ranks import difference, least_chance, rank_test


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], -1),  # 2 of 70 divisions are as extreme: p = 0.029
        ([1, 2, 3], [5, 6, 7], 0),  # 2 of 20: p = 0.1
        ([1, 2, 3], [5, 6, 7, 8, 9], -1),  # 2 of 56: p = 0.036
        ([1, 2, 3, 6], [5, 7, 8, 9], 0),  # 4 of 70: p = 0.057
        ([1], [50, 51], 0),
        ([1, 1, 1, 1], [50, 50, 50, 50], -1),
        ([1, 1, 1, 1], [1, 1, 1, 1], 0),
        ([5, 6, 7, 8], [None] * 4, -1),
        ([5, 6, 7, 8], [6, None, 6, 9], 0),
        ([None] * 5, [None] * 5, 0),
        # one run of ten does not decide, as it does for the means
        ([2.6] * 9 + [2.7], [4.7] * 9 + [43.6], -1),
        (list(range(30)), list(range(20, 50)), -1),  # too many divisions: the normal distribution
    ],
)
def test_clear_differences(one, other, expected):
    assert difference(one, other) == expected
    assert difference(other, one) == -expected


def test_the_rank_test_is_scipys():
    """Without equal numbers, SciPy has exact p-values too."""
    from scipy import stats

    draw = np.random.default_rng(0)
    for n, m in ((4, 4), (3, 6), (5, 8), (10, 10)):
        for shift in (0.0, 0.8, 1.6):
            a, b = draw.normal(size=n).tolist(), (draw.normal(size=m) + shift).tolist()
            expected = stats.mannwhitneyu(a, b, method="exact").pvalue
            assert rank_test(a, b)[1] == pytest.approx(expected)
            assert bool(difference(a, b)) == (expected < 0.05)


@pytest.mark.parametrize(("runs", "others", "p"), [(3, 3, 0.1), (3, 5, 2 / 56), (4, 4, 2 / 70)])
def test_few_runs_cannot_reach_every_p_value(runs, others, p):
    """The least one is that of rows of which all errors of one are lower."""
    assert least_chance(runs, others) == pytest.approx(p)
    lower, higher = list(range(runs)), list(range(10, 10 + others))
    assert rank_test(lower, higher) == (-1, pytest.approx(p))
