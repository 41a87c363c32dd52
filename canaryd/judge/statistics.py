"""Formulas of probability that several rules share."""

from __future__ import annotations

import math
from typing import NamedTuple

RULE_OF_THREE = 3
"""No failure in n trials bounds the rate by about 3/n at 95 %: clean trials count from 3 expected failures on.
For a device that fails at exactly this rate, the conclusion is wrong with a probability of e^-3, 5 %."""
CONFIDENCE = 0.95
"""Of the intervals that are printed (the field's custom)."""


def rate_bound(trials: int) -> float:
    """Return the failure rate at which `trials` trials all stay clean with a probability of 5 %: 1 - 0.05^(1/n)."""
    return -math.expm1(math.log(0.05) / trials)


def outlasts(clean: int, trials: int, failures: int) -> bool:
    """Return whether `clean` trials are at least three times the mean trials per failure (`trials` / `failures`)."""
    return clean * failures >= RULE_OF_THREE * trials


class Count(NamedTuple):
    """Numbers of results and of uploads, and of the wrong ones among them."""

    results: int = 0
    wrong: int = 0
    """Results that were wrong."""
    uploads: int = 0
    failed: int = 0
    """Uploads with a wrong result. Data damaged on their way to the device make all results of the upload wrong."""

    def plus(self, other: Count) -> Count:
        """Return the sum of both counts."""
        results, wrong, uploads, failed = other
        return Count(self.results + results, self.wrong + wrong, self.uploads + uploads, self.failed + failed)

    def outlasts(self, accused: Count) -> bool:
        """Return whether these clean counts are at least three times the trials that one failure took in `accused`.

        It must hold for results and for uploads, because a fault can affect single results or whole uploads.
        """
        by_results = outlasts(self.results, accused.results, accused.wrong)
        return by_results and outlasts(self.uploads, accused.uploads, accused.failed)


def tail(times: int, trials: int, rate: float) -> float:
    """Return the probability of `times` or more events in `trials` at `rate` each (the binomial's upper tail)."""
    return _at_most(trials - times, trials, 1 - rate)


def interval(wrong: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a rate after `wrong` of `trials` (C. J. Clopper, E. S. Pearson, Biometrika 26, 1934).

    If the trials are independent, it contains the true rate at least 95 % of the time, whatever the rate is.
    """
    if not trials:
        return 0.0, 1.0
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if wrong == 0 else 1 - _solve(trials - wrong, trials, tail)
    high = 1.0 if wrong == trials else _solve(wrong, trials, tail)
    return low, high


def _solve(k: int, n: int, tail: float) -> float:
    """Return the rate p at which at most k of n events happen with probability `tail`; by bisection, for k < n."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(k, n, middle) > tail else (low, middle)
    return (low + high) / 2


def _at_most(k: int, n: int, p: float) -> float:
    """Return the probability that at most k of n events happen, each with probability p."""
    if k >= n:
        return 1.0
    if k < 0 or p >= 1:
        return 0.0
    if p <= 0:
        return 1.0
    if k > n * p:  # the other tail has fewer terms and loses no digits
        return 1.0 - _at_most(n - k - 1, n, 1 - p)
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    log = ways + k * math.log(p) + (n - k) * math.log1p(-p)
    term = total = math.exp(log)
    for i in range(k, 0, -1):
        term *= i / (n - i + 1) * (1 - p) / p
        total += term
        if term < total * 1e-17:
            break
    return min(1.0, total)
