"""Slow changes: what a device's readings were day by day, and whether they are worse than before or than its peers'.

All pure functions. Neighbouring readings depend on each other, so a day counts as one value. A change is accepted when
an exact rank test (Mann and Whitney 1947) tells the days after it from the days before it, and when it is large
besides: docs/trend.md has the rules, what their false alarms rest on, and what was simulated. Slow is not wrong:
nothing here makes a device worse than degraded.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import NamedTuple

from canaryd.model import Cause, Finding, Outcome, Reading, Rival, Run, State, reading_key
from canaryd.wording import DAY, HOUR, MINUTE, number, quantity

FALSE_ALARMS = 0.01
"""Chance of a false alarm per device, rule and year of daily looks, from the rank test alone and however the days are
distributed, as long as they are exchangeable (ours). `LOOKS` and the series examined share it out (Bonferroni)."""
LOOKS = 365
"""Looks in a year: only days that are over count, so a second look on a day sees the same."""
SPLITS = (6, 7, 8, 10, 14, 20, 28)
"""Days after the change that are tried: about a week at least, so that no weekend decides (ours)."""
BEFORE, LEAST_BEFORE, WEEK = 56, 14, 7
"""Days before the change that are looked at, and the least of them (ours). With few days before it takes more after: 6
against 14 are that far apart by chance once in 38,760 looks, which is too often; 8 against 14 once in 319,770."""
APART = 4.0
"""Times the scatter of the days before (normal days: 1.4826 times the median absolute deviation) that a change must
measure (ours). Days do depend on each other, and there the rank test alone is often wrong: where one day's level takes
over 0.8 of the day before, in 99 of 100 years. With this and `SLOWER` in none (docs/trend.md has the table)."""
SLOWER = 1.10
"""Times as long as in the slowest week before (ours): healthy GPUs of one model differ by 8 % on average (Sinha et al.,
SC 2022), and a device is more like itself than like others. False
alarms: `FALSE_ALARMS`, and 0 in the simulations of the tests."""
PEERS_SLOWER = 1.25
"""Times as long as the peers' median: healthy GPUs of one model differ by 22 % at most in five clusters (Sinha et al.,
SC 2022). False alarms: at most 3e-6 per device where units scatter by 4 % (log-normal), once for all, not per year."""
PEERS_SCATTER = 5.0
"""Times the peers' own scatter (normal units: 1.4826 times the median absolute deviation) that it must be apart (ours):
where peers differ much among themselves, one that differs says little."""
PEERS_DAYS, LEAST_DAYS = 7, 3
"""Days on which peers are compared, and how many of them must be common, on each of which it was the slowest (ours)."""
ERROR_GREW = 1.5
"""Times its error distance in the worst week before (ours): the same cases on the same stack give the same errors;
fresh operands move the largest of many errors by some per cent. False alarms: as for `SLOWER`."""
HOTTER = 6.0
"""Degrees Celsius by which it got hotter than in its hottest week, at the same power, beyond what its peers did (ours):
the air of one room reaches all of them. False alarms: as for `SLOWER`."""
HOTTER_ALONE = 12.0
"""The same where no peer tells the room's part: more than the 9 degrees by which the air of a room may move (ASHRAE
TC 9.9, recommended envelope, 18 to 27 °C)."""
SHARED = 0.5
"""Share of a change that peers show too, from which on it is not the device's own (ours)."""
POWER_LIMIT_MOVED = 0.02
"""Relative difference of the power limit that may explain slowness (ours): limits are set, not measured."""
LOAD_MOVED = 0.2
"""Difference of the share of time in use, or of the load per 1.0, that may explain slowness (ours)."""
BAND = 1.05
"""Ratio of the bounds of a band of power (ours): within it heat differs by 5 % of the rise over the air, 2 °C of 40."""
LOADED = 0.5
"""Share of the power limit above which a device is under load (ours): below, heat tells of what went before."""
STEADY, STEADY_BANDS = 15 * MINUTE, 2
"""Seconds and bands within which three polls in a row must lie for heat to have settled (ours): a heat sink follows
within minutes."""
LEAST_POLLS = 3
"""Settled polls that make a day's temperature: below, it is not known (ours)."""
FRESH = 3
"""Days after which a series without a new value says nothing of today (ours)."""
MARKED = 1.05
"""Least ratio of a change that `marks` shows (ours): smaller ones are of no use to anybody."""
MARK_WARMTH = 3.0
"""The same for temperatures, in degrees Celsius (ours)."""


class Key(NamedTuple):
    """What makes values comparable."""

    probe: str
    reading: str
    """`Reading.key`, or one derived here, e.g. "temperature_celsius{power=600-630,sensor=core}"."""
    basis: str
    """Version and level of the probe, and the stack: another one begins a series of its own."""


class Point(NamedTuple):
    """One value at one time."""

    at: float
    """Seconds since the epoch."""
    value: float


@dataclass(kw_only=True)
class Track:
    """All values of one series."""

    unit: str
    points: list[Point] = field(default_factory=list)
    """Oldest first."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One series on one day."""

    probe: str
    reading: str
    basis: str
    unit: str
    value: float
    """By the reading's kind: the median, the edge of the best quarter, or the mean."""
    count: int
    """Values that it was made of."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The software under some runs."""

    id: str
    """`Run.stack_id`."""
    at: float
    """When the first run on it started, as far as looked, in seconds since the epoch."""
    parts: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Day:
    """One device on one day of UTC, for good: what outlives the runs and polls it was made of."""

    device: str
    """`Device.uuid`."""
    day: int
    """Days since the epoch."""
    levels: tuple[Level, ...]
    stacks: tuple[Stack, ...] = ()
    """What runs were computed with on this day, the first seen first."""


@dataclass(kw_only=True)
class Course:
    """One series, day by day."""

    unit: str
    days: dict[int, float] = field(default_factory=dict)
    """Days since the epoch → level."""


Courses = Mapping[Key, Course]


@dataclass(frozen=True, kw_only=True)
class Followed:
    """How a reading is followed."""

    worse: int = 0
    """1 where more is worse, -1 where less is, 0 where neither."""
    level: str = "median"
    """"median"; "best", the edge of the best quarter, for what other work on the device can only make worse; "mean"."""
    rule: str = ""
    """The rule that looks at it; "" for what is only shown."""


SHOWN = Followed()
FOLLOWED: Mapping[str, Followed] = {
    "kernel_seconds": Followed(worse=1, level="best", rule="slower"),
    "recorded_error_ratio": Followed(worse=1, rule="error"),
    "canary_logit_distance": Followed(worse=1, rule="error"),
    "canary_margin_min": Followed(worse=-1),
    "canary_sensitive_margin": SHOWN,
    # Latencies of endpoints depend on their load; canaryd.recorded judges them where that is known.
    "endpoint_first_token_seconds": Followed(worse=1),
    "endpoint_token_seconds": Followed(worse=1),
    "temperature_celsius": Followed(worse=1),
    "power_watts": SHOWN,
    "power_limit_watts": SHOWN,
    "clock_hertz": Followed(worse=-1),
    "utilization_ratio": SHOWN,
    "load_average": SHOWN,
    "fan_ratio": SHOWN,
    # Counters as rates; canaryd.telemetry judges them.
    "ecc_errors_total": Followed(worse=1, level="mean"),
    "edac_errors_total": Followed(worse=1, level="mean"),
    "pcie_replays_total": Followed(worse=1, level="mean"),
    "throttle_seconds_total": Followed(worse=1, level="mean"),
}
"""Readings that are followed over time."""
SPEED = Followed(worse=-1, level="best", rule="slower")
"""Every reading whose name begins with `speed_`."""
HEAT = Followed(worse=1, rule="hotter")
"""Temperatures within one band of power."""
PER_HOUR = " per hour"
WORK = {"utilization_ratio": "the share of time in use", "load_average": "the load per core"}
"""Readings that tell of other work on the device, in words."""
CONTEXT = ("power_limit_watts", *WORK)
"""Readings that may explain slowness."""
NO_END = 1e9
"""Ratio beyond which a change is not measured."""
NORMAL = 1.4826
"""Standard deviation of normal values over their median absolute deviation (Hampel 1974)."""
Finder = Callable[["Trends"], Iterator[Finding]]


# --- From runs and polls to days --------------------------------------------------------------------------------------


def followed(reading: str) -> Followed | None:
    """Return how a reading (name or key) is followed; None where it is not."""
    if reading.startswith("temperature_celsius{power="):
        return HEAT
    if reading.startswith("speed_"):
        return SPEED
    return FOLLOWED.get(reading.partition("{")[0])


def tracks(runs: Iterable[Run] = (), polls: Iterable[Run] = ()) -> dict[Key, Track]:
    """Return all followed values of one device. `polls` are the telemetry of it, in any order.

    Only whole runs as usual count: no drill, no confirmation, no retest at another intensity, no baselining. Counters
    become what they rose by per hour; throttled time becomes a share.
    """
    found: dict[Key, Track] = {}

    def add(run: Run, reading: str, unit: str, at: float, value: float) -> None:
        key = Key(run.probe, reading, f"{run.probe_version}/{run.level}/{run.stack_id}")
        found.setdefault(key, Track(unit=unit)).points.append(Point(at, value))

    for run in sorted(filter(_counts, runs), key=lambda r: r.started):
        for reading in run.readings:
            if followed(reading.name) is not None and (value := _number(reading)) is not None:
                add(run, reading.key, reading.unit, run.started, value)
    by_probe: dict[str, list[Run]] = defaultdict(list)
    for poll in sorted(filter(_counts, polls), key=lambda r: r.started):
        by_probe[poll.probe].append(poll)
    for of_probe in by_probe.values():
        before: list[tuple[Run, dict[str, Reading]]] = []
        for poll in of_probe:
            now = {r.key: r for r in poll.readings if followed(r.name) is not None and _number(r) is not None}
            for key, reading in now.items():
                if reading.name == "load_average":
                    continue  # below, per core: alone it says nothing
                if (followed(reading.name) or SHOWN).level != "mean":
                    add(poll, key, reading.unit, poll.started, float(reading.value))
                elif before and (old := before[-1][1].get(key)) and poll.started > before[-1][0].started:
                    rise = max(0.0, float(reading.value) - float(old.value))
                    per = HOUR if reading.name != "throttle_seconds_total" else 1.0
                    unit = f"1{PER_HOUR}" if per == HOUR else "1"
                    add(poll, key, unit, poll.started, rise * per / (poll.started - before[-1][0].started))
            cores = next((r.value for r in poll.readings if r.key == "cpu_cores{state=online}"), 0)
            if (load := now.get("load_average")) and isinstance(cores, (int, float)) and cores > 0:
                add(poll, "load_average{per=core}", "1", poll.started, float(load.value) / cores)
            before = [*before[-2:], (poll, now)]
            for key, reading in _settled(before):
                add(poll, key, reading.unit, poll.started, float(reading.value))
    return found


def summary(device: str, day: int, runs: Iterable[Run], polls: Iterable[Run]) -> Day:
    """Return what a day (since the epoch, UTC) was, from all runs and polls that began on it."""
    here = [[r for r in of if int(r.started // DAY) == day] for of in (runs, polls)]
    levels = tuple(
        Level(probe=k.probe, reading=k.reading, basis=k.basis, unit=track.unit, value=value, count=count)
        for k, track in sorted(tracks(*here).items())
        for value, count in _levels(k, track.points).values()
    )
    return Day(device=device, day=day, levels=levels, stacks=tuple(stacks(here[0])))


def stacks(runs: Iterable[Run]) -> list[Stack]:
    """Return each stack under these runs once, the first seen first; drills count like all others."""
    first: dict[str, Stack] = {}
    for run in sorted(runs, key=lambda r: r.started):
        if run.stack:
            first.setdefault(run.stack_id, Stack(id=run.stack_id, at=run.started, parts=run.stack))
    return list(first.values())


def courses(days: Iterable[Day] = (), runs: Iterable[Run] = (), polls: Iterable[Run] = ()) -> dict[Key, Course]:
    """Return each series day by day: from the summaries, and from runs and polls for the days that have none."""
    found: dict[Key, Course] = {}
    summed = set()
    for day in days:
        summed.add(day.day)
        for level in day.levels:
            key = Key(level.probe, level.reading, level.basis)
            found.setdefault(key, Course(unit=level.unit)).days[day.day] = level.value
    for key, track in tracks(runs, polls).items():
        for number_of_day, (value, _) in _levels(key, track.points).items():
            if number_of_day not in summed:
                found.setdefault(key, Course(unit=track.unit)).days[number_of_day] = value
    return found


def _counts(run: Run) -> bool:
    odd = run.drill or run.intensity or run.baselining
    return run.outcome is Outcome.COMPLETED and run.whole and not odd


def _number(reading: Reading) -> float | None:
    """Return a reading's value where it is a finite number."""
    if isinstance(reading.value, (str, bool)) or not math.isfinite(reading.value):
        return None
    return float(reading.value)


def _levels(key: Key, points: Sequence[Point]) -> dict[int, tuple[float, int]]:
    """Return day → (level, values it is made of)."""
    how = followed(key.reading) or SHOWN
    by_day: dict[int, list[float]] = defaultdict(list)
    for point in points:
        by_day[int(point.at // DAY)].append(point.value)
    least = LEAST_POLLS if how is HEAT else 1
    return {day: (level(values, how), len(values)) for day, values in by_day.items() if len(values) >= least}


def level(values: Sequence[float], how: Followed) -> float:
    """Return the one value that stands for several of a time."""
    if how.level == "mean":
        return statistics.fmean(values)
    if how.level == "best":
        return sorted(values, reverse=how.worse < 0)[(len(values) - 1) // 4]
    return statistics.median(values)


def _settled(polls: Sequence[tuple[Run, Mapping[str, Reading]]]) -> Iterator[tuple[str, Reading]]:
    """Yield temperatures and clocks of the newest of three polls, by power, where it was under steady load."""
    if len(polls) < 3 or polls[-1][0].started - polls[0][0].started > STEADY:
        return
    bands = []
    for _, readings in polls:
        power, limit = readings.get("power_watts"), readings.get("power_limit_watts{limit=enforced}")
        if power is None or limit is None or not float(power.value) >= LOADED * float(limit.value) > 0:
            return
        bands.append(math.floor(math.log(float(power.value), BAND)))
    if max(bands) - min(bands) > STEADY_BANDS:
        return
    between = f"{BAND ** bands[-1]:.0f}-{BAND ** (bands[-1] + 1):.0f}"
    for reading in polls[-1][1].values():
        if reading.name == "temperature_celsius":
            yield reading_key(reading.name, {**reading.labels, "power": between}), reading
        elif reading.name == "clock_hertz":
            yield reading_key(reading.name, {**reading.labels, "under": "load"}), reading


# --- Has it changed? --------------------------------------------------------------------------------------------------


def chance(after: Sequence[float], before: Sequence[float]) -> float:
    """Return the exact chance that exchangeable values lie as far above `before` as `after` do.

    One-sided Mann-Whitney test: of all ways to choose which values are the later ones, the share that puts them at
    least so high. Of equal values the earlier is taken for the higher, so ties make no alarm. 1.0 where more than a
    quarter of the pairs stand the wrong way round: nothing is claimed of those.
    """
    ordered = sorted(before)
    higher = sum(len(ordered) - bisect.bisect_left(ordered, value) for value in after)
    m, n = len(after), len(before)
    if higher * 4 > m * n:
        return 1.0
    return sum(_ways(m, n, higher)) / math.comb(m + n, m)


@functools.lru_cache(maxsize=4096)
def _ways(m: int, n: int, most: int) -> tuple[int, ...]:
    """Return, for 0 … `most`, in how many ways m values stand among n so that so many pairs are the wrong way round.

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
    """Median of the worst week of these: what a change is measured against."""
    after: float
    early: tuple[int, ...]
    """The days before it that were looked at."""
    late: tuple[int, ...]
    chance: float
    """Of the rank test for this one split."""


def change(
    course: Course, worse: int, threshold: float, until: float = math.inf, since: float = -math.inf
) -> Change | None:
    """Return the most certain change for the worse that still holds on the last day, if there is one.

    `worse` is 1 where more is worse, -1 where less is. `threshold` is the chance allowed for each split. Only the days
    from `since` to `until` are looked at.
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


def _weeks(values: Sequence[float]) -> list[float]:
    """Return the medians of whole weeks, counted from the end, of two weeks or more."""
    return [statistics.median(values[end - WEEK : end]) for end in range(len(values), WEEK - 1, -WEEK)]


def marks(course: Course, reading: str) -> list[Change]:
    """Return the changes of a series in either direction, oldest first, for those who look at its course.

    Each is held to `FALSE_ALARMS` per series and year, shared between the directions; it is shown when it was clearest.
    """
    threshold = FALSE_ALARMS / LOOKS / len(SPLITS) / 2
    found: list[Change] = []
    for until in sorted(course.days):
        begun = [c.since for c in found if until - c.since >= LEAST_BEFORE]  # what was before has been told
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
    if reading.startswith("temperature_celsius"):
        return abs(seen.after - seen.before) >= MARK_WARMTH
    low, high = sorted((abs(seen.before), abs(seen.after)))
    return seen.before * seen.after < 0 or high >= MARKED * low


# --- Rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trends:
    """All that is judged here."""

    own: Courses
    peers: Mapping[str, Courses]
    """By name, the other devices of this node that have the same backend and model."""
    today: int
    """Days since the epoch."""

    def examined(self, rule: str) -> dict[Key, Course]:
        """Return the own series that a rule looks at and that have a value of the last days."""
        return {
            key: course
            for key, course in self.own.items()
            if (how := followed(key.reading)) is not None
            and how.rule == rule
            and self.today - max(course.days) <= FRESH
        }

    def changed(self, rule: str) -> dict[Key, Change]:
        """Return what became worse, by the rank test alone."""
        series = self.examined(rule)
        threshold = FALSE_ALARMS / LOOKS / len(SPLITS) / max(1, len(series))
        changes = {k: change(c, (followed(k.reading) or SHOWN).worse, threshold) for k, c in series.items()}
        return {k: c for k, c in changes.items() if c is not None}

    def context(self, of: Courses, name: str, days: Iterable[int]) -> dict[str, float]:
        """Return the median over these days of every reading of a name, by its key, whatever the stack."""
        values: dict[str, list[float]] = defaultdict(list)
        wanted = set(days)
        for key, course in of.items():
            if key.reading.partition("{")[0] == name:
                values[key.reading] += [v for d, v in course.days.items() if d in wanted]
        return {k: statistics.median(v) for k, v in values.items() if v}


def slower_than_before(trends: Trends) -> Iterator[Finding]:
    """Kernels take longer than they did on this device and stack; the numbers are still right."""
    worst = _worst(trends, "slower", SLOWER)
    if worst is None:
        return
    key, seen, times, more, alike, rivals = worst
    was, is_ = ({name: trends.context(trends.own, name, days) for name in CONTEXT} for days in (seen.early, seen.late))
    explained, settings = _settings(was, is_)
    rivals += [Rival(cause=Cause.SOFTWARE, why="the stack is the same before and after", rejected=True), *settings]
    rivals.append(Rival(cause=Cause.HARDWARE, why="a part wears out or repeats work; clocks tell", rejected=False))
    text = (
        f"{_told(key, trends.own[key].unit, seen)}: {number(times)} times as slow on the same stack{more}. "
        f"{RIGHT}. Look at clocks, heat, power limit and other work on the device{_ended(alike, explained)}{ODDS}"
    )
    yield _finding("slower-than-before", Cause.ENVIRONMENT, text, key.probe, rivals, note=bool(alike or explained))


def slower_than_peers(trends: Trends) -> Iterator[Finding]:
    """Kernels take much longer than on the other devices of the same model and stack on this node."""
    days = range(trends.today - PEERS_DAYS, trends.today)
    slow: dict[Key, tuple[float, int]] = {}
    for key, course in trends.examined("slower").items():
        behind: list[float] = []
        slowest = True
        for peer in trends.peers.values():
            theirs = peer[key].days if key in peer else {}
            each = [_times(key, theirs[d], course.days[d]) for d in days if d in theirs and d in course.days]
            if len(each) >= LEAST_DAYS:
                behind.append(math.log(statistics.median(each)))
                slowest = slowest and min(each) > 1.0
        if not behind or not slowest:
            continue
        middle = statistics.median(behind)
        scatter = NORMAL * statistics.median(abs(b - middle) for b in behind)
        if math.exp(middle) >= PEERS_SLOWER and (len(behind) == 1 or middle >= PEERS_SCATTER * scatter):
            slow[key] = (math.exp(middle), len(behind))
    if not slow:
        return
    key, (times, count) = max(slow.items(), key=lambda item: item[1])
    own = {name: trends.context(trends.own, name, days) for name in (*CONTEXT, "temperature_celsius")}
    theirs_all = [{name: trends.context(peer, name, days) for name in own} for peer in trends.peers.values()]
    usual = {name: _middle([of[name] for of in theirs_all]) for name in own}
    explained, rivals = _settings(usual, own)
    heat, hot = _heat(usual["temperature_celsius"], own["temperature_celsius"])
    silicon = f"units of one model differ, but by {PEERS_SLOWER - 1:.0%} hardly (Sinha et al., SC 2022)"
    rivals = [
        Rival(cause=Cause.SOFTWARE, why="the peers run the same stack", rejected=True),
        *rivals,
        heat,
        Rival(cause=Cause.HARDWARE, why=silicon, rejected=count > 1),
    ]
    known = not hot and all(r.rejected for r in rivals if r.cause is Cause.ENVIRONMENT)
    course = trends.own[key]
    shown = quantity(statistics.median(course.days[d] for d in days if d in course.days), course.unit)
    whom = f"the median of {count} peers" if count > 1 else "its only peer"
    text = (
        f"{key.reading} is {shown} in the last {PEERS_DAYS} days: {number(times)} times as slow as "
        f"{whom} of the same model and stack{_more(slow)}. {RIGHT}. "
    )
    text += "Of two nobody can tell which is as it should be" if count == 1 else "Look at clocks, heat and power limit"
    cause = Cause.HARDWARE if known else Cause.ENVIRONMENT
    text += _ended("", explained)
    yield _finding("slower-than-peers", cause, text, key.probe, rivals, note=count == 1 or bool(explained))


def error_growing(trends: Trends) -> Iterator[Finding]:
    """Results are farther from the truth than they were, within what is allowed."""
    worst = _worst(trends, "error", ERROR_GREW)
    if worst is None:
        return
    key, seen, times, more, alike, rivals = worst
    rivals.append(Rival(cause=Cause.SOFTWARE, why="the stack is the same before and after", rejected=True))
    size = f"{number(times)} times as large" if times < NO_END else "there was none before"
    text = (
        f"{_told(key, trends.own[key].unit, seen)}: {size} on the same stack{more}. It is within what is "
        f"allowed. Exact goldens tell whether the device computes right{_ended(alike, '')}{ODDS}"
    )
    yield _finding("error-growing", Cause.HARDWARE, text, key.probe, rivals, note=bool(alike))


def hotter_at_same_power(trends: Trends) -> Iterator[Finding]:
    """It gets hotter than it did under steady load at the same power: the way out of the heat is worse."""
    warmer = {k: c for k, c in trends.changed("hotter").items() if c.after - c.worst >= HOTTER}
    if not warmer:
        return
    key, seen = max(warmer.items(), key=lambda item: item[1].after - item[1].worst)
    rise = seen.after - seen.worst
    of_peers = [r for peer in trends.peers.values() if (r := _warmed(peer, key, seen)) is not None]
    room = statistics.median(of_peers) if of_peers else None
    if room is None and rise < HOTTER_ALONE:
        return
    own = rise if room is None else rise - room
    what = f"the room: {len(of_peers)} peers got {number(room or 0.0)} °C hotter in the same days"
    if room is None:
        what = f"the room: no peer tells, and air may move by 9 °C; this is {number(rise)} °C"
    rivals = [
        Rival(cause=Cause.ENVIRONMENT, why=what, rejected=own >= HOTTER),
        Rival(cause=Cause.ENVIRONMENT, why="fan control was changed; fan_ratio tells", rejected=False),
        Rival(cause=Cause.HARDWARE, why="the sensor or the contact to the heat sink", rejected=False),
    ]
    text = (
        f"{_told(key, trends.own[key].unit, seen)}: {number(rise)} °C hotter at the same power"
        f"{_more(warmer)}. {RIGHT}. Look at dust, fans, heat sink and the air that comes in"
    )
    alike = "Its peers got hotter too, so it is the room" if own < HOTTER else ""
    text += _ended(alike, "") + ODDS
    yield _finding("hotter-at-same-power", Cause.ENVIRONMENT, text, key.probe, rivals, note=bool(alike))


RULES: tuple[Finder, ...] = (slower_than_before, slower_than_peers, error_growing, hotter_at_same_power)
"""Every rule is asked, in any order."""
RIGHT = "The numbers are still right"
ODDS = f". By chance once in {1 / FALSE_ALARMS:.0f} device-years at most, where days are exchangeable"


def findings(own: Courses, peers: Mapping[str, Courses], now: float) -> Iterator[Finding]:
    """Yield what each rule finds at `now` (seconds since the epoch); days that are not over do not count.

    `peers` are the other devices of this node that have the same backend and model, by name.
    """
    today = int(now // DAY)
    trends = Trends(own=_over(own, today), peers={name: _over(of, today) for name, of in peers.items()}, today=today)
    return itertools.chain.from_iterable(rule(trends) for rule in RULES)


def _over(of: Courses, today: int) -> dict[Key, Course]:
    """Return the days that are over; a clock that ran ahead may have left some of the future."""
    past = {k: {d: v for d, v in course.days.items() if d < today} for k, course in of.items()}
    return {k: Course(unit=of[k].unit, days=days) for k, days in past.items() if days}


def _finding(rule: str, cause: Cause, text: str, probe: str, rivals: Sequence[Rival], *, note: bool) -> Finding:
    state, why = (State.HEALTHY, Cause.NONE) if note else (State.DEGRADED, cause)
    return Finding(rule=rule, state=state, cause=why, message=text, probe=probe, rivals=tuple(rivals))


def _times(key: Key, before: float, after: float) -> float:
    """Return how many times as bad `after` is, `NO_END` where nothing became something."""
    worse = (followed(key.reading) or SHOWN).worse
    good, bad = (before, after) if worse > 0 else (after, before)
    if good <= 0:
        return NO_END if bad > 0 else 1.0
    return min(max(bad / good, 1 / NO_END), NO_END)


def _moved(peer: Courses, key: Key, seen: Change) -> tuple[float, float] | None:
    """Return a peer's medians of the same days; None where it has less than half of them."""
    if key not in peer:
        return None
    early, late = ([peer[key].days[d] for d in days if d in peer[key].days] for days in (seen.early, seen.late))
    if 2 * len(early) < len(seen.early) or 2 * len(late) < len(seen.late):
        return None
    return statistics.median(early), statistics.median(late)


def _warmed(peer: Courses, key: Key, seen: Change) -> float | None:
    """Return by how many degrees a peer got hotter in the same days, at whatever power it runs, by the same sensor."""
    sensor = key.reading.partition(",")[2]
    alike = [k for k in peer if followed(k.reading) is HEAT and k.reading.partition(",")[2] == sensor]
    rises = [after - before for k in alike if (moved := _moved(peer, k, seen)) for before, after in [moved]]
    return statistics.median(rises) if rises else None


class _Worst(NamedTuple):
    """What became worst by a factor, and what the peers say of it."""

    key: Key
    seen: Change
    times: float
    more: str
    """How many others became worse, in words."""
    alike: str
    """That the peers changed as much, in words; "" where they did not."""
    rivals: list[Rival]


def _worst(trends: Trends, rule: str, least: float) -> _Worst | None:
    """Return what of a rule's series is most times as large as it was, from `least` times on; None where nothing is."""

    def grown(item: tuple[Key, Change]) -> float:
        key, seen = item
        return _times(key, seen.worst, seen.after)

    found = {key: seen for key, seen in trends.changed(rule).items() if grown((key, seen)) >= least}
    if not found:
        return None
    key, seen = max(found.items(), key=grown)
    times = grown((key, seen))
    by_peers = [_times(key, *moved) for peer in trends.peers.values() if (moved := _moved(peer, key, seen))]
    return _Worst(key, seen, times, _more(found), *_shared(by_peers, times))


def _shared(by_peers: Sequence[float], times: float) -> tuple[str, list[Rival]]:
    """Return in words that the peers changed alike ("" where not), and the rival that says so."""
    if not by_peers:
        why = "something all devices of the node share: there is no peer to ask"
        return "", [Rival(cause=Cause.ENVIRONMENT, why=why, rejected=False)]
    theirs = statistics.median(by_peers)
    alike = theirs > 1 and math.log(theirs) >= SHARED * math.log(times)
    why = f"something all devices of the node share: {len(by_peers)} peers changed {number(theirs)} times"
    said = "Its peers changed alike, so it is not this device" if alike else ""
    return said, [Rival(cause=Cause.ENVIRONMENT, why=why, rejected=not alike)]


def _settings(
    usual: Mapping[str, Mapping[str, float]], here: Mapping[str, Mapping[str, float]]
) -> tuple[str, list[Rival]]:
    """Return in words which setting or load explains slowness ("" for none that is known), and what was considered."""
    explained, rivals = [], []
    was, is_ = (of["power_limit_watts"].get("power_limit_watts{limit=enforced}") for of in (usual, here))
    if was is None or is_ is None:
        why = "a lower power limit: it is not known here"
        rivals.append(Rival(cause=Cause.ENVIRONMENT, why=why, rejected=False))
    else:
        lower = is_ < was * (1 - POWER_LIMIT_MOVED)
        why = f"the power limit is {quantity(is_, 'watts')}, against {quantity(was, 'watts')}"
        rivals.append(Rival(cause=Cause.ENVIRONMENT, why=why, rejected=not lower))
        explained += [why] * lower
    rises = {
        (name, key): (of[key], value)
        for name, of in usual.items()
        if name in WORK
        for key, value in here[name].items()
        if key in of
    }
    if not rises:
        why = "other work on the device: nothing tells how busy it is"
        rivals.append(Rival(cause=Cause.ENVIRONMENT, why=why, rejected=False))
    else:
        (name, _), (was, is_) = max(rises.items(), key=lambda item: item[1][1] - item[1][0])
        busier = is_ - was >= LOAD_MOVED
        why = f"other work on the device: {WORK[name]} is {number(is_)}, against {number(was)}"
        rivals.append(Rival(cause=Cause.ENVIRONMENT, why=why, rejected=not busier))
        explained += [why] * busier
    return "; ".join(explained), rivals


def _heat(usual: Mapping[str, float], here: Mapping[str, float]) -> tuple[Rival, bool]:
    """Return what heat has to say about a device that is slower than its peers, and whether it is hotter."""
    rises = {k: here[k] - usual[k] for k in here if k in usual}
    if not rises:
        return Rival(cause=Cause.ENVIRONMENT, why="heat: no temperature is known of both", rejected=False), False
    key, rise = max(rises.items(), key=lambda item: item[1])
    hot = rise >= HOTTER
    why = f"heat: {key} is {number(here[key])} °C, against {number(usual[key])} °C"
    return Rival(cause=Cause.ENVIRONMENT, why=why, rejected=not hot), hot


def _middle(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = {k for one in of for k in one}
    return {k: statistics.median(one[k] for one in of if k in one) for k in keys}


def _told(key: Key, unit: str, seen: Change) -> str:
    since = f"{datetime.fromtimestamp(seen.since * DAY, tz=timezone.utc):%Y-%m-%d}"
    now, before = quantity(seen.after, unit), quantity(seen.before, unit)
    week = quantity(seen.worst, unit)
    worst = f", {week} in the worst week" if week != before else ""
    return f"{key.reading} is {now} since {since}, and was {before} on {len(seen.early)} days before{worst}"


def _more(found: Mapping[Key, object]) -> str:
    return f", and {len(found) - 1} more of its readings are worse" if len(found) > 1 else ""


def _ended(alike: str, explained: str) -> str:
    """Return the end of a message that says why it is only a note."""
    said = alike or (f"Not held against it: {explained}" if explained else "")
    return f". {said}" if said else ""
