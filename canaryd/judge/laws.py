"""Two laws for whatever devices, drivers and the kernel report: company and recurrence. Pure functions.

Company: who else had trouble of this kind, and when? Recurrence: does it come back on this device alone?
"""

from __future__ import annotations

import bisect
import enum
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from canaryd.formatting import DAY
from canaryd.model import Cause

TOGETHER = 60.0
"""Seconds within which trouble of several devices is one occasion: what they share strikes them in one second, and a
driver and a log take a moment for each (ours)."""
MORE = 3
"""How many times as often as the median sibling a device must have trouble to have it alone: the design's factor for
comparable exposure."""
SOON = 7 * DAY
"""Seconds after a change in which trouble that begins may be the change's, though nobody else has it yet (ours)."""
ENOUGH = 3
"""Times that trouble comes on a device alone, with a remedy in between, that make it faulty: the design's."""


class Who(enum.Enum):
    """Who else had trouble of one kind: what accuses the device most comes first."""

    ALONE = "alone"
    """Identical devices are clean, or most of them had it far less."""
    UNCOMPARED = "uncompared"
    """There is no identical device, or none has been clean for long enough since a change."""
    OTHERS = "with others, no change"
    """Most identical devices have it too, at other times."""
    CHANGED = "since the same change"
    """Most identical devices have it too, and nobody had it before the newest change of software or hardware."""
    TOGETHER = "together"
    """Others had it in the same minute, or between the same two polls."""


class Moment(NamedTuple):
    """When trouble came: at a moment, or at an unknown time between two. Seconds since the epoch."""

    first: float
    last: float


class Trouble(NamedTuple):
    """When each device of a host had trouble of one kind. Devices are physical: instances are units of theirs."""

    own: Sequence[Moment]
    others: Mapping[str, Sequence[Moment]]
    """Name → spans, for every other device of the host that had any."""
    siblings: Collection[str] = ()
    """Names of the identical ones among the others."""
    changes: Sequence[float] = ()
    """When software or hardware of the device changed, ascending."""
    now: float = math.inf


class Company(NamedTuple):
    """Who else had trouble that a device had."""

    who: Who
    names: Sequence[str] = ()
    """Who had it at the same time, sorted."""

    @property
    def is_own(self) -> bool:
        """Whether it counts when it comes back: another device that breaks at other times takes nothing back."""
        return self.who not in (Who.TOGETHER, Who.CHANGED)

    @property
    def cause(self) -> Cause:
        """The cause of what only hardware does."""
        return Cause.HARDWARE if self.who is Who.ALONE else Cause.UNDETERMINED


ALONE = Company(Who.ALONE)


def company(trouble: Trouble, at: Moment) -> Company:
    """Return who else had the trouble that a device had `at` a time. Each occasion is judged by itself."""
    if names := with_it(trouble, at):
        return Company(Who.TOGETHER, names)
    if not trouble.siblings:
        return Company(Who.UNCOMPARED)
    theirs = {name: trouble.others.get(name, ()) for name in trouble.siblings}
    changed = max((c for c in trouble.changes if c <= at.first), default=None)
    if changed is not None and (since := min(span.first for span in trouble.own) - changed) >= 0:
        begun = [spans for spans in theirs.values() if spans]
        if 2 * len(begun) > len(theirs) and all(span.first >= changed for spans in begun for span in spans):
            return Company(Who.CHANGED)
        if since <= SOON and trouble.now - changed < MORE * since:
            return Company(Who.UNCOMPARED)
    # What several had together is nobody's own.
    median = statistics.median_low(_lone(trouble, name) for name in theirs)
    return ALONE if _lone(trouble) >= MORE * median else Company(Who.OTHERS)


def closest(companies: Iterable[Company]) -> Company:
    """Return the one that accuses the device most."""
    return min(companies, key=lambda found: list(Who).index(found.who))


def with_it(trouble: Trouble, at: Moment) -> list[str]:
    """Return the names of the others that had the trouble at the same time, sorted."""
    return sorted(name for name, spans in trouble.others.items() if any(meet(at, span) for span in spans))


def _lone(trouble: Trouble, name: str | None = None) -> int:
    """Return how often a device (None: this one) had the trouble while nobody else had it."""
    own = trouble.own if name is None else trouble.others.get(name, ())
    rest = [span for other, spans in trouble.others.items() if other != name for span in spans]
    rest += () if name is None else trouble.own
    return len(_occasions(span for span in own if not any(meet(span, other) for other in rest)))


def meet(one: Moment, other: Moment) -> bool:
    """Return whether two times may be one."""
    return one.first <= other.last + TOGETHER and other.first <= one.last + TOGETHER


def _occasions(spans: Iterable[Moment]) -> list[Moment]:
    """Return the spans, with those that meet as one."""
    found: list[Moment] = []
    for span in sorted(spans):
        if found and meet(found[-1], span):
            found[-1] = Moment(found[-1].first, max(found[-1].last, span.last))
        else:
            found.append(span)
    return found


class Recurrence(NamedTuple):
    """How often trouble came back on a device."""

    back: int
    """Remedies after which it was there again."""
    is_faulty: bool
    company: Company


def recurrence(
    occasions: Iterable[tuple[float, Company]], remedies: Sequence[float], since: float, few: int = ENOUGH
) -> Recurrence:
    """Return how often trouble came back after its remedies (ascending), by the occasions that were the device's own.

    It is faulty after `ENOUGH` on record, or `few` since a time, of which one at least came since then.

    False alarms: with passing trouble once in ten years, a healthy device has two in a given 30 days by a chance of
    3.4e-5, and three in five years by one of 1.4 %. So `faulty` is hardware only where identical devices are clean.
    """
    own = [(bisect.bisect_left(remedies, at), at >= since, found) for at, found in occasions if found.is_own]
    times, lately = len({n for n, *_ in own}), len({n for n, late, _ in own if late})
    is_faulty = lately >= few or (lately > 0 and times >= ENOUGH)
    return Recurrence(max(0, times - 1), is_faulty, closest([found for *_, found in own] or [ALONE]))
