"""Two laws for whatever devices, drivers and the kernel report: company and recurrence. Pure functions.

Company: who else had trouble of this kind, and when? Recurrence: does it come back on this device alone?
"""

from __future__ import annotations

import bisect
import enum
import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from canaryd.formatting import DAY
from canaryd.model import Cause, Part, Whose

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

POWER_AND_PCIE = (Part.SUPPLY, Part.RISER, Part.SWITCH)
"""What the devices of a host share between its mains and their slots."""


class Who(enum.Enum):
    """Who else had trouble of one kind: what accuses the device most comes first."""

    ALONE = "alone"
    """Identical devices are clean, or most of them had it far less."""
    UNCOMPARED = "uncompared"
    """There is no identical device, or none has been clean for long enough since a change."""
    OTHERS = "with others, no change"
    """Most identical devices have it too, at other times."""
    CHANGED = "since the same change"
    """Most identical devices have it too, and nobody had it before the newest change of their software or hardware."""
    TOGETHER = "together"
    """Others had it in the same minute, or between the same two polls."""


class Moment(NamedTuple):
    """When trouble came: at a moment, or at an unknown time between two. Seconds since the epoch."""

    first: float
    last: float


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

    @property
    def subject(self) -> Whose:
        """What the trouble points to."""
        told = {Who.TOGETHER: Whose.SHARED, Who.OTHERS: Whose.SHARED, Who.CHANGED: Whose.SOFTWARE}
        return told.get(self.who, Whose.DEVICE)

    def __str__(self) -> str:
        words = {
            Who.TOGETHER: f"At about the same time: {', '.join(self.names)} had it too.",
            Who.CHANGED: "Most identical devices have it since the same change: look at what changed.",
            Who.OTHERS: "Most identical devices had it too, at other times.",
            Who.UNCOMPARED: "No identical device here has been clean for long enough to tell: move the part to another"
            " machine, and see.",
        }
        return words.get(self.who, "")


ALONE = Company(Who.ALONE)


def together_with(names: Iterable[str]) -> Company | None:
    """Return the company of the devices that had trouble at the same time; None if there were none."""
    return Company(Who.TOGETHER, sorted(names)) if names else None


@dataclass(frozen=True)
class Trouble:
    """When each device of a host had trouble of one kind. Devices are physical: instances are units of theirs."""

    own: Sequence[Moment]
    others: Mapping[str, Sequence[Moment]]
    """Name → moments, for every other device of the host that had any."""
    siblings: Collection[str] = ()
    """Names of the identical ones among the others."""
    changes: Sequence[float] = ()
    """When software or hardware of the device changed, and that of an identical one too, ascending."""
    now: float = math.inf
    within: float = TOGETHER
    """Seconds within which it is one occasion."""

    @cached_property
    def _sorted(self) -> Mapping[str, tuple[Sequence[float], Sequence[float]]]:
        """Name ("": this device) → the ends, ascending, and the least beginning of those that end then or later."""
        found = {}
        for name, moments in {**self.others, "": self.own}.items():
            ascending = sorted(moments, key=lambda moment: moment.last)
            least = [*itertools.accumulate((m.first for m in reversed(ascending)), min)][::-1]
            found[name] = [m.last for m in ascending], least
        return found

    def with_it(self, at: Moment, of: str = "") -> list[str]:
        """Return the names of the devices, `of` left out, that had the trouble at that time, sorted."""
        found = []
        for name, (ends, least) in self._sorted.items():
            later = bisect.bisect_left(ends, at.first - self.within)
            if name != of and later < len(ends) and least[later] <= at.last + self.within:
                found.append(name)
        return sorted(found)

    @cached_property
    def comparison(self) -> Company:
        """Who else has it at other times."""
        theirs = {name: self.others.get(name, ()) for name in self.siblings}
        if not theirs:
            return Company(Who.UNCOMPARED)
        times, begun = [m.first for m in self.own], [each for each in theirs.values() if each]
        changed = max((c for c in self.changes if times and c <= max(times)), default=math.inf)
        if times and (first := min(times)) >= changed:
            if 2 * len(begun) > len(theirs) and all(m.first >= changed for each in begun for m in each):
                return Company(Who.CHANGED)
            if first - changed <= SOON and self.now - changed < MORE * (first - changed):
                return Company(Who.UNCOMPARED)
        # What several had together is nobody's own.
        median = statistics.median_low(self._lone(name) for name in theirs)
        return ALONE if self._lone("") >= MORE * median else Company(Who.OTHERS)

    def _lone(self, name: str) -> int:
        """Return how often a device had the trouble while nobody else had it."""
        moments = self.others.get(name, ()) if name else self.own
        ends, occasions = -math.inf, 0
        for moment in sorted(m for m in moments if not self.with_it(m, of=name)):
            occasions += moment.first > ends + self.within
            ends = max(ends, moment.last)
        return occasions


def company(trouble: Trouble, at: Moment) -> Company:
    """Return who else had the trouble that a device had `at` a time. Each occasion is judged by itself."""
    names = trouble.with_it(at)
    return Company(Who.TOGETHER, names) if names else trouble.comparison


def closest(companies: Iterable[Company]) -> Company:
    """Return the one that accuses the device most."""
    return min(companies, key=lambda found: list(Who).index(found.who))


def meet(one: Moment, other: Moment) -> bool:
    """Return whether two times may be one."""
    return one.first <= other.last + TOGETHER and other.first <= one.last + TOGETHER


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
