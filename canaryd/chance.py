"""The formulas of chance and of time that rules of the judge share."""

from __future__ import annotations

import math
from typing import NamedTuple

RULE_OF_THREE = 3
"""No failure in n trials bounds the rate by about 3/n at 95 %: a record counts from 3 expected failures. It is wrong
with a probability of e^-3, 5 %, for a device that fails at exactly the rate in question."""
EPOCH = 1_577_836_800.0
"""2020-01-01: what is dated before it was dated by a clock that had not been set (ours). False alarms: none, it moves
what happened."""
TINY = 1e-12


def rate_bound(trials: int) -> float:
    """Return the rate at which so many trials would all be clean with a probability of 5 %: 1 - 0.05^(1/n)."""
    return -math.expm1(math.log(0.05) / trials)


def outlasts(clean: int, trials: int, failures: int) -> bool:
    """Whether `clean` trials are at least three times as many as it took for one failure."""
    return clean * failures >= RULE_OF_THREE * trials


class Count(NamedTuple):
    """How often something was tried, and how often it failed."""

    results: int = 0
    wrong: int = 0
    """Results that were wrong."""
    uploads: int = 0
    failed: int = 0
    """Uploads with a wrong result: what was hit on its way to the device is wrong every time."""

    def plus(self, other: Count) -> Count:
        """Return both together."""
        return Count(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def outlasts(self, accused: Count) -> bool:
        """Whether this clean record is three times as long as what the accused needs to fail once.

        In results and in uploads: a fault may strike a result or an upload, and which of the two is not known.
        """
        by_results = outlasts(self.results, accused.results, accused.wrong)
        return by_results and outlasts(self.uploads, accused.uploads, accused.failed)


def tail(times: int, trials: int, rate: float) -> float:
    """Return the chance of at least `times` events in `trials` at `rate` each (the binomial's upper tail).

    Summed from the top, in logarithms: below 1e-12 the rest of the sum is nothing.
    """
    if times == 0 or rate >= 1:
        return 1.0
    total = 0.0
    for k in range(times, trials + 1):
        ways = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        part = math.exp(ways + k * math.log(rate) + (trials - k) * math.log1p(-rate))
        total += part
        if k > trials * rate and part < TINY * max(total, TINY):
            break
    return min(1.0, total)
