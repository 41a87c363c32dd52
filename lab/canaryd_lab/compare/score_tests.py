"""The statistical tests behind a comparison of scores."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Sequence
from statistics import NormalDist

EXACT_UP_TO = 16
"""Largest number of unequal pairs for which all 2^n sign flips are counted instead of drawn."""
FLIPS = 9_999
"""Sign flips drawn for more pairs: the smallest p is then 1/10,000."""
SEED = 20_240_229
"""Seed of the drawn sign flips: the same files always give the same p."""


def mcnemar(b: int, c: int) -> float:
    """Return the exact two-sided p of b against c discordant pairs: a fair coin tossed b + c times (McNemar 1947)."""
    n = b + c
    tail = sum(math.comb(n, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / (1 << n)) if n else 1.0


def sign_flip(differences: Sequence[float], *, flips: int = FLIPS) -> float:
    """Return the two-sided p of the mean of paired differences under random signs (Fisher 1935).

    Up to 16 differences that are not zero: exact over all 2^n assignments. More: (hits + 1)/(flips + 1) of drawn
    ones, which never understates p (Phipson and Smyth 2010).
    """
    live = [d for d in differences if d]
    if not live:
        return 1.0
    observed = abs(math.fsum(live)) - 1e-9 * math.fsum(
        map(abs, live)
    )  # rounding: sums in another order must count as equal
    if len(live) <= EXACT_UP_TO:
        sums = _signed_sums(live)
        return sum(abs(s) >= observed for s in sums) / len(sums)
    tables = [_signed_sums([*live[i : i + 8], *[0.0] * (i + 8 - len(live))]) for i in range(0, len(live), 8)]
    draw = random.Random(SEED)
    hits = sum(abs(sum(map(operator.getitem, tables, draw.randbytes(len(tables))))) >= observed for _ in range(flips))
    return (hits + 1) / (flips + 1)


def _signed_sums(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums = [s + value for s in sums] + [s - value for s in sums]
    return sums


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number by Holm's step-down method (1979), in the given order."""
    adjusted = [0.0] * len(ps)
    worst = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = worst
    return adjusted


def t95(freedom: int) -> float:
    """Return Student's 97.5 % quantile by Cornish and Fisher's expansion (Abramowitz and Stegun 26.7.5): 3+ degrees."""
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))
