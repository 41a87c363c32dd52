"""Slow changes: what a device's readings were day by day, and whether they are worse than before or than its peers'.

All pure functions. Neighbouring readings depend on each other, so a day counts as one value. A change is accepted when
an exact rank test (Mann and Whitney 1947) tells the days after it from the days before it, and when it is large
besides: docs/judgement.md has the rules, what their false alarms rest on, and what was simulated. Slow is not wrong:
nothing here makes a device worse than degraded.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import NamedTuple

from canaryd.formatting import DAY, number, quantity
from canaryd.judge.trends.change import FALSE_ALARMS, LOOKS, NORMAL, SPLITS, Change, change
from canaryd.judge.trends.days import HEAT, SHOWN, Course, Courses, Key, followed
from canaryd.model import Cause, Finding, Rival, State

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
FRESH = 3
"""Days after which a series without a new value says nothing of today (ours)."""
WORK = {"utilization_ratio": "the share of time in use", "load_average": "the load per core"}
"""Readings that tell of other work on the device, in words."""
CONTEXT = ("power_limit_watts", *WORK)
"""Readings that may explain slowness."""
NO_END = 1e9
"""Ratio beyond which a change is not measured."""
Finder = Callable[["Trends"], Iterator[Finding]]


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
