"""The rules of slow changes: whether a device's readings got worse from day to day, or are worse than its peers'.

All pure functions. Neighbouring readings depend on each other, so a day counts as one value. A change is accepted when
it is large and an exact rank test (Mann and Whitney 1947) separates the days after it from the days before it.
docs/judgement.md has the rules, their false alarms and the simulations. Slow is not wrong: no rule here makes a device
worse than degraded.
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
from canaryd.judge.findings import finding
from canaryd.judge.telemetry.readings import in_words
from canaryd.judge.trends.change import FALSE_ALARMS, LOOKS, NORMAL, SPLITS, Change, change, step
from canaryd.judge.trends.days import Course, Courses, Key
from canaryd.judge.trends.followed import HEAT, SHOWN, followed
from canaryd.model import Cause, Finding, Rival, State

SLOWER = 1.10
"""Times as long as in the slowest week before (ours): healthy GPUs of one model differ by 8 % on average (Sinha et al.,
SC 2022), and a device differs less from itself. False alarms: `FALSE_ALARMS`, and 0 in the simulations of the tests."""
AT_ONCE = 1.20
"""Times as long on each of the last two days as on the slowest day before, while no peer changed and nothing else used
the device (ours): a quarter of the speed lost makes 1.33. False alarms: 0 in the simulations of the tests."""
PEERS_SLOWER = 1.25
"""Times as long as the peers' median: healthy GPUs of one model differ by 22 % at most in five clusters (Sinha et al.,
SC 2022). False alarms: at most 3e-6 per device, once, where units scatter by 4 % (log-normal)."""
PEERS_SCATTER = 5.0
"""Times the peers' own scatter (normal units: 1.4826 times the median absolute deviation) by which it must differ
(ours): where peers differ much among themselves, one that differs shows little."""
PEERS_DAYS, LEAST_DAYS = 7, 3
"""Days on which peers are compared, and how many of them must be common; it must be the slowest on each (ours)."""
ERROR_GREW = 1.5
"""Times its error distance in the worst week before (ours): the same cases on the same stack give the same errors;
fresh operands move the largest of many errors by a few per cent. False alarms: as for `SLOWER`."""
HOTTER = 6.0
"""Degrees Celsius by which it got hotter than in its hottest week, at the same power, more than its peers did (ours):
the air of one room reaches all of them. False alarms: as for `SLOWER`."""
HOTTER_ALONE = 12.0
"""The same without a peer that shows the room's part: more than the 9 degrees by which the air of a room may vary
(ASHRAE TC 9.9, recommended envelope, 18 to 27 °C)."""
SHARED = 0.5
"""Share of a change from which on, if peers show it too, it is not the device's own (ours)."""
POWER_LIMIT_MOVED = 0.02
"""Relative difference of the power limit that may explain slowness (ours): limits are set, not measured."""
LOAD_MOVED = 0.2
"""Difference of the share of time in use, or of the load per 1.0, that may explain slowness (ours)."""
FRESH = 3
"""Days after which a series without a new value shows nothing about today (ours)."""
WORK = {"utilization_ratio": "the share of time in use", "load_average": "the load per core"}
"""Readings that show other work on the device, in words."""
CONTEXT = ("power_limit_watts", *WORK)
"""Readings that may explain slowness."""
NO_END = 1e9
"""Ratio beyond which a change is not measured."""
Finder = Callable[["Trends"], Iterator[Finding]]


@dataclass(frozen=True, kw_only=True)
class Trends:
    """All that the trend rules judge."""

    own: Courses
    peers: Mapping[str, Courses]
    """By name, the other devices of this node that have the same backend and model."""
    today: int
    """Days since the epoch."""

    def examined(self, rule: str) -> dict[Key, Course]:
        """Return the device's own series of a kind of rule that have a value of the last days."""
        return {
            key: course
            for key, course in self.own.items()
            if (how := followed(key.reading)) is not None
            and how.rule == rule
            and self.today - max(course.days) <= FRESH
        }

    def changed(self, rule: str) -> dict[Key, Change]:
        """Return the series of a kind of rule that became worse, by the rank test alone."""
        series = self.examined(rule)
        threshold = FALSE_ALARMS / LOOKS / len(SPLITS) / max(1, len(series))
        changes = {k: change(c, (followed(k.reading) or SHOWN).worse, threshold) for k, c in series.items()}
        return {k: c for k, c in changes.items() if c is not None}


def slower_than_before(trends: Trends) -> Iterator[Finding]:
    """Kernels take longer than they did on this device and stack; the results are still right."""
    worst = _worst(trends, trends.changed("slower"), SLOWER)
    if worst is None:
        return
    key, seen, unit = worst.key, worst.seen, trends.own[worst.key].unit
    was, is_ = (_context(trends.own, days) for days in (seen.early, seen.late))
    explained, settings = _settings(was, is_)
    rivals = [*worst.rivals, SAME_STACK, *settings]
    rivals.append(Rival(cause=Cause.HARDWARE, why="a worn part that repeats work: its clocks show it", rejected=False))
    yield _finding(
        *("slower-than-before", Cause.ENVIRONMENT, key),
        f"Slower {_since(key, unit, seen)}, {number(worst.times)} times as slow as in its slowest week before "
        f"({quantity(seen.worst, unit)}).",
        "Check clocks, heat, power limit and other work on the device.",
        [*_before(seen, unit), worst.more, f"Limit: {SLOWER:g} times as slow.", RIGHT, ODDS],
        rivals,
        excuse=worst.alike or explained,
    )


def slower_at_once(trends: Trends) -> Iterator[Finding]:
    """Kernels take much longer from one day to the next, while the peers and the load stay as they were.

    Too few days for the rank test, so it takes peers with which to compare, and telemetry that rules out other work.
    """
    steps = {k: step(c, (followed(k.reading) or SHOWN).worse) for k, c in trends.examined("slower").items()}
    worst = _worst(trends, {k: s for k, s in steps.items() if s is not None}, AT_ONCE)
    if worst is None or not any(_moved(peer, worst.key, worst.seen) for peer in trends.peers.values()):
        return
    key, seen, unit = worst.key, worst.seen, trends.own[worst.key].unit
    was, is_ = (_context(trends.own, days) for days in (seen.early, seen.late))
    explained, settings = _settings(was, is_)
    if worst.alike or explained or not any(was[name].keys() & is_[name].keys() for name in WORK):
        return
    yield _finding(
        *("slower-at-once", Cause.ENVIRONMENT, key),
        f"Suddenly slower {_since(key, unit, seen)}, {number(worst.times)} times as slow as on its slowest day before "
        f"({quantity(seen.worst, unit)}).",
        "Check clocks, heat, power limit and memory bandwidth of the device.",
        [f"Median of {len(seen.early)} days before: {quantity(seen.before, unit)}.", worst.more, RIGHT],
        [*worst.rivals, SAME_STACK, *settings],
        excuse="",
    )


def slower_than_peers(trends: Trends) -> Iterator[Finding]:
    """Kernels take much longer than on the other devices of the same model and stack on this node."""
    days = range(trends.today - PEERS_DAYS, trends.today)
    slow = {key: found for key in trends.examined("slower") if (found := _behind(trends, key, days))}
    if not slow:
        return
    key, (times, count) = max(slow.items(), key=lambda item: item[1])
    names = (*CONTEXT, "temperature_celsius")
    own, theirs = _context(trends.own, days, names), [_context(peer, days, names) for peer in trends.peers.values()]
    usual = {name: _middle([of[name] for of in theirs]) for name in names}
    explained, rivals = _settings(usual, own)
    heat, hot = _heat(usual["temperature_celsius"], own["temperature_celsius"])
    silicon = f"normal variation: units of one model rarely differ by {PEERS_SLOWER - 1:.0%} (Sinha et al., SC 2022)"
    rivals = [
        Rival(cause=Cause.SOFTWARE, why="its peers run the same software", rejected=True),
        *rivals,
        heat,
        Rival(cause=Cause.HARDWARE, why=silicon, rejected=count > 1),
    ]
    known = not hot and all(r.rejected for r in rivals if r.cause is Cause.ENVIRONMENT)
    course = trends.own[key]
    now = quantity(statistics.median(course.days[d] for d in days if d in course.days), course.unit)
    whom = f"the median of its {count} peers" if count > 1 else "its only peer"
    only = "With two devices it is not known which one is normal." if count == 1 else ""
    yield _finding(
        *("slower-than-peers", Cause.HARDWARE if known else Cause.ENVIRONMENT, key),
        f"Slower than identical devices: {in_words(key.reading)} is {now}, {number(times)} times as slow as {whom}.",
        "Check clocks, heat and power limit.",
        [
            f"Medians of {PEERS_DAYS} days. The peers have the same model and software.",
            *(_more(slow), f"Limit: {PEERS_SLOWER:g} times as slow.", RIGHT),
        ],
        rivals,
        excuse=only or explained,
    )


def _behind(trends: Trends, key: Key, days: Iterable[int]) -> tuple[float, int] | None:
    """Return how many times as slow as its peers a series is, and how many peers; None where it does not stand out."""
    days, course = list(days), trends.own[key]
    behind: list[float] = []
    for peer in trends.peers.values():
        theirs = peer[key].days if key in peer else {}
        each = [_times(key, theirs[d], course.days[d]) for d in days if d in theirs and d in course.days]
        if len(each) >= LEAST_DAYS:
            if min(each) <= 1.0:
                return None
            behind.append(math.log(statistics.median(each)))
    if not behind:
        return None
    middle = statistics.median(behind)
    scatter = NORMAL * statistics.median(abs(b - middle) for b in behind)
    stands_out = len(behind) == 1 or middle >= PEERS_SCATTER * scatter
    return (math.exp(middle), len(behind)) if math.exp(middle) >= PEERS_SLOWER and stands_out else None


def error_growing(trends: Trends) -> Iterator[Finding]:
    """Results are farther from the exact ones than they were, within what is allowed."""
    worst = _worst(trends, trends.changed("error"), ERROR_GREW)
    if worst is None:
        return
    key, seen, unit = worst.key, worst.seen, trends.own[worst.key].unit
    size = f"{number(worst.times)} times as large as in its worst week before ({quantity(seen.worst, unit)})"
    yield _finding(
        *("error-growing", Cause.HARDWARE, key),
        f"Less exact {_since(key, unit, seen)}, {size if worst.times < NO_END else 'there was none before'}.",
        "Run canaryd check: its exact tests show whether the device computes right.",
        [
            *_before(seen, unit),
            worst.more,
            f"Limit: {ERROR_GREW:g} times as large.",
            "The error is still within its limit.",
            ODDS,
        ],
        [*worst.rivals, SAME_STACK],
        excuse=worst.alike,
    )


def hotter_at_same_power(trends: Trends) -> Iterator[Finding]:
    """The device gets hotter than it did under steady load at the same power: it is cooled worse."""
    warmer = {k: c for k, c in trends.changed("hotter").items() if c.after - c.worst >= HOTTER}
    if not warmer:
        return
    key, seen = max(warmer.items(), key=lambda item: item[1].after - item[1].worst)
    rise, unit = seen.after - seen.worst, trends.own[key].unit
    of_peers = [r for peer in trends.peers.values() if (r := _warmed(peer, key, seen)) is not None]
    room = statistics.median(of_peers) if of_peers else None
    if room is None and rise < HOTTER_ALONE:
        return
    own = rise if room is None else rise - room
    what = f"the room: {len(of_peers)} peers got {number(room or 0.0)} °C hotter on the same days"
    if room is None:
        what = f"the room: no peer to compare with; air may vary by 9 °C, this is {number(rise)} °C"
    rivals = [
        Rival(cause=Cause.ENVIRONMENT, why=what, rejected=own >= HOTTER),
        Rival(cause=Cause.ENVIRONMENT, why="another fan control: compare fan speeds before and after", rejected=False),
        Rival(cause=Cause.HARDWARE, why="the sensor, or the contact to the heat sink", rejected=False),
    ]
    limit = f"Limit: {HOTTER:g} °C more than its peers, {HOTTER_ALONE:g} °C without peers."
    yield _finding(
        *("hotter-at-same-power", Cause.ENVIRONMENT, key),
        f"Hotter {_since(key, unit, seen)}, {number(rise)} °C more than in its hottest week before at the same power.",
        "Check dust, fans, heat sink and incoming air.",
        [*_before(seen, unit), _more(warmer), limit, RIGHT, ODDS],
        rivals,
        excuse="Its peers got hotter too, so the reason is the room." if own < HOTTER else "",
    )


RULES: tuple[Finder, ...] = (slower_than_before, slower_at_once, slower_than_peers, error_growing, hotter_at_same_power)
"""Every rule of trends. Their order has no effect."""
RIGHT = "The results are still right."
ODDS = f"Chance of a false alarm: at most once in {1 / FALSE_ALARMS:.0f} device-years, if days are alike."
SAME_STACK = Rival(cause=Cause.SOFTWARE, why="the software is the same before and after", rejected=True)


def findings(own: Courses, peers: Mapping[str, Courses], now: float) -> Iterator[Finding]:
    """Yield the findings of every rule at `now` (seconds since the epoch); only days that are over count.

    `peers` are the other devices of this node that have the same backend and model, by name.
    """
    today = int(now // DAY)
    trends = Trends(own=_over(own, today), peers={name: _over(of, today) for name, of in peers.items()}, today=today)
    return itertools.chain.from_iterable(rule(trends) for rule in RULES)


def _over(of: Courses, today: int) -> dict[Key, Course]:
    """Return the days that are over; a clock that ran ahead may have left some of the future."""
    past = {k: {d: v for d, v in course.days.items() if d < today} for k, course in of.items()}
    return {k: Course(unit=of[k].unit, days=days) for k, days in past.items() if days}


def _finding(
    rule: str,
    cause: Cause,
    key: Key,
    message: str,
    action: str,
    evidence: Sequence[str],
    rivals: Sequence[Rival],
    *,
    excuse: str,
) -> Finding:
    """Return a finding on a series; with an `excuse`, a sentence that explains the change, it is a note."""
    if not excuse:
        return finding(rule, State.DEGRADED, cause, message, action, *evidence, probe=key.probe, rivals=rivals)
    why = f"Not counted against the device: {excuse}"
    return finding(rule, State.HEALTHY, Cause.NONE, message, "", why, *evidence, probe=key.probe, rivals=rivals)


def _times(key: Key, before: float, after: float) -> float:
    """Return how many times as bad `after` is, `NO_END` where nothing became something."""
    worse = (followed(key.reading) or SHOWN).worse
    good, bad = (before, after) if worse > 0 else (after, before)
    if good <= 0:
        return NO_END if bad > 0 else 1.0
    return min(max(bad / good, 1 / NO_END), NO_END)


def _moved(peer: Courses, key: Key, seen: Change) -> tuple[float, float] | None:
    """Return a peer's medians before and after a change; None where it has less than half of the days."""
    if key not in peer:
        return None
    early, late = ([peer[key].days[d] for d in days if d in peer[key].days] for days in (seen.early, seen.late))
    if 2 * len(early) < len(seen.early) or 2 * len(late) < len(seen.late):
        return None
    return statistics.median(early), statistics.median(late)


def _warmed(peer: Courses, key: Key, seen: Change) -> float | None:
    """Return by how many degrees a peer got hotter on the same days, by the same sensor and at any power."""
    sensor = key.labels.get("sensor")
    alike = [k for k in peer if followed(k.reading) is HEAT and k.labels.get("sensor") == sensor]
    rises = [after - before for k in alike if (moved := _moved(peer, k, seen)) for before, after in [moved]]
    return statistics.median(rises) if rises else None


class _Worst(NamedTuple):
    """The series that became worse by the largest factor, and what its peers show."""

    key: Key
    seen: Change
    times: float
    more: str
    """How many other series became worse, as a sentence; "" for none."""
    alike: str
    """That the peers changed as much, as a sentence; "" where they did not."""
    rivals: list[Rival]


def _worst(trends: Trends, changes: Mapping[Key, Change], least: float) -> _Worst | None:
    """Return the series that became worse by the largest factor, if that is at least `least`."""

    def grown(item: tuple[Key, Change]) -> float:
        key, seen = item
        return _times(key, seen.worst, seen.after)

    found = {key: seen for key, seen in changes.items() if grown((key, seen)) >= least}
    if not found:
        return None
    key, seen = max(found.items(), key=grown)
    times = grown((key, seen))
    by_peers = [_times(key, *moved) for peer in trends.peers.values() if (moved := _moved(peer, key, seen))]
    return _Worst(key, seen, times, _more(found), *_shared(by_peers, times))


def _shared(by_peers: Sequence[float], times: float) -> tuple[str, list[Rival]]:
    """Return the sentence that the peers changed alike ("" where not), and the rival for it."""
    if not by_peers:
        why = "something that all devices of the node share: there is no peer to compare with"
        return "", [Rival(cause=Cause.ENVIRONMENT, why=why, rejected=False)]
    theirs = statistics.median(by_peers)
    alike = theirs > 1 and math.log(theirs) >= SHARED * math.log(times)
    why = f"something that all devices of the node share: {len(by_peers)} peers changed by a factor of {number(theirs)}"
    text = "Its peers changed in the same way, so this device is not the reason." if alike else ""
    return text, [Rival(cause=Cause.ENVIRONMENT, why=why, rejected=not alike)]


def _context(of: Courses, days: Iterable[int], names: Sequence[str] = CONTEXT) -> dict[str, dict[str, float]]:
    """Return name → the median over these days of every reading of the name, by its key, whatever the stack."""
    values: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    wanted = set(days)
    for key, course in of.items():
        if key.name in values:
            values[key.name][key.reading] += [v for d, v in course.days.items() if d in wanted]
    return {name: {k: statistics.median(v) for k, v in found.items() if v} for name, found in values.items()}


def _settings(
    usual: Mapping[str, Mapping[str, float]], here: Mapping[str, Mapping[str, float]]
) -> tuple[str, list[Rival]]:
    """Return which setting or load explains slowness, as a sentence ("" for none), and the rivals considered."""
    explained, rivals = [], []
    was, is_ = (of["power_limit_watts"].get("power_limit_watts{limit=enforced}") for of in (usual, here))
    if was is None or is_ is None:
        why = "a lower power limit: the limit is unknown here"
        rivals.append(Rival(cause=Cause.ENVIRONMENT, why=why, rejected=False))
    else:
        lower = is_ < was * (1 - POWER_LIMIT_MOVED)
        why = f"the power limit: {quantity(is_, 'watts')} now, {quantity(was, 'watts')} to compare with"
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
        why = "other work on the device: its load is unknown"
        rivals.append(Rival(cause=Cause.ENVIRONMENT, why=why, rejected=False))
    else:
        (name, _), (was, is_) = max(rises.items(), key=lambda item: item[1][1] - item[1][0])
        busier = is_ - was >= LOAD_MOVED
        why = f"other work on the device: {WORK[name]} is {number(is_)}, {number(was)} to compare with"
        rivals.append(Rival(cause=Cause.ENVIRONMENT, why=why, rejected=not busier))
        explained += [why] * busier
    return f"{'; '.join(explained)}." if explained else "", rivals


def _heat(usual: Mapping[str, float], here: Mapping[str, float]) -> tuple[Rival, bool]:
    """Return heat as a rival for a device that is slower than its peers, and whether the device is hotter."""
    rises = {k: here[k] - usual[k] for k in here if k in usual}
    if not rises:
        return Rival(cause=Cause.ENVIRONMENT, why="heat: no temperature of both is known", rejected=False), False
    key, rise = max(rises.items(), key=lambda item: item[1])
    hot = rise >= HOTTER
    why = f"heat: {in_words(key)} is {number(here[key])} °C, {number(usual[key])} °C on its peers"
    return Rival(cause=Cause.ENVIRONMENT, why=why, rejected=not hot), hot


def _middle(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = {k for one in of for k in one}
    return {k: statistics.median(one[k] for one in of if k in one) for k in keys}


def _since(key: Key, unit: str, seen: Change) -> str:
    """Return since when, and what a reading is since then."""
    since = f"{datetime.fromtimestamp(seen.since * DAY, tz=timezone.utc):%Y-%m-%d}"
    return f"since {since}: {in_words(key.reading)} is {quantity(seen.after, unit)}"


def _before(seen: Change, unit: str) -> tuple[str, str]:
    """Return what a reading was before a change, in sentences."""
    return (
        f"Median of {len(seen.early)} days before: {quantity(seen.before, unit)}.",
        f"Worst week before: {quantity(seen.worst, unit)}.",
    )


def _more(found: Mapping[Key, object]) -> str:
    return f"{len(found) - 1} more readings of it are worse." if len(found) > 1 else ""
