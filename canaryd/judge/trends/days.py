"""Days: what the runs and polls of one day add up to."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from canaryd.formatting import DAY, HOUR, MINUTE
from canaryd.model import Outcome, Reading, Run, reading_key

BAND = 1.05
"""Ratio of the bounds of a band of power (ours): within it heat differs by 5 % of the rise over the air, 2 °C of 40."""
LOADED = 0.5
"""Share of the power limit above which a device is under load (ours): below, heat tells of what went before."""
STEADY, STEADY_BANDS = 15 * MINUTE, 2
"""Seconds and bands within which three polls in a row must lie for heat to have settled (ours): a heat sink follows
within minutes."""
LEAST_POLLS = 3
"""Settled polls that make a day's temperature: below, it is not known (ours)."""


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
