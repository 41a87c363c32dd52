"""Find out, day by day, whether a device became slower than it was, and than identical devices of this node.

All pure functions. Neighbouring runs depend on each other, so a day counts as one value. Slow is not wrong: the rule
never makes a device worse than degraded. docs/judgement.md has the rule, docs/thresholds.md its chances.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import NamedTuple

from canaryd.facts import SPEEDS, Reading
from canaryd.formatting import DAY, number, quantity
from canaryd.judge.findings import finding
from canaryd.judge.telemetry.readings import in_words, split_key
from canaryd.judge.watch import days_of_tests
from canaryd.model import Cause, Finding, Outcome, Rival, Run, State

SPAN = 60
"""Number of newest days that are used (ours): older ones may be another season."""
LATE = 7
"""Number of newest days that must each be slower than usual (ours): a whole week, so that no weekend decides."""
LEAST_BEFORE = 14
"""Least number of days with values before the `LATE` newest ones (ours): fewer do not show what is usual."""
SLOWER = 1.10
"""Least ratio to the median of the earlier days that counts as slower (ours): healthy GPUs of one model differ by 8 %
on average (Sinha et al., SC 2022), one device less from itself. False alarms: 0 in the simulations of the tests."""
POWER_LIMIT_MOVED = 0.02
"""Least relative fall of the power limit that explains slowness (ours): limits are set, not measured."""
LOAD_MOVED = 0.2
"""Least rise of the share of time in use, or of the load per core, that explains slowness (ours)."""
FRESH = 3
"""Days without a new value after which a series shows nothing about today (ours)."""
TIME, LIMIT, LOAD = "kernel_seconds", "power_limit_watts{limit=enforced}", "load_average"
WORK = {"utilization_ratio": "the share of time in use", LOAD: "the load per core"}
"""Name of a reading that shows work of other programs → words for it."""


class Key(NamedTuple):
    """The key of a series of daily values: only values with equal keys are compared."""

    probe: str
    reading: str
    """`Reading.key`; a load is divided by the number of cores."""
    basis: str
    """Version and level of the probe, and the stack: each combination has its own series."""

    @property
    def is_speed(self) -> bool:
        """Whether the values are speeds: then a smaller value means slower."""
        return self.reading.startswith(SPEEDS)

    @property
    def judged(self) -> bool:
        """Whether the series measures the device's speed. Other series can only explain it."""
        return self.is_speed or split_key(self.reading)[0] == TIME


@dataclass(frozen=True, kw_only=True)
class Level:
    """The value of one series on one day, computed from all runs and polls of the day."""

    probe: str
    reading: str
    basis: str
    unit: str
    value: float
    """For speeds and times the value that the best quarter reaches (other work only slows down), else the median."""
    count: int
    """Number of values from which `value` was computed."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The software of some runs."""

    id: str
    """`Run.stack_id`."""
    at: float
    """Start of the first run on the software, in seconds since the epoch."""
    parts: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Day:
    """Summary of one device on one day of UTC. It is kept longer than the runs and polls of that day."""

    device: str
    """`Device.uuid`."""
    day: int
    """Days since the epoch."""
    levels: tuple[Level, ...]
    stacks: tuple[Stack, ...] = ()
    """The stacks of the day's runs, in order of their first run."""
    tested: tuple[str, ...] = ()
    """The probes that completed a whole run on that day."""


@dataclass(kw_only=True)
class Course:
    """The values of one series, day by day."""

    unit: str
    days: dict[int, float] = field(default_factory=dict)
    """Day (days since the epoch) → value."""


Courses = Mapping[Key, Course]


class Change(NamedTuple):
    """A series that became slower."""

    early: Sequence[int]
    """The earlier days, which show what is usual (days since the epoch)."""
    late: Sequence[int]
    """The newest days, on which the device was slower than usual (days since the epoch)."""
    before: float
    after: float
    """Median of the newest days."""
    times: float
    """Factor by which the device became slower: 2.0 means half as fast."""


# --- What a day leaves ------------------------------------------------------------------------------------------------


def summary(device: str, day: int, runs: Iterable[Run], polls: Iterable[Run]) -> Day:
    """Return the summary of a day (days since the epoch, UTC) from all runs and polls that began on this day.

    Only normal, whole runs count: no confirmation, retest at another intensity or run to make a baseline.
    """
    here = [[r for r in of if int(r.started // DAY) == day] for of in (runs, polls)]
    found: dict[Key, tuple[str, list[float]]] = {}
    for run in (r for of in here for r in of if _counts(r)):
        for reading, unit, value in _values(run):
            key = Key(run.probe, reading, f"{run.probe_version}/{run.level}/{run.stack_id}")
            found.setdefault(key, (unit, []))[1].append(value)
    levels = tuple(
        Level(probe=k.probe, reading=k.reading, basis=k.basis, unit=unit, value=level(k, values), count=len(values))
        for k, (unit, values) in sorted(found.items())
    )
    tested = tuple(days_of_tests(here[0]))
    return Day(device=device, day=day, levels=levels, stacks=tuple(stacks(here[0])), tested=tested)


def stacks(runs: Iterable[Run]) -> list[Stack]:
    """Return each software stack of these runs once, in the order in which they were first used."""
    first: dict[str, Stack] = {}
    for run in sorted(runs, key=lambda r: r.started):
        if run.stack:
            first.setdefault(run.stack_id, Stack(id=run.stack_id, at=run.started, parts=run.stack))
    return list(first.values())


def courses(days: Iterable[Day]) -> dict[Key, Course]:
    """Return for each series its values, day by day."""
    found: dict[Key, Course] = {}
    for day in days:
        for of in day.levels:
            found.setdefault(Key(of.probe, of.reading, of.basis), Course(unit=of.unit)).days[day.day] = of.value
    return found


def level(key: Key, values: Sequence[float]) -> float:
    """Return the value that stands for all values of a day: of the best quarter for speeds, else the median."""
    if key.judged:
        return sorted(values, reverse=key.is_speed)[(len(values) - 1) // 4]
    return statistics.median(values)


def _counts(run: Run) -> bool:
    odd = run.intensity or run.baselining
    return run.outcome is Outcome.COMPLETED and run.whole and not odd


def _values(run: Run) -> Iterator[tuple[str, str, float]]:
    """Yield (reading, unit, value) for readings that measure or explain a device's speed."""
    cores = next((r.value for r in run.readings if r.key == "cpu_cores{state=online}"), 0)
    for reading in run.readings:
        if (value := _number(reading)) is None:
            continue
        if reading.name == LOAD:
            if isinstance(cores, (int, float)) and cores > 0:
                yield f"{LOAD}{{per=core}}", "1", value / cores
        elif reading.name == TIME or reading.name.startswith(SPEEDS) or reading.name in WORK or reading.key == LIMIT:
            yield reading.key, reading.unit, value


def _number(reading: Reading) -> float | None:
    """Return a reading's value if it is a finite number, else None."""
    if isinstance(reading.value, (str, bool)) or not math.isfinite(reading.value):
        return None
    return float(reading.value)


# --- The rule ---------------------------------------------------------------------------------------------------------


def findings(own: Courses, peers: Mapping[str, Courses], now: float) -> Iterator[Finding]:
    """Yield the finding that a device is slower than it was. Days that have not ended do not count.

    The finding is a note if its peers became slower as well, or if its power limit or other work explains it. `peers`
    are the other devices of this node with the same backend and model, by name.
    """
    changes = {key: _change(key, course, int(now // DAY)) for key, course in own.items() if key.judged}
    slower = {key: change for key, change in changes.items() if change is not None}
    if not slower:
        return
    key, change = max(slower.items(), key=lambda item: item[1].times)
    unit, since = own[key].unit, f"{datetime.fromtimestamp(change.late[0] * DAY, tz=timezone.utc):%Y-%m-%d}"
    reasons = [_beside(peers, key, change), _limit(own, change), _work(own, change)]
    explained = "; ".join(why for why, explains in reasons if explains)
    yield finding(
        "slower-than-before",
        *((State.HEALTHY, Cause.NONE) if explained else (State.DEGRADED, Cause.ENVIRONMENT)),
        f"Slower since {since} or before: {in_words(key.reading)} is {quantity(change.after, unit)}, "
        f"{number(change.times)} times as slow as usual ({quantity(change.before, unit)}).",
        "" if explained else "Check clocks, heat, power limit and other work on the device.",
        f"Not counted against the device: {explained}." if explained else "",
        f"Median of {len(change.early)} days before: {quantity(change.before, unit)}.",
        f"{len(slower) - 1} more readings of it are worse." if len(slower) > 1 else "",
        f"Limit: {SLOWER:g} times as slow on each of {LATE} days.",
        "The results are still right.",
        probe=key.probe,
        rivals=[
            *(Rival(cause=Cause.ENVIRONMENT, why=why, rejected=explains is False) for why, explains in reasons),
            Rival(cause=Cause.SOFTWARE, why="the software is the same before and after", rejected=True),
            Rival(cause=Cause.HARDWARE, why="a worn part that repeats work: its clocks show it", rejected=False),
        ],
    )


def _change(key: Key, course: Course, today: int) -> Change | None:
    """Return the change if every newest day was slower than the median of the earlier days; else None."""
    days = sorted(day for day in course.days if today - SPAN <= day < today)
    early, late = days[:-LATE], days[-LATE:]
    if len(early) < LEAST_BEFORE or late[-1] < today - FRESH:
        return None
    before, after = (statistics.median(course.days[d] for d in part) for part in (early, late))
    if min(_times(key, before, course.days[day]) for day in late) < SLOWER:
        return None
    return Change(early, late, before, after, _times(key, before, after))


def _times(key: Key, before: float, after: float) -> float:
    """Return how many times as slow `after` is as `before`; 1.0 if one of the values is not positive."""
    if before <= 0 or after <= 0:
        return 1.0
    return before / after if key.is_speed else after / before


def _moved(of: Courses, key: Key, change: Change) -> tuple[float, float] | None:
    """Return a series' medians before and after a change, or None if more than half of the days have no value."""
    if key not in of:
        return None
    early, late = ([of[key].days[d] for d in days if d in of[key].days] for days in (change.early, change.late))
    if 2 * len(early) < len(change.early) or 2 * len(late) < len(change.late):
        return None
    return statistics.median(early), statistics.median(late)


def _beside(peers: Mapping[str, Courses], key: Key, change: Change) -> tuple[str, bool | None]:
    """Return words about the peers' change, and whether the device did not slow down more (None without a peer)."""
    theirs = [_times(key, *moved) for peer in peers.values() if (moved := _moved(peer, key, change))]
    if not theirs:
        return "something that all devices of the node share: there is no peer to compare with", None
    usual = statistics.median(theirs)
    why = f"something that all devices of the node share: {len(theirs)} peers changed by a factor of {number(usual)}"
    return why, change.times < SLOWER * usual


def _limit(own: Courses, change: Change) -> tuple[str, bool | None]:
    """Return words about the power limit, and whether its fall explains the change (None if the limit is not known)."""
    moved = next((m for key in own if key.reading == LIMIT and (m := _moved(own, key, change))), None)
    if moved is None:
        return "a lower power limit: the limit is unknown here", None
    why = f"the power limit: {quantity(moved[1], 'watts')} now, {quantity(moved[0], 'watts')} before"
    return why, moved[1] < moved[0] * (1 - POWER_LIMIT_MOVED)


def _work(own: Courses, change: Change) -> tuple[str, bool | None]:
    """Return words about other programs' work, and whether its rise explains the change (None if it is not known)."""
    moved = [
        (is_ - was, f"other work on the device: {WORK[name]} is {number(is_)}, {number(was)} before")
        for key in own
        if (name := split_key(key.reading)[0]) in WORK and (seen := _moved(own, key, change))
        for was, is_ in [seen]
    ]
    if not moved:
        return "other work on the device: its load is unknown", None
    rise, why = max(moved)
    return why, rise >= LOAD_MOVED
