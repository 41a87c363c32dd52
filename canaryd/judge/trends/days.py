"""One value per day of each followed reading, from the day's runs and polls."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from canaryd.facts import Reading, reading_key
from canaryd.formatting import DAY, HOUR, MINUTE
from canaryd.judge.telemetry.readings import split_key
from canaryd.judge.trends.followed import HEAT, SHOWN, Followed, followed
from canaryd.judge.watch import days_of_tests
from canaryd.model import Outcome, Run

BAND = 1.05
"""Ratio of the bounds of a band of power (ours): within it heat differs by 5 % of the rise over the air, 2 °C of 40."""
LOADED = 0.5
"""Share of the power limit above which a device is under load (ours): below it heat depends on what ran before."""
STEADY, STEADY_BANDS = 15 * MINUTE, 2
"""Seconds and bands of power within which three polls in a row must lie for heat to have settled (ours): a heat sink
follows within minutes."""
LEAST_POLLS = 3
"""Settled polls that make a day's temperature; with fewer it is unknown (ours)."""


class Key(NamedTuple):
    """What makes values comparable."""

    probe: str
    reading: str
    """`Reading.key`, or one derived here, e.g. "temperature_celsius{power=600-630,sensor=core}"."""
    basis: str
    """Version and level of the probe, and the stack: each begins a series of its own."""

    @property
    def name(self) -> str:
        """Name of the reading."""
        return split_key(self.reading)[0]

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of the reading."""
        return split_key(self.reading)[1]


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
    """The median, the edge of the best quarter, or the mean: see `Followed.level`."""
    count: int
    """How many values it was made of."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The software under some runs."""

    id: str
    """`Run.stack_id`."""
    at: float
    """When the first of the runs on it started, in seconds since the epoch."""
    parts: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Day:
    """One device on one day of UTC; it outlives the runs and polls that it was made of."""

    device: str
    """`Device.uuid`."""
    day: int
    """Days since the epoch."""
    levels: tuple[Level, ...]
    stacks: tuple[Stack, ...] = ()
    """The stacks of the day's runs, in order of their first run."""
    tested: tuple[str, ...] = ()
    """The probes that completed a whole run on it."""


@dataclass(kw_only=True)
class Course:
    """One series, day by day."""

    unit: str
    days: dict[int, float] = field(default_factory=dict)
    """Days since the epoch → level."""


Courses = Mapping[Key, Course]


PER_HOUR = " per hour"


def tracks(runs: Iterable[Run] = (), polls: Iterable[Run] = ()) -> dict[Key, Track]:
    """Return all followed values of one device. `polls` is its telemetry, in any order.

    Only usual, whole runs count: no drill, confirmation, retest at another intensity or baselining. Counters become
    rises per hour; throttled time becomes a share of time.
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
        recent: list[tuple[Run, dict[str, Reading]]] = []
        for poll in of_probe:
            now = {r.key: r for r in poll.readings if followed(r.name) is not None and _number(r) is not None}
            for key, unit, value in _values(poll, now, recent[-1] if recent else None):
                add(poll, key, unit, poll.started, value)
            recent = [*recent[-2:], (poll, now)]
            for key, settled in _settled(recent):
                add(poll, key, settled.unit, poll.started, float(settled.value))
    return found


def _values(
    poll: Run, now: Mapping[str, Reading], before: tuple[Run, Mapping[str, Reading]] | None
) -> Iterator[tuple[str, str, float]]:
    """Yield (reading, unit, value) of a poll's followed readings `now`; counters as rates since the poll `before`."""
    for key, reading in now.items():
        if reading.name == "load_average":
            continue  # yielded per core below: by itself it shows nothing
        if (followed(reading.name) or SHOWN).level != "mean":
            yield key, reading.unit, float(reading.value)
        elif before and (old := before[1].get(key)) and poll.started > before[0].started:
            rise = max(0.0, float(reading.value) - float(old.value))
            per = HOUR if reading.name != "throttle_seconds_total" else 1.0
            unit = f"1{PER_HOUR}" if per == HOUR else "1"
            yield key, unit, rise * per / (poll.started - before[0].started)
    cores = next((r.value for r in poll.readings if r.key == "cpu_cores{state=online}"), 0)
    if (load := now.get("load_average")) and isinstance(cores, (int, float)) and cores > 0:
        yield "load_average{per=core}", "1", float(load.value) / cores


def summary(device: str, day: int, runs: Iterable[Run], polls: Iterable[Run]) -> Day:
    """Return the summary of a day (since the epoch, UTC), from all runs and polls that began on it."""
    here = [[r for r in of if int(r.started // DAY) == day] for of in (runs, polls)]
    levels = tuple(
        Level(probe=k.probe, reading=k.reading, basis=k.basis, unit=track.unit, value=value, count=count)
        for k, track in sorted(tracks(*here).items())
        for value, count in _levels(k, track.points).values()
    )
    tested = tuple(days_of_tests(here[0]))
    return Day(device=device, day=day, levels=levels, stacks=tuple(stacks(here[0])), tested=tested)


def stacks(runs: Iterable[Run]) -> list[Stack]:
    """Return each stack of these runs once, in order of their first run; drills count too."""
    first: dict[str, Stack] = {}
    for run in sorted(runs, key=lambda r: r.started):
        if run.stack:
            first.setdefault(run.stack_id, Stack(id=run.stack_id, at=run.started, parts=run.stack))
    return list(first.values())


def courses(days: Iterable[Day] = (), runs: Iterable[Run] = (), polls: Iterable[Run] = ()) -> dict[Key, Course]:
    """Return each series day by day: from summaries, and from runs and polls for days without a summary."""
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
    """Return day → (level, number of values that it was made of)."""
    how = followed(key.reading) or SHOWN
    by_day: dict[int, list[float]] = defaultdict(list)
    for point in points:
        by_day[int(point.at // DAY)].append(point.value)
    least = LEAST_POLLS if how is HEAT else 1
    return {day: (level(values, how), len(values)) for day, values in by_day.items() if len(values) >= least}


def level(values: Sequence[float], how: Followed) -> float:
    """Return the one value that stands for several."""
    if how.level == "mean":
        return statistics.fmean(values)
    if how.level == "best":
        return sorted(values, reverse=how.worse < 0)[(len(values) - 1) // 4]
    return statistics.median(values)


def _settled(polls: Sequence[tuple[Run, Mapping[str, Reading]]]) -> Iterator[tuple[str, Reading]]:
    """Yield temperatures and clocks of the newest of three polls, by band of power, if the load was steady."""
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
