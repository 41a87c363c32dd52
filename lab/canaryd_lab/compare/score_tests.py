"""The statistical tests for comparing scores: SciPy's, imported at the first test, and some that SciPy lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from canaryd_lab.compare.score_files import ScoreError

EXACT_UP_TO = 16
"""Maximum number of unequal pairs for which all 2^n assignments of signs are tried; for more, some are drawn."""
FLIPS = 9_999
"""Number of assignments of signs that are drawn if not all are tried; the smallest possible p is then 1/10,000."""
SEED = 20_240_229
"""Seed of the random signs, so that the same files always give the same p."""


def _stats() -> Any:
    """Return `scipy.stats`; raise `ScoreError` if SciPy is not installed."""
    try:
        from scipy import stats
    except ImportError as error:
        raise ScoreError(
            f"scores are compared by SciPy, which is not here ({error}); install it: pip install scipy"
        ) from None
    return stats


def mcnemar(b: int, c: int) -> float:
    """Return the exact two-sided p of McNemar's test (1947); `b`, `c`: how many questions only A, only B has right."""
    return float(_stats().binomtest(b, b + c).pvalue) if b + c else 1.0


def sign_flip(differences: Sequence[float], *, flips: int = FLIPS) -> float:
    """Return the two-sided p of the mean of paired differences under random signs (Fisher 1935).

    Up to `EXACT_UP_TO` nonzero differences: exact, over all 2^n assignments of signs. More: (hits + 1)/(flips + 1) over
    drawn assignments, which never understates p (Phipson and Smyth 2010).
    """
    largest = max(map(abs, differences), default=0.0)
    live = [d / largest for d in differences if d]
    if len(live) < 2:
        return 1.0

    def total(signed: Any, axis: int) -> Any:
        return signed.sum(axis).round(9)  # sums in another order must count as equal

    count = 2 ** len(live) if len(live) <= EXACT_UP_TO else flips
    options = {"permutation_type": "samples", "n_resamples": count, "batch": 1_000, "rng": SEED}
    return float(_stats().permutation_test((live,), total, **options).pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values in the given order, adjusted for the number of tests by Holm's step-down method (1979)."""
    adjusted = [0.0] * len(ps)
    worst = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = worst
    return adjusted


def t95(freedom: int) -> float:
    """Return Student's 97.5 % quantile for `freedom` degrees of freedom."""
    return float(_stats().t.ppf(0.975, freedom))
