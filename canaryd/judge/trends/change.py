"""The test for a change between days, with its false-alarm chance."""

from __future__ import annotations

import bisect
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from canaryd.judge.telemetry.readings import split_key
from canaryd.judge.trends.days import Course

FALSE_ALARMS = 0.01
"""Chance of a false alarm per device, rule and year of daily looks, by the rank test alone, for any distribution of
exchangeable days (ours). It is shared among `LOOKS`, `SPLITS` and the series of a rule (Bonferroni)."""
LOOKS = 365
"""Looks in a year: only days that are over count, so further looks on a day see the same."""
SPLITS = (6, 7, 8, 10, 14, 20, 28)
"""Numbers of days after the change that are tried: about a week at least, so that no weekend decides (ours)."""
BEFORE, LEAST_BEFORE, WEEK = 56, 14, 7
"""Days before the change that are compared, and the least of them (ours). Fewer days before need more days after: 6
against 14 are that far apart by chance once in 38,760 looks, which is too often; 8 against 14 once in 319,770."""
STEP_SPLITS = (2, 3, 4, 5)
"""Numbers of days after a sudden change (ours): one may be a day's work, and from six on the rank test decides."""
APART = 4.0
"""Times the scatter of the days before (normal days: 1.4826 times the median absolute deviation) that a change must
measure (ours). Days depend on each other, and then the rank test alone is often wrong: if each day's level takes over
0.8 of the day before, in 99 of 100 years. With this limit and `SLOWER` in none (docs/judgement.md has the table)."""
MARKED = 1.05
"""Least ratio of a change that `marks` shows (ours): smaller ones help nobody."""
MARK_WARMTH = 3.0
"""The same for temperatures, in degrees Celsius (ours)."""
NORMAL = 1.4826
"""Standard deviation of normal values over their median absolute deviation (Hampel 1974)."""


def chance(after: Sequence[float], before: Sequence[float]) -> float:
    """Return the exact chance that exchangeable values lie as far above `before` as `after` do.

    One-sided Mann-Whitney test: of all ways to choose which values are the later ones, the share that puts them at
    least as high. Of equal values the earlier counts as the higher, so ties raise no alarm. 1.0 where more than a
    quarter of the pairs are the wrong way round: those are not computed.
    """
    ordered = sorted(before)
    higher = sum(len(ordered) - bisect.bisect_left(ordered, value) for value in after)
    m, n = len(after), len(before)
    if higher * 4 > m * n:
        return 1.0
    return sum(_ways(m, n, higher)) / math.comb(m + n, m)


@functools.lru_cache(maxsize=4096)
def _ways(m: int, n: int, most: int) -> tuple[int, ...]:
    """Return, for 0 … `most`, in how many orders of m among n values so many pairs are the wrong way round.

    The coefficients of the Gaussian binomial: the product over i = 1 … m of (1 - q^(n+i)) / (1 - q^i).
    """
    ways = [1] + [0] * most
    for i in range(1, m + 1):
        for power in range(most, n + i - 1, -1):
            ways[power] -= ways[power - n - i]
        for power in range(i, most + 1):
            ways[power] += ways[power - i]
    return tuple(ways)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A series moved from one level to another."""

    since: int
    """First day after it, in days since the epoch."""
    before: float
    """Median of the days before."""
    worst: float
    """Median of the worst week before: a change is measured against it."""
    after: float
    early: tuple[int, ...]
    """The days before it that were compared, in days since the epoch."""
    late: tuple[int, ...]
    """The days after it."""
    chance: float
    """The chance by the rank test for this one split."""


def change(
    course: Course, worse: int, threshold: float, until: float = math.inf, since: float = -math.inf
) -> Change | None:
    """Return the most certain change for the worse that still holds on the last day; None without one.

    `worse` is 1 where more is worse, -1 where less is. `threshold` is the chance allowed for each split. Only the days
    from `since` to `until` (since the epoch) are compared.
    """
    days = sorted(d for d in course.days if since <= d <= until)
    best: Change | None = None
    for count in SPLITS:
        early, late = days[-count - BEFORE : -count], days[-count:]
        if len(early) < LEAST_BEFORE:
            break
        before, after = ([worse * course.days[d] for d in part] for part in (early, late))
        usual = statistics.median(before)
        scatter = NORMAL * statistics.median(abs(value - usual) for value in before)
        if statistics.median(after) - usual <= APART * scatter:
            continue
        by_chance = chance(after, before)
        if by_chance <= threshold and (best is None or by_chance < best.chance):
            best = Change(
                since=late[0],
                before=worse * usual,
                worst=worse * max(_weeks(before)),
                after=statistics.median(course.days[d] for d in late),
                early=tuple(early),
                late=tuple(late),
                chance=by_chance,
            )
    return best


def step(course: Course, worse: int) -> Change | None:
    """Return the sudden change for the worse that still holds on the last day; None without one.

    Each of the last days is worse than every day before, so `worst` is the worst day; how much worse is the caller's
    to judge. `Change.chance` is that of so few days being the worst of all, which is far too often for an alarm.
    """
    days = sorted(course.days)
    for count in STEP_SPLITS:
        early, late = days[-count - BEFORE : -count], days[-count:]
        if len(early) < LEAST_BEFORE:
            break
        before, after = ([worse * course.days[d] for d in part] for part in (early, late))
        if min(after) > max(before):
            return Change(
                since=late[0],
                before=worse * statistics.median(before),
                worst=worse * max(before),
                after=worse * min(after),
                early=tuple(early),
                late=tuple(late),
                chance=1 / math.comb(len(days[-count - BEFORE :]), count),
            )
    return None


def _weeks(values: Sequence[float]) -> list[float]:
    """Return the medians of the whole weeks of two weeks or more, counted from the end."""
    return [statistics.median(values[end - WEEK : end]) for end in range(len(values), WEEK - 1, -WEEK)]


def marks(course: Course, reading: str) -> list[Change]:
    """Return the changes of a series in either direction, oldest first, to be marked in its history.

    The false alarms of a series are `FALSE_ALARMS` per year, shared between the directions. A change that several days
    show is marked where it was clearest.
    """
    threshold = FALSE_ALARMS / LOOKS / len(SPLITS) / 2
    found: list[Change] = []
    for until in sorted(course.days):
        begun = [c.since for c in found if until - c.since >= LEAST_BEFORE]  # what was before is marked already
        for worse in (1, -1):
            seen = change(course, worse, threshold, until, max(begun, default=-math.inf))
            if seen is None or not _notable(seen, reading):
                continue
            same = found and seen.since <= found[-1].late[-1]
            if same and (seen.after > seen.before) == (found[-1].after > found[-1].before):
                found[-1] = min(found[-1], seen, key=lambda c: c.chance)
            else:
                found.append(seen)
    return found


def _notable(seen: Change, reading: str) -> bool:
    if split_key(reading)[0] == "temperature_celsius":
        return abs(seen.after - seen.before) >= MARK_WARMTH
    low, high = sorted((abs(seen.before), abs(seen.after)))
    return seen.before * seen.after < 0 or high >= MARKED * low
